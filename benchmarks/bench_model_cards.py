"""Verdicts on the models with a verification card of Megatron-Bridge: read, legal, fits, or refused.

`python -m benchmarks.bench_model_cards [--record]` predicts the published layout of each row of
benchmarks/data/nvidia_cards.csv. Nothing is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench_published_fits import priced
from benchmarks.telling import shown
from benchmarks.validation.nvidia import SHAPES
from benchmarks.validation.nvidia_rows import CARDS, RECIPES, read_rows, read_shapes
from pipette_launch.errors import PipetteError
from pipette_launch.facts.measurements import MemoryNeed
from pipette_launch.text import GIB

RESULT = Path(__file__).parent / "results" / "model_cards.md"


class Card(NamedTuple):
    """A card, and the prediction of its layout or the sentence that refuses it."""

    name: str
    words: str = ""
    memory: MemoryNeed | None = None
    refused: str = ""
    note: str = ""


def cards() -> Iterator[Card]:
    """Predict the layout of each card."""
    shapes, recipes = read_shapes(SHAPES), {row["recipe"]: row for row in read_rows(RECIPES).rows}
    for card in read_rows(CARDS).rows:
        name, note = card["card"], card["note"]
        row = card if card["flags"] else recipes.get(card["recipe"])
        if row is None:
            yield Card(name, refused=f"Megatron-LM has no flags for it: {note}")
            continue
        where = f"{row['gpus']} {row['system']}, {row['precision']}: "
        try:
            job, memory = priced(row, shapes.get(row["model"]))
            yield Card(name, where + job.own.words(), memory, note=note)
        except PipetteError as error:
            yield Card(name, where, refused=str(error).splitlines()[0], note=note)


def report() -> Iterator[str]:
    """List all cards, then count."""
    found = list(cards())
    yield "Predicted, not run, by the flags of Megatron-LM 0.20. A layout fits if its fullest rank fits on the device."
    yield ""
    yield "| model | layout | predicted | device | verdict |"
    yield "|---|---|--:|--:|---|"
    for card in found:
        sizes = (max(card.memory.need_bytes), card.memory.free_bytes) if card.memory else ()
        cells = [f"{size / GIB:.1f} GiB" for size in sizes] or ["", ""]
        verdict = card.memory.verdict if card.memory else f"refused: {card.refused}"
        more = f" ({card.note})" if card.note and not card.refused else ""
        yield f"| {card.name} | {card.words}{more} | {cells[0]} | {cells[1]} | {verdict} |"
    yield ""
    refused = sum(bool(card.refused) for card in found)
    fit = sum(card.memory is not None and card.memory.fits for card in found)
    yield f"Of {len(found)} models, {len(found) - refused} are read and legal, {fit} fit, and {refused} are refused."


def main() -> None:
    """Print the report, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write benchmarks/results/{RESULT.name}")
    given = parser.parse_args()
    text = shown(report())
    if given.record:
        RESULT.write_text(f"# Models with a verification card\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
