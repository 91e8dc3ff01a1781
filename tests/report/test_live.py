"""What is said of a job that runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipette_launch.facts.health import Verdict
from pipette_launch.facts.outcome import LiveJob
from pipette_launch.report.live import live_line, live_rows, live_screen, sparkline
from pipette_launch.text import duration_text

JOB = LiveJob(
    read_s=1000.0,
    written_s=996.0,
    script="pretrain_gpt.py",
    host="node0",
    nodes=2,
    began_s=100.0,
    phase="training",
    phase_began_s=400.0,
    key="k",
    layout="pp2 dp2",
    schedule="1f1b",
    predicted_step_s=0.5,
    own_predicted_step_s=0.7,
    step_s=0.51,
    predicted_tokens_per_s=12_600.0,
    tokens_per_s=12_300.0,
    iteration=120,
    iterations=200,
    printed_s=998.0,
    memory_need_bytes=14 << 30,
    memory_limit_bytes=20 << 30,
)


def said(job: LiveJob, *steps_s: float) -> dict[str, str]:
    """The named rows."""
    return {row.name: row.words for row in live_rows(job, steps_s) if row.name}


def test_rows_say_what_is_known() -> None:
    """Each figure beside its prediction, and how old it is."""
    rows = said(JOB, 0.4, 0.6)

    assert rows["Step"] == "510 ms, predicted 500 ms: 2.0% too short"
    assert rows["Iteration"].startswith("120 of 200 ")
    assert rows["Iteration"].endswith(" 40 s left")
    assert rows["Tokens/s"] == "12.3 k, predicted 12.6 k"
    assert rows["Memory"] == "needs 14.00 GiB of 20.00 GiB (70%)"
    assert rows["Failures"] == "no restarts, no lost nodes"
    assert rows["Phase"] == "training for 10 min"
    assert rows["Data"] == "written 4 s ago, last iteration 2 s ago"


def test_a_launcher_that_is_silent_is_told() -> None:
    """After a minute; not of a job that has ended."""
    silent = replace(JOB, read_s=1057.0)

    assert said(silent)["Data"].startswith("STALE: written 61 s ago")
    assert "stale" in live_line(silent)
    assert "STALE" not in said(replace(silent, phase="succeeded"))["Data"]


def test_a_warm_up_tells_where_it_is() -> None:
    """Without figures of a training."""
    warm = LiveJob(
        read_s=9.0,
        written_s=9.0,
        phase="warmup",
        warmup_phase="links",
        warmup_done=3,
        warmup_total=7,
        phase_began_s=1.0,
    )

    assert said(warm)["Phase"] == "warm-up for 8 s: links, 3 of 7"
    assert live_line(warm) == "warm-up, links, 3 of 7"


def test_the_line_changes_with_what_happens_alone() -> None:
    """Not with the clock."""
    assert live_line(JOB) == live_line(replace(JOB, read_s=1001.0, written_s=1001.0))
    assert live_line(JOB) != live_line(replace(JOB, iteration=121))


@pytest.mark.parametrize("phase", ["warmup", "training", "failed"])
def test_the_screen_fits_24_lines_of_80_columns(phase: str) -> None:
    """With long names, several problems, and a history; names of others are escaped."""
    slow = Verdict(kind="slow-link", host="node0" * 6, other_host="node1" * 6, figure="10 MB/s", peers="1 GB/s" * 6)
    full = replace(
        JOB,
        phase=phase,
        layout="tp8 pp16 dp64 cp4 ep8 etp1 vpp4 mbs2 full recompute of 4 layers seq-par dist-opt overlap",
        script="\x1b[2J" * 8,
        restarts=3,
        lost_nodes=2,
        verdicts=(slow,) * 9,
        warmup_phase="collectives",
        warmup_phase_s={f"phase{index}": 10.0 for index in range(6)},
        measured_memory_bytes=30 << 30,
    )
    lines = live_screen(full, [0.5] * 40).splitlines()

    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(lines)


def test_a_sparkline_begins_at_zero() -> None:
    """So that a steady pace looks steady."""
    assert "▄██" == sparkline([0.4, 0.99, 1.0])
    assert "▁▁" == sparkline([0.0, 0.0])


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (119, "119 s"), (420, "7 min"), (11_100, "3 h 5 min"), (187_200, "2 d 4 h")]
)
def test_durations_are_short(seconds: float, words: str) -> None:
    """Two units at most."""
    assert words == duration_text(seconds)
