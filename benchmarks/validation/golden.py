"""The golden data set, from files to a section of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.validation.first_step import first_step_bytes
from benchmarks.validation.golden_jobs import ReadLayout, read_layout, short_reason
from benchmarks.validation.golden_rows import GoldenData, distinct_layouts, read_golden
from benchmarks.validation.golden_score import (
    DATA,
    Estimate,
    Scored,
    corrected,
    detail,
    families_of,
    is_hybrid,
    score,
    skipped_by_group,
)
from benchmarks.validation.lines import Found, Section, counted
from benchmarks.validation.workspace import FITTED
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job

Estimator = Callable[[Job], Estimate]
"""One method; raises PipetteError for a job that it cannot take."""
NOTES = (
    (
        "Golden rows hold torch's allocator on the LAST pipeline stage; layouts are scored once, measured = median of "
        "the distinct values of a layout on one GPU type."
    ),
    (
        "Workspaces: 'stated' by the product from the libraries' constants, nothing fitted; 'fitted on other tests' "
        "adds one constant per transformer implementation and GPU, the median static residual of other families of "
        "tests; a family is all tests that share a name, the flags that matter, or the job read."
    ),
    (
        "Fused cross-entropy under torch before 2.6, which the product does not run on: the peak of the first step, in "
        "which inductor copies the logits to time its kernels (first_step.py)."
    ),
    "A row without a world size ran on one node of 8, that CI's default; release tests without one are left out.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """A golden file and its flags."""

    rows: Path
    args: Path


def closed_form(job: Job) -> Estimate:
    """Estimate by the product's closed form, for the last stage."""
    last = peak_memory_bytes(job, job.own)[-1]
    return Estimate(static_bytes=last.static, peak_bytes=last.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """A golden file as read, and the rows that constants may be fitted to."""

    data: GoldenData
    given: tuple[tuple[ReadLayout, int], ...]
    """Layouts to score, with the family of each."""
    fit: tuple[tuple[ReadLayout, int], ...]
    """Layouts of the development data, with their families; the same as `given` where these are scored."""

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """(reason, row) of the layouts without a job."""
        return tuple((read.reason, _row_name(read)) for read, _ in self.given if read.job is None)

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions made while reading, each with its count."""
        return counted(note for read, _ in self.given for note in read.notes)


def read(files: Files, development: Files) -> Golden:
    """Read a golden file; families span it and the development data, so that no constant comes from a twin."""
    known = read_golden(development.rows, development.args)
    data = known if files == development else read_golden(files.rows, files.args, known.rows)
    given = [read_layout(layout) for layout in distinct_layouts(data.rows)]
    if files == development:
        paired = tuple(zip(given, families_of(given), strict=True))
        return Golden(data=data, given=paired, fit=paired)
    fit = [read_layout(layout) for layout in distinct_layouts(known.rows)]
    numbers = families_of([*given, *fit])
    return Golden(
        data=data,
        given=tuple(zip(given, numbers[: len(given)], strict=True)),
        fit=tuple(zip(fit, numbers[len(given) :], strict=True)),
    )


def run(golden: Golden, method: str, estimator: Estimator) -> Found:
    """Score one of our methods. Returns lines, jobs that it rejected, and each prediction in words."""
    scored, refused = _estimate(golden.given, estimator)
    scored = [_with_first_step(item) for item in scored]
    fitted_on = scored if golden.fit is golden.given else _estimate(golden.fit, estimator)[0]
    # Few tests of one hybrid model would move the constants of all others.
    plain = (item.residual for item in fitted_on if item.read.job is not None and not is_hybrid(item.read.job))
    residuals = [residual for residual in plain if residual is not None]
    details = [f"{method}: {detail(item, corrected(item, residuals, FITTED))}" for item in scored]
    return Found(
        lines=tuple(score(method, scored, residuals, _skipped(refused))),
        skipped=tuple((f"{method}: {reason}", _row_name(item)) for item, reason in refused),
        details=tuple(sorted(details)),
    )


def section(golden: Golden, name: str, found: Found) -> Section:
    """Everything that was found on the golden data."""
    layouts = len(golden.given)
    counts = (
        f"{golden.data.num_rows} rows, {golden.data.without_memory} without a measured peak, "
        f"{layouts} distinct layouts, {sum(read.job is not None for read, _ in golden.given)} read"
    )
    return Section(
        data=DATA,
        source=f"{name} ({golden.data.digest})",
        lines=found.lines,
        skipped=(*golden.skipped, *found.skipped),
        notes=(counts, *NOTES, *golden.notes),
        details=found.details,
    )


def _skipped(refused: Sequence[tuple[ReadLayout, str]]) -> dict[str, int]:
    return skipped_by_group(item.job for item, _ in refused if item.job is not None)


def _estimate(
    layouts: Sequence[tuple[ReadLayout, int]], estimator: Estimator
) -> tuple[list[Scored], list[tuple[ReadLayout, str]]]:
    scored, refused = [], []
    for item, family in layouts:
        estimate = _attempt(item, estimator)
        if isinstance(estimate, Estimate):
            scored.append(Scored(read=item, family=family, estimate=estimate))
        elif estimate:
            refused.append((item, estimate))
    return scored, refused


def _with_first_step(item: Scored) -> Scored:
    """Return the estimate with the peak of the first step, if that peak is higher than the peak of later steps."""
    first = first_step_bytes(item.job, item.estimate.peak_bytes, item.read.layout.newest.logit_copies)
    return replace(item, estimate=replace(item.estimate, peak_bytes=max(item.estimate.peak_bytes, first)))


def _attempt(item: ReadLayout, estimator: Estimator) -> Estimate | str:
    """Return the estimate or the reason why it is missing. The reason is blank if the row has no job."""
    if item.job is None:
        return ""
    try:
        return estimator(item.job)
    except PipetteError as error:
        return short_reason(error)


def _row_name(item: ReadLayout) -> str:
    row = item.layout.newest
    name = f"line {row.line}: {row.tag} {row.model}/{row.test_case} {row.gpu}"
    return f"{name}: {item.detail}" if item.detail else name
