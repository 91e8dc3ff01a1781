"""Pipeline schedules: figures of papers, of the simulator, and of trainings on CPUs (memory and messages).

`python -m benchmarks.bench_schedules [--out FILE.md]` trains a tiny GPT of 16 layers under each with 4 pipeline ranks,
beside Megatron's own schedule, and counts the bytes of tensors that the step made and held at once, and those sent.
`--nccl` trains nothing: it runs the programs of 8 pipeline ranks under the rules of NCCL (`tests/gpu_rules/nccl.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.bench_simulate import equal_stages
from benchmarks.telling import shown
from benchmarks.validation.conditions import conditions
from pipette_launch.cost.pipeline.engine import StageTimes, simulate
from pipette_launch.cost.pipeline.extra import SCHEDULES, StreamEngine, named_schedule, peak_live_bytes
from pipette_launch.facts.schedule import Action, Schedule, programs
from tests.gpu_rules.nccl import Pipeline, batched_by_moments, seconds_of, together

ROOT = Path(__file__).parents[1]
PP, MICROBATCHES, LAYERS = 4, 8, 16
P = PP
PUBLISHED: tuple[tuple[str, int, int | None, Fraction, Fraction], ...] = (
    ("1f1b", 1, None, Fraction(3 * (P - 1)), Fraction(P)),
    ("eager-1f1b", 1, None, Fraction(3 * (P - 1)), Fraction(2 * P - 1)),
    ("zb-h1", 1, None, Fraction(P - 1), Fraction(P)),
    ("zb-1p", 1, None, Fraction(P - 1), Fraction(P)),
    ("zb-2p", 1, None, Fraction(0), Fraction(2 * P)),
    ("interleaved-1f1b", 2, None, Fraction(3 * (P - 1), 2), P + Fraction(P - 1, 2)),
    ("interleaved-1f1b", 4, None, Fraction(3 * (P - 1), 4), P + Fraction(P - 1, 4)),
    ("interleaved-zb", 2, None, Fraction(P - 1, 2), Fraction(P)),
    ("interleaved-zb", 4, None, Fraction(P - 1, 4), Fraction(P)),
    ("gis", 2, P, Fraction(2 * (P - 1), 2), Fraction(P)),
    ("gis", 2, P // 2, Fraction(2 * (P - 1), 2) + Fraction(P // 2, 2), Fraction(3 * P, 4)),
    ("gis", 4, P // 2, Fraction(2 * (P - 1), 4) + Fraction(3 * P // 2, 4), Fraction(5 * P, 8)),
    ("v-zb", 2, None, Fraction(P - 1, 2), Fraction(P)),
    ("v-half", 2, None, Fraction(3 * (P - 1), 2), Fraction(P + 2, 2)),
    ("v-min", 2, None, Fraction(2 * (P - 1)), Fraction(P + 4, 3)),
    ("1f1b-v", 2, None, Fraction(3 * (P - 1)), Fraction(2 * P + 2, 3)),
)
"""Schedule, chunks, groups, bubble where F, B and W take 1, and activations in micro-batches of a rank's layers."""
NCCL_PP, NCCL_MICROBATCHES = 8, 32
NCCL_SCHEDULES = ("1f1b", "eager-1f1b", "zb-1p", "zb-2p", "interleaved-zb", "gis", "v-zb", "v-half", "v-min", "1f1b-v")
"""1F1B first: the others are shown beside it."""


def case(name: str, vpp: int, group: int | None) -> dict[str, Any]:
    """Training job of the tests' worker."""
    schedule = {"name": name} | ({"group_size": group} if group else {})
    return {
        "pp": PP,
        "vpp": vpp if vpp > 1 else None,
        "layers": LAYERS,
        "microbatches": MICROBATCHES,
        "named_weights": SCHEDULES[name].placement == "v",
        "schedule": schedule,
    }


def trained() -> list[list[Mapping[str, float]]]:
    """Train under every schedule; returns what each rank has counted."""
    paths = (ROOT, ROOT / "patches", ROOT / "tests" / "patches")
    variables = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    cases = [case(*one[:3]) for one in PUBLISHED]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PP)),
                *(ROOT / "tests" / "patches" / "schedules_worker.py", folder, json.dumps(cases)),
            ],
            env={**os.environ, **variables},
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    return [json.loads(line)["ranks"] for line in done.stdout.splitlines() if line.startswith("{")]


