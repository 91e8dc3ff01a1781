"""The same training under torchrun and under pipette-launch, on the same laboratory, in turns."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.netlab import everywhere
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.system import LabError
from pipette_launch.megatron.logs import parse_iteration

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "-m", "pipette_patches.run", "--patch", "cpu_backend", "--")
"""On CPUs pipette-launch starts the script through the same patch."""
SHOWN_LINES = 30
PATIENCE_S = 30.0
"""Seconds for other hosts to go on after a host has failed."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One training."""

    step_s: tuple[float, ...]
    """Time of every iteration, including warm-up iterations."""
    losses: tuple[str, ...]
    """As printed."""
    wall_s: float

    def steady_s(self, skip: int) -> float:
        """The median step after the first ones."""
        return statistics.median(self.step_s[skip:] or self.step_s)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both launchers' trainings, pair by pair, and the start that measured."""

    cold: Ended
    pairs: tuple[tuple[Ended, Ended], ...]
    """torchrun's and pipette-launch's."""
    skip: int

    def steps_s(self) -> list[tuple[float, float]]:
        """Steady step times of every pair."""
        return [(stock.steady_s(self.skip), ours.steady_s(self.skip)) for stock, ours in self.pairs]

    def ratios(self) -> list[float]:
        """By how much every pair's pipette-launch was faster; below 1 = it was slower."""
        return [stock_s / ours_s for stock_s, ours_s in self.steps_s()]

    def lines(self) -> Iterator[str]:
        """For people, as Markdown."""
        yield "| pair | torchrun ms | pipette-launch ms | ratio |"
        yield "|--:|--:|--:|--:|"
        for number, (stock_s, ours_s) in enumerate(self.steps_s(), start=1):
            yield f"| {number} | {stock_s * 1e3:.1f} | {ours_s * 1e3:.1f} | {stock_s / ours_s:.2f} |"
        yield ""
        yield f"torchrun        {_spread([stock_s for stock_s, _ in self.steps_s()])}"
        yield f"pipette-launch  {_spread([ours_s for _, ours_s in self.steps_s()])}"
        yield f"ratio           median {statistics.median(self.ratios()):.3f}, worst {min(self.ratios()):.3f}"
        yield f"losses          {self.agreement()}"
        cached_s = statistics.median(ours.wall_s for _, ours in self.pairs)
        yield f"whole job       {self.cold.wall_s:.1f} s with warm-up and planning, {cached_s:.1f} s from the cache"

    def agreement(self) -> str:
        """Say if the losses agree, and by how much they differ; other layouts draw other first weights."""
        stock, ours = self.pairs[0]
        if stock.losses == ours.losses:
            return f"the same to every printed digit over {len(stock.losses)} iterations"
        both = zip(map(float, stock.losses), map(float, ours.losses), strict=False)
        apart = [abs(a - b) / max(abs(a), 1e-9) for a, b in both]
        middle, most = statistics.median(apart), max(apart)
        return f"apart by {middle:.2%} in the median of {len(apart)} iterations, {most:.2%} at most"


def _spread(seconds: Sequence[float]) -> str:
    middle = statistics.median(seconds)
    scatter = statistics.median(abs(value - middle) for value in seconds) / middle
    return f"median {middle * 1e3:.1f} ms a step, spread {scatter:.1%}"


def compare(
    lab: Lab, words: Sequence[str], *, pairs: int, skip: int, ours: Sequence[str] = (), say: Callable[[str], None]
) -> Comparison:
    """Train in turns; pipette-launch measures once, before, and uses its cached plan from then on.

    Args:
        lab: where.
        words: the script and its arguments.
        pairs: how many trainings of each.
        skip: iterations at the start of each that do not count.
        ours: flags of pipette-launch.
        say: receives a line about each training that starts.

    Raises:
        LabError: a training failed or printed no iteration; the text contains the end of its output.

    """
    cache = f"--pipette-cache={lab.folder / 'plans'}"
    stock = [*TORCHRUN, *words]
    launch = ["-m", "pipette_launch", cache, *ours, *words]
    say("pipette-launch, cold")
    cold = train(lab, launch)
    found = in_turns(lambda: train(lab, stock), lambda: train(lab, launch), pairs=pairs, say=say)
    return Comparison(cold=cold, pairs=found, skip=skip)


