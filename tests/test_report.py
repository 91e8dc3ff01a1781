"""The screen shows what was measured, chosen and why, at any width, and computes nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from hypothesis import given, settings
from hypothesis import strategies as st
from screens import NEW, OLD, SCREENS, at_width, choice, drawn, plan, shown, shown_need

from pipette_launch.facts import Layout, Samples
from pipette_launch.facts.outcome import Outcome, PeakReading
from pipette_launch.facts.plan import Rate, Setting, Trial, Trials
from pipette_launch.facts.schedule import ScheduleFile, schedule_of
from pipette_launch.report.plan import outcome_line, plan_file_screen, rank_ranges
from pipette_launch.report.screen import arguments_diff

GOLDEN = Path(__file__).parent / "data" / "screens"
WIDTHS = (80, 120)
REGENERATE = "PYTHONPATH=.:tests python tests/test_report.py"
"""Writes the golden screens anew; look at them before you commit them."""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_golden_screens(name: str, width: int) -> None:
    """The screens look as they did when someone last looked at them."""
    expected = (GOLDEN / f"{name}-{width}.txt").read_text()

    assert expected == drawn(name, width), f"if this is meant, run: {REGENERATE}"


@settings(max_examples=20, deadline=None)
@given(st.integers(60, 120), st.sampled_from(sorted(SCREENS)))
def test_no_line_is_wider_than_the_terminal(width: int, name: str) -> None:
    """Nothing wraps by itself."""
    assert max(len(line) for line in drawn(name, width).splitlines()) <= width


def test_colour_is_all_that_a_terminal_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal there is not one escape code."""
    cluster = tiny_cluster(1, 2)
    made = plan(cluster, choice(Layout(dp=2), 1.0), choice(Layout(pp=2), 2.0))
    plain = shown(made, tiny_measurements(cluster), new_arguments=NEW)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    coloured = shown(made, tiny_measurements(cluster), new_arguments=NEW)

    assert "\x1b" not in plain
    assert "\x1b" in coloured


def test_a_terminal_without_unicode_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars, arrows and rules have plain stand-ins of the same width."""

    class Plain:
        encoding = "ascii"

        def isatty(self) -> bool:
            """No terminal."""
            return False

    monkeypatch.setattr(sys, "stderr", Plain())

    assert drawn("changed", 80).isascii()


def test_an_own_layout_that_does_not_fit_is_shown_as_such() -> None:
    """It stands last, marked, beside what was chosen in its place."""
    cluster = tiny_cluster(1, 2)
    own = choice(Layout(dp=2), 1.0, memory=shown_need((9 << 30,)))
    text = shown(plan(cluster, choice(Layout(pp=2), 2.0), own), None, new_arguments=None)

    assert "yours, too large  tp1 pp1 dp2 mbs1" in text


def test_an_own_layout_that_megatron_refuses_has_no_step_time() -> None:
    """The figure is another layout's, so that it stands in no bar."""
    made = plan(tiny_cluster(1, 2), choice(Layout(pp=2), 2.0), choice(Layout(dp=2), 1.0))
    refused = replace(made, own_fault="its batch does not divide")

    assert "yours" in shown(made, None, new_arguments=None)
    assert "yours" not in shown(refused, None, new_arguments=None)


def test_a_plan_that_could_not_be_kept_has_no_path() -> None:
    """The reason and what to do stand where the path would."""
    made = plan(tiny_cluster(1, 2), choice(Layout(dp=2), 1.0), choice(Layout(pp=2), 2.0))
    text = shown(made, None, new_arguments=None, saved_to=None, unsaved="/x cannot be written: do this")

    assert "Plan file  not kept: /x cannot be written: do this\n" in text


def test_a_single_thing_is_singular() -> None:
    """Each trial had one iteration."""
    run = Trial(
        layout=Layout(dp=2),
        placement=(0, 1),
        is_own=True,
        predicted_step_s=1.0,
        step=Samples(values_s=(1.0,)),
        failure="",
        took_s=1.0,
    )
    tried = replace(
        plan(tiny_cluster(1, 2), choice(Layout(dp=2), 1.0), choice(Layout(pp=2), 2.0)),
        trials=Trials(asked=1, iterations=1, runs=(run,)),
    )

    assert "timed: 1 iteration of each trial;" in shown(tried, None, new_arguments=None)


def test_a_stage_over_the_limit_says_so() -> None:
    """A plan from a file may ask for more than there is."""
    cluster = tiny_cluster(1, 2)
    chosen = choice(Layout(dp=2), 1.0, memory=shown_need((9 << 30,)))

    assert "9.00 GiB of 7.00 GiB, over" in shown(
        plan(cluster, chosen, choice(Layout(pp=2), 2.0)), None, new_arguments=None
    )


def test_changed_flags_are_paired() -> None:
    """Equal flags are left out, whichever way they are spelled; changed ones show both values."""
    assert arguments_diff(OLD, NEW) == [
        ("~", "--tensor-model-parallel-size 1 → 2"),
        ("~", "--micro-batch-size 1 → 4"),
        ("-", "--recompute-activations"),
        ("+", "--pipeline-model-parallel-size 2"),
        ("+", "--use-distributed-optimizer"),
        ("+", "--global-batch-size 64"),
    ]
    assert arguments_diff(["--a=1", "--b"], ["--b", "--a", "1"]) == []
    assert arguments_diff(["x", "--a", "1"], ["x", "--a", "1"]) == []


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0, 1, 2, 3), "0-3"), ((0, 1), "0 1"), ((3, 2, 1), "3 2 1"), ((4, 5, 6, 0, 8, 9, 10), "4-6 0 8-10"), ((), "")],
)
def test_runs_of_ranks_are_short(ranks: tuple[int, ...], text: str) -> None:
    """Three and more in a row are written as a range."""
    assert text == rank_ranges(ranks)


