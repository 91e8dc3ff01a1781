"""Korthikanti et al. 2022: measured iteration times (table 5), and the paper's own formula values (figure 1)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.validation.latency import METHOD, Machines, StepTime, hosts_of
from benchmarks.validation.lines import Line, Section
from benchmarks.validation.scores import errors
from benchmarks.validation.shapes import job_of
from benchmarks.validation.tables import Row, number, read_table, size, word
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job
from pipette_launch.facts.devices import DeviceSpec
from pipette_launch.text import GIB

DATA = "Korthikanti 2022"
COLUMNS = {
    "model": word,
    **dict.fromkeys(("layers", "hidden", "heads", "seq", "gpus", "tp", "pp", "interleave", "gbs", "mbs"), size),
    **dict.fromkeys(
        (
            "fig1_par_opt_GiB",
            "fig1_act_none_GiB",
            "fig1_act_sp_selective_GiB",
            "tab5_iter_full_s",
            "tab5_iter_seqsel_s",
        ),
        number,
    ),
}
DEVICES_PER_HOST = 8
VOCABULARY = 51200
"""Models of the paper."""
FULL = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
SELECTIVE = {"recompute-granularity": "selective", "sequence-parallel": True}
NOTES = (
    "A100-80GB, 8 a node, fp16, data-parallel size 1. Only the iteration times are measured.",
    "Figure 1 holds values of the paper's own formula: agreement is a check of the closed form, not an accuracy.",
)


def section(path: Path, device: DeviceSpec, step_time: StepTime) -> Section:
    """Score iteration times, and compare first-stage memory with the paper's formula."""
    table = read_table(path, COLUMNS)
    lines: list[Line] = []
    skipped: list[tuple[str, str]] = []
    for group, column, flags in (
        ("full recompute", "tab5_iter_full_s", FULL),
        ("SP + selective", "tab5_iter_seqsel_s", SELECTIVE),
    ):
        pairs = []
        for row in table.rows:
            answer = _seconds(row, flags, step_time, device)
            if isinstance(answer, str):
                skipped.append((f"{METHOD}: {answer}", f"{row['model']}, {group}"))
            else:
                pairs.append((answer, row[column]))
        lines.append(_line(group, METHOD, "step time", pairs, len(table.rows) - len(pairs)))
    formula, refused = _formula_lines(table.rows)
    return Section(
        data=DATA,
        source=f"{path.name} ({table.digest})",
        lines=(*lines, *formula),
        skipped=(*skipped, *refused),
        notes=NOTES,
    )


def job_of_row(row: Row, flags: Mapping[str, Any]) -> Job:
    """Read one model of the paper with the given recompute; raises PipetteError where it cannot be cut like that."""
    degrees: dict[str, Any] = {
        "num-layers": row["layers"],
        "hidden-size": row["hidden"],
        "num-attention-heads": row["heads"],
        "seq-length": row["seq"],
        "max-position-embeddings": row["seq"],
        "vocab-size": VOCABULARY,
        "tensor-model-parallel-size": row["tp"],
        "pipeline-model-parallel-size": row["pp"],
        "micro-batch-size": row["mbs"],
        "global-batch-size": row["gbs"],
        "transformer-impl": "local",
        "fp16": True,
    }
    if row["interleave"] > 1:
        degrees["num-virtual-stages-per-pipeline-rank"] = row["interleave"]
    return job_of({**degrees, **flags}, world_size=row["gpus"], device_name="A100-80GB")


def _seconds(row: Row, flags: Mapping[str, Any], step_time: StepTime, device: DeviceSpec) -> float | str:
    num_hosts, per_host = hosts_of(row["gpus"], DEVICES_PER_HOST)
    try:
        machines = Machines(device=device, num_hosts=num_hosts, devices_per_host=per_host)
        return step_time(job_of_row(row, flags), machines)
    except PipetteError as error:
        return str(error).split(";")[0][:100]


def _formula_lines(rows: tuple[Row, ...]) -> tuple[list[Line], list[tuple[str, str]]]:
    """First stage by the closed form against the paper's: states; activations without and with recompute."""
    found: dict[str, list[tuple[float, float]]] = {"states": [], "activations, none": [], "activations, SP + sel.": []}
    skipped = []
    for row in rows:
        try:
            plain = peak_memory_bytes(job := job_of_row(row, {}), job.own)[0]
            lean = peak_memory_bytes(job := job_of_row(row, SELECTIVE), job.own)[0]
        except PipetteError as error:
            skipped.append((f"closed form: {str(error).split(';')[0][:100]}", f"{row['model']}"))
            continue
        found["states"].append((plain.static / GIB, row["fig1_par_opt_GiB"]))
        found["activations, none"].append((plain.activations / GIB, row["fig1_act_none_GiB"]))
        found["activations, SP + sel."].append((lean.activations / GIB, row["fig1_act_sp_selective_GiB"]))
    return [_line(group, "closed form", "formula value", pairs, 0) for group, pairs in found.items()], skipped


def _line(group: str, method: str, quantity: str, pairs: list[tuple[float, float]], skipped: int) -> Line:
    scores = errors([predicted for predicted, _ in pairs], [measured for _, measured in pairs])
    return Line(
        data=DATA, group=group, method=method, quantity=quantity, scored=len(pairs), skipped=skipped, errors=scores
    )
