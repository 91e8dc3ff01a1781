"""Measure the whole product against torchrun on laboratories of unevenly joined hosts.

`python -m benchmarks.netlab.suite [--quick] [--part NAME ...] [--out FOLDER]` runs all parts, or those named, and
writes netlab.md and netlab.json; a part takes the place of its former self there, the others stay. Needs root and
iproute2 (docs/netlab.md); the part nvidia needs a checkout of Megatron-LM, named by MEGATRON_LM_DIR.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks import netlab, pace
from benchmarks.netlab.suite.cases import megatron_lm
from benchmarks.netlab.suite.parts import TITLES, Entry, PartResult, Setting, circumstances, entry, report
from benchmarks.stolen import processor_time

RESULTS = Path(__file__).parents[2] / "results"
PARTS = tuple(name for name in TITLES if importlib.util.find_spec(f"{__package__}.{name}"))


def main(arguments: Sequence[str]) -> int:
    """Run parts and write their results; return 1 if a part failed, 2 without a laboratory."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.netlab.suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few runs, under five minutes: shows that all works")
    parser.add_argument("--part", action="extend", nargs="+", choices=PARTS, metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of netlab.md and netlab.json")
    options = parser.parse_args(arguments)
    reason = netlab.missing()
    if reason:
        _say(reason)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    usual = PARTS if megatron_lm() else [name for name in PARTS if name != "nvidia"]
    asked = [name for name in PARTS if name in (options.part or usual)]
    failed = [name for name in asked if not _measure(name, options.out, quick=options.quick)]
    if failed:
        _say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _measure(name: str, folder: Path, *, quick: bool) -> bool:
    """Run one part and file it; false if it failed."""
    entries = _entries(folder)
    setting = Setting(quick=quick, known={part: one["raw"] for part, one in entries.items()})
    found = circumstances(name, quick=quick)
    num_looks = pace.QUICK_LOOKS if quick else pace.LOOKS
    looks_s = pace.looks(num_looks)
    began_s, before = time.monotonic(), processor_time()
    _say(f"{name}: begins")
    try:
        result: PartResult = importlib.import_module(f"{__package__}.{name}").run(setting, _say)
    except Exception:  # noqa: BLE001 - the other parts are worth running all the same
        _say(f"{name}: {traceback.format_exc()}")
        return False
    took_s = time.monotonic() - began_s
    found["stolen"] = f"{processor_time().stolen_since(before):.1%}"
    found["pace"] = pace.words([*looks_s, *pace.looks(num_looks)])
    _say(f"{name}: took {took_s:.0f} s")
    print("\n".join(result.lines), flush=True)
    entries[name] = entry(result, found, took_s=took_s)
    (folder / "netlab.json").write_text(json.dumps(entries, indent=1) + "\n")
    (folder / "netlab.md").write_text(report(entries))
    return True


def _entries(folder: Path) -> dict[str, Entry]:
    path = folder / "netlab.json"
    found: dict[str, Entry] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _say(text: str) -> None:
    print(f"netlab suite: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
