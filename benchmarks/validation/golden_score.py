"""Golden memory: predicted against measured peak and static memory, by group and method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.validation.folds import families
from benchmarks.validation.golden_jobs import DEVICES, ReadLayout
from benchmarks.validation.golden_rows import release_words
from benchmarks.validation.lines import Line
from benchmarks.validation.scores import errors
from benchmarks.validation.workspace import (
    CORRECTIONS,
    FITTED,
    STATED,
    Correction,
    Residual,
    fitted_bytes,
    stated_bytes,
)
from pipette_launch.cost.memory.overhead import NUM_OVERLAP_STREAMS
from pipette_launch.facts import Job, ModelSpec
from pipette_launch.facts.job import PerformanceOptions
from pipette_launch.text import MIB

DATA = "golden memory"
LARGE = 6.5e9
"""Parameters from which a model counts as 7B or larger."""
FIRST_OWN_WORKSPACE = (0, 16)
"""First release whose containers have a TransformerEngine (2.10) that gives products without overlap a workspace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Predicted bytes on the last pipeline rank. Methods that predict only the peak leave `static` None."""

    static_bytes: float | None
    peak_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A layout with its job, its family of tests, and one method's estimate."""

    read: ReadLayout
    family: int
    estimate: Estimate

    @property
    def job(self) -> Job:
        """Job as the product read it. Layouts without a job are never scored."""
        assert self.read.job is not None
        return self.read.job

    @property
    def workspace_bytes(self) -> float:
        """Workspaces, stated from the libraries' constants and the test's environment."""
        row = self.read.layout.newest
        device, variables = DEVICES.get(row.gpu, ""), row.configuration.environment
        stated = stated_bytes(self.job, device, variables)
        if not self.job.options.tp_comm_overlap or release_words(row.tag) >= FIRST_OWN_WORKSPACE:
            return stated
        plain = replace(self.job, options=replace(self.job.options, tp_comm_overlap=False))
        own = (stated - stated_bytes(plain, device, variables)) / NUM_OVERLAP_STREAMS
        return stated - own

    @property
    def residual(self) -> Residual | None:
        """Static memory that the estimate lacks."""
        measured, predicted = self.read.layout.static_bytes, self.estimate.static_bytes
        if measured is None or predicted is None:
            return None
        return Residual(
            family=self.family,
            implementation=self.job.model.transformer_impl,
            gpu=self.read.layout.newest.gpu,
            bytes=measured - predicted - self.workspace_bytes,
        )


def families_of(layouts: Sequence[ReadLayout]) -> tuple[int, ...]:
    """Number each layout's family: tests that share a name, the flags that matter, or the job that is read of them."""
    return families([list(_family_keys(read)) for read in layouts])


def _family_keys(read: ReadLayout) -> Iterable[tuple[object, ...]]:
    for row in read.layout.rows:
        yield ("test", row.model, row.test_case)
        yield ("flags", row.configuration.layout_words)
    if read.job is not None:
        yield ("job", bare(read.job))


def bare(job: Job) -> Job:
    """Return the job without what tells twins apart: releases, lengths, and what a GPU type chooses."""
    model, job = replace(job.model, attention_backend="auto"), replace(job, compute_capability=None)
    job = replace(job, model=model, megatron_version="", options=PerformanceOptions())
    return replace(job, notes=(), pinned=(), log_interval=1, train_iters=None)


def total_parameters(model: ModelSpec) -> float:
    """Parameters of the whole model, experts and embeddings included."""
    dense = model.num_layers - sum(model.moe_layer_freq)
    experts = (model.num_experts or 0) * model.mlp_parameters(model.moe_ffn_hidden_size)
    layers = model.num_layers * model.attention_parameters() + dense * model.mlp_parameters()
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    return float(layers + sum(model.moe_layer_freq) * experts + tables * model.vocab_size * model.hidden_size)


def is_hybrid(job: Job) -> bool:
    """True if layers are of different kinds. These jobs form their own group, so that other groups stay comparable."""
    return job.model.hybrid is not None


def is_fp8(job: Job) -> bool:
    """True if matrices are multiplied in FP8."""
    return any(flag.startswith("--fp8") for flag in job.performance_flags)


def _is_dense(job: Job) -> bool:
    return not job.model.num_experts and not is_hybrid(job)


def _is_plain(job: Job) -> bool:
    own = job.own
    return _is_dense(job) and own.cp == 1 and own.recompute.granularity == "none" and not is_fp8(job)


