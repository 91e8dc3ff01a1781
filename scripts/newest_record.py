"""Print the record of a run of scripts/test-newest, whose exit code is the argument, as JSON."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
FOLDERS = ("pipette_launch/megatron", "pipette_launch/probe", "patches/pipette_patches")


def digest() -> str:
    """Return a digest of the sources that depend on a release of megatron-core."""
    total = hashlib.sha256()
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        total.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def main() -> None:
    """Print the record."""
    suite = next(ET.parse(ROOT / "build" / "newest.xml").getroot().iter("testsuite"))  # noqa: S314 - pytest wrote it
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    covered = json.loads((ROOT / "build" / "coverage.json").read_text())["totals"]["percent_covered"]
    record = {
        "date": f"{datetime.now(tz=timezone.utc):%Y-%m-%d}",
        "python": platform.python_version(),
        "megatron_core": version("megatron-core"),
        "torch": version("torch"),
        "exit_code": int(sys.argv[1]),
        **counts,
        "coverage_percent": round(covered, 1),
        "digest": digest(),
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
