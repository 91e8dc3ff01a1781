"""Execute ranks of training jobs abstractly: `python -m oracle.worker`.

A request on stdin is a pickled job, layout and list of pipeline ranks. An answer on stdout is a pickled list of
`RankMemory`, or the text of an error. The process ends at the end of stdin.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Sequence

from oracle.memory import RankMemory

from pipette_launch.facts import Job, Layout


def main() -> None:
    """Answer every request. Print the output of megatron-core on stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)  # noqa: S301
        except EOFError:
            return
        pickle.dump(answer(*request), answers)
        answers.flush()


def answer(job: Job, layout: Layout, pp_ranks: Sequence[int]) -> list[RankMemory] | str:
    """Execute the ranks of one request, and return the result or the error."""
    from oracle import execution

    try:
        execution.load()
        return [execution.run_rank(job, layout, pp_rank) for pp_rank in pp_ranks]
    except Exception as error:  # noqa: BLE001 megatron-core raises errors of many types for a job that it refuses.
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
