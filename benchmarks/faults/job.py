"""A training on laboratory hosts whose lines are read as they come."""

from __future__ import annotations

import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks.netlab import Lab

ROOT = Path(__file__).parent.parent.parent
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 12 --vocab-size 256 --transformer-impl local --lr 1e-3 "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 --save-interval 5"
).split()
"""A GPT that three hosts train as well as four."""
DISK_BYTES = 256 << 20
"""Room for the checkpoints of a training."""
ITERATION = re.compile(r"iteration\s+(\d+)/")
SAVED = re.compile(r"saved checkpoint of iteration (\d+)")


class Line(NamedTuple):
    """One line of one host."""

    at_s: float
    host: str
    text: str


@dataclass
class Job:
    """Launchers on all hosts of a laboratory, and their output."""

    lab: Lab
    disk: Path
    """A file system of its own, for checkpoints."""
    launchers: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(
        self, launcher: str, flags: Sequence[object], script: Sequence[object], env: Mapping[str, str] | None = None
    ) -> None:
        """Start a launcher with the example's trainer, which saves to the disk and loads from it, on every host."""
        saved = self.disk / "checkpoints"
        words = [*flags, ROOT / "examples" / "pretrain_gpt.py", *MODEL, "--save", saved, "--load", saved, *script]
        for host in self.lab.hosts:
            process = self.lab.run(
                host,
                [sys.executable, "-m", launcher, *words],
                {
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'patches'}",
                    "OMP_NUM_THREADS": "1",
                    "TORCHDYNAMO_DISABLE": "1",
                    "PYTHONWARNINGS": "ignore",
                    **(env or {}),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self.launchers[host] = process
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                threading.Thread(target=self._follow, args=(host, stream), daemon=True).start()

    def _follow(self, host: str, stream: IO[str]) -> None:
        for line in stream:
            with self._lock:
                self.lines.append(Line(time.monotonic(), host, line.rstrip()))

    def matches(self, pattern: re.Pattern[str] | str, since_s: float = 0.0) -> list[tuple[Line, re.Match[str]]]:
        """Lines that hold a pattern, in the order in which they came."""
        with self._lock:
            found = [(line, re.search(pattern, line.text)) for line in self.lines if line.at_s >= since_s]
        return [(line, match) for line, match in found if match]

    def iterations(self, since_s: float = 0.0) -> list[tuple[float, int]]:
        """When which iteration was printed."""
        return [(line.at_s, int(match.group(1))) for line, match in self.matches(ITERATION, since_s)]

    def write(self, path: Path, since_s: float) -> None:
        """Write all lines, with seconds since a moment."""
        path.write_text("".join(f"{line.at_s - since_s:8.2f} {line.host} {line.text}\n" for line in self.lines))


def median_step_s(seen: Sequence[tuple[float, int]]) -> float:
    """Return the median time between iterations; 0 where there are not two."""
    times = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(seen)]
    return statistics.median(times) if times else 0.0


@contextmanager
def small_disk() -> Iterator[Path]:
    """Make a file system in memory; its folder is removed with it."""
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", name], check=True)  # noqa: S607
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)  # noqa: S607


def await_so(is_so: Callable[[], bool], patience_s: float) -> bool:
    """Wait for something; false where it did not come in time."""
    ends_s = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.02)
    return True
