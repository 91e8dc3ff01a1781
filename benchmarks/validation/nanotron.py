"""The nanotron sweep: how well layouts are ranked inside a (model, nodes) group, and which of them would not fit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.validation.latency import Machines, StepTime
from benchmarks.validation.lines import Line, Section
from benchmarks.validation.nanotron_rows import DEVICES_PER_HOST, Configuration, read
from benchmarks.validation.scores import Errors, area_under_curve, errors, regret, spearman
from pipette_launch.cost.memory.overhead import overhead_of
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job
from pipette_launch.facts.accelerators import DeviceSpec

DATA = "nanotron"
DEVICE = "AWS-P5-H100"
PLAIN_REPLICAS = "pp > 1, dp > 1, no ZeRO"
SMALLEST_GROUP = 3
"""Fewer configurations than this have no ranking worth a figure."""
NOTES = (
    (
        "nanotron is a trainer of its own; it is priced as Megatron, cut by nanotron's rule, on the built-in "
        "figures of an H100, 8 a node, and the collectives between nodes that were published for this very cluster "
        "(no scored row is in them). Compared are seconds per token, medians of repeated rows; slow outliers stay."
    ),
    (
        "Pipelines of plain replicas (pp > 1, dp > 1, no ZeRO) took up to 33 x as long as the same layout with ZeRO-1, "
        "for a reason in that trainer that nothing here models; with and without them the ranking is scored apart."
    ),
    "Error lines: one scale factor for each group, the median of measured / predicted over all other groups.",
    "'that fit': only configurations whose predicted memory fits 80 GiB with the product's overheads, as a plan would.",
    (
        "Memory decisions: no_result is not the same as out of memory (the source does not separate out of memory from "
        "other failures). Configurations that also have a result count as fitting; those that break nanotron's own "
        "rule grad_acc >= pp - 1 are left out. Weak evidence."
    ),
    "Six of the measured 80B rows are of another shape or sequence (the data's README), which the file does not mark.",
)
MemoryEstimator = Callable[[Job], float]
"""Bytes that the fullest device holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """An estimator, and how much of a device its authors would fill by it."""

    estimate: MemoryEstimator
    share: float = 1.0


def device_peak_bytes(job: Job, device: DeviceSpec) -> float:
    """Bytes of the fullest stage by the closed form, with the product's stated overheads."""
    stages = peak_memory_bytes(job, job.own)
    overhead = overhead_of(job, job.own, device_kind="cuda", device_name=device.name)
    return max(overhead.device_peak_bytes(stage.total) for stage in stages)


def section(
    path: Path, device: DeviceSpec, step_times: Mapping[str, StepTime], memories: Mapping[str, MemoryModel]
) -> Section:
    """Score every latency model and every memory model on the sweep.

    Args:
        path: the sweep.
        device: device of the machines.
        step_times: latency models by name; the first is ours.
        memories: memory models by name; the first is ours, and decides what fits.

    """
    table, configurations, skipped = read(path)
    measured = [item for item in configurations if item.is_measured]
    groups = _groups(measured)
    fits = next(iter(memories.values()))
    fitting = {item for item in measured if fits.estimate(item.job) <= fits.share * device.memory_bytes}
    answers: dict[str, Mapping[Configuration, float]] = {}
    lines: list[Line] = []
    left_out = list(skipped)
    for name, model in step_times.items():
        times, refused = _predicted(measured, model, device)
        left_out += [(f"{name}: {reason}", _row(item)) for item, reason in refused]
        lines += ranking_lines(name, groups, times, fitting)
        answers[name] = times
    lines += _subset_lines(groups, answers, fitting)
    for name, memory in memories.items():
        found, refused = _sizes(configurations, memory.estimate)
        left_out += [(f"{name}: {reason}", _row(item)) for item, reason in refused]
        lines += memory_lines(name, found, memory.share * device.memory_bytes)
    unsteady = [item for item in measured if item.spread > 1.1]
    repeats = f"{len(table.rows)} rows, {len(configurations)} configurations, {len(measured)} measured; repeats of "
    repeats += f"{len(unsteady)} differ by more than 10 %, at most {max([1.0, *(i.spread for i in measured)]):.1f} x."
    return Section(
        data=DATA,
        source=f"{path.name} ({table.digest})",
        lines=tuple(lines),
        skipped=tuple(left_out),
        notes=(repeats, *NOTES),
    )


def ranking_lines(
    method: str,
    groups: Mapping[str, Sequence[Configuration]],
    times: Mapping[Configuration, float],
    fitting: AbstractSet[Configuration],
) -> list[Line]:
    """One line for each group, one for all errors after the other groups' scale, one with the medians over groups."""
    lines, ranks, costs, fitting_costs = [], [], [], []
    predicted_all: list[float] = []
    measured_all: list[float] = []
    known = {name: [item for item in members if item in times] for name, members in groups.items()}
    for name, members in known.items():
        if len(members) < SMALLEST_GROUP:
            continue
        predicted, measured = _per_token(members, times)
        scale = _scale(known, times, without=name)
        predicted_all += [value * scale for value in predicted]
        measured_all += measured
        figures = {"regret": regret(predicted, measured)}
        costs.append(figures["regret"])
        kept = [item for item in members if item in fitting]
        if kept:
            figures["regret that fit"] = _regret_against(kept, members, times)
            fitting_costs.append(figures["regret that fit"])
        scores = errors([value * scale for value in predicted], measured)
        rank = spearman(predicted, measured)
        ranks += [] if rank is None else [rank]
        lines.append(_line(name, method, len(members), len(groups[name]) - len(members), scores, figures))
    if not lines:
        return []
    summary = {
        "groups": float(len(lines)),
        "Spearman median": statistics.median(ranks),
        "Spearman min": min(ranks),
        "regret median": statistics.median(costs),
        "regret max": max(costs),
    }
    if fitting_costs:
        summary |= {
            "regret median that fit": statistics.median(fitting_costs),
            "regret max that fit": max(fitting_costs),
        }
    total = errors(predicted_all, measured_all)
    return [_line("all groups", method, len(measured_all), sum(line.skipped for line in lines), total, summary), *lines]


