"""A record says that the tests passed with the newest megatron-core, and its age is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
from newest_record import FOLDERS, RECORD, age  # noqa: E402

FOUND = json.loads(RECORD.read_text())


def test_the_record_names_newer_releases_than_the_other_tests_use() -> None:
    """Python 3.12 or later, and a megatron-core that is newer than the pinned one."""
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if "megatron-core" in line)

    assert Version("3.12") <= Version(FOUND["python"])
    assert Version(pinned.partition("==")[2]) < Version(FOUND["megatron_core"])


def test_the_recorded_run_had_all_tests() -> None:
    """Thousands passed, few were skipped, and expected failures are named gaps, which only get fewer."""
    assert FOUND["passed"] > 2000
    assert FOUND["skipped"] < 40
    assert FOUND["expected_failures"] <= 25


def test_the_age_is_printed_with_the_changes_since() -> None:
    """One line if no source changed; else the commits and the command."""
    record = {"date": "2026-11-26", "megatron_core": "0.19.2", "python": "3.12.1"}
    passed = "scripts/test-newest passed on 2026-11-26 with megatron-core 0.19.2 and Python 3.12.1."

    assert passed == age(record, [])
    told = age(record, ["1a2b3c [probe] Time more"])
    assert told.startswith(f"{passed}\nLater commits that change {FOLDERS[0]}")
    assert ": 1\n1a2b3c [probe] Time more\nRun scripts/test-newest" in told


def test_the_folders_exist() -> None:
    """A folder that was renamed would hide its changes."""
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)
