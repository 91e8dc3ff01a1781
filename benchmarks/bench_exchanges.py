"""Exchanges that Megatron requests in a training step, beside those that the formulas count.

`MEGATRON_LM_DIR=FOLDER python -m benchmarks.bench_exchanges [--record]` plays ranks of many layouts with NVIDIA's
pretrain_gpt.py under a fake process group, and compares number and bytes of each operation. `--record` writes
`benchmarks/results/exchanges.md`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.telling import shown
from benchmarks.validation.conditions import conditions
from tests.patches.exchanges import CASES, RELEASE, SUM, Case, Key, left_out, nvidias, predicted, record, recorded

RESULT = Path(__file__).parent / "results" / "exchanges.md"
NAMES = {
    "tp": "tensor parallelism",
    "cp": "ring attention",
    "ep": "tokens to experts",
    "etp": "tokens to experts",
    "ep_etp": "tokens to experts",
    "pp": "messages between stages",
    "dp_cp": "gradients and parameters",
    "expert_dp": "gradients and parameters of experts",
    "embedding": "gradient of the tied embedding",
}
_Tally = tuple[int, int]
"""Number and bytes."""


def _sum(counter: Counter[int]) -> _Tally:
    number = sum(count for size, count in counter.items() if size != SUM)
    return number, sum(count if size == SUM else size * count for size, count in counter.items())


class Comparison:
    """Counts over all layouts."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self.layouts: dict[Key, set[str]] = defaultdict(set)
        self.different: dict[Key, set[str]] = defaultdict(set)
        self.left_out: dict[str, set[str]] = defaultdict(set)
        self.share: dict[str, float] = defaultdict(float)
        self.failed: dict[str, str] = {}

    def add(self, case: Case, pp_rank: int, records: Any) -> None:
        """Compare one rank."""
        if isinstance(records, str):
            self.failed[f"{case.name}, stage {pp_rank}"] = records
            return
        job, megatrons = case.job(), recorded(records)
        ours = predicted(job, pp_rank)
        rest = {key: Counter(counter) for key, counter in megatrons.items()}
        total = sum(_sum(counter)[1] for counter in megatrons.values())
        unpriced: Counter[str] = Counter()
        for item in left_out(job, pp_rank, is_nvidias=True):
            if item.count:
                rest.setdefault(item.key, Counter())[item.size_bytes] -= item.count
                unpriced[item.reason] += item.size_bytes * item.count
                self.left_out[item.reason].add(case.name)
        for reason, size in unpriced.items():
            self.share[reason] = max(self.share[reason], size / total)
        for key in {*ours, *rest}:
            one, other = ({k: v for k, v in found.get(key, Counter()).items() if v} for found in (ours, rest))
            if one or other:
                self.layouts[key].add(case.name)
            if one != other:
                self.different[key].add(case.name)


def compared(cases: Sequence[Case], checkout: str) -> Comparison:
    """Play and compare the first, the second and the last stage of each case."""
    ranks = [(case, pp_rank) for case in cases for pp_rank in case.pp_ranks()]
    found = Comparison()
    records = record(ranks, nvidias(checkout), timeout_s=3000)
    for (case, pp_rank), each in zip(ranks, records, strict=True):
        found.add(case, pp_rank, each)
    return found


def report(cases: Sequence[Case], checkout: str) -> Iterator[str]:
    """Yield the lines of the result."""
    yield f"`python -m benchmarks.bench_exchanges`, {', '.join(conditions(None).values())}"
    yield ""
    found = compared(cases, checkout)
    unequal = {name for names in found.different.values() for name in names} | {*found.failed}
    yield f"NVIDIA's pretrain_gpt.py of core_v{RELEASE} plays the first, the second and the last pipeline rank of"
    yield f"{len(cases)} layouts under a fake process group, on a CPU. Recorded: each collective and message of the"
    yield "second training step. Equal: number and bytes of each operation are those of the formulas, to the byte."
    yield f"**{len(cases) - len(unequal)} of {len(cases)} layouts are equal.**"
    yield ""
    yield "Conditions: routing of experts is balanced by a fixed choice. Layers are Megatron's own, because Transformer"
    yield "Engine needs a GPU. Megatron's own attention refuses context parallelism, so a stand-in sends the messages"
    yield "of Transformer Engine 2.8. Padding of buckets is not counted."
    yield ""
    yield "| exchange | phase | operation | group | layouts | equal |"
    yield "|---|---|---|---|--:|--:|"
    for phase, operation, group in sorted(found.layouts, key=lambda key: (NAMES.get(key[2], key[2]), *key)):
        names = found.layouts[phase, operation, group]
        equal = len(names - found.different[phase, operation, group])
        yield f"| {NAMES.get(group, group)} | {phase} | {operation} | {group} | {len(names)} | {equal} |"
    yield ""
    yield "Left out of the formulas, with exact numbers and bytes in `tests/patches/exchanges.py`. The share is the"
    yield "largest share of the bytes that a rank of these small models (hidden size 128) exchanges in a step."
    yield ""
    yield "| exchange | layouts | largest share of bytes |"
    yield "|---|--:|--:|"
    for reason, names in sorted(found.left_out.items()):
        yield f"| {reason} | {len(names)} | {100 * found.share[reason]:.2g} % |"
    yield ""
    yield "Priced as one exchange, although Megatron sends the same bytes in several:"
    yield ""
    yield "- a tied embedding has a bucket of its own in the distributed optimizer of the first and the last stage;"
    yield "- without expert parallelism, experts and other parameters share one buffer (the formulas price two);"
    yield "- without `--overlap-param-gather`, the two optimizers of a model with experts gather all parameters twice."
    yield ""
    yield f"Layouts: {'; '.join(case.name for case in cases)}."
    for name, error in found.failed.items():
        yield f"Failed: {name}: {error}"
    for key, names in found.different.items():
        if names:
            yield f"Different: {' '.join(key)}: {', '.join(sorted(names))}"


def main() -> None:
    """Print the report, and write it with --record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_exchanges", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the report into benchmarks/results")
    args = parser.parse_args()
    checkout = os.environ.get("MEGATRON_LM_DIR")
    if not checkout:
        sys.exit(f"MEGATRON_LM_DIR must name a checkout of Megatron-LM core_v{RELEASE}")
    text = shown(report(CASES, checkout))
    if args.record:
        RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
