"""Speed of making and pricing schedules, and their bubbles beside published and earlier figures.

`python -m benchmarks.bench_simulate [--out FILE.md]` prints three tables: processor seconds for 32 ranks and 256
micro-batches, the zero-bubble rates of 2401.10241's Table 5, and makespan bubbles at peak memory of every family.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.telling import shown
from pipette_launch.cost.pipeline.engine import Engine, StageTimes, Timeline, simulate
from pipette_launch.cost.pipeline.extra import SCHEDULES, named_schedule, peak_live_bytes
from pipette_launch.cost.pipeline.extra.drafts import SchedulingProblem, zero_bubble
from pipette_launch.facts.schedule import Schedule

CHUNKS = {"one": 1, "two": 2, "several": 2}

# p, n, F, I, W, hop in ms; published rates of 1F1B, ZB-1p, ZB-2p (2401.10241, Table 5).
PUBLISHED = (
    (8, 24, 18.522, 18.086, 9.337, 0.601, (0.2431, 0.1585, 0.0433)),
    (8, 64, 18.546, 18.097, 9.321, 0.762, (0.1240, 0.0674, 0.0026)),
    (16, 48, 11.347, 11.248, 8.132, 0.377, (0.2552, 0.1397, 0.0066)),
    (16, 128, 11.325, 11.308, 8.109, 0.378, (0.1251, 0.0576, 0.0028)),
    (32, 96, 10.419, 10.207, 7.715, 0.408, (0.2646, 0.1421, 0.0038)),
    (32, 256, 10.402, 10.248, 7.698, 0.460, (0.1352, 0.0594, 0.0018)),
)
SETTINGS = (
    (8, 32, 1.0, 1.0, 1.0, 0.0),
    (8, 32, 10.4, 10.2, 7.7, 0.41),
    (8, 32, 10.0, 16.0, 7.0, 0.5),
    (8, 32, 10.0, 13.0, 10.0, 3.0),
    (16, 64, 10.4, 10.2, 7.7, 0.41),
)
# Name, chunks, group as a part of p, whether W is put anew; bubbles simulated earlier with other generators.
FAMILIES: tuple[tuple[str, int, float, bool, tuple[float | None, ...]], ...] = (
    ("1f1b", 1, 1, False, (0.179, 0.200, 0.201, 0.292, 0.211)),
    ("eager-1f1b", 1, 1, False, (0.179, 0.184, 0.184, 0.205, 0.194)),
    ("interleaved-1f1b", 2, 1, False, (0.099, 0.109, 0.110, 0.163, 0.116)),
    ("interleaved-1f1b", 4, 1, False, (0.052, 0.076, 0.078, 0.209, 0.080)),
    ("zb-1p", 1, 1, False, (0.068, 0.101, 0.122, 0.142, 0.107)),
    ("zb-2p", 1, 1, False, (0.068, 0.077, 0.074, 0.079, 0.082)),
    ("interleaved-zb", 2, 1, False, (0.035, 0.062, 0.074, None, 0.066)),
    ("gis", 2, 1, False, (0.068, 0.082, 0.088, 0.156, 0.087)),
    ("gis", 4, 1, False, (0.035, 0.054, 0.058, 0.313, 0.057)),
    ("gis", 2, 0.5, False, (0.086, 0.108, 0.130, 0.216, 0.113)),
    ("gis", 4, 0.5, False, (0.063, 0.100, 0.157, 0.401, 0.102)),
    ("gis", 2, 1, True, (None,) * 5),
    ("gis", 4, 1, True, (None,) * 5),
    ("gis", 2, 0.5, True, (None,) * 5),
    ("gis", 4, 0.5, True, (None,) * 5),
    ("v-zb", 2, 1, False, (0.035, 0.053, 0.070, 0.115, 0.057)),
    ("v-half", 2, 1, False, (0.081, 0.117, 0.205, 0.256, 0.132)),
    ("v-min", 2, 1, False, (0.123, 0.251, 0.408, 0.456, 0.265)),
    ("1f1b-v", 2, 1, False, (0.147, 0.232, 0.179, 0.336, 0.263)),
)


def equal_stages(setting: tuple[float, ...], vpp: int) -> StageTimes:
    """Equal stages of `vpp` chunks for each rank; the setting gives the seconds of a whole rank."""
    pp, _, forward_s, input_s, weight_s, hop_s = setting[:6]
    stages = int(pp) * vpp
    return StageTimes(
        forward_s=(forward_s / vpp,) * stages,
        backward_s=((input_s + weight_s) / vpp,) * stages,
        input_s=(input_s / vpp,) * stages,
        weight_s=(weight_s / vpp,) * stages,
        forward_hop_s=(hop_s,) * (stages - 1),
        backward_hop_s=(hop_s,) * (stages - 1),
    )


def bubble_rate(timeline: Timeline, whole_s: float) -> float:
    """Share of `whole_s` that the mean rank waits: of the makespan, or of the longest span as 2401.10241 has it."""
    spans = zip(timeline.start_s, timeline.end_s, strict=True)
    busy_s = sum(end - start for starts, ends in spans for start, end in zip(starts, ends, strict=True))
    return 1 - busy_s / (len(timeline.end_s) * whole_s)


def timed(work: Callable[[], object], repeats: int = 3) -> float:
    """Least processor seconds of a few runs: other processes may share the cores."""
    least = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        work()
        least = min(least, time.process_time() - began)
    return least


def speed(pp: int = 32, microbatches: int = 256) -> Iterator[str]:
    """Seconds to make a schedule, to ready it, to price it once and 64 times side by side, and to tell it in full."""
    yield f"p = {pp}, n = {microbatches}; processor seconds, least of three (making: one)"
    yield ""
    yield "| schedule | v | actions | make | engine | price | both | 64 pipelines | timeline |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name, known in SCHEDULES.items():
        vpp = CHUNKS[known.chunks]
        times = equal_stages((pp, microbatches, 1.0, 1.0, 1.0, 0.05), vpp)
        began = time.process_time()
        schedule = named_schedule(
            name, pp=pp, vpp=vpp, num_microbatches=microbatches, times=times if known.by_times else None
        )
        make_s = time.process_time() - began
        ready_s = timed(lambda schedule=schedule: Engine(schedule))
        first_s = timed(lambda schedule=schedule, times=times: Engine(schedule).timeline(times))
        engine = Engine(schedule)
        price_s = timed(lambda engine=engine, times=times: engine.timeline(times))
        durations_R = np.repeat(np.array(times.durations_s)[:, None], 64, axis=1)
        hops_R = np.repeat(np.array(times.hops_s)[:, None], 64, axis=1)
        many_s = timed(lambda engine=engine, a=durations_R, b=hops_R: engine.drain_s_SR(a, b))
        told_s = timed(lambda engine=engine, times=times: engine.timeline(times))
        actions = sum(len(rank) for rank in schedule.ranks)
        seconds = " | ".join(f"{value:.3f}" for value in (make_s, ready_s, price_s, first_s, many_s, told_s))
        yield f"| {name} | {vpp} | {actions} | {seconds} |"


def rates() -> Iterator[str]:
    """1 - n(F+I+W)/longest span, published and ours; for ours also against the makespan."""
    yield "Bubble against the longest span of one rank, published / ours; (ours against the makespan)"
    yield ""
    yield "| p, n | F, I, W, c (ms) | 1F1B | ZB-1P, limit p | ZB-2P, limit 2p |"
    yield "|---|---|---|---|---|"
    for setting in PUBLISHED:
        pp, microbatches, *_, published = setting
        times = equal_stages(setting[:6], 1)
        cells = []
        for name, rate in zip(("1f1b", "zb-1p", "zb-2p"), published, strict=True):
            schedule = named_schedule(name, pp=pp, num_microbatches=microbatches)
            if SCHEDULES[name].by_times:
                problem = SchedulingProblem(
                    pp=pp,
                    vpp=1,
                    num_microbatches=microbatches,
                    times=times,
                    held_S=(1.0,) * pp,
                    w_share=0.5,
                    limit_P=(SCHEDULES[name].peak(pp, 1, pp),) * pp,
                    objective="span",
                )
                schedule = zero_bubble(name, problem)
            timeline = simulate(schedule, times)
            ours = [bubble_rate(timeline, whole_s) for whole_s in (max(timeline.span_s_P), timeline.makespan_s)]
            cells.append(f"{rate:.4f} / {ours[0]:.4f} ({ours[1]:.4f})")
        shown = ", ".join(str(value) for value in setting[2:6])
        yield f"| {pp}, {microbatches} | {shown} | {' | '.join(cells)} |"


def bubbles() -> Iterator[str]:
    """Makespan bubble @ peak relative to p micro-batches, and what an earlier simulation gave."""
    heads = " | ".join(f"p{p} n{n}, {f:g}/{i:g}/{w:g}, {c:g}" for p, n, f, i, w, c in SETTINGS)
    yield "Makespan bubble @ peak relative to 1F1B (bubble of an earlier simulation with other generators)"
    yield ""
    yield f"| schedule | {heads} |"
    yield "|---|" + "---|" * len(SETTINGS)
    for name, vpp, part, anew, earlier in FAMILIES:
        cells = []
        for setting, before in zip(SETTINGS, earlier, strict=True):
            times = equal_stages(setting, vpp)
            schedule = made(name, vpp, part, times if anew or SCHEDULES[name].by_times else None, setting)
            peak = max(peak_live_bytes(schedule, (1,) * schedule.num_stages)) / vpp / schedule.pp
            timeline = simulate(schedule, times)
            rate = bubble_rate(timeline, timeline.makespan_s)
            cells.append(f"{rate:.3f} @ {peak:.2f}" + (f" ({before:.3f})" if before is not None else ""))
        label = name + (f" v={vpp}" if vpp > 1 else "") + (" g=p/2" if part < 1 else "") + (", W anew" if anew else "")
        yield f"| {label} | {' | '.join(cells)} |"


def made(name: str, vpp: int, part: float, times: StageTimes | None, setting: tuple[float, ...]) -> Schedule:
    """The schedule of one cell."""
    pp, microbatches = int(setting[0]), int(setting[1])
    group = int(pp * part) if name in ("gis", "interleaved-1f1b") else None
    return named_schedule(name, pp=pp, vpp=vpp, num_microbatches=microbatches, group_size=group, times=times)


def report() -> Iterator[str]:
    """All of it, a line at a time."""
    yield f"Python {platform.python_version()}, numpy {version('numpy')}, {platform.machine()}; one process"
    whole = sorted(name for name, known in SCHEDULES.items() if not known.splits_backward)
    yield f"whole backwards: {', '.join(whole)}; all others split them"
    for table in (speed, rates, bubbles):
        yield ""
        yield from table()


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a Markdown file to write as well")
    args = parser.parse_args()
    text = shown(report())
    if args.out:
        args.out.write_text(f"# Schedules: speed and bubbles\n\n{text}")


if __name__ == "__main__":
    main()
