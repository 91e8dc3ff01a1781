"""Asking which links, groups and stages the plans that may win would use; the answer comes from a process of its own.

The probe knows no planner: the orders name a command that reads a Question and writes an Advice.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job, Measurements, files
from pipette_launch.facts.advice import Advice
from pipette_launch.facts.question import Question

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
