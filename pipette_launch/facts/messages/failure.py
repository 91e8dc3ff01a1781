"""Why a worker or a trial ended early, as data: made where its output is read, matched by kind everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal[
    "out-of-memory", "out-of-host-memory", "unknown-flags", "refused-flag", "missing", "exception", "other"
]
"""`out-of-memory`: of a GPU; `out-of-host-memory`: of the host or its cgroup.
`missing`: a file or module that is missing under every plan. `exception`: one that no layout is known to cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One cause, and the rank that told it."""

    cause: str
    """One sentence for the user; empty where nothing is known."""
    kind: FailureKind = "other"
    flags: tuple[str, ...] = ()
    """Names of the flags that the script does not know or refuses, as `--seed`."""
    rank: int | None = None
    """RANK of the worker that ended; None where none did."""
    exit_code: int = 0
    """Of that worker; negative for the signal that ended it."""

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the memory of the device or of the host was used up."""
        return self.kind in ("out-of-memory", "out-of-host-memory")

    @property
    def sentence(self) -> str:
        """Say what the user reads: the cause, behind the rank and how it ended."""
        if self.rank is None:
            return self.cause
        told = f"rank {self.rank} ended with {exit_words(self.exit_code)}"
        return f"{told}: {self.cause}" if self.cause else told


def exit_words(exit_code: int) -> str:
    """Return an exit code as people say it: `exit code 1`, `signal 9`."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
