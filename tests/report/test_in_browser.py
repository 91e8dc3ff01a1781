"""The report of a plan in a real browser: its values, keys and pointer, widths, contrast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from pages import drawn, many_hosts

from pipette_launch.facts import Plan, files
from pipette_launch.text import bytes_text, seconds_text

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

WIDTHS = (1280, 800, 400)
THEMES = ("light", "dark")
OPEN_ALL = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
CHECKS = Path(__file__).parent.with_name("page_checks.js").read_text()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The plan that has everything, and one of 1,280 hosts, as files."""
    folder = tmp_path_factory.mktemp("pages")
    made = {"small": drawn(), "large": many_hosts(1280)}
    for name, found in made.items():
        (folder / f"{name}.html").write_text(found.html)
    files.write(folder / "plan.json", made["small"].plan)
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests."""
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def text_of(browser: Browser, selector: str) -> str:
    """What an element says."""
    return str(browser.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def test_values_are_those_of_the_plan_file(browser: Browser, pages: dict[str, Path]) -> None:
    """Step, memory, each configuration's point, each stage's memory and each device's rank; and no script fails."""
    browser.open(pages["small"])
    plan = files.read(pages["small"].with_name("plan.json"), Plan)
    listed = (plan.chosen, *plan.alternatives, plan.own)
    needs = plan.chosen.memory.need_bytes

    assert [] == browser.errors
    assert seconds_text(plan.chosen.step_time_s) == text_of(browser, "#step")
    assert f"{1 - plan.chosen.step_time_s / plan.own.step_time_s:.1%}" == text_of(browser, "#saved")
    assert bytes_text(max(needs)) == text_of(browser, "#memory-need")
    points = browser.run("[...document.querySelectorAll('.point')].map((p) => [+p.dataset.stepS, +p.dataset.bytes])")
    assert [[one.step_time_s, max(one.memory.need_bytes)] for one in listed] == points
    values = browser.run("[...document.querySelectorAll('#memory .value')].map((one) => one.textContent)")
    assert [bytes_text(need) for need in needs] == values
    ranks = browser.run("[...document.querySelectorAll('.devices .stage')].map((one) => +one.textContent)")
    assert list(plan.chosen.placement) == ranks


def test_faster_points_stand_further_left(browser: Browser, pages: dict[str, Path]) -> None:
    """And leaner ones further down; the limit lies above those that fit and no others."""
    browser.open(pages["small"])
    points = browser.run(
        "[...document.querySelectorAll('.point')].map((p) => { const b = p.getBoundingClientRect();"
        " return [+p.dataset.stepS, (b.left + b.right) / 2, +p.dataset.bytes, (b.top + b.bottom) / 2]; })"
    )

    assert [one[0] for one in sorted(points)] == [one[0] for one in sorted(points, key=lambda one: (one[1], one[0]))]
    for one in points:
        for other in points:
            assert not (one[2] > other[2] and one[3] > other[3] + 0.01)
    limit = drawn().plan.chosen.memory.limit_bytes
    assert {True, False} == {one[2] <= limit for one in points}
    assert all((one[2] <= limit) == (browser.box(".limit")[1] < one[3]) for one in points)


def test_a_click_on_a_point_shows_its_flags(browser: Browser, pages: dict[str, Path]) -> None:
    """Flags stand below the plot after a click, ready to copy; the table has the same flags."""
    browser.open(pages["small"])
    assert browser.run("document.querySelector('#picked').hidden")

    browser.run("document.querySelector('.point.chosen').click()")
    browser.run("new Promise((done) => setTimeout(done, 100))")

    flags = browser.run("document.querySelector('.point.chosen').dataset.flags")
    assert flags == text_of(browser, "#picked pre")
    assert text_of(browser, "#picked p").startswith("chosen: ")
    assert flags.replace(" \\\n", " ") in text_of(browser, "#alternatives")


def test_keys_reach_what_the_pointer_reaches(browser: Browser, pages: dict[str, Path]) -> None:
    """Tab shows a point's figures, arrows walk the matrix and the passes, + and 0 zoom; Escape hides the figures."""
    browser.open(pages["small"])
    browser.run("document.querySelector('.point').focus()")
    shown = text_of(browser, "#tip")
    assert seconds_text(drawn().plan.chosen.step_time_s) in shown
    browser.press("Tab")
    assert text_of(browser, "#tip") != shown
    browser.press("Escape")
    assert browser.run("document.getElementById('tip').hidden")

    browser.run("document.querySelector('.matrix svg').focus()")
    browser.press("ArrowDown", 2)
    assert "node2 to node1: " in text_of(browser, ".matrix output")

    browser.run("document.querySelector('.track').focus()")
    browser.press("ArrowRight", 2)
    told = text_of(browser, ".timeline output")
    assert told.startswith("pipeline rank 0: forward of micro-batch 1 on stage 0")
    browser.press("ArrowDown")
    assert text_of(browser, ".timeline output").startswith("pipeline rank 1: ")
    view = "document.querySelector('.track svg').viewBox.baseVal.width"
    whole = browser.run(view)
    browser.press("+", 2)
    assert whole == 4 * browser.run(view)
    browser.press("0")
    assert whole == browser.run(view)


