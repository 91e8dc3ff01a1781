"""The tests marked `gpu`, which hold each line that only CUDA reaches; without a device pytest skips all of them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from benchmarks.gpu.launches import ROOT
from benchmarks.gpu.notebook import Notebook, Record, of_kind
from pipette_launch.errors import PipetteError


def measure(book: Notebook) -> None:
    """Run them all."""
    book.attempt("tests marked gpu", lambda: _run(book))


def _run(book: Notebook) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        words = ["-q", "-m", "gpu", "--junit-xml", report, "--durations=5", *(["--run-gpu"] * (book.kind == "cuda"))]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *map(str, words), str(ROOT / "tests" / "gpu")], cwd=ROOT, check=False
        )
        if not report.exists():
            raise PipetteError(f"pytest ended with {done.returncode} and left no report")
        # Written by the pytest just run.
        cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314
        for case in cases:
            book.add("test", name=f"{case.get('classname')}.{case.get('name')}", **_outcome(case))


def _outcome(case: ET.Element) -> dict[str, object]:
    for name in ("failure", "error", "skipped"):
        found = case.find(name)
        if found is not None:
            said = (found.get("message") or "").strip().splitlines()
            return {"outcome": name, "why": said[0] if said else "", "seconds": float(case.get("time") or 0)}
    return {"outcome": "passed", "why": "", "seconds": float(case.get("time") or 0)}


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Return the number of passed tests, and each test that did not pass."""
    tests = of_kind(records, "test")
    count = {name: sum(test["outcome"] == name for test in tests) for name in ("passed", "failure", "error", "skipped")}
    yield (
        f"{len(tests)} tests: {count['passed']} passed, {count['failure'] + count['error']} failed, "
        f"{count['skipped']} skipped."
    )
    reasons = {test["why"] for test in tests if test["outcome"] == "skipped"}
    yield from (f"Skipped: {reason}." for reason in sorted(reasons))
    for test in tests:
        if test["outcome"] in ("failure", "error"):
            yield f"- {test['name']}: {test['why']}"
