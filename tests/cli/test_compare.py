"""`pipette compare`: from a command line to tables and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster
from screens import choice, plan

from pipette_launch.cli.pipette import main
from pipette_launch.facts import Layout, files
from pipette_launch.facts.plan import Setting
from pipette_launch.planning.compare import compare, num_moved

CLUSTER = tiny_cluster(2, 2)
ONE = plan(CLUSTER, choice(Layout(dp=4), 1.0), choice(Layout(pp=4), 2.0), floor_s=0.8)
SWAPPED = replace(ONE, chosen=choice(Layout(pp=2, dp=2), 0.9, placement=(0, 1, 3, 2)))


def answer(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str, str]:
    """Return exit code, stdout and stderr of `pipette compare WORDS`."""
    with pytest.raises(SystemExit) as caught:
        main(["compare", *words.split()])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.fixture(name="folder")
def folder_of_plans(tmp_path: Path) -> Path:
    """Write a.plan.json and b.plan.json for the same hosts, and c.plan.json for others."""
    files.write(tmp_path / "a.plan.json", ONE)
    files.write(tmp_path / "b.plan.json", SWAPPED)
    files.write(tmp_path / "c.plan.json", replace(ONE, hosts=("x", "y")))
    return tmp_path


def test_files_stand_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The screen shows step, ratio, gap, parts, and the number of moved ranks."""
    code, out, err = answer(f"{folder / 'a.plan.json'} {folder / 'b.plan.json'} {folder / 'c.plan.json'}", capsys)
    text = " ".join(out.split())

    assert (0, "") == (code, err)
    assert "1 a 1.00 s 1.000 86% 25.0% tp1 pp1 dp4 mbs1 2 b 900 ms 0.900 86% 12.5% tp1 pp2 dp2 mbs1" in text
    assert "ranks on another device than in plan 1, of 4: plan 2: 2" in text
    assert "for other machines than plan 1: 3" in text
    assert "may be for another job than plan 1" in text


@pytest.mark.parametrize(
    ("least_gib", "faults", "remarks"),
    [
        (9, ("Does not fit: stage 0 needs 9.00 GiB, and the limit is 7.00 GiB.",), ()),
        (7, (), ("Tight: stage 0 needs 9.00 GiB, and the limit is 7.00 GiB.",)),
    ],
)
def test_a_tight_plan_can_run(folder: Path, least_gib: int, faults: tuple[str, ...], remarks: tuple[str, ...]) -> None:
    """A plan without memory for its tensors has a fault, and a tight plan only a remark."""
    fat = choice(Layout(dp=4), 1.0, peak_memory_bytes=(9 << 30,))
    assert fat.memory is not None
    fat = replace(fat, memory=replace(fat.memory, least_bytes=(least_gib << 30,)))
    files.write(folder / "fat.plan.json", replace(ONE, chosen=fat))
    found = compare([folder / "a.plan.json", folder / "fat.plan.json"]).entries[1]

    assert (faults, remarks, not faults) == (found.faults, found.remarks, found.runs)


def test_a_network_that_was_not_described_is_not_called_measured(folder: Path) -> None:
    """Plans of one host and of measured hosts have no described network, and nothing else is known of it."""
    setting = Setting(
        script="x.py",
        arguments=(),
        new_arguments=(),
        num_parameters=1,
        global_batch_size=1,
        seq_length=1,
        device_name="x",
        device_memory_bytes=1,
        machines="x",
        network="",
    )
    files.write(folder / "one.plan.json", replace(ONE, setting=setting))
    files.write(folder / "two.plan.json", replace(ONE, setting=replace(setting, network="47 GB/s")))
    notes = compare([folder / "one.plan.json", folder / "two.plan.json"]).notes

    assert ("2: other network than plan 1: 47 GB/s instead of one that was not described.",) == notes


def test_hosts_may_stand_in_another_order() -> None:
    """Ranks are compared device by device, whatever the order of hosts in the files."""
    turned = replace(ONE, hosts=ONE.hosts[::-1], chosen=replace(ONE.chosen, placement=(2, 3, 0, 1)))

    assert (0, 2, None) == (
        num_moved(ONE, turned),
        num_moved(ONE, SWAPPED),
        num_moved(ONE, replace(ONE, hosts=("x", "y"))),
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("a.plan.json", "nothing to compare: name two plan files or more"),
        ("--planners ours a.plan.json", "unknown flag --planners"),
        ("nowhere.json nowhere2.json", "nowhere.json: cannot be read"),
    ],
)
def test_complaints(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad input exits with 2 and prints one line to stderr and nothing to stdout."""
    code, out, err = answer(words, capsys)

    assert (2, "") == (code, out)
    assert complaint in err