def launched(cache: Path, budget_s: float, *flags: str) -> tuple[str, ...]:
    """Return the command that starts pipette-launch with a folder for plans and a number of seconds for a warm-up."""
    return ("-m", "pipette_launch", f"--pipette-cache={cache}", f"--pipette-budget={budget_s:g}", *flags)


def in_turns(
    one: Callable[[], T], other: Callable[[], T], *, pairs: int, say: Callable[[str], None] = lambda _text: None
) -> tuple[tuple[T, T], ...]:
    """Train both in turns `pairs` times; each begins every other pair, so that a drift affects both."""
    found = []
    for number in range(pairs):
        say(f"pair {number + 1} of {pairs}")
        first = number % 2
        done = {which: (one, other)[which]() for which in (first, 1 - first)}
        found.append((done[0], done[1]))
    return tuple(found)


def train(
    lab: Lab,
    words: Sequence[str],
    *,
    python: str = sys.executable,
    env: Callable[[str], Mapping[str, str]] = lambda _host: {},
) -> Ended:
    """Run a launcher on every host and read the iterations that any of them printed.

    Args:
        lab: where.
        words: what stands behind the interpreter: TORCHRUN, or `-m pipette_launch`, with what follows.
        python: the interpreter of launchers and workers.
        env: variables of a host beside those that all have.

    Raises:
        LabError: it failed or printed no iteration; the text contains the end of its output.

    """
    began_s = time.monotonic()
    outputs = [lab.folder / host / "output" for host in lab.hosts]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("w")) for path in outputs]
        jobs = [
            lab.run(
                host,
                [python, *words],
                {**environment(), "PYTHON_EXEC": python, **env(host)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for host, file in zip(lab.hosts, files, strict=True)
        ]
        code, blamed = everywhere.finish(dict(zip(lab.hosts, jobs, strict=True)), PATIENCE_S)
    fault = f"{blamed} failed first, exit code {code}" if code else ""
    return ended(words, outputs, wall_s=time.monotonic() - began_s, fault=fault)


def ended(words: Sequence[str], outputs: Sequence[Path], *, wall_s: float, fault: str) -> Ended:
    """Read the iterations of a training from what its processes printed.

    Args:
        words: what ran, for the error.
        outputs: one file of each process.
        wall_s: how long it took.
        fault: what went wrong; empty = nothing.

    Raises:
        LabError: it failed or printed no iteration; the text contains the end of its output.

    """
    lines = [line for path in outputs for line in path.read_text(errors="replace").splitlines()]
    found = {one.iteration: one for one in map(parse_iteration, lines) if one is not None}
    if fault or not found:
        said = fault or "no iteration was printed"
        raise LabError(f"{' '.join(words)}: {said}\n" + "\n".join(lines[-SHOWN_LINES:]))
    ordered = [found[number] for number in sorted(found)]
    return Ended(
        step_s=tuple(one.step_time_s for one in ordered),
        losses=tuple(one.loss or "nan" for one in ordered),
        wall_s=wall_s,
    )


def environment() -> Mapping[str, str]:
    """Variables of every training, beside the host's own.

    The C library gives no memory back between steps, as a GPU's allocator does not: otherwise what a pass takes depends
    on what lies at the end of the heap, by half of its time (measured: 63 to 94 ms of one backward, 4 us a page).
    """
    before = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "patches"), *([before] if before else [])]),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
        "MALLOC_TOP_PAD_": str(1 << 26),
    }
