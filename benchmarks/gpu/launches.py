"""Starts launchers as a user would and watches them: output, iterations, seconds, memory of the device."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from pipette_launch import megatron
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Device, files
from pipette_launch.megatron import Iteration
from pipette_launch.probe.health import nvml

ROOT = Path(__file__).parent.parent.parent
TRAINER = ROOT / "examples" / "pretrain_gpt.py"
TORCHRUN = "torch.distributed.run"
OURS = "pipette_launch"
LOOK_S = 1.0
"""Seconds between two queries of the driver: each takes a lock of the driver, which may hold up a short step."""
GRACE_S = 5.0
"""Between asking a launcher that took too long to end and killing it."""

Fact = TypeVar("Fact", bound=files.Document)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Output and measurements of one launcher."""

    code: int | None
    """None where it had to be ended."""
    out: str
    err: str
    seconds: float
    first_iteration_s: float | None
    """From the start of the launcher to the first iteration line."""
    most_bytes: int
    """Peak bytes of the launcher's processes on the device, by NVML; 0 on a CPU."""

    @property
    def iterations(self) -> list[Iteration]:
        """All that were printed."""
        found = map(megatron.parse_iteration, self.out.splitlines())
        return [one for one in found if one is not None]

    @property
    def losses(self) -> dict[int, str]:
        """Loss of each iteration, as printed."""
        return {one.iteration: one.loss or "" for one in self.iterations}

    @property
    def stderr_end(self) -> str:
        """The end of stderr in one line."""
        return " / ".join(self.err.strip().splitlines()[-3:])[-400:]

    def failure(self, launcher: str) -> PipetteError:
        """An error that says how the launcher ended, and after how long."""
        how = "had to be ended" if self.code is None else f"ended with {self.code}"
        return PipetteError(f"{launcher} {how} after {self.seconds:.0f} s: {self.stderr_end}")


@dataclass(kw_only=True)
class Launch:
    """One launcher that is running; `finish` waits for it."""

    words: Sequence[object]
    folder: Path
    device: Device
    launcher: str = OURS
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._began_s = time.perf_counter()
        self._first_s: float | None = None
        self._out: list[str] = []
        self._err: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.launcher, *map(str, self.words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=self.folder,
            env=environment(self.folder, self.device.kind) | dict(self.variables),
        )
        pipes = ((self._process.stdout, self._saw, sys.stdout), (self._process.stderr, self._err.append, sys.stderr))
        self._readers = [threading.Thread(target=_read, args=pipe, daemon=True) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    def finish(self, limit_s: float) -> Run:
        """Wait until the launcher ends; at the deadline end it and its workers."""
        with nvml.session() if self.device.kind == "cuda" else nullcontext() as driver:
            code, most_bytes = self._watch(driver, time.perf_counter() + limit_s)
        if code is None:
            self._process.terminate()
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        seconds = time.perf_counter() - self._began_s
        for reader in self._readers:
            reader.join(1.0)
        return Run(
            code=code,
            out="".join(self._out),
            err="".join(self._err),
            seconds=seconds,
            first_iteration_s=self._first_s,
            most_bytes=most_bytes,
        )

    def _saw(self, line: str) -> None:
        self._out.append(line)
        if self._first_s is None and megatron.parse_iteration(line):
            self._first_s = time.perf_counter() - self._began_s

    def _watch(self, driver: Any, ends_s: float) -> tuple[int | None, int]:
        """Wait for the launcher in one session of NVML, if there is one; returns its exit code and the most bytes."""
        handle = driver.nvmlDeviceGetHandleByUUID(self.device.uuid) if driver else None

        def used_bytes() -> int:
            if driver is None:
                return 0
            memory = nvml.memory(driver, handle)
            return memory.total_bytes - memory.free_bytes

        before_bytes = most_bytes = used_bytes()
        while (left_s := ends_s - time.perf_counter()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(min(left_s, LOOK_S)), most_bytes - before_bytes
            most_bytes = max(most_bytes, used_bytes())
        return self._process.poll(), most_bytes - before_bytes


def losses_apart(some: Sequence[str], others: Sequence[str]) -> float:
    """Largest relative difference between two runs' losses as printed; infinite if one has fewer, or no number."""
    if len(some) != len(others) or not all((*some, *others)):
        return math.inf
    pairs = [(float(one), float(other)) for one, other in zip(some, others, strict=True)]
    found = [abs(one / other - 1) for one, other in pairs if one != other]
    return math.inf if any(map(math.isnan, found)) else max(found, default=0.0)


def newest_cached(folder: Path, kind: type[Fact], name: str) -> Fact:
    """Read the newest file of a launcher's cache; raise PipetteError if it is missing."""
    found = sorted((folder / "cache").glob(f"pipette-launch/*/{name}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise PipetteError(f"the launcher left no {name}")
    return files.read(found[-1], kind)


def environment(folder: Path, device_kind: str) -> dict[str, str]:
    """The environment of a launcher whose cache lies in a folder of the check."""
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "patches"))),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    # On a GPU torch compiles, as it does for a user.
    on_cpu = {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""} if device_kind == "cpu" else {}
    return {**os.environ, **own, **on_cpu}


def _read(pipe: IO[str], keep: Callable[[str], None], show: IO[str]) -> None:
    """Keep a stream line by line, and pass it on to the log."""
    with pipe:
        for line in pipe:
            keep(line)
            show.write(line)
            show.flush()
