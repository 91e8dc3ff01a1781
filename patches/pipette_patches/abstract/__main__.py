"""Execute ranks of training jobs abstractly: `python -m pipette_patches.abstract`, JSON in and out, one line each.

A request is a line of `facts.messages.abstract_execution.ExecutionRequest`, an answer a line of `ExecutionAnswer`; the
process goes on to the next line, and ends with exit code 0, or 1 when its last answer was an error.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import IO

from pipette_launch.errors import PipetteError
from pipette_launch.facts.files import from_plain, to_plain
from pipette_launch.facts.messages import ExecutionAnswer, ExecutionRequest


def main() -> int:
    """Answer every line of stdin on stdout; whatever megatron-core prints goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    return serve(sys.stdin, answers)


def serve(requests: IO[str], answers: IO[str]) -> int:
    """Answer line by line; returns the exit code."""
    failed = False
    for line in requests:
        given = answer(line)
        failed = given.error is not None
        answers.write(json.dumps(to_plain(given)) + "\n")
        answers.flush()
    return int(failed)


def answer(line: str) -> ExecutionAnswer:
    """Execute what one line asks for; an error becomes the answer."""
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
        # megatron-core refuses by any of these.
        return ExecutionAnswer(error=f"megatron-core refuses it: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    sys.exit(main())
