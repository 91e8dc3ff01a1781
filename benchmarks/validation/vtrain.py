"""vTrain's measured iteration times: a device model fitted to a tenth of the rows, and all other rows predicted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.validation.device_fit import Fitted, MeasuredStep, fit
from benchmarks.validation.latency import Machines, StepTime, hosts_of, pipette
from benchmarks.validation.lines import Line, Section, step_time_line
from benchmarks.validation.scores import determination
from benchmarks.validation.shapes import job_of
from benchmarks.validation.tables import Row, number, read_table, size
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job
from pipette_launch.facts.devices import DeviceSpec

DATA = "vTrain"
COLUMNS = {
    **dict.fromkeys(
        (
            "num_gpus",
            "global_batch",
            "micro_batch",
            "hidden_size",
            "attention_heads",
            "num_layers",
            "sequence_length",
            "tensor_parallelism",
            "data_parallelism",
            "pipeline_parallelism",
        ),
        size,
    ),
    "iteration_time_ms": number,
}
DEVICE = "A100-80GB"
DEVICES_PER_HOST = 8
MOST_FITTED = 150
"""More steps than this make a fit slower, not better."""
NOTES = (
    (
        "Megatron-DeepSpeed on A100 with activation checkpointing, priced as Megatron with full recompute, Megatron's "
        "own attention, fp16. vTrain's own published error: 8.37 % on one node, 14.73 % on many."
    ),
    (
        "'drawn rows': fitted to rows drawn from every (model shape, GPUs) stratum; 'whole strata': to all rows of a "
        "few strata, so that most shapes were never seen. Only rows that were not fitted to are scored."
    ),
    (
        "These times look simulated: at dp = 1, for one width, tp, pp and micro-batch, they are linear in layers and "
        "micro-batches to 1e-14 (48 cells of 8 to 16 rows, 4 coefficients), which no clock on a machine is. So this "
        "table shows that the model's terms suffice, not how close it comes to a machine."
    ),
    "Baselines run on the same fitted device ('drawn rows') and are scored on the same rows.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One row, with its job."""

    row: Row
    job: Job

    @property
    def machines(self) -> tuple[int, int]:
        """Hosts, and devices on each."""
        return hosts_of(self.row["num_gpus"], DEVICES_PER_HOST)

    @property
    def step(self) -> MeasuredStep:
        """The row as the fit takes it."""
        num_hosts, per_host = self.machines
        return MeasuredStep(
            job=self.job,
            layout=self.job.own,
            num_hosts=num_hosts,
            devices_per_host=per_host,
            step_s=self.row["iteration_time_ms"] / 1e3,
        )

    @property
    def stratum(self) -> tuple[int, ...]:
        """Model shape and number of GPUs."""
        names = ("hidden_size", "attention_heads", "num_layers", "sequence_length", "num_gpus")
        return tuple(self.row[name] for name in names)


def read(path: Path, every: int = 1) -> tuple[str, tuple[Sample, ...], tuple[tuple[str, str], ...]]:
    """Read every n-th row. Returns digest, samples, and (reason, row) of rows that cannot be priced."""
    table = read_table(path, COLUMNS)
    samples, skipped = [], []
    for row in table.rows[::every]:
        found = _sample(row)
        if isinstance(found, Sample):
            samples.append(found)
        else:
            skipped.append((found, f"line {row.line}"))
    return table.digest, tuple(samples), tuple(skipped)


def section(
    path: Path,
    device: DeviceSpec,
    *,
    fraction: float,
    seed: int,
    development: Path | None = None,
    every: int = 1,
) -> Section:
    """Fit to a fraction of the rows, predict the rest.

    Args:
        path: the measurements.
        device: built-in figures to start from.
        fraction: share of the rows that may be fitted to.
        seed: of the draw.
        development: other measurements; where given, a fit to a fraction of them alone is scored on all rows of `path`.
        every: distance between rows that are read.

    """
    digest, samples, skipped = read(path, every)
    device = without_host_steps(device)
    plain = Machines(device=device, num_hosts=1, devices_per_host=1)
    shares: list[str] = []
    lines, left_out = _scored(samples, "pipette, built-in figures", pipette, plain)
    if development is not None:
        known = read(development)[1]
        machines = _machines(_fitted(known, drawn_rows(known, fraction, seed), device))
        _add(lines, left_out, _scored(samples, "pipette, fitted on development data", pipette, machines))
    for name, chosen in (
        ("drawn rows", drawn_rows(samples, fraction, seed)),
        ("whole strata", whole_strata(samples, fraction, seed)),
    ):
        if not chosen:
            continue
        machines = _machines(_fitted(samples, chosen, device))
        rest = [sample for place, sample in enumerate(samples) if place not in chosen]
        shares.append(f"{name} {len(chosen) / len(samples):.1%}")
        _add(lines, left_out, _scored(rest, f"pipette, fitted to {name}", pipette, machines))
    counts = f"{len(samples)} rows read, {len({sample.stratum for sample in samples})} strata, seed {seed}; fitted to: "
    counts += ", ".join(shares) or "nothing, there are too few rows"
    return Section(
        data=DATA,
        source=f"{path.name} ({digest})",
        lines=tuple(lines),
        skipped=(*skipped, *left_out),
        notes=(counts, *NOTES),
    )


