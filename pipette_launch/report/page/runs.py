"""What was measured once plans ran: trials, and the training itself."""

from __future__ import annotations

from pipette_launch.facts import Plan
from pipette_launch.facts.outcome import Outcome
from pipette_launch.report.page.pieces import Table
from pipette_launch.text import bytes_text, seconds_text


def trials_table(plan: Plan) -> Table | None:
    """Set measured trials beside what was predicted for them; None without trials."""
    if plan.trials is None:
        return None
    rows = [
        (
            run.layout.words() + (" (yours)" if run.is_own else ""),
            seconds_text(run.predicted_step_s),
            seconds_text(run.step.median_s) if run.step else run.failure,
            f"{run.predicted_step_s / run.step.median_s - 1:+.1%}" if run.step and run.step.median_s > 0 else "",
            f"{run.step.spread:.0%}" if run.step else "",
        )
        for run in plan.trials.runs
    ]
    return Table("Trials", ("layout", "predicted", "measured", "error", "spread"), rows)


def outcome_table(outcome: Outcome) -> Table:
    """Predicted, measured and the error of the step, and of the fullest rank that was read."""
    measured = outcome.measured_step
    step = f"step, up to iteration {outcome.last_iteration}"
    rows = [
        (
            step,
            seconds_text(outcome.predicted_step_s),
            seconds_text(measured.median_s),
            f"{outcome.error:+.1%}",
            f"{measured.spread:.0%}{', unstable' if measured.is_unstable else ''}",
        )
    ]
    peak = outcome.fullest
    if peak is not None and peak.measured_bytes:
        error = peak.predicted_bytes / peak.measured_bytes - 1
        name = f"memory of rank {peak.rank}, by its {peak.source}"
        rows.append((name, bytes_text(peak.predicted_bytes), bytes_text(peak.measured_bytes), f"{error:+.1%}", ""))
    caption = f"It ran: {outcome.layout.words()}"
    return Table(caption, ("", "predicted", "measured", "error", "spread"), rows)