def test_the_outcome_in_one_line() -> None:
    """Measured, predicted, the error, and whether the measurement can be trusted."""
    outcome = Outcome(
        key="k",
        layout=Layout(tp=2, dp=2),
        placement=(0, 1, 2, 3),
        predicted_step_s=0.110,
        measured_step=Samples(values_s=(0.1, 0.1, 0.1), warmup_s=(0.9,)),
        first_iteration=1,
        last_iteration=20,
        losses=("1.0",) * 4,
        rate=Rate(tokens_per_s=20_480, flops_per_s=5.1e9, mfu=None),
    )
    shaky = Outcome(
        key="k",
        layout=Layout(),
        placement=(0,),
        predicted_step_s=1.0,
        measured_step=Samples(values_s=(1.0, 2.0, 3.0)),
        first_iteration=1,
        last_iteration=20,
        losses=(),
    )

    assert "step 100 ms, predicted 110 ms: 10% too long; 20.5 k tokens/s" == outcome_line(outcome)
    assert "step 2.00 s, predicted 1.00 s: 50% too short, unstable (spread 50%)" == outcome_line(shaky)


def test_the_outcome_fits_a_line_of_a_terminal() -> None:
    """With memory measured on a GPU the rate gives way; the report has it."""
    peak = PeakReading(rank=3, pp_rank=0, predicted_bytes=60 << 30, measured_bytes=61 << 30, source="device")
    outcome = Outcome(
        key="k",
        layout=Layout(),
        placement=(0,),
        predicted_step_s=12.34,
        measured_step=Samples(values_s=(12.7,)),
        first_iteration=1,
        last_iteration=20,
        losses=(),
        rate=Rate(tokens_per_s=20_480, flops_per_s=5.1e14, mfu=0.45),
        peaks=(peak,),
    )
    line = outcome_line(outcome)

    assert "step 12.70 s, predicted 12.34 s: 2.8% too short; memory 61.00 GiB, predicted 60.00 GiB" == line
    assert line in outcome_line(replace(outcome, peaks=(peak,)), 200)
    assert outcome_line(outcome, 200).endswith("; 20.5 k tokens/s, MFU 45.0%")


def test_flags_to_paste_stay_whole() -> None:
    """A shell takes what the screen shows: a flag a line, joined by backslashes, not one of them broken."""
    shown = drawn("planned", 80).partition("Append to the script's flags:\n")[2].partition("And delete")[0]

    assert [line.removesuffix(" \\").strip().partition(" ")[0] for line in shown.splitlines()] == [
        "--tensor-model-parallel-size",
        "--micro-batch-size",
        "--pipeline-model-parallel-size",
        "--use-distributed-optimizer",
        "--global-batch-size",
    ]
    assert all(line.endswith(" \\") for line in shown.splitlines()[:-1])
    assert not shown.splitlines()[-1].endswith("\\")


def test_a_schedule_that_megatron_lacks_is_said_beside_the_flags() -> None:
    """Flags alone would run another."""
    cluster = tiny_cluster(1, 2)
    order = replace(ScheduleFile.of(schedule_of(Layout(pp=2), 4)), name="zb-1p")
    own = choice(Layout(dp=2), 2.0)
    setting = Setting(
        script="train.py",
        arguments=OLD,
        new_arguments=NEW,
        num_parameters=1,
        global_batch_size=4,
        seq_length=8,
        device_name="cpu",
        device_memory_bytes=1 << 30,
        machines="measured",
        network="",
    )
    made = plan(cluster, replace(choice(Layout(pp=2), 1.0), schedule="zb-1p", order=order), own, setting=setting)

    text = plan_file_screen(made, title="pipette plan", saved_to=None)

    assert text.endswith(
        "Flags alone run 1f1b. pipette-launch runs zb-1p:\n"
        "  --pipette-schedules zb-1p, or --pipette-plan with the plan file\n"
    )


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for screen in SCREENS:
        for columns in WIDTHS:
            (GOLDEN / f"{screen}-{columns}.txt").write_text(drawn(screen, columns))


def test_plans_for_fewer_nodes_stand_in_a_table() -> None:
    """Nodes, step time, what that is of the plan's, layout, and what becomes of a checkpoint; without any, no table."""
    cluster = tiny_cluster(4, 2)
    whole = plan(cluster, choice(Layout(tp=2, dp=4), 0.5), choice(Layout(dp=8), 1.0))
    smaller = [
        plan(tiny_cluster(count, 2), choice(layout, step_s), choice(Layout(dp=2 * count), 2.0))
        for count, layout, step_s in ((3, Layout(tp=2, dp=3), 0.65), (2, Layout(pp=2, dp=2), 1.0))
    ]
    made = replace(whole, templates=tuple(smaller))
    with at_width(100):
        lines = [" ".join(line.split()) for line in shown(made, None, new_arguments=None).splitlines()]
    at = lines.index("On a loss 4 nodes 500 ms tp2 pp1 dp4 mbs1")

    assert "3 nodes 650 ms +30% tp2 pp1 dp3 mbs1 keeps TP and PP" == lines[at + 1]
    assert "2 nodes 1.00 s +100% tp1 pp2 dp2 mbs1 reshards the checkpoint" == lines[at + 2]
    assert "On a loss" not in shown(whole, None, new_arguments=None)
