"""Which worker's death was the first, and what it said last."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from pipette_launch import megatron

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from pipette_launch.facts.messages import Failure

MOST_CHARACTERS = 300


def failure(result: RunResult, ranks: Sequence[int], tail: Callable[[int], Sequence[str]]) -> Failure | None:
    """Return why the first worker of a node died; None where none did.

    Args:
        result: what torch says of the workers that ended.
        ranks: RANK of each worker, by LOCAL_RANK.
        tail: the last lines of stderr of the worker with this LOCAL_RANK.

    """
    if not result.failures:
        return None
    first = root_cause(result)
    lines = tail(first.local_rank)
    # Whoever is killed does not come to say so: what it said last is no cause.
    said = "" if first.exitcode == -signal.SIGKILL else first_line(first) or last_words(lines)
    why = megatron.explain_failure("\n".join(lines)) or megatron.failure_of(said)
    return replace(why, rank=ranks[first.local_rank], exit_code=first.exitcode)


def root_cause(result: RunResult) -> ProcessFailure:
    """Return the failure that came first; torch ends the other workers by SIGTERM, and they are no cause."""
    return min(result.failures.values(), key=lambda one: (one.exitcode == -signal.SIGTERM, one.timestamp))


def first_line(failure: ProcessFailure) -> str:
    """Return the first line of a worker's error file; empty when it left none."""
    message: object = failure.message
    if isinstance(message, dict):
        # What a worker under torch's @record leaves.
        message = message.get("message", "")
    lines = [line.strip() for line in str(message).splitlines() if line.strip()]
    # Without an error file torch puts "Signal 9 (SIGKILL) received by PID 1" here, which says nothing new.
    return lines[0] if lines and not lines[0].startswith(("Signal", "To enable")) else ""


def last_words(lines: Sequence[str]) -> str:
    """Return the exception that a worker died of, or the last thing that it said; cut where it runs on."""
    said = [line.strip() for line in lines if line.strip()]
    # Warnings of libraries that are torn down may come behind the exception.
    return (megatron.exception_in("\n".join(said)) or said[-1])[:MOST_CHARACTERS] if said else ""
