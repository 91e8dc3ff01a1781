"""Compares plan files: layouts, predicted steps, memory and moved ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipette_launch.errors import UsageError
from pipette_launch.facts import Choice, Plan, files
from pipette_launch.facts.measurements import MemoryVerdict
from pipette_launch.facts.plan import in_order_of
from pipette_launch.facts.prediction import Comparison, Entry
from pipette_launch.text import bytes_text, counted

NO_NETWORK = "one that was not described"


def compare(paths: Sequence[str | Path]) -> Comparison:
    """Compare plan files, as `pipette compare` does. Ranks that moved are counted relative to the first file.

    Returns:
        One entry for each file, in the order of `paths`. The result's `notes` name plans for another job or other
        machines.

    Raises:
        UsageError: fewer than two files.
        FileFormatError: a file is missing, damaged or not a plan.

    """
    if isinstance(paths, str | Path) or len(paths) < 2:
        raise UsageError(f"nothing to compare: name two plan files or more, got {paths!r}")
    places = [Path(path) for path in paths]
    plans = [files.read(path, Plan) for path in places]
    names = [path.name.removesuffix(".json").removesuffix(".plan") for path in places]
    if len(set(names)) < len(names):
        names = [str(path) for path in places]
    entries = [
        Entry(
            name=name,
            choice=plan.chosen,
            gap=plan.gap,
            num_moved=num_moved(plans[0], plan),
            faults=tuple(_memory_words(plan.chosen, "too large")),
            remarks=(*(("This is your own configuration.",) * plan.keeps_own), *_memory_words(plan.chosen, "tight")),
        )
        for name, plan in zip(names, plans, strict=True)
    ]
    return Comparison(entries=tuple(entries), notes=tuple(_differences(plans)))


def num_moved(one: Plan, other: Plan) -> int | None:
    """Count the ranks whose device differs between the plans; None if hosts or devices per host differ."""
    if sorted(one.hosts) != sorted(other.hosts) or one.devices_per_host != other.devices_per_host:
        return None
    placements = one.chosen.placement, in_order_of(other, one.hosts).chosen.placement
    return sum(rank != other_rank for rank, other_rank in zip(*placements, strict=True))


def _memory_words(choice: Choice, verdict: MemoryVerdict) -> Iterator[str]:
    """Yield a sentence on the fullest stage of a choice with this verdict."""
    if choice.verdict == verdict:
        shown, words = choice.memory_shown, "Tight" if verdict == "tight" else "Does not fit"
        peak = max(shown.need_bytes)
        stage = shown.need_bytes.index(peak)
        yield f"{words}: stage {stage} needs {bytes_text(peak)}, and the limit is {bytes_text(shown.limit_bytes)}."


def _differences(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield a note for each difference from the first plan in job or machines, which makes step times incomparable."""
    first = plans[0]
    for number, plan in enumerate(plans[1:], 2):
        if first.setting is None or plan.setting is None:
            yield f"{number}: may be for another job than plan 1; one of the files does not name its job."
            continue
        for what, name in (
            ("parameters", "num_parameters"),
            ("sequences per step", "global_batch_size"),
            ("tokens per sequence", "seq_length"),
            ("devices", "device_name"),
            ("network", "network"),
        ):
            mine, others = getattr(plan.setting, name), getattr(first.setting, name)
            if mine != others:
                yield f"{number}: other {what} than plan 1: {mine or NO_NETWORK} instead of {others or NO_NETWORK}."
        if len(plan.hosts) != len(first.hosts):
            yield f"{number}: {counted(len(plan.hosts), 'host')} instead of {len(first.hosts)}."
