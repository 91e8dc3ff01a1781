"""Who wins when plans and the user's own configuration have been tried: pure decisions on measured step times."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pipette_launch.cost.learned.uncertainty import ERRORS_APART
from pipette_launch.facts import Samples
from pipette_launch.facts.plan import Trial, Trials
from pipette_launch.text import seconds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipette_launch.facts import Choice, Plan
    from pipette_launch.facts.messages import TrialReport


def tried(choice: Choice, report: TrialReport, *, is_own: bool, warm_ups: int, iterations: int) -> Trial:
    """Put together what came of one trial.

    Args:
        choice: what ran.
        report: what the agents saw.
        is_own: whether it is the user's own configuration.
        warm_ups: iterations at the start that do not count.
        iterations: how many behind them do.

    """
    steps_s = report.step_s[: warm_ups + iterations]
    is_whole = len(steps_s) == warm_ups + iterations
    short = f"it ended after {len(steps_s)} of {warm_ups + iterations} iterations"
    return Trial(
        layout=choice.layout,
        placement=choice.placement,
        is_own=is_own,
        predicted_step_s=choice.step_time_s,
        step=Samples(values_s=steps_s[warm_ups:], warmup_s=steps_s[:warm_ups]) if is_whole else None,
        failure="" if is_whole else report.failure.sentence if report.failure else short,
        took_s=report.took_s,
    )


def noise_s(one: Samples, other: Samples) -> float:
    """By how much two medians may differ by chance."""
    return ERRORS_APART * math.hypot(one.median_error_s, other.median_error_s)


def outruns(plan: Trial, own: Trial, *, margin: float) -> bool:
    """Whether a plan was measured faster than the user's own configuration, beyond noise and by the margin."""
    if plan.step is None or own.step is None:
        return plan.step is not None
    return own.median_s - plan.median_s > max(margin * own.median_s, noise_s(plan.step, own.step))


def winner(runs: Sequence[Trial], *, margin: float) -> int | None:
    """Return the index of the best trial; None where none came to an end.

    A plan takes the place of the user's own configuration only if it outruns it; of those that do, the fastest wins.
    """
    own = next(run for run in runs if run.is_own)
    better = [index for index, run in enumerate(runs) if not run.is_own and outruns(run, own, margin=margin)]
    if better:
        return min(better, key=lambda index: runs[index].median_s)
    return None if own.step is None else runs.index(own)


def settle(plan: Plan, trials: Trials, *, margin: float) -> Plan:
    """Let the measured best be the plan; without any, the plan stays as it was predicted.

    Alternatives that outran the user's own configuration come first, the fastest in front, and no other is tried
    before it, unless it did not run itself.
    """
    best = winner(trials.runs, margin=margin)
    if best is None:
        return replace(plan, trials=trials)
    won = trials.runs[best]
    own = next(run for run in trials.runs if run.is_own)
    runs = {(run.layout, run.placement): run for run in trials.runs if not run.is_own}

    def rank(choice: Choice) -> tuple[int, float]:
        run = runs.get((choice.layout, choice.placement))
        if run is None:
            return 1, 0.0
        return 0 if outruns(run, own, margin=margin) else 2 if run.step else 3, run.median_s

    others = [one for one in plan.contenders() if (one.layout, one.placement) != (won.layout, won.placement)]
    chosen = next((one for one in plan.contenders() if one not in others), plan.own)
    others.sort(key=rank)
    # What was not tried is only predicted: the user's own configuration, which ran, is the safer one.
    in_line = [one for one in others if rank(one)[0] <= (0 if own.step else 2)]
    return replace(
        plan,
        chosen=plan.own if won.is_own else chosen,
        keeps_own=won.is_own,
        alternatives=tuple(others),
        num_in_line=len(in_line),
        reasons=(_why(trials, won, own, margin=margin), *_predicted(plan, won)),
        trials=trials,
    )


def trial_line(run: Trial) -> str:
    """Say in one line what came of a trial."""
    who = "your own configuration" if run.is_own else run.layout.words()
    if run.step is None:
        return f"{who}: {run.failure}"
    return (
        f"{who}: measured {seconds_text(run.median_s)} a step, spread {run.step.spread:.0%}, "
        f"predicted {seconds_text(run.predicted_step_s)}"
    )


def _why(trials: Trials, won: Trial, own: Trial, *, margin: float) -> str:
    finished = sum(run.step is not None for run in trials.runs)
    head = f"Settled by trials of {trials.iterations} iterations each, {finished} of {len(trials.runs)} ran: "
    if won.is_own:
        return f"{head}no plan was measured faster than your own configuration beyond noise and {margin:.0%}."
    took = f"{won.layout.words()} took {seconds_text(won.median_s)} a step"
    if own.step is None:
        return f"{head}{took}; your own configuration did not run: {own.failure}."
    gain = 1 - won.median_s / own.median_s
    return f"{head}{took}, {gain:.1%} less than your own configuration with {seconds_text(own.median_s)}."


def _predicted(plan: Plan, won: Trial) -> tuple[str, ...]:
    if (won.layout, won.placement) == (plan.chosen.layout, plan.chosen.placement):
        return plan.reasons
    return (f"Predicted best, by the model alone, was {plan.chosen.layout.words()}.",)
