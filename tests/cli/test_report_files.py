"""`pipette report --trace` writes a trace from the files beside a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import drawn

from pipette_launch.cli.pipette import main
from pipette_launch.facts import files
from pipette_launch.launch.plan_reports import trace_path
from pipette_launch.report.trace import STEPS


def test_a_trace_is_made_of_what_lies_beside_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace has the steps of outcome.json; without cluster.json a line lists the missing parts."""
    found = drawn()
    files.write(tmp_path / "plan.json", found.plan)
    files.write(tmp_path / "outcome.json", found.outcome)
    with pytest.raises(SystemExit) as caught:
        main(["report", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "t.json")])
    out, err = capsys.readouterr()
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == STEPS}

    assert (0, "") == (caught.value.code, out)
    assert "no cluster.json with its hosts lies beside the plan" in err
    assert {"training, measured", "training, predicted"} <= tracks


def test_where_a_trace_lies() -> None:
    """The trace lies beside the plan, named after it."""
    assert Path("/a/trace.json") == trace_path(Path("/a/plan.json"))
    assert Path("/a/b.plan.trace.json") == trace_path(Path("/a/b.plan.json"))
