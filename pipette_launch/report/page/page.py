"""Writes the views of a plan into one HTML file, which includes the styles and the script."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from pipette_launch.errors import PipetteError
from pipette_launch.facts import Measurements, Plan, files
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.outcome import Outcome
from pipette_launch.planning.picture import Picture
from pipette_launch.report.page import choices, machines
from pipette_launch.report.page.tables_and_bars import memory_view, outcome_table, trials_table
from pipette_launch.report.plan import schedule_words
from pipette_launch.report.screen import NOT_MODELLED, arguments_diff, paste_text
from pipette_launch.text import bytes_text, count_text, printable, seconds_text

if TYPE_CHECKING:
    from jinja2 import Environment

BEGIN, END = "<!--outcome-->", "<!--/outcome-->"
"""Marks around the outcome in the page. Names in the page cannot contain the marks, because `<` is escaped."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Content security policy, which stops the page from loading anything from a network."""


def plan_page(
    plan: Plan, measurements: Measurements | None = None, picture: Picture | None = None, outcome: Outcome | None = None
) -> str:
    """Draw a plan as one HTML file without network requests.

    Args:
        measurements: measurements that priced the plan; None leaves out links, layer times and verdicts.
        picture: drawn steps and memory by kind; None leaves out the timeline and the split of memory.
        outcome: measured outcome of the plan's training; None if the training did not run long enough.

    Raises:
        PipetteError: jinja2 is not installed.

    """
    runs = " ".join(sorted({_run(choice.layout, choice.placement) for choice in (*plan.candidates(), plan.own)}))
    template = _environment().get_template("page.html")
    return template.render(
        policy=POLICY,
        style=_text("page.css"),
        script=_text("page.js"),
        plan=plan,
        runs=f"{plan.provenance.key} {runs}",
        title=plan.chosen.layout.words(),
        tiles=choices.tiles(plan),
        changes=choices.what_changes(plan),
        alternatives=choices.alternatives(plan),
        search=choices.tables_of_the_search(plan),
        time=choices.step_parts(plan),
        trials=trials_table(plan),
        outcome=None if outcome is None else outcome_table(outcome),
        memory=memory_view(plan, picture),
        timeline=choices.timeline_view(plan, picture),
        links=machines.links_view(plan, measurements),
        placement=machines.placement_view(plan),
        layers=machines.layers_view(plan, measurements),
        problems=machines.health_table(measurements),
        is_measured=measurements is not None and plan.provenance.source != "imagined",
        job=_job(plan),
        flags=_flags(plan),
        notes=[note for note in plan.notes if not note.startswith(NOT_MODELLED)],
        gaps=[note.removeprefix(NOT_MODELLED) for note in plan.notes if note.startswith(NOT_MODELLED)],
        solve=seconds_text(plan.solve_s),
        num_layouts=f"{plan.num_layouts:,}",
    )


def with_outcome(html: str, outcome: Outcome) -> str:
    """Write an outcome into the page of the outcome's plan, and return the page of another plan unchanged.

    Raises PipetteError if jinja2 is not installed.
    """
    before, begin, rest = html.partition(BEGIN)
    _, end, after = rest.partition(END)
    runs = before.partition('<meta name="runs" content="')[2].partition('"')[0].split()
    if not end or outcome.key not in runs or _run(outcome.layout, outcome.placement) not in runs:
        return html
    block = _environment().get_template("outcome.html").render(outcome=outcome_table(outcome))
    return before + begin + block + end + after


def _run(layout: Layout, placement: tuple[int, ...]) -> str:
    """Digest layout and placement, which identify the configuration of a run."""
    return files.digest(layout, list(placement))


def _text(name: str) -> str:
    return resources.files("pipette_launch.report.page").joinpath(name).read_text(encoding="utf-8")


def _environment() -> Environment:
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise PipetteError("a report needs jinja2, which is not installed: pip install jinja2") from error
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(_text)
    )
    # All values are escaped, because host names come from outside.
    environment.finalize = lambda value: printable(value, keep="\n") if type(value) is str else value
    return environment


def _job(plan: Plan) -> list[tuple[str, str]]:
    hosts, kind, setting = f"{len(plan.hosts)} x {plan.devices_per_host}", plan.device_kind, plan.setting
    if setting is None:
        return [("Machines", f"{hosts} {kind}"), ("Made", plan.provenance.made_at)]
    memory = bytes_text(setting.device_memory_bytes)
    rows = [
        ("Script", setting.script),
        ("Model", f"{count_text(setting.num_parameters)} parameters"),
        ("Step", f"{setting.global_batch_size:,} sequences = {count_text(setting.tokens_per_step)} tokens"),
        ("Machines", f"{hosts} {setting.device_name or kind} with {memory}, {setting.machines}"),
        ("Network", setting.network),
        ("Made", plan.provenance.made_at),
    ]
    return [(name, value) for name, value in rows if value]


def _flags(plan: Plan) -> dict[str, Any] | None:
    if plan.setting is None:
        return None
    old, new = plan.setting.arguments, plan.setting.new_arguments
    return {"changes": arguments_diff(old, new), "paste": paste_text(old, new) + schedule_words(plan)}
