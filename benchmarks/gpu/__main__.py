"""The GPU check: `python -m benchmarks.gpu [--device auto|cuda|cpu] [--out FOLDER] [--minutes 9] [--part NAME ...]`.

`scripts/gpu-check` makes the environment that this needs. Each part's records go to FOLDER/NAME.json as they come,
what they say to FOLDER/gpu-check.md, and the output of all processes to FOLDER/gpu-check.log.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import report, supervise
from benchmarks.gpu.notebook import Notebook, device_here
from benchmarks.gpu.supervise import PARTS
from pipette_launch.errors import PipetteError

CLOSING_S = 4.0
"""For the report, once all parts are over."""
LEAST_S = 5.0
"""Less is no use to any part."""
SAVING_S = 3.0
"""A part that heeds its own clock ends so long before it would be ended."""


def main(argv: Sequence[str]) -> int:
    """Run the requested parts; 0 if every part ended by itself and no result was wrong."""
    args = _arguments(argv)
    warnings.simplefilter("ignore")
    try:
        device = device_here(args.device)
    except PipetteError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return error.exit_code
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only_part:
        return _be_part(args, device)
    supervise.adopt_orphans()
    ends_at_s = (args.began or time.time()) + 60 * args.minutes
    names = args.part or [part.name for part in PARTS]
    parts = tuple(part for part in PARTS if part.name in names)
    whole = True
    for index, part in enumerate(parts):
        left_s = ends_at_s - CLOSING_S - time.time()
        # On a CPU limits only end what hangs: a slow machine leaves nothing out.
        limit_s = left_s if device.kind == "cpu" else supervise.limits_s(parts[index:], left_s)
        if limit_s < LEAST_S:
            print(f"gpu-check: no time is left for {', '.join(one.name for one in parts[index:])}", flush=True)
            whole = False
            break
        print(f"gpu-check: {part.name}, {part.says}; at most {limit_s:.0f} s", flush=True)
        words = ["--device", device.kind, "--out", str(args.out), "--ends-at", str(time.time() + limit_s - SAVING_S)]
        trouble = supervise.run(part, words, limit_s=limit_s, log=args.out / "gpu-check.log", device_kind=device.kind)
        if trouble:
            whole = False
            print(f"gpu-check: {part.name}: {trouble}", flush=True)
            report.note_end(args.out / f"{part.name}.json", trouble)
        print(report.part_text(args.out / f"{part.name}.json"), flush=True)
        report.write(args.out, args.out / "gpu-check.md")
    print(f"gpu-check: the report is {args.out / 'gpu-check.md'}", flush=True)
    return 0 if whole else 1


def _be_part(args: argparse.Namespace, device: object) -> int:
    (part,) = (one for one in PARTS if one.name == args.only_part)
    book = Notebook(path=args.out / f"{part.name}.json", part=part.name, device=device, ends_at_s=args.ends_at)  # type: ignore[arg-type]
    importlib.import_module(f"benchmarks.gpu.{part.module}").measure(book)
    book.close()
    return 1 if book.failed else 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu-check",
        description=(__doc__ or "")
        + "\nParts, the most valuable first:\n"
        + "\n".join(f"  {part.name:8} {part.says}" for part in PARTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=9.0, help="the check ends after so many (default: 9)")
    parser.add_argument("--part", nargs="+", choices=[part.name for part in PARTS], help="default: all")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--only-part", choices=[part.name for part in PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--ends-at", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    # Parts run in folders of their own.
    args.out = args.out.absolute()
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
