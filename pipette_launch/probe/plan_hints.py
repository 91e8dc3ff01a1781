"""Asking which links, groups and stages the plans that may win would use; the answer comes from a process of its own.

The probe knows no planner: the orders name a command that reads a Question and writes an Advice.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job, Measurements, files
from pipette_launch.facts.messages.measuring_advice import Advice, CollectiveKind, Dimension
from pipette_launch.facts.messages.measuring_question import Question

START_S = 30.0
"""How much longer than its search the adviser may take to start, to read and to write; cores may be busy."""
QUESTION, ANSWER = "question.json", "advice.json"


def ask(command: Sequence[str], job: Job, measurements: Measurements, *, folder: Path, budget_s: float) -> Advice:
    """Start the adviser and wait for its answer; whatever goes wrong is an empty Advice that says so.

    Args:
        command: its words, but for the two files.
        job: what is to be planned.
        measurements: what is known so far.
        folder: where both files go.
        budget_s: seconds that it may search.

    """
    question, answer = folder / QUESTION, folder / ANSWER
    try:
        files.write(question, Question(job=job, measurements=measurements, budget_s=budget_s))
        done = subprocess.run(
            [*command, str(question), str(answer)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=budget_s + START_S,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            return Advice(words=f"the adviser ended with exit code {done.returncode}: {last}")
        return files.read(answer, Advice)
    except subprocess.TimeoutExpired:
        return Advice(words=f"the adviser gave no answer within {budget_s + START_S:.0f} s")
    except (OSError, PipetteError) as error:
        return Advice(words=f"nobody could be asked: {error}")


def untold(advised: Sequence[Dimension], measured: Sequence[Dimension], devices_per_host: int) -> tuple[Dimension, ...]:
    """Return what of the advised dimensions would tell something new.

    Of each kind of collective one group tells for all that have as many slots on as many hosts.
    """
    told = {shape for dimension in measured for shape in _shapes(dimension, devices_per_host)}
    found: list[Dimension] = []
    for dimension in advised:
        alone = [replace(dimension, kinds=(kind,)) for kind in dimension.kinds]
        kinds = tuple(one.kinds[0] for one in alone if not _shapes(one, devices_per_host) <= told)
        if kinds:
            found.append(replace(dimension, kinds=kinds))
            told |= _shapes(dimension, devices_per_host)
    return tuple(found)


def _shapes(dimension: Dimension, devices_per_host: int) -> set[tuple[CollectiveKind, int, int]]:
    """Each kind with each size that groups have and the number of hosts that they lie on."""
    return {
        (kind, len(group), len({slot // devices_per_host for slot in group}))
        for kind in dimension.kinds
        for group in dimension.groups
    }


def share(advice: Advice | None, device_kind: str) -> Advice:
    """Bring rank 0's advice to all ranks over the world communicator; the others pass None.

    Not through the store: groups of thousands of ranks times thousands of readers would be its traffic.
    """
    text = b"" if advice is None else files.dumps(advice).encode()
    size = torch.tensor([len(text)], device=device_kind)
    dist.broadcast(size, src=0)
    buffer = torch.zeros(int(size), dtype=torch.uint8, device=device_kind)
    if advice is not None:
        buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return files.loads(Advice, bytes(buffer.cpu().tolist()).decode(), "rank 0's advice")
