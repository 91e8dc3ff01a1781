"""The report of a plan is one file that says what the plan says, whatever names it holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import drawn, many_hosts

from pipette_launch.report.page import page
from pipette_launch.report.page.page import (
    _matrix,
    front,
    links_view,
    placement_view,
    plan_page,
    what_changes,
)
from pipette_launch.report.page.tables_and_bars import Axis, stages_drawn
from pipette_launch.text import bytes_text, seconds_text

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Parser(HTMLParser):
    """Notes elements left open, ids, and every address that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open one."""
        if tag not in VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One that closes itself, as in SVG."""
        self._note(attrs)

    def handle_endtag(self, tag: str) -> None:
        """Close the last one."""
        assert tag == self.open.pop(), f"</{tag}> closes another element"

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "action", "data"):
                (self.targets if (value or "").startswith("#") else self.addresses).append(value or "")


def parsed(html: str) -> Parser:
    """Read a page to its end."""
    found = Parser()
    found.feed(html)
    found.close()
    return found


def embedded(html: str, name: str) -> object:
    """Return what the page hands to its script."""
    match = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', html, re.DOTALL)
    assert match
    return json.loads(match[1])


def test_the_page_is_whole_and_asks_for_nothing() -> None:
    """Elements close, ids differ, links lead within the page, and nothing comes from a network."""
    found = parsed(drawn().html)

    assert [] == found.open
    assert len(found.ids) == len(set(found.ids))
    assert {target[1:] for target in found.targets} <= set(found.ids)
    assert [] == found.addresses
    assert "url(" not in drawn().html
    assert "@import" not in drawn().html


def test_figures_are_those_of_the_plan() -> None:
    """Step, saving, memory, every configuration, every stage's kinds, and every pass."""
    found = drawn()
    html, chosen = found.html, found.plan.chosen

    assert f'id="step">{seconds_text(chosen.step_time_s)}<' in html
    for choice in (chosen, *found.plan.alternatives, found.plan.own):
        assert f'data-step-s="{choice.step_time_s}"' in html
        assert seconds_text(choice.step_time_s) in html
    for kinds, need in zip(found.picture.memory_bytes, chosen.memory.need_bytes, strict=True):
        assert bytes_text(need) in html
        assert all(bytes_text(size) in html for size in kinds.values() if size)
    timelines = embedded(html, "timeline-data")
    assert isinstance(timelines, dict)
    step = timelines["steps"][0]
    assert len(found.picture.chosen.rank_A) == sum(len(rank["starts"]) for rank in step["ranks"])
    assert step["makespan"] == pytest.approx(
        found.picture.chosen.makespan_s / timelines["longest_s"] * timelines["resolution"], abs=1
    )


def test_names_of_others_are_only_text() -> None:
    """Hosts, reasons and flags that look like markup, or hold control characters, change nothing of the page."""
    found = drawn()
    evil = '<script>alert(1)</script>"\x1b[31m'
    hosts = tuple(f"{evil}{index}" for index in range(4))
    cluster = found.measurements.cluster
    named = replace(
        cluster, hosts=tuple(replace(host, name=name) for host, name in zip(cluster.hosts, hosts, strict=True))
    )
    plan = replace(found.plan, hosts=hosts, reasons=(evil,), notes=(evil,))
    html = plan_page(plan, replace(found.measurements, cluster=named), found.picture, found.outcome)

    assert "<script>alert" not in html
    assert "\x1b" not in html
    assert [] == parsed(html).open
    assert parsed(html).ids == parsed(found.html).ids


def test_a_plan_alone_has_a_page() -> None:
    """Without measurements and picture it lacks links, timeline and kinds of memory, and says nothing of them."""
    found = drawn()
    html = plan_page(replace(found.plan, setting=None, trials=None))

    assert [] == parsed(html).open
    assert 'id="timeline-data"' not in html
    assert 'id="links-data"' not in html
    assert bytes_text(max(found.plan.chosen.memory.need_bytes)) in html


