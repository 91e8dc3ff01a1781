"""Bad input is named in one sentence by the one who decides (`end_to_end/test_bad_input` has a case of each, whole)."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch.worlds import ARGUMENTS, chief, options, records


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
    """The flag and its value stand in the message; the user's own words train, or with `fail` the job stops."""
    decision = chief(tmp_path, options(*changes, on_error=on_error)).decide(records(), None)

    assert expected in decision.reason
    assert ({"train": "train", "fail": "stop"}[on_error], on_error == "fail") == (decision.phase, decision.failed)
    assert (None, None) == (decision.plan, decision.script_arguments)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ('{"kind": "plan", "schema_version": 99}', "schema_version 99"),
        ('{"kind": "cluster", "schema_version": 1}', "expected a 'plan' document, found 'cluster'"),
        ('{"kind": "plan", "schema_version": 1, "hots": []}', "unknown field 'hots'"),
    ],
    ids=["missing", "damaged", "version", "kind", "field"],
)
def test_a_bad_plan_file_is_named(tmp_path: Path, content: str | None, expected: str) -> None:
    """File and field are named, and training goes on without the plan."""
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)

    decision = chief(tmp_path, options(plan=path)).decide(records(), None)

    assert "mine.json" in decision.reason
    assert expected in decision.reason
    assert ("train", None) == (decision.phase, decision.plan)
    assert ARGUMENTS == decision.script_arguments
