"""Facts about a job that rules need beside the layout, and a broken rule with a message in the user's own flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from pipette_launch.facts import Job, Layout
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.job import PerformanceOptions
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.layout import DEGREES, DESTS_OF, GROUP_SIZE

SIZES = {**DEGREES, "microbatch_group_size": GROUP_SIZE}
"""Layout fields that a message shows even if the user's flags do not set the field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """One job on one kind of device. `judge` applies the rules to the layouts of this job.

    The rules come from `validate_args` (megatron/training/arguments.py) and TransformerConfig of core_v0.16.0 to
    v0.19.0, and from failures at run time. Line numbers refer to v0.16.1.
    """

    job: Job
    release: tuple[int, ...]
    device_kind: str
    options: PerformanceOptions
    rooms: Domains | None = None
    """Sizes of hosts and NVLink domains into which groups of ranks must fit.

    The field is `None` on CPU and for Megatron's own rules.
    """

    @property
    def ramps_up(self) -> bool:
        """True if the batch size grows during training.

        Megatron ignores `--rampup-batch-size` from 0.18 on (num_microbatches_calculator.py).
        """
        return bool(self.options.rampup_batch_size) and self.release < (0, 18)

    def earlier_counts(self, samples: int) -> tuple[int, ...]:
        """Return the micro-batches of earlier steps by `--step-batch-size-schedule`, if a replica runs `samples`.

        The user's own layout may continue a training whose first steps ran on fewer replicas.
        """
        own = self.job.own
        if samples == own.micro_batch_size * own.dp:
            return ()
        return tuple(size // samples * (size % samples == 0) for size in self.job.batch.earlier_sizes)

    @classmethod
    def of(cls, job: Job, *, device_kind: str, rooms: Domains | None = None) -> Rules:
        """Read the options that the flags of a job set."""
        rooms = rooms if device_kind == "cuda" else None
        options = job.options
        return cls(job=job, release=job.release, device_kind=device_kind, options=options, rooms=rooms)


class BrokenRule(NamedTuple):
    """A rule that a layout breaks."""

    reason: str
    """Reason of the refusal. All layouts of a job get the same text, so that the planner can count equal reasons."""
    names: tuple[str, ...]
    """Layout fields and Megatron's destinations that together break the rule."""
    remedy: str = "change one of them"
    """Advice to the user, which may contain sizes of the layout."""
    is_refused: bool = True
    """False if Megatron starts, and then hangs or computes wrong gradients. `predict` then only adds a note."""

    def sentence(self, arguments: Arguments, layout: Layout) -> str:
        """Return the message with flags and values, reason and remedy: `--tensor-model-parallel-size 3: ...; ...`."""
        shown = dict.fromkeys(words for name in self.names for words in _shown(name, arguments, layout))
        *first, last = [words for words in shown if words not in self.reason] or [""]
        flags = f"{', '.join(first)} and {last}" if first else last
        return f"{flags}{': ' if flags else ''}{self.reason}; {self.remedy}"


Broken: TypeAlias = Iterator[BrokenRule]


def _shown(name: str, arguments: Arguments, layout: Layout) -> Iterator[str]:
    """Yield the flags of a layout field in the user's words.

    If no flag sets a size, yield the flag that could set the size.
    """
    if name not in SIZES:
        yield from (arguments.shown(dest) for dest in DESTS_OF.get(name, (name,)) if arguments.is_given(dest))
        return
    dest, size = SIZES[name], getattr(layout, name)
    if arguments.get(dest) == size and arguments.is_given(dest):
        yield arguments.shown(dest)
    elif size > 1:
        # A checkpoint may demand other sizes than the flags, and Megatron derives ETP from TP.
        yield f"{arguments.option(dest)} {size}"
