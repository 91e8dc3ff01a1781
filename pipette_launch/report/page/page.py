"""Puts the page together: the views of a plan into one HTML file with its own styles and script."""

from __future__ import annotations

from importlib import resources
from typing import Any

from pipette_launch.facts import Measurements, Plan
from pipette_launch.facts.results.outcome import Outcome
from pipette_launch.forecast.picture import Picture
from pipette_launch.printable import printable
from pipette_launch.report.figures import NOT_MODELLED
from pipette_launch.report.flag_changes import arguments_diff, paste_text
from pipette_launch.report.page import choices, machines
from pipette_launch.report.page.memory import memory_view
from pipette_launch.report.page.timeline import timeline_view
from pipette_launch.units import bytes_text, count_text, seconds_text


def plan_page(
    plan: Plan,
    measurements: Measurements | None = None,
    picture: Picture | None = None,
    outcome: Outcome | None = None,
) -> str:
    """Draw a plan as one HTML file, which asks for nothing from any network.

    Args:
        plan: what was chosen, with its setting if its file has one.
        measurements: what it was priced by; None leaves out links and layer times.
        picture: what its file does not hold; None leaves out the timeline and the split of memory.
        outcome: what its run came to; None where it did not run, or not long enough.

    """
    # An environment takes milliseconds to make, and jinja2 comes with torch.
    from jinja2 import Environment, StrictUndefined

    folder = resources.files("pipette_launch.report.page")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # Names of hosts are what others wrote.
    environment.finalize = lambda value: printable(value, keep="\n") if type(value) is str else value
    texts = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    return environment.from_string(texts["page.html"]).render(
        style=texts["page.css"],
        script=texts["page.js"],
        plan=plan,
        headline=choices.headline(plan),
        alternatives=choices.alternatives(plan),
        step_parts=choices.step_parts(plan),
        part_names=choices.PARTS,
        trials=choices.trials(plan),
        outcome=choices.outcome_rows(outcome),
        memory=memory_view(plan, picture),
        timeline=timeline_view(plan, picture),
        links=machines.links_view(plan, measurements),
        placement=machines.placement_view(plan),
        layers=machines.layers_view(measurements),
        verdicts=[] if measurements is None else measurements.verdicts,
        job=_job(plan),
        flags=_flags(plan),
        notes=[note for note in plan.notes if not note.startswith(NOT_MODELLED)],
        gaps=[note.removeprefix(NOT_MODELLED) for note in plan.notes if note.startswith(NOT_MODELLED)],
        dropped=sorted(plan.dropped.items(), key=lambda item: -item[1]),
        solve=seconds_text(plan.solve_s),
    )


def _job(plan: Plan) -> list[tuple[str, str]]:
    hosts = f"{len(plan.hosts)} x {plan.devices_per_host} {plan.device_kind}"
    setting = plan.setting
    if setting is None:
        return [("Machines", hosts), ("Made", plan.provenance.made_at)]
    rows = [
        ("Script", setting.script),
        ("Model", f"{count_text(setting.num_parameters)} parameters"),
        ("Step", f"{setting.global_batch_size} sequences = {count_text(setting.tokens_per_step)} tokens"),
        ("Machines", f"{hosts} ({setting.device_name}, {bytes_text(setting.device_memory_bytes)}), {setting.machines}"),
        ("Network", setting.network),
        ("Made", plan.provenance.made_at),
    ]
    return [(name, value) for name, value in rows if value]


def _flags(plan: Plan) -> dict[str, Any] | None:
    """How the script's flags change, and what to paste; None where the plan's file does not name them."""
    if plan.setting is None:
        return None
    old, new = plan.setting.arguments, plan.setting.new_arguments
    return {"changes": arguments_diff(old, new), "paste": paste_text(old, new)}
