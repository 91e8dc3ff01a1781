"""The command line of the validation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipette_launch.errors import UsageError

FOLDER = Path(__file__).parent.parent
DATA = FOLDER / "data"
GOLDEN_ROWS, GOLDEN_ARGS = DATA / "megatron_golden_dev.csv", DATA / "megatron_golden_dev_args.jsonl"
DATA_SETS = ("golden", "logs", "korthikanti", "vtrain", "readme", "nvidia")
DEFAULT_FILES = {
    "golden": GOLDEN_ROWS,
    "logs": DATA / "public_logs_dev.csv",
    "korthikanti": DATA / "korthikanti2022.csv",
    "vtrain": DATA / "vtrain_single.csv",
    "readme": DATA / "megatron_readme_2024.csv",
    "nvidia": DATA / "nvidia_perf_dev.csv",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Data sets to score, and what to print."""

    files: dict[str, Path]
    """File of each data set that is scored."""
    args: Path
    """Flags of the golden file."""
    fraction: float
    """Share of vTrain's rows that may be fitted on."""
    seed: int
    date: str | None
    json: Path | None
    markdown: Path | None
    record: bool
    leave_model_out: bool
    verbose: bool


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; raises UsageError where flags contradict each other."""
    given = _parser().parse_args(argv)
    named = {name: getattr(given, name) for name in DATA_SETS if getattr(given, name) is not None}
    if bool(given.golden) != bool(given.args):
        raise UsageError("--golden and --args belong together: the rows, and the flags behind each args_key")
    if not 0 < given.vtrain_fraction < 1:
        raise UsageError(f"--vtrain-fraction {given.vtrain_fraction}: must be between 0 and 1")
    if given.record and (named or given.only):
        raise UsageError("--record takes the figures of all the development data; remove the flags that choose data")
    if given.only and (left_out := sorted(set(named) - set(given.only))):
        raise UsageError(f"--only {' '.join(given.only)} leaves out the file of --{left_out[0]}; remove one of them")
    names = given.only or tuple(named) or DATA_SETS
    return Options(
        files={name: named.get(name, DEFAULT_FILES[name]) for name in DATA_SETS if name in names},
        args=given.args or GOLDEN_ARGS,
        fraction=given.vtrain_fraction,
        seed=given.seed,
        date=given.date,
        json=given.json,
        markdown=given.markdown,
        record=given.record,
        leave_model_out=given.leave_model_out,
        verbose=given.verbose,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validation",
        description="Predicted against measured memory and step time. Without a file all of benchmarks/data is scored; "
        "with files, only these, by constants of the development data.",
    )
    add = parser.add_argument
    add("--golden", type=Path, metavar="CSV", help="golden values of Megatron-LM; needs --args")
    add("--args", type=Path, metavar="JSONL", help="the flags behind the golden file's args_key")
    add("--vtrain", type=Path, metavar="CSV", help="iteration times of vTrain, any number of GPUs")
    add("--logs", type=Path, metavar="CSV", help="memory lines of public Megatron-LM logs")
    add("--korthikanti", type=Path, metavar="CSV", help="Korthikanti et al. 2022, iteration times and formula values")
    add("--readme", type=Path, metavar="CSV", help="weak scaling of Megatron-LM's README")
    add("--nvidia", type=Path, metavar="CSV", help="throughput of NVIDIA's tuned recipes")
    add("--only", nargs="+", choices=DATA_SETS, help="score these data sets only")
    add("--vtrain-fraction", type=float, default=0.1, metavar="F", help="share of vTrain's rows to fit on (0.1)")
    add("--seed", type=int, default=0, help="which rows of vTrain are fitted on (0)")
    add("--date", help="date of the report; the default is now")
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    add("--markdown", type=Path, metavar="FILE", help="write the report as Markdown")
    add("--record", action="store_true", help="record the figures that CI holds later ones against")
    add("--leave-model-out", action="store_true", help="score NVIDIA's recipes, each model by constants fitted to the "
        "other models; with --record, keep the errors that predictions quote")  # fmt: skip
    add("--verbose", action="store_true", help="list every row that is not scored, and every prediction")
    return parser
