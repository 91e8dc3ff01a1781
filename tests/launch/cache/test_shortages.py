"""Which plan ran out of memory, kept from job to job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_model

from pipette_launch.facts import Layout
from pipette_launch.facts.plan import Shortage
from pipette_launch.launch.cache.shortages import ShortageFile

HOST = tiny_cluster().hosts[0]
GIVEN: dict[str, Any] = {"host": HOST, "job": tiny_job(), "versions": {"torch": "2.13.0"}}
FOUND = Shortage(layout=Layout(dp=4), need_bytes=6, free_bytes=10, cause="out of memory", noticed_at="now")


def test_keeps_what_was_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For the next job; neither a first job nor one without a cache is told anything."""
    file, off = ShortageFile(tmp_path, **GIVEN), ShortageFile(None, **GIVEN)

    assert file.load() is None
    file.keep(FOUND)
    off.keep(FOUND)
    assert (FOUND, None, None) == (ShortageFile(tmp_path, **GIVEN).load(), off.load(), off.path)
    assert file.path is not None
    assert [file.path] == [path for path in tmp_path.rglob("*") if path.is_file()]
    assert 0o600 == file.path.stat().st_mode & 0o777
    assert [] == caplog.records


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"host": tiny_cluster().hosts[1]}, True),
        ({"job": tiny_job(own=Layout(tp=2, dp=2), pinned=("tp",), train_iters=77)}, True),
        ({"host": replace(HOST, cores=99)}, False),
        ({"job": tiny_job(model=tiny_model(num_layers=8))}, False),
        ({"job": tiny_job(megatron_version="0.15.0")}, False),
        ({"job": tiny_job(performance_flags=("--cross-entropy-loss-fusion",))}, False),
        ({"versions": {"torch": "2.12.0"}}, False),
    ],
)
def test_holds_for_such_machines_and_such_a_training(tmp_path: Path, changes: dict[str, Any], is_same: bool) -> None:
    """Other hosts of the same make and other layouts are the same; another model, flag or version is not."""
    assert is_same == (ShortageFile(tmp_path, **GIVEN).path == ShortageFile(tmp_path, **{**GIVEN, **changes}).path)


@pytest.mark.parametrize("text", ["", '{"kind": "plan"}', '{"kind": "shortage", "schema_version": 1}'])
def test_a_file_that_cannot_be_used_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    """And counts as none."""
    file = ShortageFile(tmp_path, **GIVEN)
    assert file.path is not None
    file.path.parent.mkdir(parents=True)
    file.path.write_text(text)

    assert file.load() is None
    assert str(file.path) in caplog.text


def test_a_link_out_of_the_cache_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither to read nor to write; a folder that cannot be written costs the lesson, not the job."""
    file = ShortageFile(tmp_path / "cache", **GIVEN)
    assert file.path is not None
    file.path.parent.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    file.path.parent.symlink_to(tmp_path / "elsewhere")
    file.keep(FOUND)

    assert file.load() is None
    assert [] == [*(tmp_path / "elsewhere").iterdir()]
    assert "cannot be kept for later jobs" in caplog.text