def _subset_lines(
    groups: Mapping[str, Sequence[Configuration]],
    answers: Mapping[str, Mapping[Configuration, float]],
    fitting: AbstractSet[Configuration],
) -> list[Line]:
    """Our model on part of the configurations: without a pipeline, with one, and what each baseline can price."""
    ours, times = next(iter(answers.items()))
    parts = {"pp = 1": {item for item in times if item.job.own.pp == 1}}
    parts["pp > 1"] = set(times) - parts["pp = 1"]
    parts[PLAIN_REPLICAS] = {item for item in parts["pp > 1"] if item.has_plain_replicas}
    parts["all others"] = set(times) - parts[PLAIN_REPLICAS]
    parts |= {f"what {name} prices": set(known) for name, known in answers.items() if len(known) < len(times)}
    lines = []
    for name, kept in parts.items():
        some = {group: [item for item in members if item in kept] for group, members in groups.items()}
        lines += [replace(line, group=name) for line in ranking_lines(ours, some, times, fitting)[:1]]
    return lines


def memory_lines(method: str, found: Sequence[tuple[Configuration, float]], capacity_bytes: float) -> list[Line]:
    """Area under the curve and decisions at the capacity; and predicted against logged memory."""
    sizes = [bytes_held for _, bytes_held in found]
    missing = [not item.is_measured for item, _ in found]
    area = area_under_curve(sizes, missing)
    figures = {} if area is None else {"AUC": area}
    figures |= {
        "measured but predicted not to fit": float(
            sum(bytes_held > capacity_bytes for item, bytes_held in found if item.is_measured)
        ),
        "no result but predicted to fit": float(
            sum(bytes_held <= capacity_bytes for item, bytes_held in found if not item.is_measured)
        ),
    }
    decisions = Line(
        data=DATA, group="fits or not", method=method, quantity="memory", scored=len(found), figures=figures
    )
    logged = [(bytes_held / 1e9, statistics.median(item.memory_gb)) for item, bytes_held in found if item.memory_gb]
    scores = errors([predicted for predicted, _ in logged], [measured for _, measured in logged])
    return [
        decisions,
        Line(data=DATA, group="gpu_mem_GB", method=method, quantity="memory", scored=len(logged), errors=scores),
    ]


def _line(
    group: str, method: str, scored: int, skipped: int, scores: Errors | None, figures: Mapping[str, float]
) -> Line:
    return Line(
        data=DATA,
        group=group,
        method=method,
        quantity="time per token",
        scored=scored,
        skipped=skipped,
        errors=scores,
        figures=dict(figures),
    )


def _groups(measured: Sequence[Configuration]) -> dict[str, list[Configuration]]:
    groups: dict[str, list[Configuration]] = {}
    for item in sorted(measured, key=lambda item: (float(item.model.rstrip("B")), item.nodes)):
        groups.setdefault(item.group, []).append(item)
    return groups


def _per_token(
    members: Sequence[Configuration], times: Mapping[Configuration, float]
) -> tuple[list[float], list[float]]:
    """Predicted and measured seconds per token."""
    return [times[item] / item.tokens for item in members], [item.step_s / item.tokens for item in members]


def _regret_against(
    kept: Sequence[Configuration], members: Sequence[Configuration], times: Mapping[Configuration, float]
) -> float:
    """Regret of the best of `kept` against the measured best of all members."""
    predicted, measured = _per_token(kept, times)
    best = min(_per_token(members, times)[1])
    return measured[min(range(len(kept)), key=lambda place: predicted[place])] / best - 1


def _scale(
    groups: Mapping[str, Sequence[Configuration]], times: Mapping[Configuration, float], *, without: str
) -> float:
    """Median of measured / predicted over all other groups; 1 without another group."""
    ratios = [item.step_s / times[item] for name, members in groups.items() if name != without for item in members]
    return statistics.median(ratios) if ratios else 1.0


def _predicted(
    items: Sequence[Configuration], model: StepTime, device: DeviceSpec
) -> tuple[dict[Configuration, float], list[tuple[Configuration, str]]]:
    times, refused = {}, []
    for item in items:
        machines = Machines(device=device, num_hosts=item.nodes, devices_per_host=DEVICES_PER_HOST)
        answer = _attempt(partial(model, item.job, machines))
        if isinstance(answer, str):
            refused.append((item, answer))
        else:
            times[item] = answer
    return times, refused


def _sizes(
    items: Sequence[Configuration], memory: MemoryEstimator
) -> tuple[list[tuple[Configuration, float]], list[tuple[Configuration, str]]]:
    found, refused = [], []
    for item in items:
        answer = _attempt(partial(memory, item.job))
        if isinstance(answer, str):
            refused.append((item, answer))
        else:
            found.append((item, answer))
    return found, refused


def _attempt(question: Callable[[], float]) -> float | str:
    try:
        return question()
    except PipetteError as error:
        return str(error).split(";")[0][:100]


def _row(item: Configuration) -> str:
    return f"line {item.lines[0]}: {item.group} {item.words}"
