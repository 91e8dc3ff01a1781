"""The documents hold together: links lead somewhere, and the site is built of them and needs no other server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from doc_pages import PAGES, ROOT, anchors, blocks, links, name_of

COLUMNS = 132
TOO_WIDE = """
[...document.querySelectorAll("html, pre, pre > code, .md-typeset__scrollwrap")]
  .filter(found => found.scrollWidth > found.clientWidth)
  .map(found => found.textContent.slice(0, 60))
"""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Each relative link of a page names a file of the repository, and an anchor one of its headings."""
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page

        assert file.exists(), f"{name_of(page)}: {target}"
        assert not anchor or anchor in anchors(file), f"{name_of(page)}: {target}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents as MkDocs builds them, which finds nothing amiss with --strict."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)

    assert 0 == done.returncode, done.stderr
    return folder


def test_the_site_asks_no_other_server(site: Path) -> None:
    """No page loads a script, style, font or picture from elsewhere."""
    loads = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//"
    )
    assert [] == [page.name for page in site.rglob("*.html") if loads.search(page.read_text())]
    styles = site.rglob("*.css")
    assert [] == [style.name for style in styles if re.search(r"url\(\"?(?:https?:)?//", style.read_text())]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_no_page_scrolls_sideways_on_a_laptop(site: Path, tmp_path: Path) -> None:
    """In a window of 1280 pixels every page, block of code and table is as wide as its contents."""
    with Browser(tmp_path) as browser:
        found: dict[str, list[str]] = {}
        for page in sorted(site.rglob("*.html")):
            browser.open(page)
            found[str(page.relative_to(site))] = browser.run(TOO_WIDE)

    assert len(found) > len(PAGES)
    assert {} == {page: texts for page, texts in found.items() if texts}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_of_code_are_not_wrapped(page: Path) -> None:
    """A block of code is at most as wide as the site shows it in one line, except for stored lines of a log."""
    lines = [line for block in blocks(page) if block.mark != "log" for line in block.text.splitlines()]

    assert [] == [line for line in lines if len(line) > COLUMNS]


def test_the_readme_is_short() -> None:
    """The front page leads on to others in at most 120 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
