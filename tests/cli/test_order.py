"""`pipette order` prints or writes the files of another launcher."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from launch.test_plan_reports import JOB
from pages import BEFORE, drawn

from pipette_launch.cli.pipette import main
from pipette_launch.facts import files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan of four hosts with a whole command line, whose measurements lie elsewhere."""
    found = drawn()
    assert found.plan.setting is not None
    setting = replace(found.plan.setting, arguments=(*BEFORE, *JOB))
    files.write(tmp_path / "plan.json", replace(found.plan, setting=setting))
    files.write(tmp_path / "measured.json", replace(found.measurements, versions={"megatron-core": "0.16.1"}))
    return tmp_path / "plan.json"


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run the command, and return what it prints."""
    with pytest.raises(SystemExit) as end:
        main(["order", *map(str, words)])
    out, err = capsys.readouterr()
    assert (0, "") == (end.value.code, err)
    return out


def test_files_are_printed_or_written(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --out the files are on the screen, ready to paste, and with --out in the folder."""
    printed = answer(capsys, plan, "--for", "mpirun")
    written = answer(capsys, plan, "--for", "mpirun", "--out", plan.parent / "order")

    for name in ("rank.sh", "hosts.txt"):
        body = (plan.parent / "order" / name).read_text()
        assert f"cat > {name} <<'END'\n{body}END\n" in printed
        assert body not in written
    assert "node2\nnode0\nnode3\nnode1\n" == (plan.parent / "order" / "hosts.txt").read_text()
    assert "mpirun -np 4 --hostfile hosts.txt --map-by seq" in written
    assert "--pipeline-model-parallel-size 4" in written


def test_a_whole_screen(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hosts are in the order of their ranks; the plan without permuted devices of a host loses nothing."""
    words = " ".join(answer(capsys, plan, "--for", "ray", "--cluster", plan.parent / "measured.json").split())

    assert "node2 0 - node0 1 - node3 2 - node1 3 -" in words
    assert "nodes in the order of hosts: nothing is lost" in words
