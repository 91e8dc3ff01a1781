"""Bring files of the repository that the documents link to into the site, so that a link works on GitHub and here."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = "repository"  # the folder of the site that holds what lies beside docs/
PATTERNS = ("*.md", "examples/*", "examples/*/*", "benchmarks/results/*", "benchmarks/data/*.md")
LINK = re.compile(r"(?<=\]\()(?!#|\w+:)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that documents may link to outside of docs/."""
    for pattern in PATTERNS:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                name = path.relative_to(ROOT).as_posix()
                # The home page is index.md; a README would take the place of its folder's.
                uri = f"{BESIDE}/{name.replace('README.md', 'about.md')}"
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between docs/ and the rest of the repository into links inside the site."""
    own = page.file.src_uri

    def inside(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(_in_repository(own)), match[1]))
        return posixpath.relpath(_in_site(target), posixpath.dirname(own) or ".")

    # GitHub needs a backslash before a pipe in a cell of a table. The site's Markdown would show the backslash.
    return LINK.sub(inside, markdown).replace("\\|", "|")


def _in_repository(uri: str) -> str:
    path = uri.removeprefix(f"{BESIDE}/")
    return path.replace("about.md", "README.md") if path != uri else f"docs/{uri}"


def _in_site(path: str) -> str:
    inner = path.removeprefix("docs/")
    return inner if inner != path else f"{BESIDE}/{path.replace('README.md', 'about.md')}"
