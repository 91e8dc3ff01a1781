"""`pipette explain`: from a command line to answers and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from screens import choice

from pipette_launch.cli.pipette import main
from pipette_launch.facts import Layout, Plan, Provenance, files
from pipette_launch.facts.glossary import MEANINGS
from pipette_launch.facts.plan import Rate


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str, str]:
    """Return exit code, stdout and stderr of `pipette explain WORDS`."""
    with pytest.raises(SystemExit) as caught:
        main(["explain", *words])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """Write a plan with a step of 1 s and a floor of 0.8 s."""
    chosen = replace(choice(Layout(tp=2, pp=2), 1.0), rate=Rate(tokens_per_s=1000.0, flops_per_s=2e14, mfu=0.5))
    plan = Plan(
        hosts=("a",),
        devices_per_host=4,
        device_kind="cuda",
        chosen=chosen,
        alternatives=(),
        own=chosen,
        keeps_own=True,
        reasons=("It is alone.",),
        notes=(),
        num_layouts=1,
        dropped={},
        solve_s=0.0,
        provenance=Provenance(key="k", made_at="2026-11-24", versions={}, source="imagined"),
        floor_s=0.8,
    )
    files.write(tmp_path / "a.plan.json", plan)
    return str(tmp_path / "a.plan.json")


def test_alone_it_lists_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Each label has one line."""
    code, out, err = answer([], capsys)

    assert (0, "") == (code, err)
    assert len(MEANINGS) == len(out.splitlines())
    assert all(meaning.what in out for meaning in MEANINGS.values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gap", "25.00%"),
        ("MFU", "50.0%"),
        ("data_parallel", "23 ms of 1.00 s"),
        ("Step time", "1.00 s"),
        ("tp", "2"),
        ("memory margin", "8%"),
        ("yours", "tp2 pp2 dp1 mbs1, 1.00 s a step predicted"),
    ],
)
def test_a_plan_gives_the_value(key: str, value: str, saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of files and labels of screens both work."""
    code, out, err = answer([key, saved], capsys)

    assert (0, "") == (code, err)
    assert f"  here    {value}\n" in out


def test_the_document_says_the_same(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` has every field of the table, and the value."""
    (one,) = json.loads(answer(["--json", "gap", saved], capsys)[1])["keys"]

    assert ("gap", MEANINGS["gap"].how, "25.00%") == (one["key"], one["how"], one["value"])


def test_a_misspelt_key_gets_its_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2."""
    code, out, err = answer(["bubbel"], capsys)

    assert (2, "") == (code, out)
    assert "unknown label 'bubbel'; did you mean bubble?" in err
