"""Screen of a prediction: verdict on memory, memory of every stage by kind, step time, and assumptions."""

# S = stages shown.

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipette_launch.facts.glossary import SHORT
from pipette_launch.facts.prediction import PARTS, Prediction, StageMemory
from pipette_launch.report.screen import (
    Section,
    breakdown,
    bullet,
    columns,
    limit_words,
    memory_bars,
    rate_words,
    render,
    sheet,
    stages_shown,
    text,
    without_gaps,
)
from pipette_launch.text import GIB, MIB, bytes_text, count_text, plural, printable, seconds_text

MOST_BARS = 8
MOST_ROWS = 16
TABLE_WIDTH = 80
"""Least width of a screen with the table of memory. Narrower screens list the parts of the fullest stage."""
LONG_WIDTH = 100
"""Least width of a screen whose table has whole words as headings."""
METHODS = {
    "closed": "the model's tensors counted by formula",
    "abstract": "the model's tensors counted by running megatron-core's own code without data",
}
STYLES = {"fits": "bold green", "tight": "bold yellow", "too large": "bold red", "unknown": "bold"}


def prediction_screen(
    prediction: Prediction, *, width: int | None = None, colour: bool | None = None, stream: TextIO | None = None
) -> str:
    """Draw the screen of a prediction: verdict on memory, memory by stage and kind, and step time."""
    target = stream or sys.stdout
    wide = columns(width, target)
    sections: tuple[Section, ...] = (
        ("Job", _job(prediction)),
        ("Machines", _machines(prediction)),
        ("Verdict", [_verdict(prediction)]),
        ("Memory", _memory(prediction)),
        ("Split", _split(prediction, wide)),
        ("Step time", _step(prediction)),
        ("Notes", map(bullet, without_gaps(prediction.notes, what=" on the step's time", listed="--json lists them"))),
    )
    return render("pipette predict", sheet(sections), width=wide, colour=colour, stream=target)


def _job(prediction: Prediction) -> Iterator[Text]:
    layout = text(prediction.layout.words(), "bold")
    count = prediction.num_microbatches
    layout.append(printable(f"  {prediction.schedule}, {count} micro-batch{'es' if count > 1 else ''}"), "default")
    yield text(
        f"{prediction.script}: {count_text(prediction.num_parameters)} parameters, {prediction.global_batch_size} "
        f"sequences = {count_text(prediction.tokens_per_step)} tokens a step"
    )
    yield layout


def _machines(prediction: Prediction) -> Iterator[Text]:
    hosts, devices = prediction.num_hosts, prediction.devices_per_host
    if not prediction.device_name:
        kind = "GPUs" if prediction.device_kind == "cuda" else "CPUs"
        yield text(f"{prediction.world_size} {plural('rank', prediction.world_size)} on {kind} of unknown type")
        return
    yield text(
        f"{prediction.world_size} {plural('rank', prediction.world_size)} on {hosts} {plural('host', hosts)} x "
        f"{devices} {prediction.device_name}, {prediction.machines}"
    )


def _verdict(prediction: Prediction) -> Text:
    """Return a sentence with the verdict on memory, which names the fullest stage."""
    fullest, capacity, limit = prediction.fullest, prediction.capacity_bytes, prediction.limit_bytes
    where = "the stage shown" if len(prediction.stages) == 1 else f"stage {fullest.pp_rank}, the fullest,"
    need = f"{where} needs {bytes_text(fullest.peak_bytes)}"
    if capacity is None or limit is None:
        return text(f"Memory only: {need} on each rank.", STYLES["unknown"])
    left, whole = capacity - fullest.peak_bytes, bytes_text(capacity)
    words = {
        "fits": f"It fits: {need} of the {bytes_text(limit)} that a rank may hold.",
        "tight": f"It is tight: {need} of the {bytes_text(limit)} that a rank may hold, and leaves "
        f"{left / capacity:.1%} of {whole}, less than the margin of {prediction.memory_margin:.0%}.",
        "too large": f"It does not fit: {need}, {bytes_text(-left)} more than the {whole} of a device.",
    }[prediction.verdict]
    remedy = f" With {' or '.join(prediction.remedies)} it would fit." if prediction.remedies else ""
    return text(f"{words}{remedy}", STYLES[prediction.verdict])


def _memory(prediction: Prediction) -> Iterator[RenderableType]:
    """Return bars of the peak memory of each stage's device, as shares of the limit if the limit is known."""
    shown, limit = _shown(prediction, MOST_BARS), prediction.limit_bytes
    yield memory_bars([(stage.pp_rank, stage.peak_bytes) for stage in shown], limit)
    hidden = len(prediction.stages) - len(shown)
    if hidden:
        yield text(f"… {hidden} more stages, none of them fuller; --stage S and --json show them", "dim")
    if prediction.capacity_bytes is not None and limit is not None:
        yield text(limit_words(limit, prediction.capacity_bytes, prediction.memory_margin), "dim")
    yield text(METHODS[prediction.method], "dim")


def _shown(prediction: Prediction, most: int) -> Sequence[StageMemory]:
    peaks = [stage.peak_bytes for stage in prediction.stages]
    return [prediction.stages[index] for index in stages_shown(peaks, most)]


def _split(prediction: Prediction, width: int) -> Iterator[RenderableType]:
    """Return the table of memory at each stage's peak, by kind."""
    if width < TABLE_WIDTH:
        fullest = prediction.fullest
        parts = " · ".join(f"{name} {bytes_text(size)}" for name, size in fullest.parts_bytes.items())
        yield text(f"stage {fullest.pp_rank}: {parts}")
        return
    table = Table.grid(padding=(0, 2 if width >= LONG_WIDTH else 1, 0, 0))
    unit, size = ("GiB", GIB) if prediction.fullest.model_peak_bytes >= GIB else ("MiB", MIB)
    heads = [unit, "layers", *(part if width >= LONG_WIDTH else SHORT[part] for part in PARTS), "peak"]
    for _ in heads:
        table.add_column(justify="right", no_wrap=True)
    table.add_row(*(text(head, "dim") for head in heads))
    for stage in _shown(prediction, MOST_ROWS):
        sizes = [stage.parts_bytes[part] for part in PARTS] + [stage.peak_bytes]
        cells = [f"stage {stage.pp_rank}", str(stage.num_layers), *(_amount(part / size) for part in sizes)]
        table.add_row(*(text(cell) for cell in cells))
    yield table


def _amount(amount: float) -> str:
    """Return an amount of memory in at most five characters."""
    if 0 < amount < 0.005:
        return "<0.01"
    return f"{amount:.2f}" if amount < 100 else f"{amount:.1f}"


def _step(prediction: Prediction) -> Iterator[Text]:
    if prediction.step_time_s is None or prediction.rate is None:
        return
    condition = ", if there were memory for it" if prediction.verdict == "too large" else ""
    line = text(seconds_text(prediction.step_time_s), "bold")
    line.append(f" a step predicted{condition}", "default")
    yield line
    yield text(rate_words(prediction.rate, prediction.world_size))
    yield breakdown(prediction.breakdown_s, prediction.step_time_s)
