"""A rule that a layout breaks, and the sentence that names the user's own flags for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from pipette_launch.facts import Job, Layout
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.job import PerformanceOptions
from pipette_launch.megatron.chunks import PATTERN_DESTS, SPLIT_DESTS
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.layout import CP, EP, ETP, GROUP_SIZE, PP, TP
from pipette_launch.megatron.performance import performance_options


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """One job on one kind of device; `judge` applies the rules to its layouts.

    Sources: `validate_args` (megatron/training/arguments.py) and TransformerConfig of core_v0.14.0 to v0.19.0, with
    line numbers of v0.16.1, and what fails only at run time.
    """

    job: Job
    release: tuple[int, ...]
    """Megatron's release, read once from the job."""
    device_kind: str
    options: PerformanceOptions
    rooms: Domains | None = None
    """Hosts and domains that must hold the ranks that flags demand together; None on CPU and for Megatron's rules."""

    @property
    def ramps_up(self) -> bool:
        """True if the batch grows; from 0.18 on Megatron ignores the flag (num_microbatches_calculator.py)."""
        return bool(self.options.rampup_batch_size) and self.release < (0, 18)

    @classmethod
    def of(cls, job: Job, *, device_kind: str, rooms: Domains | None = None) -> Rules:
        """Read the options that a job's own flags set."""
        rooms = rooms if device_kind == "cuda" else None
        options = performance_options(job)
        return cls(job=job, release=job.release, device_kind=device_kind, options=options, rooms=rooms)


SIZES = {"tp": TP, "pp": PP, "cp": CP, "ep": EP, "etp": ETP, "microbatch_group_size": GROUP_SIZE}
"""Layout fields whose flag has another name."""
SEVERAL = {
    "dp": (),
    "vpp": (*SPLIT_DESTS[:3], *PATTERN_DESTS),
    "layers_per_chunk": (*SPLIT_DESTS, *PATTERN_DESTS),
    "recompute": ("recompute_activations", "recompute_granularity", "recompute_method", "recompute_num_layers"),
}
"""Layout fields that several flags can set, or no flag."""


class BrokenRule(NamedTuple):
    """A rule that a layout breaks."""

    reason: str
    """Countable: the same text for all layouts of a job that break the rule."""
    names: tuple[str, ...]
    """Layout fields and Megatron's destinations that break the rule together."""
    remedy: str = "change one of them"
    """It may name sizes of this layout."""
    is_refused: bool = True
    """False if Megatron starts, and then hangs or computes wrong gradients: no plan has it, `predict` adds a note."""

    def sentence(self, arguments: Arguments, layout: Layout) -> str:
        """Return flags with their values, the reason and the remedy: `--tensor-model-parallel-size 3: ...; ...`."""
        shown = dict.fromkeys(words for name in self.names for words in _shown(name, arguments, layout))
        *first, last = [words for words in shown if words not in self.reason] or [""]
        flags = f"{', '.join(first)} and {last}" if first else last
        return f"{flags}{': ' if flags else ''}{self.reason}; {self.remedy}"


Broken: TypeAlias = Iterator[BrokenRule]


def _shown(name: str, arguments: Arguments, layout: Layout) -> Iterator[str]:
    """Flags behind a name in the user's words; a size that the user did not give as the flag would say it."""
    if name in SIZES:
        dest, size = SIZES[name], getattr(layout, name)
        if arguments.get(dest) == size and arguments.is_given(dest):
            yield arguments.shown(dest)
        elif size > 1:
            # A checkpoint may demand other sizes than the flags, and Megatron derives ETP from TP.
            yield f"{arguments.without(dest).shown(dest)} {size}"
        return
    for dest in SEVERAL.get(name, (name,)):
        if arguments.is_given(dest):
            yield arguments.shown(dest)