GROUPS: Mapping[str, Callable[[Job], bool]] = {
    "all": lambda _: True,
    "dense": _is_dense,
    "dense, no CP, recompute or FP8": _is_plain,
    "MoE": lambda job: bool(job.model.num_experts) and not is_hybrid(job),
    "hybrid": is_hybrid,
    "CP": lambda job: job.own.cp > 1 and not is_hybrid(job),
    "recompute": lambda job: job.own.recompute.granularity != "none",
    "7B and larger": lambda job: total_parameters(job.model) >= LARGE,
    "FP8": is_fp8,
    "MLA": lambda job: job.model.latent_attention is not None,
    "MTP": lambda job: bool(job.model.mtp_num_layers),
}
WITH_ALL_CORRECTIONS = ("all", "dense", "MoE", "7B and larger")
WITH_STATIC = ("all", "dense", "MoE")


def corrected(scored: Scored, residuals: Sequence[Residual], correction: Correction) -> Estimate:
    """Add the workspace constant to peak and static."""
    constant = 0.0
    gpu = scored.read.layout.newest.gpu
    if correction in (STATED, FITTED):
        constant = scored.workspace_bytes
    if correction == FITTED:
        implementation = scored.job.model.transformer_impl
        constant += fitted_bytes(residuals, family=scored.family, implementation=implementation, gpu=gpu)
    static = scored.estimate.static_bytes
    return Estimate(
        static_bytes=None if static is None else static + constant,
        peak_bytes=scored.estimate.peak_bytes + constant,
    )


def score(
    method: str, given: Sequence[Scored], residuals: Sequence[Residual], skipped: Mapping[str, int]
) -> list[Line]:
    """Lines of one of our own methods, with each correction; `residuals` are what constants may come from."""
    lines = []
    for correction in CORRECTIONS:
        estimates = [corrected(item, residuals, correction) for item in given]
        name = f"{method}, {correction}"
        for group, members in _groups(given):
            if correction not in (STATED, FITTED) and group not in WITH_ALL_CORRECTIONS:
                continue
            chosen = [(given[place], estimates[place]) for place in members]
            lines += _lines(group, name, chosen, skipped.get(group, 0), with_static=group in WITH_STATIC)
        if correction in (STATED, FITTED):
            lines.append(_every_measurement(name, list(zip(given, estimates, strict=True))))
    return lines


def skipped_by_group(jobs: Iterable[Job]) -> dict[str, int]:
    """Number of jobs that each group lacks because the method rejected them."""
    kept = list(jobs)
    return {group: sum(map(belongs, kept)) for group, belongs in GROUPS.items()}


def _groups(given: Sequence[Scored]) -> list[tuple[str, list[int]]]:
    found = [(name, [i for i, item in enumerate(given) if belongs(item.job)]) for name, belongs in GROUPS.items()]
    gpus = sorted({item.read.layout.newest.gpu for item in given})
    found += [(gpu, [i for i, item in enumerate(given) if item.read.layout.newest.gpu == gpu]) for gpu in gpus]
    return [(name, members) for name, members in found if members]


def _lines(
    group: str, method: str, chosen: Sequence[tuple[Scored, Estimate]], skipped: int, *, with_static: bool
) -> list[Line]:
    peaks = errors([estimate.peak_bytes for _, estimate in chosen], [item.read.layout.peak_bytes for item, _ in chosen])
    line = Line(
        data=DATA, group=group, method=method, quantity="peak", scored=len(chosen), skipped=skipped, errors=peaks
    )
    lines = [line]
    pairs = [
        (estimate.static_bytes, item.read.layout.static_bytes)
        for item, estimate in chosen
        if estimate.static_bytes is not None and item.read.layout.static_bytes is not None
    ]
    if with_static and pairs:
        statics = errors([predicted for predicted, _ in pairs], [measured for _, measured in pairs])
        lines.append(replace(line, quantity="static", scored=len(pairs), errors=statics))
    return lines


def _every_measurement(method: str, chosen: Sequence[tuple[Scored, Estimate]]) -> Line:
    pairs = [(estimate.peak_bytes, row.peak_bytes) for item, estimate in chosen for row in item.read.layout.distinct]
    found = errors([predicted for predicted, _ in pairs], [measured for _, measured in pairs])
    group = "all, every distinct measurement"
    return Line(data=DATA, group=group, method=method, quantity="peak", scored=len(pairs), errors=found)


def detail(scored: Scored, estimate: Estimate) -> str:
    """Predicted against measured, for people."""
    layout = scored.read.layout
    static = f"{layout.static_bytes / MIB:.0f}" if layout.static_bytes is not None else "-"
    predicted = f"{estimate.static_bytes / MIB:.0f}" if estimate.static_bytes is not None else "-"
    return (
        f"{estimate.peak_bytes / layout.peak_bytes - 1:+7.2%}  peak {estimate.peak_bytes / MIB:8.0f} / "
        f"{layout.peak_bytes / MIB:8.0f} MiB  static {predicted:>6} / {static:>6} MiB  {layout.newest.gpu} "
        f"{layout.newest.model} {layout.newest.test_case} ({layout.newest.tag})"
    )
