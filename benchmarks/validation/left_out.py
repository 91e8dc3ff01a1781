"""Errors of predictions for models that no constant saw: each model is predicted with constants of the other models.

The constants are fitted by least squares on log time, with priors from other sources. Rows of one job on one
system weigh like one row, and errors beyond `OUTLIER` count less (Huber 1964).
"""

# N = rows, K = constants, as logarithms relative to their built-in values.

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.validation.latency import Machines, pipette
from benchmarks.validation.nvidia import SHAPES, kind_of, refusal, run_of
from benchmarks.validation.nvidia_rows import measured_s, read_rows, read_shapes
from benchmarks.validation.tables import Row
from pipette_launch.cost.layers import mlp
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job, Layout

Array = NDArray[np.float64]

KINDS = ("dense", "experts", "hybrid")
RECORD = Path(__file__).parents[2] / "pipette_launch" / "facts" / "data" / "published_errors.csv"
NOISE, OUTLIER = 0.06, 0.15
FEW_PAIRS = 10
"""A kind of models with fewer pairs of layouts quotes the pairs of all models."""
_ROUNDS, _STEP = 2, 0.02
_BLACKWELL = 10
_ROUTERS = ("ROUTER_KERNELS", "FUSED_ROUTER_KERNELS", "FLEX_ROUTER_KERNELS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """Constants that are fitted together, as one factor on all of them."""

    names: tuple[str, ...]
    """Constants of `pipette_launch.cost.layers.mlp`, or shares of Blackwell's `Efficiency`."""
    prior: float
    """Prior belief about the first of the constants, from a source that is no row here."""
    width: float
    """Prior belief: deviation of the constant's logarithm."""
    rows: str
    """Rows whose prediction depends on the constant."""


# Priors: grouped products of DeepSeek-V3 reach 2,672 of 5,000 TFLOP/s, and routers launch 72, 31 and 17 kernels
# (Megatron-LM's guide to DeepSeek-V3 on GB200); passes over outputs were counted in megatron-core's experts with
# biases; dispatch kernels take 20 of 132 multiprocessors; memory has the shares of H100.
CONSTANTS = (
    Constant(names=("GROUPED_HALF",), prior=1.3, width=0.5, rows="experts, hybrid"),
    Constant(names=("EXPERT_KERNELS",), prior=40.0, width=0.5, rows="experts, hybrid"),
    Constant(names=_ROUTERS, prior=72.0, width=0.5, rows="experts, hybrid"),
    Constant(names=("BIASED_TOUCHES",), prior=13.0, width=0.4, rows="GPT-OSS"),
    Constant(names=("OVERLAP_COSTS",), prior=0.15, width=0.5, rows="experts with overlap"),
    Constant(names=("memory_share",), prior=0.76, width=0.2, rows="all on Blackwell"),
    Constant(names=("scan_share",), prior=0.32, width=0.3, rows="hybrid on Blackwell"),
)
_BUILT_IN = (*(getattr(mlp, one.names[0]) for one in CONSTANTS[:5]), 0.58, 0.24)
_PRIOR_K = np.log([one.prior / value for one, value in zip(CONSTANTS, _BUILT_IN, strict=True)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Published rows that can be predicted."""

    rows: tuple[Row, ...]
    kinds: tuple[str, ...]
    jobs: tuple[tuple[Job, Machines], ...]
    """Job and machines of each different run."""
    job_N: NDArray[np.int64]
    measured_s_N: Array

    @property
    def weight_N(self) -> Array:
        """Weight of each row, so that all rows of one job weigh 1 together."""
        return np.asarray(1 / np.bincount(self.job_N)[self.job_N])


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Errors of rows under constants that did not see the row's model."""

    error_by_model: dict[tuple[str, str], tuple[float, ...]]
    """Predicted by measured seconds minus 1, by kind and model."""
    lead_errors: dict[str, tuple[float, ...]]
    """Errors of the lead of one layout over another layout of one model, system and precision, by kind of model."""
    factors: dict[str, tuple[float, float, float]]
    """Factor on each built-in constant: fitted to all rows, then least and largest of the fits without a model."""

    def of(self, kind: str) -> tuple[int, float, str, float]:
        """Return rows, mean absolute error, worst model, and the mean absolute error of this model."""
        mine = {model: np.abs(errors) for (one, model), errors in self.error_by_model.items() if one == kind}
        every = np.concatenate([*mine.values()])
        worst = max(mine, key=lambda model: float(mine[model].mean()))
        return len(every), float(every.mean()), worst, float(mine[worst].mean())


def read_runs(path: Path) -> Runs:
    """Read the rows of a file that can be predicted and compared."""
    shapes, jobs = read_shapes(SHAPES), dict[tuple[Job, str], tuple[int, tuple[Job, Machines]]]()
    found = []
    for row in read_rows(path).rows:
        seconds = measured_s(row)
        if seconds is None or refusal(row, shapes):
            continue
        try:
            run = run_of(row, shapes[row["model"]])
        except PipetteError:
            continue
        number, _ = jobs.setdefault((run[0], run[1].device.name), (len(jobs), run))
        found.append((row, kind_of(shapes[row["model"]]), number, seconds))
    rows, kinds, job_N, seconds_N = zip(*found, strict=True)
    runs = tuple(run for _, run in jobs.values())
    return Runs(rows=rows, kinds=kinds, jobs=runs, job_N=np.array(job_N), measured_s_N=np.array(seconds_N))


def left_out(runs: Runs) -> LeftOut:
    """Fit the constants to all rows, and again without each model; predict each model by the fit without the model."""
    log_K, all_N = np.zeros(len(CONSTANTS)), np.arange(len(runs.rows))
    for _ in range(_ROUNDS):
        error_N = _log_errors(runs, log_K, all_N)
        nudges = log_K + _STEP * np.eye(len(log_K))
        slope_NK = np.stack([(_log_errors(runs, one, all_N) - error_N) / _STEP for one in nudges], axis=1)
        weight_N = runs.weight_N * np.minimum(1.0, OUTLIER / np.maximum(np.abs(error_N), 1e-9))
        offset_N = error_N - slope_NK @ log_K
        log_K = _fitted(slope_NK, offset_N, weight_N)
    names = np.array([row["model"] for row in runs.rows])
    errors: dict[tuple[str, str], tuple[float, ...]] = {}
    fits, left_N = [], np.zeros(len(names))
    for model in dict.fromkeys(names.tolist()):
        mine = np.flatnonzero(names == model)
        fits.append(_fitted(slope_NK, offset_N, weight_N * (names != model)))
        left_N[mine] = _log_errors(runs, fits[-1], mine)
        errors[runs.kinds[mine[0]], model] = tuple(np.expm1(left_N[mine]).tolist())
    spread = zip(CONSTANTS, np.exp(log_K), np.exp(np.min(fits, axis=0)), np.exp(np.max(fits, axis=0)), strict=True)
    factors = {", ".join(one.names): (float(fit), float(least), float(most)) for one, fit, least, most in spread}
    return LeftOut(error_by_model=errors, lead_errors=_lead_errors(runs, left_N), factors=factors)


def _lead_errors(runs: Runs, error_N: Array) -> dict[str, tuple[float, ...]]:
    """Return 1 - exp(-|difference of log errors|) for each pair of layouts; rows of one layout count as their mean."""
    groups: dict[tuple[str, ...], dict[Layout, list[float]]] = {}
    for row, kind, number, error in zip(runs.rows, runs.kinds, runs.job_N, error_N, strict=True):
        group = groups.setdefault((kind, row["model"], row["system"], row["precision"]), {})
        group.setdefault(runs.jobs[number][0].own, []).append(float(error))
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for (kind, *_), layouts in groups.items():
        means = [float(np.mean(errors)) for errors in layouts.values()]
        found[kind] += [1 - math.exp(-abs(one - other)) for one, other in combinations(means, 2)]
    return {kind: tuple(errors) for kind, errors in found.items()}


def table(found: LeftOut) -> str:
    """Return the errors of each model and kind, and the constants, as Markdown."""
    lines = ["| kind | model | rows | mean error | signed | least | largest |", "|---|---|--:|--:|--:|--:|--:|"]
    for (kind, model), errors in sorted(found.error_by_model.items()):
        signed = " | ".join(f"{error:+.1%}" for error in (np.mean(errors), min(errors), max(errors)))
        lines.append(f"| {kind} | {model} | {len(errors)} | {np.mean(np.abs(errors)):.1%} | {signed} |")
    lines += ["", "| kind | rows | mean error | worst model | its mean error |", "|---|--:|--:|---|--:|"]
    for kind in KINDS:
        rows, mean, worst, most = found.of(kind)
        lines.append(f"| {kind} | {rows} | {mean:.1%} | {worst} | {most:.1%} |")
    lines += ["", "| kind | pairs of layouts | mean error of the lead | median |", "|---|--:|--:|--:|"]
    for kind, leads in found.lead_errors.items():
        lines.append(f"| {kind} | {len(leads)} | {np.mean(leads):.1%} | {np.median(leads):.1%} |")
    lines += ["", "| constants | rows | factor of a fit to all rows | least and largest factor without a model |"]
    lines.append("|---|---|--:|--:|")
    for one, (fit, least, most) in zip(CONSTANTS, found.factors.values(), strict=True):
        lines.append(f"| {', '.join(one.names)} | {one.rows} | {fit:.2f} | {least:.2f} to {most:.2f} |")
    return "\n".join(lines)


def record(found: LeftOut, path: Path = RECORD) -> None:
    """Write the errors that predictions quote."""
    lines = ["kind,rows,models,mean_error,worst_model,worst_error,pairs,pairs_of,lead_error"]
    for kind in KINDS:
        rows, mean, worst, most = found.of(kind)
        models = sum(one == kind for one, _ in found.error_by_model)
        words = "models with experts" if kind == "experts" else f"{kind} models"
        leads, of_models = found.lead_errors[kind], words
        if len(leads) < FEW_PAIRS:
            leads, of_models = sum(found.lead_errors.values(), ()), "all models"
        of_leads = f"{len(leads)},{of_models},{np.mean(leads):.3f}"
        lines.append(f"{words},{rows},{models},{mean:.3f},{worst},{most:.3f},{of_leads}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _fitted(slope_NK: Array, offset_N: Array, weight_N: Array) -> Array:
    """Minimise weight * (offset + slope x)^2 / NOISE^2 + ((x - prior) / width)^2."""
    prior_KK = np.diag([(NOISE / one.width) ** 2 for one in CONSTANTS])
    weighted_KN = slope_NK.T * weight_N
    wanted_K = prior_KK @ _PRIOR_K - weighted_KN @ offset_N
    return np.asarray(np.linalg.solve(weighted_KN @ slope_NK + prior_KK, wanted_K))


def _log_errors(runs: Runs, log_K: Array, some_N: NDArray[np.int64]) -> Array:
    """Return log(predicted / measured) of some rows under constants."""
    seconds = {}
    with _changed(log_K) as shares:
        for number in dict.fromkeys(runs.job_N[some_N].tolist()):
            job, machines = runs.jobs[number]
            seconds[number] = pipette(job, _with_shares(machines, shares))
    return np.log([seconds[runs.job_N[row]] / runs.measured_s_N[row] for row in some_N])


@contextmanager
def _changed(log_K: Array) -> Iterator[dict[str, float]]:
    """Multiply constants of experts, and give the factors of the shares of Blackwell."""
    factors = {name: float(np.exp(log)) for one, log in zip(CONSTANTS, log_K, strict=True) for name in one.names}
    before = {name: getattr(mlp, name) for name in factors if hasattr(mlp, name)}
    try:
        for name, value in before.items():
            setattr(mlp, name, value * factors[name])
        yield {name: factor for name, factor in factors.items() if name not in before}
    finally:
        for name, value in before.items():
            setattr(mlp, name, value)


def _with_shares(machines: Machines, factors: dict[str, float]) -> Machines:
    device = machines.device
    if (device.compute_capability or 0) < _BLACKWELL:
        return machines
    shares = {name: min(1.0, getattr(device.efficiency, name) * factor) for name, factor in factors.items()}
    return replace(machines, device=replace(device, efficiency=replace(device.efficiency, **shares)))
