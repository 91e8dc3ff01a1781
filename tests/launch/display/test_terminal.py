"""What a node prints of a job, by how much the user wants to read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from launch.worlds import options, plan, records

from pipette_launch.facts import Layout
from pipette_launch.facts.messages import Decision
from pipette_launch.launch.display.terminal import Kept, Terminal
from pipette_launch.probe.messages import Sign

MADE = replace(plan(Layout(pp=2, dp=2)), notes=("Matrix products reach 72% of a peak.",))
WARMUP = Decision(
    phase="warmup", tokens=tuple(one.token for one in records()), hosts=("node0", "node1"), num_slots=(2, 2)
)
TRAINING = replace(WARMUP, phase="train", plan=MADE, script_arguments=("--lr", "1"))


def printed(detail: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a start prints, a warm-up among it, and something that is not as the user asked."""
    terminal = Terminal(options(detail=detail))
    terminal.tell(WARMUP, None, Kept())
    terminal.warmup_goes_on(Sign(phase="links", at_s=0.0, limit_s=1.0))
    terminal.warmup_is_over(None)
    terminal.say("the warm-up took 3 s")
    terminal.begin("choosing a plan, {:.0f} s".format)
    terminal.end()
    measured = tiny_measurements(tiny_cluster(2, 2))
    terminal.tell(replace(TRAINING, reason="node7 is left out"), measured, Kept())
    return capsys.readouterr().err.splitlines()


def test_quiet_prints_what_was_chosen_and_what_is_not_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Two lines, both with our head."""
    lines = printed("quiet", capsys)

    assert "pipette-launch: node7 is left out" == lines[0]
    assert lines[1].startswith("pipette-launch: tp1 pp2 dp2 mbs1")
    assert 2 == len(lines)


def test_verbose_prints_all_notes(capsys: pytest.CaptureFixture[str]) -> None:
    """They are counted where nobody asks for them."""
    whole, usual = ("\n".join(printed(detail, capsys)) for detail in ("verbose", "usual"))

    assert MADE.notes[0] in whole
    assert MADE.notes[0] not in usual
    assert "on what was assumed; --pipette-verbose shows them" in usual
    assert "the warm-up took 3 s" in usual