def without_host_steps(device: DeviceSpec) -> DeviceSpec:
    """Set the host's time once a step to 0: these times have no constant part.

    At dp = 1 what neither layers nor micro-batches explain is 0.2 to 1.1 ms: no more than the optimizer of the ends.
    """
    return replace(device, efficiency=replace(device.efficiency, step_s=0.0))


def drawn_rows(samples: Sequence[Sample], fraction: float, seed: int) -> set[int]:
    """Places of at most this share of the rows, spread over the strata as evenly as they go."""
    rng = random.Random(seed)
    strata = _strata(samples)
    for places in strata:
        rng.shuffle(places)
    rng.shuffle(strata)
    most = min(int(fraction * len(samples)), MOST_FITTED)
    rounds = max((len(places) for places in strata), default=0)
    order = [places[turn] for turn in range(rounds) for places in strata if turn < len(places)]
    return set(order[:most])


def whole_strata(samples: Sequence[Sample], fraction: float, seed: int) -> set[int]:
    """Places of all rows of as many strata as stay within this share of the rows."""
    strata = _strata(samples)
    random.Random(seed).shuffle(strata)
    chosen: set[int] = set()
    for places in strata:
        if len(chosen) + len(places) <= min(fraction * len(samples), MOST_FITTED):
            chosen.update(places)
    return chosen


def _strata(samples: Sequence[Sample]) -> list[list[int]]:
    strata: dict[tuple[int, ...], list[int]] = {}
    for place, sample in enumerate(samples):
        strata.setdefault(sample.stratum, []).append(place)
    return [strata[key] for key in sorted(strata)]


def _fitted(samples: Sequence[Sample], chosen: set[int], device: DeviceSpec) -> Fitted:
    return fit([samples[place].step for place in sorted(chosen)], device)


def _machines(fitted: Fitted) -> Machines:
    return Machines(device=fitted.device, num_hosts=1, devices_per_host=1, factors=fitted.factors)


def _scored(
    samples: Sequence[Sample], method: str, model: StepTime, machines: Machines
) -> tuple[list[Line], list[tuple[str, str]]]:
    """One line over all rows, and one for each number of hosts where there are several."""
    answers: list[tuple[Sample, float]] = []
    refused = []
    for sample in samples:
        answer = _seconds(sample, model, machines)
        if isinstance(answer, str):
            refused.append((f"{method}: {answer}", f"line {sample.row.line}"))
        else:
            answers.append((sample, answer))
    lines = [_line("all", method, answers, len(refused))]
    hosts = sorted({sample.machines[0] for sample, _ in answers})
    if len(hosts) > 1:
        for count in hosts:
            kept = [item for item in answers if item[0].machines[0] == count]
            lines.append(_line(f"{count} host{'s' if count > 1 else ''}", method, kept, 0))
    return lines, refused


def _line(group: str, method: str, answers: Sequence[tuple[Sample, float]], skipped: int) -> Line:
    pairs = [(seconds, sample.step.step_s) for sample, seconds in answers]
    explained = determination([predicted for predicted, _ in pairs], [measured for _, measured in pairs])
    figures = {} if explained is None else {"R2": explained}
    return step_time_line(DATA, group, method, pairs, skipped=skipped, figures=figures)


def _seconds(sample: Sample, model: StepTime, machines: Machines) -> float | str:
    num_hosts, per_host = sample.machines
    try:
        return model(
            sample.job,
            Machines(device=machines.device, num_hosts=num_hosts, devices_per_host=per_host, factors=machines.factors),
        )
    except PipetteError as error:
        return str(error).split(";")[0][:100]


def _add(lines: list[Line], left_out: list[tuple[str, str]], found: tuple[list[Line], list[tuple[str, str]]]) -> None:
    lines += found[0]
    left_out += found[1]


def _sample(row: Row) -> Sample | str:
    degrees = row["tensor_parallelism"] * row["data_parallelism"] * row["pipeline_parallelism"]
    if degrees != row["num_gpus"]:
        return "tp x dp x pp is not the number of GPUs"
    if row["num_gpus"] > DEVICES_PER_HOST and row["num_gpus"] % DEVICES_PER_HOST:
        return "GPUs that do not fill hosts of 8"
    try:
        return Sample(row=row, job=job_of(job_flags(row), world_size=row["num_gpus"], device_name=DEVICE))
    except PipetteError as error:
        return str(error).split(";")[0]


def job_flags(row: Row) -> dict[str, Any]:
    """Return the run in Megatron's flags."""
    return {
        "num-layers": row["num_layers"],
        "hidden-size": row["hidden_size"],
        "num-attention-heads": row["attention_heads"],
        "seq-length": row["sequence_length"],
        "max-position-embeddings": row["sequence_length"],
        "micro-batch-size": row["micro_batch"],
        "global-batch-size": row["global_batch"],
        "tensor-model-parallel-size": row["tensor_parallelism"],
        "pipeline-model-parallel-size": row["pipeline_parallelism"],
        "transformer-impl": "local",
        "fp16": True,
        "recompute-granularity": "full",
        "recompute-method": "uniform",
        "recompute-num-layers": 1,
    }
