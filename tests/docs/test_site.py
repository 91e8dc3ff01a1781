"""The documents hold together: links lead somewhere, and the site is built of them and needs no other server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, anchors, links, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Each relative link of a page names a file of the repository, and an anchor one of its headings."""
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page

        assert file.exists(), f"{name_of(page)}: {target}"
        assert not anchor or anchor in anchors(file), f"{name_of(page)}: {target}"


def test_the_site_is_built_and_asks_no_other_server(tmp_path: Path) -> None:
    """MkDocs finds nothing amiss with --strict, and no page loads a script, style, font or picture from elsewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)

    assert 0 == done.returncode, done.stderr
    loads = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//"
    )
    assert [] == [page.name for page in tmp_path.rglob("*.html") if loads.search(page.read_text())]
    styles = tmp_path.rglob("*.css")
    assert [] == [style.name for style in styles if re.search(r"url\(\"?(?:https?:)?//", style.read_text())]


def test_the_readme_is_short() -> None:
    """The front page leads on to others in at most 120 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