def test_the_skip_link_is_the_first_stop(browser: Browser, pages: dict[str, Path]) -> None:
    """Enter on it leads to the choice."""
    browser.open(pages["small"])
    browser.press("Tab")

    assert "skip" == browser.run("document.activeElement.className")
    assert browser.box(".skip")[0] >= 0


def test_the_pointer_shows_figures(browser: Browser, pages: dict[str, Path]) -> None:
    """Over a point, a bar, a host, a link and a pass; dragging moves a timeline that is zoomed."""
    browser.open(pages["small"])
    found = drawn()
    browser.hover(".point.chosen")
    assert found.plan.chosen.layout.words() in text_of(browser, "#tip")
    browser.hover("#memory .row")
    assert bytes_text(found.picture.memory_bytes[0]["weights"]) in text_of(browser, "#tip")
    browser.hover(".host .label")
    assert "node0" in text_of(browser, "#tip")
    browser.hover(".matrix svg", across=0.9, down=0.1)
    assert "node0 to node3: " in text_of(browser, ".matrix output")
    browser.hover(".track", across=0.002, down=0.1)
    assert text_of(browser, ".timeline output").startswith("pipeline rank 0: forward of micro-batch 0")


def test_a_zoomed_timeline_is_dragged(browser: Browser, pages: dict[str, Path]) -> None:
    """The time that was grabbed stays under the pointer."""
    browser.open(pages["small"])
    browser.run("document.querySelector('[data-zoom=in]').click()")
    view = "document.querySelector('.track svg').viewBox.baseVal.x"
    before = browser.run(view)
    browser.drag(".track", 0.75, 0.5)

    assert browser.run(view) == pytest.approx(before + 12_500, rel=0.01)


def check(browser: Browser, function: str) -> list[Any]:
    """Return what a function of `page_checks.js` finds in the open page."""
    found: list[Any] = browser.run(f"(() => {{ {CHECKS}; return {function}(); }})()")
    return found


@pytest.mark.parametrize("name", ["small", "large"])
def test_nothing_overflows_or_overlaps(browser: Browser, pages: dict[str, Path], name: str) -> None:
    """At three widths, and with all tables open; tables and flags scroll in regions of their own."""
    browser.open(pages[name])
    for width in WIDTHS:
        browser.resize(width)
        assert [] == check(browser, "overflowing"), width
        assert [] == check(browser, "overlapping"), width
    browser.run(OPEN_ALL)
    for width in WIDTHS:
        browser.resize(width)
        assert [] == check(browser, "overflowing"), width


@pytest.mark.parametrize("theme", THEMES)
def test_contrast_is_that_of_wcag_aa(browser: Browser, pages: dict[str, Path], theme: str) -> None:
    """In both themes: text 4.5 to 1, large text 3 to 1, colours of bars, passes and stages 3 to 1."""
    browser.open(pages["small"], theme=theme)
    browser.run(OPEN_ALL)
    texts, colours = check(browser, "contrastOfTexts"), check(browser, "contrastOfColours")

    assert len(texts) > 8
    assert [] == [one for one in texts if one[0] < one[1]]
    assert len(colours) > 8
    assert [] == [one for one in colours if one[0] < 3]


def test_the_checks_find_faults(browser: Browser, pages: dict[str, Path]) -> None:
    """Pale text, a wide box, shifted text and a button without a name are told, each by its own check."""
    browser.open(pages["small"])
    browser.run(
        "document.querySelector('#choice h2').style.color = '#999';"
        "document.querySelector('#alternatives p').style.width = '3000px';"
        "document.querySelector('.tiles .small').style.marginTop = '-1.5rem';"
        "document.querySelector('.point').removeAttribute('aria-label')"
    )

    assert ["The choice"] == [one[2].strip() for one in check(browser, "contrastOfTexts") if one[0] < one[1]]
    assert "the page" in check(browser, "overflowing")
    assert any("yours: " in one for one in check(browser, "overlapping"))
    assert 1 == len(check(browser, "nameless"))


def test_every_drawing_has_a_name(browser: Browser, pages: dict[str, Path]) -> None:
    """What takes the focus says what it is, and headings do not skip a level."""
    browser.open(pages["small"])
    levels = browser.run("[...document.querySelectorAll('h1, h2, h3')].map((one) => +one.tagName[1])")

    assert [] == check(browser, "nameless")
    assert 1 == levels.count(1) == levels[0]
    assert all(after - before <= 1 for before, after in pairwise(levels))