def test_the_run_and_the_trials_stand_beside_the_prediction() -> None:
    """Measured seconds, their error, and the memory that was read."""
    found = drawn()

    assert f"{found.outcome.error:+.1%}" in found.html
    assert "-10.0%" in found.html
    assert found.plan.chosen.layout.words() in found.html


@pytest.mark.parametrize(("count", "most_bytes"), [(64, 1_500_000), (1280, 3_000_000)])
def test_a_page_of_many_hosts_stays_small(count: int, most_bytes: int) -> None:
    """At most 1.5 MB at 64 hosts and 3 MB at 1,280, however different its links are."""
    html = many_hosts(count).html

    assert len(html.encode()) < most_bytes
    assert ("Each square is a host" in html) == (count > 128)


def test_both_matrices_hold_the_links_that_were_measured() -> None:
    """First in torchrun's order, then in that of the plan's ranks, where the racks stand together."""
    found = drawn()
    matrices = embedded(found.html, "links-data")
    assert isinstance(matrices, list)
    before, after = matrices
    rates = found.measurements.cluster.between_hosts.bandwidth_bytes_per_s

    assert list(found.plan.hosts) == before["names"]
    order = [found.plan.hosts.index(name) for name in after["names"]]
    assert order == sorted(range(4), key=lambda index: found.plan.chosen.placement[index])
    for row, host in enumerate(order):
        for column, other in enumerate(order):
            expected = None if host == other else rates[host, other]
            assert after["rates"][row][column] == expected


def test_blocks_of_hosts_have_the_rate_of_their_slowest_link() -> None:
    """130 hosts are drawn as blocks of three; a slow link between two of them is seen."""
    rates = np.full((130, 130), 1e9)
    rates[3, 120] = 1e6
    np.fill_diagonal(rates, 0.0)
    names = [str(index) for index in range(130)]
    found = _matrix("all", rates, names, list(range(130)), scale=(1e6, 1e9), island_of={})

    assert 44 == found["size"]
    assert "3 … 5" == found["names"][1]
    assert 1e6 == found["rates"][1][40]
    assert found["paths"][0] == "M40 1h1v1h-1z"


def test_blocks_of_hosts_fill_islands() -> None:
    """Of 160 hosts in islands of 32, four make a block: the least that 64 rows allow is three, which cuts islands."""
    rates = np.ones((160, 160))
    names = [str(index) for index in range(160)]
    islands = {index: index // 32 for index in range(160)}
    found = _matrix("all", rates, names, list(range(160)), scale=(0.5, 1.0), island_of=islands)

    assert 40 == found["size"]


def test_islands_are_what_fast_links_join() -> None:
    """The four hosts stand in two racks, 0 with 2 and 1 with 3, and the page draws no islands between equal links."""
    found = drawn()
    cluster = found.measurements.cluster
    rates = np.where(np.eye(4, dtype=bool), 0.0, 1e9)
    alike = replace(cluster, between_hosts=replace(cluster.between_hosts, bandwidth_bytes_per_s=rates))
    views = [links_view(found.plan, replace(found.measurements, cluster=one)) for one in (cluster, alike)]

    assert [["node0 … node2 (2)", "node1 … node3 (2)"], []] == [view["islands"] for view in views if view]


def test_every_device_has_its_rank_and_stage() -> None:
    """As the layout has them."""
    found = drawn()
    cells = [cell for host in placement_view(found.plan)["hosts"] for cell in host["cells"]]

    assert list(found.plan.chosen.placement) == [rank for rank, _ in cells]
    assert [found.plan.chosen.layout.cell_of(rank).pp for rank, _ in cells] == [stage for _, stage in cells]


def test_every_host_of_many_is_drawn() -> None:
    """As a square, whose parts are as wide as so many devices of a stage."""
    found = placement_view(many_hosts(1280).plan)

    assert found["is_dense"]
    assert 1280 == len(found["hosts"])
    assert {8} == {sum(count for _, count in host["runs"]) for host in found["hosts"]}


def test_what_changes_stands_beside_yours() -> None:
    """The degrees of both configurations, by name; what both lack is left out."""
    found = drawn().plan
    table = what_changes(found)

    assert ("", "yours", "chosen") == table.head
    rows = {row[0]: row[1:] for row in table.rows}
    assert (found.own.layout.pp, found.chosen.layout.pp) == rows["pipeline parallel (pp)"]
    assert "expert parallel (ep)" not in rows
    assert "recompute" not in rows


def test_layers_stand_stage_by_stage() -> None:
    """A stage lists the layers of its chunks, and counts equal chunks if more than two follow each other."""
    found = drawn().plan
    for layers, words in (((3, 2, 3, 0), "3+3 2+0"), ((2, 1, 1, 1, 1, 1, 1, 0), "2+3x1 3x1+0")):
        layout = replace(found.chosen.layout, vpp=len(layers) // 2, layers_per_chunk=layers)
        table = what_changes(replace(found, chosen=replace(found.chosen, layout=layout)))

        assert words == {row[0]: row[-1] for row in table.rows}["layers on each stage"]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8))
