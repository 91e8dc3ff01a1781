"""From the words typed behind `pipette compare` to tables and complaints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster
from megatron_lines import TEXT
from screens import choice, plan

from pipette_launch.facts import Layout, files
from pipette_launch.facts.results.comparison import Comparison
from pipette_launch.tools.compare import num_moved
from pipette_launch.tools.main import main
from pipette_launch.tools.rivals import NAMES

JOB = f"--megatron-version 0.16.1 pretrain_gpt.py {TEXT}"
ON = "--gpu h100 --nodes 2 --nproc-per-node 4 --rival-budget 0.01 --budget 0.5 --fix cp,vpp,order,overlap,recompute,ep"
CLUSTER = tiny_cluster(2, 2)
ONE = plan(CLUSTER, choice(Layout(dp=4), 1.0), choice(Layout(pp=4), 2.0), floor_s=0.8)
SWAPPED = replace(ONE, chosen=choice(Layout(pp=2, dp=2), 0.9, placement=(0, 1, 3, 2)))


def answer(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str, str]:
    """Exit code, stdout and stderr of `pipette compare WORDS`."""
    with pytest.raises(SystemExit) as caught:
        main(["compare", *words.split()])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.fixture(name="folder")
def folder_of_plans(tmp_path: Path) -> Path:
    """Plans a.plan.json and b.plan.json on the same hosts, and c.plan.json on others."""
    files.write(tmp_path / "a.plan.json", ONE)
    files.write(tmp_path / "b.plan.json", SWAPPED)
    files.write(tmp_path / "c.plan.json", replace(ONE, hosts=("x", "y")))
    return tmp_path


def test_files_stand_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step, ratio, gap, parts, and how many ranks are on another device."""
    code, out, err = answer(f"{folder / 'a.plan.json'} {folder / 'b.plan.json'} {folder / 'c.plan.json'}", capsys)
    text = " ".join(out.split())

    assert (0, "") == (code, err)
    assert "1 a 1.00 s 1.000 86% 25.0% tp1 pp1 dp4 mbs1 2 b 900 ms 0.900 86% 12.5% tp1 pp2 dp2 mbs1" in text
    assert "ranks on another device than in plan 1, of 4: plan 2: 2" in text
    assert "for other machines than plan 1: 3" in text
    assert "whether it is for the same job as 1 cannot be told" in text


def test_hosts_may_stand_in_another_order() -> None:
    """What counts is which rank a device has, not where its host is listed."""
    turned = replace(ONE, hosts=ONE.hosts[::-1], chosen=replace(ONE.chosen, placement=(2, 3, 0, 1)))

    assert (0, 2, None) == (
        num_moved(ONE, turned),
        num_moved(ONE, SWAPPED),
        num_moved(ONE, replace(ONE, hosts=("x", "y"))),
    )


def test_planners_are_priced_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """Every planner gets a row; ours is never slower than one whose choice can run; all are priced for one job."""
    code, out, err = answer(f"--json --planners {','.join(NAMES)} {ON} {JOB}", capsys)
    found = files.loads(Comparison, out, "stdout")
    ours = next(entry.choice for entry in found.entries if entry.name == "ours")
    runs = {entry.name: entry.choice for entry in found.entries if entry.runs}

    assert (0, "") == (code, err)
    assert list(NAMES) == [entry.name for entry in found.entries]
    assert ours is not None
    assert {"ours", "yours", "megatron-rules", "torchrun-order", "random"} <= set(runs)
    yours = runs["yours"]
    assert yours is not None
    assert ours.step_time_s <= yours.step_time_s
    assert runs["torchrun-order"] == yours
    assert all(one.rate and one.rate.mfu for one in runs.values() if one)


def test_an_own_layout_that_megatron_refuses_is_a_row_with_its_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """Every other planner still has its say."""
    code, out, err = answer(f"--json --planners {','.join(NAMES)} {ON} {JOB} --global-batch-size 4", capsys)
    found = {entry.name: entry for entry in files.loads(Comparison, out, "stdout").entries}

    assert (0, "") == (code, err)
    assert found["ours"].runs
    assert found["megatron-rules"].runs
    assert (
        "tp1 pp1 dp8 mbs1 is ruled out: micro_batch_size*dp does not divide global_batch_size=4."
        in found["yours"].faults
    )


def test_the_docs_list_every_planner() -> None:
    """docs/command_line.md names what --planners takes, no more and no less."""
    text = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith("| `--planners` | of "))

    assert sorted(NAMES) == sorted(row.removeprefix("| `--planners` | of ").removesuffix(" |").split(", "))


def test_a_choice_that_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """AMP asks for no memory: the fault says by how much, the remark what it would have run in its place."""
    words = f"--planners amp --gpu rtx-4090 --nodes 2 --nproc-per-node 4 {JOB} --num-layers 64 --hidden-size 4096"
    code, out, _ = answer(words, capsys)
    text = " ".join(out.split())

    assert 0 == code
    assert "does not fit: stage 0 needs" in text
    assert "Its first choice that can run is number" in text or "choices can run." in text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("a.plan.json", "what is a.plan.json compared with? Name two plan files or more"),
        ("nowhere.json nowhere2.json", "nowhere.json: cannot be read"),
        ("a.json b.json --json", "--json stands behind a file's name; flags of ours stand before"),
        ("--gpu h100 a.json b.json", "--gpu is for --planners"),
        (f"--planners amq {ON} {JOB}", "--planners amq: no such planner; did you mean amp?"),
        (f"--planners , {ON} {JOB}", "--planners needs names; known are ours, amp,"),
        (f"--planners amp --nodes 2 --nproc-per-node 4 {JOB}", "on which machines?"),
    ],
)
def test_complaints(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad input exits with 2 and one line that names it; nothing is printed to stdout."""
    code, out, err = answer(words, capsys)

    assert (2, "") == (code, out)
    assert complaint in err
