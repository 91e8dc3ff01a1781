"""The record of a green run of scripts/test-newest: print its age, or write it with `--write FILE`."""

from __future__ import annotations

import itertools
import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "data" / "newest.json"
FOLDERS = ("pipette_launch/megatron", "pipette_launch/probe", "patches/pipette_patches")
"""Sources that depend on the release of megatron-core."""
MOST_LINES, MOST_COMMITS = 10, 300


def new_record() -> dict[str, Any]:
    """Return the record of the run whose results lie in the folder `build`."""
    suite = next(ET.parse(ROOT / "build" / "newest.xml").getroot().iter("testsuite"))  # noqa: S314 - pytest wrote it
    gaps = sum(skipped.get("type") == "pytest.xfail" for skipped in suite.iter("skipped"))
    return {
        "date": f"{datetime.now(tz=timezone.utc):%Y-%m-%d}",
        "python": platform.python_version(),
        "megatron_core": version("megatron-core"),
        "torch": version("torch"),
        "passed": int(suite.attrib["tests"]) - int(suite.attrib["skipped"]),
        "expected_failures": gaps,
        "skipped": int(suite.attrib["skipped"]) - gaps,
        "trees": trees("HEAD"),
    }


def git(*words: str) -> str:
    """Return the output of a git command. Empty if the command fails, as in a clone without history."""
    command = ["git", "-C", str(ROOT), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def trees(commit: str) -> list[str]:
    """Return git's names for the contents of the folders in a commit, which no rebase changes."""
    return git("rev-parse", *(f"{commit}:{folder}" for folder in FOLDERS)).split()


def later_changes(tested: list[str]) -> list[str]:
    """Return the commits, one line each, that changed the folders after the tested contents; at most MOST_COMMITS."""
    commits = git("log", f"-{MOST_COMMITS}", "--format=%h %s", "--", *FOLDERS).splitlines()
    return list(itertools.takewhile(lambda line: trees(line.partition(" ")[0]) != tested, commits))


def age(record: dict[str, Any], changes: list[str]) -> str:
    """Return the sentences about a record and the later commits (one line each) that its run did not test."""
    releases = f"megatron-core {record['megatron_core']} and Python {record['python']}"
    lines = [f"scripts/test-newest passed on {record['date']} with {releases}."]
    if changes:
        lines += [f"Later commits that change {', '.join(FOLDERS)}: {len(changes)}", *changes[:MOST_LINES]]
        lines += ["Run scripts/test-newest before the next release, and commit tests/data/newest.json."]
    return "\n".join(lines)


def main() -> None:
    """Write the record to the file behind `--write`, or print the age of the record."""
    if sys.argv[1:2] == ["--write"]:
        text = json.dumps(new_record(), indent=1)
        Path(sys.argv[2]).write_text(f"{text}\n")
        print(text)
    elif RECORD.is_file():
        record = json.loads(RECORD.read_text())
        print(age(record, later_changes(record["trees"])))


if __name__ == "__main__":
    main()
