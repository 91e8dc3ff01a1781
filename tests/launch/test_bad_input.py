"""The coordinator names bad input in one sentence (`end_to_end/test_bad_input` has a whole case of each)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch.worlds import ARGUMENTS, coordinator, options, plan, records

from pipette_launch.facts import Layout, files
from pipette_launch.facts.messages import RunTraining, Stop


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["--tensor-model-parallel-size", "3"], "tensor-model-parallel-size 3"),
        (["--num-attention-heads", "5"], "num-attention-heads 5"),
        (["--global-batch-size", "7"], "--global-batch-size 7"),
        (["--train-samples", "5"], "exclude each other"),
    ],
)
@pytest.mark.parametrize("on_error", ["train", "fail"])
def test_contradictory_flags_are_named(tmp_path: Path, changes: list[str], expected: str, on_error: str) -> None:
    """The message has the flag and its value; the user's own arguments train, or the job stops with `fail`."""
    decision = coordinator(tmp_path, options(*changes, on_error=on_error)).decide(records(), None)

    assert expected in decision.reason
    assert {"train": RunTraining, "fail": Stop}[on_error] is type(decision)
    assert isinstance(decision, Stop) or (None, None) == (decision.plan, decision.script_arguments)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ('{"kind": "plan", "schema_version": 99}', "schema_version 99"),
        ('{"kind": "cluster", "schema_version": 2}', "expected a 'plan' document, found 'cluster'"),
        ('{"kind": "plan", "schema_version": 2, "hots": []}', "unknown field 'hots'"),
    ],
    ids=["missing", "damaged", "version", "kind", "field"],
)
@pytest.mark.parametrize("on_error", [None, "train", "fail"])
def test_a_bad_plan_file_is_named(tmp_path: Path, content: str | None, expected: str, on_error: Any) -> None:
    """The message has the file and the field; the job stops, or trains if the user asked for that."""
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)

    decision = coordinator(tmp_path, options(plan=path, on_error=on_error)).decide(records(), None)

    assert "--pipette-plan" in decision.reason
    assert "mine.json" in decision.reason
    assert expected in decision.reason
    if on_error == "train":
        assert ("train", None, ARGUMENTS) == (decision.phase, decision.plan, decision.script_arguments)
    else:
        assert ("stop", True, True) == (decision.phase, decision.failed, decision.is_misuse)


@pytest.mark.parametrize(("is_misuse", "phase"), [(True, "stop"), (False, "train")])
def test_a_device_that_is_not_there_is_an_error_of_the_users(tmp_path: Path, is_misuse: bool, phase: str) -> None:
    """It may be missing on any node. Other troubles of a machine do not stop the job."""
    first, second = records()
    nodes = [first, replace(second, host=None, trouble="NVML shows no GPU", is_misuse=is_misuse)]

    decision = coordinator(tmp_path, options(device="cuda")).decide(nodes, None)

    assert (phase, is_misuse) == (decision.phase, isinstance(decision, Stop) and decision.is_misuse)
    assert "node1: NVML shows no GPU" in decision.reason


def test_a_plan_for_hosts_that_have_gone_is_nobodys_error(tmp_path: Path) -> None:
    """A job that loses a node goes on without the plan file that the user named for all nodes."""
    path = tmp_path / "mine.json"
    files.write(path, plan(Layout(pp=2, dp=2)))
    one = coordinator(tmp_path, options(plan=path))

    decision = one.decide(records(1), one.decide(records(), None))

    assert "the plan is for the hosts node0, node1; this job runs on node0" in decision.reason
    assert "train" == decision.phase
