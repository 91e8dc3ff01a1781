"""Rules that depend on flags alone: no layout mends them."""

from __future__ import annotations

from itertools import chain

from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.rules.broken import Broken, BrokenRule
from pipette_launch.megatron.rules.flag_view import FlagView
from pipette_launch.megatron.rules.flags_of_experts import EXPERTS, GRAPHS
from pipette_launch.megatron.rules.flags_of_models import MEMORY, MODEL
from pipette_launch.megatron.rules.flags_of_training import FILES, OPTIMIZER, PRECISION, STEPS

TABLES = (PRECISION, OPTIMIZER, STEPS, FILES, MODEL, MEMORY, EXPERTS, GRAPHS)


def flag_faults(arguments: Arguments) -> Broken:
    """Check flags that exclude or need each other, by the tables of Megatron's rules."""
    view = FlagView(arguments)
    for rule in chain.from_iterable(TABLES):
        if rule.since <= view.release <= rule.until and rule.is_broken(view):
            names = tuple(rule.names.split())
            given = sum(arguments.is_given(name) for name in names)
            yield BrokenRule(rule.reason, names, "change one of them" if given > 1 else "change or remove it")
