"""A rule that a layout breaks, and the sentence that names the user's own flags for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from pipette_launch.facts import Layout
from pipette_launch.megatron.chunks import PATTERN_DESTS, SPLIT_DESTS
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.layout import CP, EP, ETP, GROUP_SIZE, PP, TP

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
