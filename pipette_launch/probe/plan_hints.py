"""Asks which links, groups and stages the plans that may win would use; a process of its own answers.

The probe imports no planner. Its orders name a command, the adviser, which reads a MeasuringQuestion and writes an
Advice.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job, Measurements, files
from pipette_launch.facts.messages import Advice, CollectiveKind, Dimension, MeasuringQuestion

START_S = 30.0
"""Seconds that the adviser may take beside its search: to start, to read and to write, on cores that may be busy."""
QUESTION, ANSWER = "question.json", "advice.json"


def ask(command: Sequence[str], job: Job, measurements: Measurements, *, folder: Path, budget_s: float) -> Advice:
    """Start the adviser and wait for its answer; if it fails, the Advice is empty and has the reason.

    Args:
        command: the words of the command, without the two files.
        job: the job that is to be planned.
        measurements: what is known so far.
        folder: where both files are written.
        budget_s: seconds that the adviser may search.

    """
    question, answer = folder / QUESTION, folder / ANSWER
    try:
        files.write(question, MeasuringQuestion(job=job, measurements=measurements, budget_s=budget_s))
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
            return Advice(words=f"the first search ended with exit code {done.returncode}: {last}")
        return files.read(answer, Advice)
    except subprocess.TimeoutExpired:
        return Advice(words=f"the first search gave no answer within {budget_s + START_S:.0f} s")
    except (OSError, PipetteError) as error:
        return Advice(words=f"no first search was made: {error}")


def not_measured(
    advised: Sequence[Dimension], measured: Sequence[Dimension], devices_per_host: int
) -> tuple[Dimension, ...]:
    """Return the advised dimensions, with those kinds of collectives that were not measured yet.

    A measured group of a kind stands for all groups with as many slots on as many hosts.
    """
    covered = {shape for dimension in measured for shape in _shapes(dimension, devices_per_host)}
    found: list[Dimension] = []
    for dimension in advised:
        alone = [replace(dimension, kinds=(kind,)) for kind in dimension.kinds]
        kinds = tuple(one.kinds[0] for one in alone if not _shapes(one, devices_per_host) <= covered)
        if kinds:
            found.append(replace(dimension, kinds=kinds))
            covered |= _shapes(dimension, devices_per_host)
    return tuple(found)


def _shapes(dimension: Dimension, devices_per_host: int) -> set[tuple[CollectiveKind, int, int]]:
    """Each kind, with the size of each group and the number of its hosts."""
    return {
        (kind, len(group), len({slot // devices_per_host for slot in group}))
        for kind in dimension.kinds
        for group in dimension.groups
    }
