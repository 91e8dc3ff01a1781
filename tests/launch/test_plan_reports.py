"""Reports and traces beside a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pages import AFTER, BEFORE, drawn

from pipette_launch.errors import ClusterError, FileFormatError
from pipette_launch.facts import files
from pipette_launch.launch.plan_reports import (
    draw_again,
    existing_page,
    found_files,
    page_of,
    page_path,
)
from pipette_launch.report.page.page import plan_page


def test_a_report_lies_beside_its_plan() -> None:
    """Beside plan.json it is report.html; plans in one folder have a report each."""
    assert Path("a/report.html") == page_path(Path("a/plan.json"))
    assert Path("a/b.plan.html") == page_path(Path("a/b.plan.json"))


def test_only_a_report_that_was_written_is_there(tmp_path: Path) -> None:
    """A plan from an earlier release may have no report."""
    plan = tmp_path / "plan.json"
    assert existing_page(None) is None
    assert existing_page(plan) is None
    page_path(plan).write_text(plan_page(drawn().plan, drawn().measurements, drawn().picture))
    assert existing_page(plan) == tmp_path / "report.html"


def kept(folder: Path) -> Path:
    """Write a plan and its other files into a cache, and return the path of the plan."""
    found = drawn()
    files.write(folder / "plan.json", found.plan)
    files.write(folder / "cluster.json", found.measurements)
    files.write(folder / "outcome.json", found.outcome)
    return folder / "plan.json"


JOB = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --global-batch-size 16 "
    "--train-iters 10 --vocab-size 256 --make-vocab-size-divisible-by 32 --transformer-impl local"
).split()


def test_files_give_the_whole_report(tmp_path: Path) -> None:
    """Links, passes and memory by kind from the plan, its flags and its measurements; the run from its outcome."""
    path, found = kept(tmp_path), drawn()
    assert found.plan.setting is not None
    setting = replace(found.plan.setting, arguments=(*BEFORE, *JOB), new_arguments=(*AFTER, *JOB))
    files.write(path, replace(found.plan, setting=setting))
    made = found_files(path, None)

    assert "" == made.missing
    assert 'id="timeline-data"' in page_of(made)
    assert 'id="links-data"' in page_of(made)
    assert "It ran" in page_of(made)


def test_the_report_is_drawn_again_with_the_outcome(tmp_path: Path) -> None:
    """Only a report that exists is drawn again; an error is returned, and the training goes on."""
    assert "" == draw_again(None)
    path = kept(tmp_path)
    assert "" == draw_again(path)
    assert not page_path(path).exists()

    page_path(path).write_text("the page without the outcome")
    assert "" == draw_again(path)
    assert "It ran" in page_path(path).read_text()

    path.write_text("{")
    assert f"{page_path(path)} does not show the outcome: " in draw_again(path)


def test_a_plan_for_layers_without_formulas_has_a_timeline(tmp_path: Path) -> None:
    """The measurements of the plan price its steps, so a job that is planned only on measured machines is drawn too."""
    path, found = kept(tmp_path), drawn()
    assert found.plan.setting is not None
    words = (*BEFORE, *JOB, "--spec", "my.layers", "layer")
    files.write(path, replace(found.plan, setting=replace(found.plan.setting, arguments=words)))
    files.write(tmp_path / "cluster.json", replace(found.measurements, versions={"megatron-core": "0.16.1"}))

    assert "" == found_files(path, None).missing


def test_what_files_lack_is_told(tmp_path: Path) -> None:
    """Refused flags cost the timeline, missing measurements also the links. Another plan's outcome is ignored."""
    path, found = kept(tmp_path), drawn()
    refused = found_files(path, None)
    assert refused.missing.startswith("the timeline is left out: ")
    assert 'id="links-data"' in page_of(refused)

    (tmp_path / "cluster.json").unlink()
    files.write(tmp_path / "outcome.json", replace(found.outcome, key="other"))
    bare = found_files(path, None)
    assert "no cluster.json" in bare.missing
    assert 'id="links-data"' not in page_of(bare)
    assert "It ran" not in page_of(bare)


def test_measurements_of_other_hosts_are_refused_where_they_are_named(tmp_path: Path) -> None:
    """A file that only lies beside the plan is ignored."""
    path, found = kept(tmp_path), drawn()
    files.write(path, replace(found.plan, hosts=("a", "b", "c", "d")))

    with pytest.raises(ClusterError, match="not those of"):
        found_files(path, tmp_path / "cluster.json")
    assert "no cluster.json with its hosts" in found_files(path, None).missing


def test_measurements_that_are_named_must_be_there(tmp_path: Path) -> None:
    """The user may have mistyped."""
    with pytest.raises(FileFormatError):
        found_files(kept(tmp_path), tmp_path / "clutser.json")