def report() -> Iterator[str]:
    """The table, a line at a time."""
    made = conditions(None)
    yield f"`python -m benchmarks.bench_schedules`, {', '.join(made.values())}"
    yield ""
    yield f"p = {PP}, n = {MICROBATCHES}. Bubble: of a step where F, B and W of a rank's layers take 1, messages 0."
    yield "Activations: of the fullest rank, in micro-batches of its layers; measured: bytes of all tensors that a step"
    yield "made and held at once beside 1F1B's, temporary ones and messages included. Sent: bytes beside 1F1B's."
    yield ""
    yield (
        "| schedule | v | bubble, published | simulated | activations, published | simulated | measured | "
        "sent, counted | measured | losses and gradients apart |"
    )
    yield "|---|" + "--:|" * 9
    rows = trained()
    fullest = [max(rank["bytes"] for rank in ranks) for ranks in rows]
    sent = [sum(rank["sent"] for rank in ranks) for ranks in rows]
    for number, (name, vpp, group, bubble, kept) in enumerate(PUBLISHED):
        times = equal_stages((PP, MICROBATCHES, 1.0, 1.0, 1.0, 0.0), vpp)
        known = SCHEDULES[name]
        schedule = named_schedule(
            name,
            pp=PP,
            vpp=vpp,
            num_microbatches=MICROBATCHES,
            group_size=group,
            times=times if known.by_times or known.refills else None,
        )
        waits = simulate(schedule, times).makespan_s - 3 * MICROBATCHES
        live = max(peak_live_bytes(schedule, [1] * schedule.num_stages)) / vpp
        apart = max(rank[figure] for rank in rows[number] for figure in ("losses", "gradients"))
        hops = 2 if schedule.placement == "v" else (PP * vpp - 1) / (PP - 1)
        yield (
            f"| {name}{f', groups of {group}' if group else ''} | {vpp} | {float(bubble):g} | {waits:g} "
            f"| {float(kept):.3g} | {live:g} | {fullest[number] / fullest[0]:.2f} | {hops:.3g} "
            f"| {sent[number] / sent[0]:.2f} | {apart:.0e} |"
        )


def unequal(head_s: float, vpp: int) -> StageTimes:
    """Times of the rows below; the head makes each pass of the last stage longer."""
    stages = NCCL_PP * vpp
    heads = [0.0] * (stages - 1) + [head_s]
    forward, input_, weight = (tuple(seconds / vpp + head for head in heads) for seconds in (1.0, 1.2, 0.8))
    return StageTimes(
        forward_s=forward,
        backward_s=tuple(map(sum, zip(input_, weight, strict=True))),
        input_s=input_,
        weight_s=weight,
        forward_hop_s=(0.05,) * (stages - 1),
        backward_hop_s=(0.05,) * (stages - 1),
    )


def over_nccl(schedule: Schedule, times: StageTimes) -> list[float]:
    """Steps with free messages, as jobs ran before, as they run now, as priced, and with passes 10 % off."""
    found = programs(schedule.ranks, schedule.rank_S, times.expected)
    pass_s, hop_s = seconds_of(times)
    rng = random.Random(0)
    off: dict[Action, float] = {}

    def disturbed_s(action: Action) -> float:
        return pass_s(action) * off.setdefault(action, rng.uniform(0.9, 1.1))

    def step_s(seconds: Callable[[Action], float], *, one_queue: bool) -> float:
        return Pipeline(found, schedule.rank_S, seconds, hop_s, one_queue=one_queue).run()

    before = batched_by_moments(schedule.ranks, schedule.rank_S)
    return [
        simulate(schedule, times).makespan_s,
        Pipeline(before, schedule.rank_S, pass_s, hop_s, stream_of=together).run(),
        step_s(pass_s, one_queue=False),
        step_s(pass_s, one_queue=True),
        StreamEngine(replace(schedule, times=times.expected)).timeline(times).makespan_s,
        step_s(disturbed_s, one_queue=True),
    ]


def nccl_report() -> Iterator[str]:
    """Cost of the order of messages over NCCL, one line at a time."""
    yield f"`python -m benchmarks.bench_schedules --nccl`, {', '.join(conditions(None).values())}"
    yield ""
    yield f"Steps of {NCCL_PP} pipeline ranks and {NCCL_MICROBATCHES} micro-batches beside 1F1B's with free messages."
    yield "Run by the rules in `tests/gpu_rules/nccl.py`; no GPU was used. F, I and W of a rank take 1, 1.2 and 0.8, a"
    yield "message takes 0.05. A head makes each pass of the last stage longer. Before: all messages of a moment in one"
    yield "group on one stream, as if every pass took as long. Now: each way of two ranks in a stream, ordered by the"
    yield "stages' times. One queue: CUDA_DEVICE_MAX_CONNECTIONS=1. Disturbed: one queue, each pass up to 10 % off."
    yield ""
    yield "| head | schedule | free messages | before | now | now, one queue | priced | disturbed |"
    yield "|--:|---|" + "--:|" * 6
    for head_s in (0.0, 0.3):
        base_s = 0.0
        for name in NCCL_SCHEDULES:
            known = SCHEDULES[name]
            vpp = 1 if known.chunks == "one" else 2
            times = unequal(head_s, vpp)
            asked = {"times": times} if known.by_times or known.refills else {}
            schedule = named_schedule(name, pp=NCCL_PP, vpp=vpp, num_microbatches=NCCL_MICROBATCHES, **asked)  # type: ignore[arg-type]
            steps_s = over_nccl(schedule, times)
            base_s = base_s or steps_s[0]
            yield f"| {head_s:g} | {name} | {' | '.join(f'{step_s / base_s:.3f}' for step_s in steps_s)} |"


def main() -> None:
    """Print the table, and write it if requested."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_schedules")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--nccl", action="store_true", help="what the order of messages costs over NCCL, by its rules")
    asked = parser.parse_args()
    text = shown(nccl_report() if asked.nccl else report())
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
