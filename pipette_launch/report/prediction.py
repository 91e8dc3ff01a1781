"""Screen of a prediction: memory by stage and kind, step time, parts and assumptions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from pipette_launch.facts.glossary import SHORT
from pipette_launch.facts.job import EXPANDABLE_SEGMENTS
from pipette_launch.facts.prediction import PARTS, Prediction, StageMemory
from pipette_launch.report.screen import (
    LEFT_OUT,
    Line,
    Section,
    breakdown,
    bullet,
    columns,
    grid,
    limit_words,
    memory_bars,
    rate_words,
    screen,
    stages_shown,
    text,
)
from pipette_launch.text import GIB, MIB, bytes_text, count_text, counted, plural, printable, seconds_text

MOST_BARS, MOST_ROWS = 8, 16
TABLE_WIDTH = 80
"""Least width of a screen with the table of memory. Narrower screens list the parts of the fullest stage."""
LONG_WIDTH = 100
"""Least width of a screen whose table has whole words as headings."""
STYLES = {"fits": "bold green", "tight": "bold yellow", "too large": "bold red", "unknown": "bold"}


def prediction_screen(prediction: Prediction) -> str:
    """Draw the screen of a prediction: verdict on memory, memory by stage and kind, and step time."""
    sections: tuple[Section, ...] = (
        ("Job", _job(prediction)),
        ("Machines", [_machines(prediction)]),
        ("Verdict", [_verdict(prediction)]),
        ("Memory", _memory(prediction)),
        ("Split", [_split(prediction, columns(sys.stdout))]),
        ("Step time", _step(prediction)),
        ("Notes", map(bullet, (*prediction.notes, LEFT_OUT))),
    )
    return screen("pipette predict", sections)


def _job(prediction: Prediction) -> Iterator[Line]:
    yield (
        f"{prediction.script}: {count_text(prediction.num_parameters)} parameters, {prediction.global_batch_size} "
        f"sequences = {count_text(prediction.tokens_per_step)} tokens a step"
    )
    count = prediction.num_microbatches
    runs = f"  {prediction.schedule}, {count} micro-batch{'es' if count > 1 else ''}"
    yield text(prediction.layout.words(), "bold").append(printable(runs), "default")


def _machines(prediction: Prediction) -> str:
    ranks = f"{prediction.world_size} {plural('rank', prediction.world_size)} on"
    hosts, devices = prediction.num_hosts, prediction.devices_per_host
    if not prediction.device_name:
        return f"{ranks} {'GPUs' if prediction.device_kind == 'cuda' else 'CPUs'} of unknown type"
    return f"{ranks} {hosts} {plural('host', hosts)} x {devices} {prediction.device_name}, {prediction.machines}"


def _verdict(prediction: Prediction) -> Line:
    fullest, capacity, limit = prediction.fullest, prediction.capacity_bytes, prediction.limit_bytes
    where = "the stage shown" if len(prediction.stages) == 1 else f"stage {fullest.pp_rank}, the fullest,"
    need = f"{where} needs {bytes_text(fullest.peak_bytes)}"
    if capacity is None or limit is None:
        return text(f"Memory only: {need} on each rank.", STYLES["unknown"])
    left, whole, least = capacity - fullest.peak_bytes, bytes_text(capacity), bytes_text(fullest.least_bytes)
    if prediction.verdict == "fits":
        words = f"It fits: {need} of the {bytes_text(limit)} that a rank may hold."
    elif prediction.verdict == "too large":
        more = bytes_text(fullest.least_bytes - capacity)
        words = f"It does not fit: {where} needs at least {least}, {more} more than the {whole} of a device."
    elif left >= 0:
        words = (
            f"It is tight: {need} of the {bytes_text(limit)} that a rank may hold, and leaves {left / capacity:.1%} of "
            f"{whole}, less than the margin of {prediction.memory_margin:.0%}."
        )
    else:
        words = (
            f"It is tight: {where} needs at least {least} of the {whole} of a device. The allocator's cache may add "
            f"{bytes_text(fullest.peak_bytes - fullest.least_bytes)}, and torch frees it before memory runs out."
        )
    if prediction.remedies:
        words += f" With {' or '.join(prediction.remedies)} it would fit."
    elif prediction.verdict == "tight" and prediction.expandable_peak_bytes is not None:
        words += f" With {EXPANDABLE_SEGMENTS} it needs about {bytes_text(prediction.expandable_peak_bytes)}."
    return text(words, STYLES[prediction.verdict])


def _memory(prediction: Prediction) -> Iterator[Line]:
    shown, limit = _shown(prediction, MOST_BARS), prediction.limit_bytes
    yield memory_bars([(stage.pp_rank, stage.peak_bytes) for stage in shown], limit)
    hidden = len(prediction.stages) - len(shown)
    if hidden:
        yield text(f"… {counted(hidden, 'more stage')}, not fuller; --stage S and --json show them", "dim")
    if prediction.capacity_bytes is not None and limit is not None:
        yield text(limit_words(limit, prediction.capacity_bytes, prediction.memory_margin), "dim")
    yield text("the model's tensors counted by formula", "dim")


def _shown(prediction: Prediction, most: int) -> Sequence[StageMemory]:
    peaks = [stage.peak_bytes for stage in prediction.stages]
    return [prediction.stages[index] for index in stages_shown(peaks, most)]


def _split(prediction: Prediction, width: int) -> Line:
    fullest, is_long = prediction.fullest, width >= LONG_WIDTH
    if width < TABLE_WIDTH:
        parts = " · ".join(f"{name} {bytes_text(size)}" for name, size in fullest.parts_bytes.items())
        return f"stage {fullest.pp_rank}: {parts}"
    unit, size = ("GiB", GIB) if fullest.model_peak_bytes >= GIB else ("MiB", MIB)
    heads = [unit, "layers", *(part if is_long else SHORT[part] for part in PARTS), "peak"]
    rows: list[list[Line]] = [[text(head, "dim") for head in heads]]
    for stage in _shown(prediction, MOST_ROWS):
        amounts = [part / size for part in (*stage.parts_bytes.values(), stage.peak_bytes)]
        # Write each amount with at most five characters.
        cells = ["<0.01" if 0 < one < 0.005 else f"{one:.{2 if one < 100 else 1}f}" for one in amounts]
        rows.append([f"stage {stage.pp_rank}", str(stage.num_layers), *cells])
    return grid("r" * len(heads), rows, gap=2 if is_long else 1)


def _step(prediction: Prediction) -> Iterator[Line]:
    if prediction.step_time_s is None or prediction.rate is None:
        return
    condition = ", if there were memory for it" if prediction.verdict == "too large" else ""
    yield text(seconds_text(prediction.step_time_s), "bold").append(f" a step predicted{condition}", "default")
    yield rate_words(prediction.rate, prediction.world_size)
    yield breakdown(prediction.breakdown_s, prediction.step_time_s)
