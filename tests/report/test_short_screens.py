"""The first screen of a job and that of `pipette plan` are short; what is not on them is counted and kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from hypothesis import given, settings
from hypothesis import strategies as st
from screens import NEW, OLD, at_width, choice, drawn, plan, shown_need

from pipette_launch.facts import Layout, Plan
from pipette_launch.facts.health import Verdict
from pipette_launch.report.plan import chosen_line, plan_file_screen, plan_screen

LINES, COLUMNS = 60, 100
ADVICE = ("--ckpt-format torch fixes tp and pp; --ckpt-format torch_dist lets them change",)
NOTES = ("Matrix products reach 72% of 989 TFLOP/s.", "links: one was estimated.")


@pytest.fixture(scope="module", autouse=True)
def _columns() -> Iterator[None]:
    with at_width(COLUMNS):
        yield


def many(count: int, what: str) -> tuple[str, ...]:
    """So many different sentences."""
    return tuple(
        f"{what} number {number}, of a length that fills the better part of a line." for number in range(count)
    )


@pytest.mark.parametrize("name", ["changed", "kept", "large", "planned-now", "small", "spared"])
def test_a_first_screen_fits(name: str) -> None:
    """Small CPU job, 64 hosts, experts with templates and spares, verdicts, imagined machines."""
    lines = drawn(name, COLUMNS).splitlines()

    assert LINES >= len(lines)
    assert COLUMNS >= max(map(len, lines))
    headings = " ".join(line[:9].strip() for line in lines)
    for heading in ("Chosen", "Why", "Memory"):
        assert heading in headings


@settings(max_examples=30, deadline=None)
@given(
    num_hosts=st.integers(1, 200),
    num_others=st.integers(0, 8),
    num_templates=st.integers(0, 8),
    num_verdicts=st.integers(0, 30),
    num_notes=st.integers(0, 40),
    num_reasons=st.integers(1, 8),
    num_flags=st.integers(0, 30),
    stages=st.sampled_from([1, 4, 16]),
)
def test_long_listings_are_cut(**sizes: int) -> None:
    """Long listings do not lengthen the screen, and the chosen layout and its memory are on it."""
    hosts = sizes["num_hosts"]
    cluster = tiny_cluster(hosts, 16)
    chosen = choice(Layout(pp=sizes["stages"], dp=hosts * 16 // sizes["stages"]), 1.0)
    made = plan(
        cluster,
        replace(chosen, placement=tuple(reversed(chosen.placement))),
        choice(Layout(dp=hosts * 16), 2.0),
        *(replace(chosen, step_time_s=1.1 + other) for other in range(sizes["num_others"])),
        templates=tuple(
            plan(tiny_cluster(hosts + 1 + one, 16), *[choice(Layout(dp=16 * (hosts + 1 + one)), 1.0)] * 2)
            for one in range(sizes["num_templates"])
        ),
        reasons=many(sizes["num_reasons"], "Reason"),
        advice=many(sizes["num_notes"], "Note"),
    )
    verdicts = tuple(
        Verdict(kind="pcie", host=f"node{one}", figure="uses 8 of the 16 lanes of its slot, which costs half its rate")
        for one in range(sizes["num_verdicts"])
    )
    flags = [word for one in range(sizes["num_flags"]) for word in (f"--flag-{one}", str(one))]
    screen = plan_screen(
        made,
        replace(tiny_measurements(cluster), verdicts=verdicts),
        arguments=OLD,
        new_arguments=(*NEW, *flags),
        saved_to=Path("/home/user/plan.json"),
    )

    assert LINES >= screen.count("\n"), screen
    assert COLUMNS >= max(map(len, screen.splitlines()))
    assert chosen.layout.words() in screen
    assert "GiB of" in screen


def noted() -> Plan:
    """A plan with one note on which the user can act, of three."""
    return plan(
        tiny_cluster(1, 2), choice(Layout(dp=2), 1.0), choice(Layout(pp=2), 2.0), advice=ADVICE, notes=NOTES, dropped={}
    )


def test_notes_that_ask_for_nothing_are_counted() -> None:
    """Advice stays. One line counts the other notes and names the report, which has all of them."""
    screens = {
        is_whole: plan_file_screen(noted(), title="", saved_to=Path("p.json"), is_whole=is_whole)
        for is_whole in (False, True)
    }

    assert [True, False, False] == [note in screens[False] for note in (*ADVICE, *NOTES)]
    assert "3 more notes on what was assumed; pipette report shows them" in screens[False]
    assert all(note in screens[True] for note in (*ADVICE, *NOTES))
    assert "docs/prediction.md" in screens[True]
    assert "pipette report shows" not in screens[True]


def test_the_last_reason_stays() -> None:
    """It says how much faster any other plan could be."""
    made = replace(noted(), reasons=(*many(30, "Reason"), "No legal layout takes less than 0.9 s."))
    screen = plan_file_screen(made, title="", saved_to=None, is_whole=False)

    assert "Reason number 0" in screen
    assert "Reason number 29" not in screen
    assert "No legal layout takes less" in screen


def test_quiet_is_one_line() -> None:
    """What was chosen, and what it saves; or that one's own stays, cannot run, or does not fit."""
    made = noted()
    line = "tp1 pp1 dp2 mbs1, no-pipelining, 1.00 s a step predicted"
    fat = choice(Layout(pp=2), 2.0, memory=shown_need((9 << 30, 9 << 30)))

    assert f"{line}, 50.0% less than your own configuration" == chosen_line(made)
    assert f"{line}; your own configuration cannot run" == chosen_line(replace(made, own_fault="x"))
    assert f"{line}; your own configuration does not fit in memory" == chosen_line(replace(made, own=fat))
    assert f"your own configuration: {line}" == chosen_line(replace(made, own=made.chosen, keeps_own=True))
