"""Runs whole jobs for tests: launchers, small scripts, and plans made by hand."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import warm
from facts_for_tests import memory_need

from pipette_launch.facts import Choice, Layout, Plan, Provenance, files

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent.parent
TRAINER = ROOT / "examples" / "pretrain_gpt.py"
ECHO = Path(__file__).parent / "echo.py"
WITHOUT_WARMUP = ":".join(map(str, (Path(__file__).parent / "stand_ins", ROOT, ROOT / "patches", ROOT / "tests")))
"""PYTHONPATH of a job whose warm-up is written down instead of measured."""
HOST = "here"
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --vocab-size 256 --transformer-impl local --lr 1e-3 "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0"
).split()
LOSS = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*lm loss: (\S+)")


@dataclass(frozen=True)
class Done:
    """What a job left."""

    code: int
    out: str
    err: str

    @property
    def losses(self) -> list[tuple[int, str]]:
        """Iterations and their losses, as printed."""
        return [(int(iteration), loss) for iteration, loss in LOSS.findall(self.out)]

    @property
    def workers(self) -> dict[int, dict[str, str]]:
        """What each rank of echo.py saw, by RANK."""
        lines = [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]
        return {int(line["RANK"]): line for line in lines}


def environment(folder: Path, **changes: str) -> dict[str, str]:
    """A clean environment whose cache and host name are the test's own."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'patches'}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TMPDIR": str(folder),
        "SLURMD_NODENAME": HOST,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
        **changes,
    }


def start(
    folder: Path, words: Sequence[object], *, launcher: str = "pipette_launch", **env: str
) -> subprocess.Popen[str]:
    """Start a launcher."""
    command = [sys.executable, "-m", launcher, *map(str, words)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(folder, **env),
        cwd=folder,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 200) -> Done:
    """Wait for a launcher; one that does not end is killed."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Done(process.returncode, out, err)


def pipette(folder: Path, *words: object, **env: str) -> Done:
    """Run a job under pipette-launch."""
    return finish(start(folder, words, **env))


def warm_pipette(folder: Path, *words: object, **env: str) -> Done:
    """Run a job under pipette-launch whose processes are all forked from a warm interpreter: it starts sooner."""
    return finish(start_warm(folder, words, **env))


def start_warm(folder: Path, words: Sequence[object], **env: str) -> subprocess.Popen[str]:
    """Start a launcher like that: one of several, or one whose output is read."""
    return _start_warm(folder, warm.command("pipette_launch", *map(str, words)), **env)


def torchrun(folder: Path, *words: object) -> Done:
    """Run a job under torchrun to compare with; the processes of our own trainer are forked from a warm interpreter."""
    if TRAINER not in words:
        return finish(start(folder, words, launcher="torch.distributed.run"))
    first = words.index(TRAINER)
    return finish(_start_warm(folder, warm.torchrun(*map(str, words[:first]), script=[*map(str, words[first:])])))


def _start_warm(folder: Path, command: Sequence[str], **changes: str) -> subprocess.Popen[str]:
    env = {**environment(folder), **warm.environment([ROOT, ROOT / "patches"]), **changes}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=folder)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plan(
    layout: Layout, placement: Sequence[int], *, own: Layout | None = None, hosts: Sequence[str] = (HOST,)
) -> Plan:
    """A plan with one candidate."""

    def choice(what: Layout, where: Sequence[int]) -> Choice:
        return Choice(
            layout=what,
            placement=tuple(where),
            schedule="1f1b",
            step_time_s=1.0,
            breakdown_s={"compute": 1.0},
            memory=memory_need((1 << 20,) * what.pp, 1 << 30),
            bound_s=1.0,
        )

    return Plan(
        hosts=tuple(hosts),
        devices_per_host=layout.world_size // len(hosts),
        device_kind="cpu",
        chosen=choice(layout, placement),
        alternatives=(),
        own=choice(own or Layout(dp=layout.world_size), range(layout.world_size)),
        keeps_own=False,
        reasons=("It was written by hand.",),
        notes=(),
        num_layouts=1,
        dropped={},
        solve_s=0.0,
        provenance=Provenance(key="by-hand", made_at="2026-11-21T00:00:00+00:00", versions={}, source="measured"),
    )


def plan_file(folder: Path, made: Plan, name: str = "plan.json") -> Path:
    """Write a plan."""
    files.write(folder / name, made)
    return folder / name


def workers(launcher: int) -> list[int]:
    """Process ids of a launcher's workers, without the shell that ends them when the launcher is killed."""
    return [child.pid for child in psutil.Process(launcher).children() if child.name() != "sh"]


def ranks(folder: Path) -> list[int]:
    """Process ids of the workers of a job whose folder for temporary files is this, also of one that starts warm."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            variables = process.environ()
            if "RANK" in variables and variables.get("TMPDIR") == str(folder):
                found.append(process.pid)
    return found


def left_behind(marker: str) -> list[str]:
    """Processes still alive whose command line names `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in words and str(os.getpid()) != path.parent.name:
            found.append(words)
    return found
