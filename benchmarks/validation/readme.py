"""The weak-scaling table of Megatron-LM's README: measured throughput of nine models on up to 6,144 H100."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.validation.latency import METHOD, Machines, StepTime, hosts_of
from benchmarks.validation.lines import Found, Line, Section, step_time_line
from benchmarks.validation.shapes import job_of
from benchmarks.validation.tables import Row, number, read_table, size, word
from pipette_launch.cost.memory.overhead import overhead_of
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job
from pipette_launch.facts.devices import DeviceSpec

DATA = "Megatron README"
COLUMNS = {
    "model": word,
    **dict.fromkeys(("heads", "hidden", "layers", "tp", "pp", "dp", "gpus", "gbs"), size),
    "tflops_per_gpu": number,
    "mfu_pct": number,
}
DEVICE = "H100-SXM"
DEVICES_PER_HOST = 8
SEQUENCE = 4096
VOCABULARY = 131072
MICRO_BATCHES = (1, 2, 4)
"""More does not divide the samples of a replica, which are 4 for each pipeline rank."""
MEMORY_SHARE = 0.92
"""Share of device memory. The product's own plans leave 8 % free."""
NOTES = (
    (
        "Stated there: model shapes, tp, pp, dp, batch, H100, --overlap-grad-reduce, --overlap-param-gather and "
        "--tp-comm-overlap (which is not priced here)."
    ),
    (
        "Follows from it: sequence parallelism (--tp-comm-overlap needs it), the distributed optimizer "
        "(--overlap-param-gather needs it), bf16 (MFU is of 989 TFLOP/s) and so gradients in fp32, and untied "
        "embeddings (with them, and with learned positions, every size but 1.7B, which is 1.75, comes out as named)."
    ),
    (
        "Assumed: one layer in each virtual stage (pipeline communication is said to be overlapped, which needs them; "
        "119B and 462B have 23 and 7 layers a rank), no recompute, dropout and all else by default, DGX H100 with "
        "eight cards of 400 Gbit/s, ranks in torchrun's order. Nothing is fitted."
    ),
    (
        "The micro-batch is not given. 'micro-batch 1' is that of Megatron's own example of 175B; 'fastest "
        "micro-batch' is that of 1, 2 and 4 which is predicted to be the fastest of those that are predicted to fit."
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Assumed values of layouts that the table leaves open."""

    group: str
    micro_batches: tuple[int, ...]
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the flags of `job_flags`."""


READINGS = (
    Reading(group="micro-batch 1", micro_batches=(1,)),
    Reading(group="fastest micro-batch", micro_batches=MICRO_BATCHES),
    Reading(group="micro-batch 1, gathers not overlapped", micro_batches=(1,), flags={"overlap-param-gather": False}),
)


def section(path: Path, device: DeviceSpec, step_time: StepTime) -> Section:
    """Score step times under every reading of the table.

    Args:
        path: the table.
        device: device of the machines.
        step_time: latency model.

    """
    table = read_table(path, COLUMNS)
    found = Found()
    for reading in READINGS:
        found += _scored(table.rows, step_time, device, reading)
    return found.section(DATA, f"{path.name} ({table.digest})", NOTES)


def measured_s(row: Row) -> float:
    """Seconds of one step by the stated FLOP/s and Megatron's count of the model's FLOPs.

    72 B s L h^2 (1 + s / 6h + V / 12 L h), all scores counted (training.py, num_floating_point_operations).
    """
    layers, hidden = row["layers"], row["hidden"]
    share = 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (12 * layers * hidden)
    flops = 72 * row["gbs"] * SEQUENCE * layers * hidden**2 * share
    seconds: float = flops / (row["tflops_per_gpu"] * 1e12 * row["gpus"])
    return seconds


def job_flags(row: Row, micro_batch_size: int) -> dict[str, Any]:
    """Return the run in Megatron's flags."""
    flags = {
        "num-layers": row["layers"],
        "hidden-size": row["hidden"],
        "num-attention-heads": row["heads"],
        "seq-length": SEQUENCE,
        "max-position-embeddings": SEQUENCE,
        "vocab-size": VOCABULARY,
        "untie-embeddings-and-output-weights": True,
        "tensor-model-parallel-size": row["tp"],
        "sequence-parallel": row["tp"] > 1,
        "pipeline-model-parallel-size": row["pp"],
        "micro-batch-size": micro_batch_size,
        "global-batch-size": row["gbs"],
        "bf16": True,
        "use-distributed-optimizer": True,
        "overlap-grad-reduce": True,
        "overlap-param-gather": True,
    }
    if row["pp"] > 1:
        flags["num-layers-per-virtual-pipeline-stage"] = 1
    return flags


def _scored(rows: Sequence[Row], step_time: StepTime, device: DeviceSpec, reading: Reading) -> Found:
    """One line for all rows, one for those with a pipeline; and each prediction."""
    answers: list[tuple[Row, float]] = []
    details, skipped = [], []
    for row in rows:
        times, refused = _times(row, step_time, device, reading)
        if not times:
            skipped.append((f"{METHOD}: {refused}", f"{row['model']}, {reading.group}"))
            continue
        chosen = min(times, key=lambda micro_batch: times[micro_batch])
        answers.append((row, times[chosen]))
        details.append(f"{METHOD}, {reading.group}: {_words(row, chosen, times[chosen])}")
    piped = [(row, seconds) for row, seconds in answers if row["pp"] > 1]
    lines = [_line(reading.group, answers, skipped=len(skipped))]
    if piped:
        lines.append(_line(f"{reading.group}, pp > 1", piped, skipped=0))
    return Found(lines=tuple(lines), skipped=tuple(skipped), details=tuple(details))


def _line(group: str, answers: Sequence[tuple[Row, float]], *, skipped: int) -> Line:
    pairs = [(seconds, measured_s(row)) for row, seconds in answers]
    return step_time_line(DATA, group, METHOD, pairs, skipped=skipped)


def device_peak_bytes(job: Job, device: DeviceSpec) -> float:
    """Bytes of the fullest stage by the closed form, with the product's stated overheads."""
    stages = peak_memory_bytes(job, job.own)
    overhead = overhead_of(job, job.own, device_kind="cuda", device_name=device.name)
    return max(overhead.device_peak_bytes(stage.total) for stage in stages)


def _times(row: Row, step_time: StepTime, device: DeviceSpec, reading: Reading) -> tuple[dict[int, float], str]:
    """Seconds by micro-batch size (only sizes that fit, if any does), and why the last size has no time."""
    num_hosts, per_host = hosts_of(row["gpus"], DEVICES_PER_HOST)
    machines = Machines(device=device, num_hosts=num_hosts, devices_per_host=per_host)
    times: dict[int, float] = {}
    refused = ""
    for micro_batch, job in _jobs(row, reading):
        if isinstance(job, str):
            refused = job
            continue
        if len(reading.micro_batches) > 1 and device_peak_bytes(job, device) > MEMORY_SHARE * device.memory_bytes:
            refused = "does not fit"
            continue
        try:
            times[micro_batch] = step_time(job, machines)
        except PipetteError as error:
            refused = str(error).split(";")[0][:100]
    return times, refused


def _jobs(row: Row, reading: Reading) -> Iterator[tuple[int, Job | str]]:
    """The job for each micro-batch size, or the reason why it is missing."""
    for micro_batch in reading.micro_batches:
        flags = {**job_flags(row, micro_batch), **reading.flags}
        kept = {name: value for name, value in flags.items() if value is not False}
        try:
            yield micro_batch, job_of(kept, world_size=row["gpus"], device_name="H100")
        except PipetteError as error:
            yield micro_batch, str(error).split(";")[0][:100]


def _words(row: Row, micro_batch: int, seconds: float) -> str:
    measured = measured_s(row)
    mfu = row["mfu_pct"] * measured / seconds
    return (
        f"{row['model']} mbs{micro_batch}: {seconds:.3f} s predicted, {measured:.3f} s measured "
        f"({seconds / measured - 1:+.1%}); MFU {mfu:.1f} % predicted, {row['mfu_pct']:.0f} % stated"
    )
