"""Figures and sentences that several screens share: rates, memory against the limit, notes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipette_launch.facts.plan import Rate
from pipette_launch.report.draw import bar, text
from pipette_launch.text import bytes_text, count_text, flops_text, plural, seconds_text

if TYPE_CHECKING:
    from rich.table import Table

NOT_MODELLED = "Not modelled: "
"""The beginning of a note on an effect that the cost model leaves out. Screens count these notes; files list them."""
FLAG = re.compile(r"(?<![\w-])--[a-z]")
TELLING = re.compile(
    r"own configuration|user's own layout .* is ruled out|own layout could not be priced|something else may be running"
)


def rate_words(rate: Rate, world_size: int) -> str:
    """Tokens of all ranks and of each, model FLOPs of each, and their part of the peak, if known."""
    mfu = "" if rate.mfu is None else f", MFU {rate.mfu:.1%}"
    tokens = f"{count_text(rate.tokens_per_s)} tokens/s, {rate.tokens_per_s / world_size:,.0f} on each rank"
    return f"{tokens}; {flops_text(rate.flops_per_s)} on each{mfu}"


def step_words(measured_s: float, predicted_s: float) -> str:
    """Set a measured step beside the predicted one; the error of the prediction is a part of what was measured."""
    words = f"{seconds_text(measured_s)}, predicted {seconds_text(predicted_s)}"
    error = round(predicted_s / measured_s - 1, 3) if measured_s > 0 else 0.0
    if not error:
        return words
    return f"{words}: {abs(error):.{1 if abs(error) < 0.1 else 0}%} too {'long' if error > 0 else 'short'}"


def memory_bars(stages: Sequence[tuple[int, int]], limit_bytes: int | None) -> Table:
    """A bar for each (stage, bytes); without a limit beside the fullest."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    whole = max(need for _, need in stages) if limit_bytes is None else limit_bytes
    limit = "" if limit_bytes is None else f" of {bytes_text(limit_bytes)}"
    for stage, need in stages:
        over = need > whole
        table.add_row(
            text(f"stage {stage}"),
            bar(min(need / whole, 1.0) if whole else 1.0, "red" if over else "default"),
            text(f"{bytes_text(need)}{limit}{', too much' if over else ''}"),
        )
    return table


def limit_words(limit_bytes: int, free_bytes: int, margin: float) -> str:
    """Say what the figures hold and what the limit is; the same words on every screen."""
    if not free_bytes:
        return "the model's tensors alone: this file of an earlier release has no overhead"
    return (
        f"what one device holds, overhead included; the limit of {bytes_text(limit_bytes)} is what is free on the "
        f"fullest device ({bytes_text(free_bytes)}), less the margin of {margin:.0%}"
    )


def short_limit_words(limit_bytes: int, free_bytes: int, margin: float) -> str:
    """Say the same as `limit_words` in one line."""
    if not free_bytes:
        return limit_words(limit_bytes, free_bytes, margin)
    return f"with overhead; limit: {bytes_text(free_bytes)} free on the fullest device, less {margin:.0%}"


def advice(notes: Sequence[str]) -> list[str]:
    """Pick the notes of a plan on which the user can act.

    They name a flag that he can change, speak of what becomes of his own configuration or of other work on hosts, or
    stand behind the notes on effects that are not modelled, with which a search ends: what was added later is on files,
    hosts and memory.
    """
    later = max((index for index, note in enumerate(notes) if note.startswith(NOT_MODELLED)), default=len(notes))
    return [
        note
        for index, note in enumerate(notes)
        if not note.startswith(NOT_MODELLED) and (index > later or FLAG.search(note) or TELLING.search(note))
    ]


def without_gaps(notes: Sequence[str], *, what: str, listed: str) -> Iterator[str]:
    """Leave out the notes on effects that are not modelled, and say at the end how many there are.

    Args:
        notes: of a plan, a prediction or a comparison.
        what: the effects are on, such as ` on the step's time`; may be empty.
        listed: where they can be read, a clause.

    """
    gaps = sum(note.startswith(NOT_MODELLED) for note in notes)
    yield from (note for note in notes if not note.startswith(NOT_MODELLED))
    if gaps:
        yield f"{gaps} {plural('effect', gaps)}{what} {'is' if gaps == 1 else 'are'} not modelled; {listed}."
