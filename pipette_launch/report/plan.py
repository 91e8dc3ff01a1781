"""Shows a plan and why it won, as text for a terminal; measures, prices and decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.facts import Measurements, Plan
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.facts.results.outcome import Outcome
from pipette_launch.report import parts
from pipette_launch.report.draw import Section, bullet, render, sheet, text
from pipette_launch.report.health import health
from pipette_launch.report.measured import link_lines, machines, slow_slots
from pipette_launch.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from rich.text import Text


def plan_screen(
    plan: Plan,
    measurements: Measurements | None,
    *,
    arguments: Sequence[str],
    new_arguments: Sequence[str] | None,
    saved_to: Path | None,
    unsaved: str = "",
    width: int | None = None,
    colour: bool | None = None,
) -> str:
    """Show in one screen what was measured, what was chosen and why, and what changes for the script.

    Args:
        plan: the plan to show.
        measurements: what it rests on; None for a plan from the cache or a file.
        arguments: the script's arguments as the user gave them.
        new_arguments: the arguments that the script will get; None for the user's own.
        saved_to: where the plan file lies, if anywhere.
        unsaved: why there is none, and what to do; empty where none was wanted.
        width: columns; None for the terminal's, 80 without one.
        colour: None for yes on a terminal only.

    """
    sections: tuple[Section, ...] = (
        ("Measured", _measured(plan, measurements)),
        ("Health", [] if measurements is None else health(measurements.verdicts)),
        ("Chosen", parts.chosen(plan)),
        ("Step time", parts.step_times(plan)),
        ("Trials", parts.trials(plan)),
        ("Why", map(bullet, plan.reasons)),
        ("Memory", parts.memory(plan.chosen)),
        ("Flags", parts.flags(arguments, new_arguments)),
        ("Notes", map(bullet, parts.notes(plan, saved_to))),
        ("Plan file", list(_file(saved_to, unsaved))),
    )
    return render("pipette-launch", sheet(sections), width=width, colour=colour)


def _file(saved_to: Path | None, unsaved: str) -> Iterator[Text]:
    if saved_to is not None:
        yield text(str(saved_to), overflow="fold")
    elif unsaved:
        yield text(f"not kept: {unsaved}", "yellow")


def outcome_line(outcome: Outcome, saved_to: Path | None) -> str:
    """Say in one line how the prediction compares with what was measured."""
    measured = outcome.measured_step
    shaky = f", spread {measured.spread:.0%}: unstable" if measured.is_unstable else ""
    where = f" ({saved_to})" if saved_to is not None else ""
    rate = f" ({parts.rate_words(outcome.rate, outcome.layout.world_size)})" if outcome.rate else ""
    peak = outcome.fullest
    memory = ""
    if peak is not None:
        predicted = bytes_text(peak.predicted_bytes)
        memory = f"; rank {peak.rank} held at most {bytes_text(peak.measured_bytes)}, predicted {predicted}"
    off = f"{abs(outcome.error):.1%} too {'long' if outcome.error > 0 else 'short'}"
    return (
        f"{outcome.layout.words()}: measured {seconds_text(measured.median_s)} a step up to iteration "
        f"{outcome.last_iteration}{rate}{shaky}, predicted {seconds_text(outcome.predicted_step_s)}, {off}"
        f"{memory}{where}"
    )


def _measured(plan: Plan, measurements: Measurements | None) -> Iterator[Text]:
    if measurements is None:
        origin = {
            "cached": "kept from an earlier start",
            "file": "given by file",
            "imagined": "made for imagined machines",
            "measured": "measured before",
        }
        yield text(f"nothing now: the plan was {origin[plan.provenance.source]}, made at {plan.provenance.made_at}")
        return
    yield machines(measurements, remark="" if plan.provenance.source == "measured" else _kept(plan))
    yield from link_lines(measurements.cluster)
    yield from _compute(plan, measurements)


def _kept(plan: Plan) -> str:
    return f"; kept from {plan.provenance.made_at}, not measured now"


def _compute(plan: Plan, measurements: Measurements) -> Iterator[Text]:
    layout = plan.chosen.layout
    wanted = (layout.tp, layout.cp, layout.micro_batch_size)
    layers = [time for time in measurements.compute if time.part in LAYERS]
    for time in layers:
        if (time.case.tp, time.case.cp, time.case.micro_batch_size) == wanted:
            backward_s = time.input_grad.median_s + time.weight_grad.median_s
            yield text(
                f"one layer: {seconds_text(time.forward.median_s)} forward, {seconds_text(backward_s)} backward "
                f"(tp{time.case.tp} mbs{time.case.micro_batch_size})"
            )
            break
    yield from slow_slots(measurements.cluster)