def test_ticks_are_round_and_inside(values: list[float]) -> None:
    """At least one and at most seven, evenly apart, and every value has a place between 0 and 100."""
    axis = Axis.around(values)
    ticks = axis.ticks()

    assert 1 <= len(ticks) <= 7
    assert all(axis.low - 1e-9 * abs(axis.low) <= tick <= axis.high + 1e-9 * abs(axis.high) for tick in ticks)
    assert all(0 <= axis.percent(value) <= 100 for value in values)
    steps = [after - before for before, after in pairwise(ticks)]
    assert not steps or max(steps) == pytest.approx(min(steps), rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 9).map(float), st.integers(1, 9)), min_size=1, max_size=9))
def test_nothing_beats_the_front_and_the_front_beats_the_rest(points: list[tuple[float, int]]) -> None:
    """In time and memory at once."""
    best = front(points)

    def beats(one: tuple[float, int], other: tuple[float, int]) -> bool:
        return one != other and one[0] <= other[0] and one[1] <= other[1]

    for index, point in enumerate(points):
        assert (index in best) == (not any(beats(other, point) for other in points))


def test_a_limit_far_above_is_told_and_not_drawn() -> None:
    """On its scale nothing could be seen of what is needed; one that is near has a mark in each bar."""
    far, near = many_hosts(64).html, drawn().html

    assert 'class="limit-mark"' not in far
    assert "far beyond these bars" in far
    assert len(drawn().plan.chosen.memory.need_bytes) == near.count('class="limit-mark"')


@given(st.lists(st.integers(1, 100), min_size=1, max_size=300))
def test_long_pipelines_show_their_ends_and_the_fullest(needs: list[int]) -> None:
    """At most 64 stages, each once."""
    found = stages_drawn(tuple(needs))

    assert len(found) <= 64
    assert sorted(set(found)) == found
    assert {0, len(needs) - 1} <= set(found)
    assert max(needs) == max(needs[stage] for stage in found)


def test_each_part_of_a_step_has_its_own_colour() -> None:
    """The style names one colour for each part, and one more for parts that the list lacks."""
    style = (Path(page.__file__).parent / "page.css").read_text(encoding="utf-8")
    colours = [re.findall(rf"--c{number}: (#[0-9a-f]{{6}});", style) for number in range(len(page.PARTS) + 1)]
    light, dark = zip(*colours, strict=True)

    assert len(page.PARTS) + 1 == len({*light}) == len({*dark})
    assert all(f".c{number} {{ background: var(--c{number}); }}" in style for number in range(len(page.PARTS) + 1))
