"""Execute ranks of training jobs abstractly: `python -m pipette_patches.abstract`, with one JSON document on each line.

A line of stdin is an `ExecutionRequest`, a line of stdout an `ExecutionAnswer` (`facts.messages`). The process ends at
the end of stdin. The exit code of the process is 0, or 1 if the last answer was an error.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

from pipette_launch.errors import PipetteError
from pipette_launch.facts.files import from_plain, to_plain
from pipette_launch.facts.messages import ExecutionAnswer, ExecutionRequest


def main() -> int:
    """Answer every line of stdin on stdout. Print the output of megatron-core on stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    failed = False
    for line in sys.stdin:
        given = answer(line)
        failed = given.error is not None
        answers.write(json.dumps(to_plain(given)) + "\n")
        answers.flush()
    return int(failed)


def answer(line: str) -> ExecutionAnswer:
    """Execute the request of one line, and return the result or the error."""
    try:
        request: ExecutionRequest = from_plain(ExecutionRequest, json.loads(line), "request")
        from pipette_patches.abstract import execution

        execution.load()
        ranks = tuple(execution.run_rank(request.job, request.layout, pp_rank) for pp_rank in request.pp_ranks)
        return ExecutionAnswer(ranks=ranks)
    except PipetteError as error:
        return ExecutionAnswer(error=str(error))
    except ValueError as error:
        return ExecutionAnswer(error=_first_line(error))
    except (AssertionError, TypeError, RuntimeError, ImportError, AttributeError, KeyError, IndexError) as error:
        # megatron-core raises errors of many types for a job that it refuses.
        return ExecutionAnswer(error=f"megatron-core refuses it: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    sys.exit(main())
