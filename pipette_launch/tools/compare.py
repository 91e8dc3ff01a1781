"""`pipette compare` prints plan files side by side."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.errors import UsageError
from pipette_launch.tools.flags import Subcommand

if TYPE_CHECKING:
    # Parsing --help must not wait for numpy.
    from pipette_launch.facts import Choice, Plan
    from pipette_launch.facts.prediction import Comparison


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette compare`."""
    parser.add_argument("--json", action="store_true", help="print a document of kind `comparison` instead of a screen")
    parser.add_argument("plans", metavar="PLAN", nargs="*", type=Path, help="two plan files or more")


def run(args: Namespace) -> int:
    """Print the comparison; returns 0."""
    from pipette_launch.facts import files
    from pipette_launch.report import comparison_screen

    found = of_files(args.plans)
    sys.stdout.write(files.dumps(found) + "\n" if args.json else comparison_screen(found))
    return 0


def of_files(paths: Sequence[Path]) -> Comparison:
    """Compare plan files with the first of them; raises UsageError for fewer than two."""
    from pipette_launch.facts import Plan, files
    from pipette_launch.facts.prediction import Comparison, Entry

    if len(paths) < 2:
        raise UsageError(f"nothing to compare with {paths[0] if paths else 'no file'}; name two plan files or more")
    plans = [files.read(path, Plan) for path in paths]
    entries = [
        Entry(
            name=name,
            choice=plan.chosen,
            gap=plan.gap,
            num_moved=num_moved(plans[0], plan),
            faults=tuple(_memory_fault(plan.chosen)),
            remarks=("This is your own configuration.",) if plan.keeps_own else (),
        )
        for name, plan in zip(_short_names(paths), plans, strict=True)
    ]
    return Comparison(entries=tuple(entries), notes=tuple(_differences(plans)))


def _short_names(paths: Sequence[Path]) -> list[str]:
    names = [path.name.removesuffix(".json").removesuffix(".plan") for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def num_moved(one: Plan, other: Plan) -> int | None:
    """Count the ranks that are on another device in the second plan; None if hosts or devices per host differ."""
    if sorted(one.hosts) != sorted(other.hosts) or one.devices_per_host != other.devices_per_host:
        return None
    size = one.devices_per_host
    moved = 0
    for index, name in enumerate(one.hosts):
        there = other.hosts.index(name)
        mine = one.chosen.placement[index * size : (index + 1) * size]
        others = other.chosen.placement[there * size : (there + 1) * size]
        moved += sum(a != b for a, b in zip(mine, others, strict=True))
    return moved


def _memory_fault(choice: Choice) -> Iterator[str]:
    from pipette_launch.text import bytes_text

    if not choice.fits:
        shown = choice.memory_shown
        peak = max(shown.need_bytes)
        stage = shown.need_bytes.index(peak)
        yield f"Does not fit: stage {stage} needs {bytes_text(peak)}, and the limit is {bytes_text(shown.limit_bytes)}."


def _differences(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield a note for each difference in job or machines from the first plan: such steps are not comparable."""
    first = plans[0]
    for number, plan in enumerate(plans[1:], 2):
        if first.setting is None or plan.setting is None:
            yield f"{number}: may be for another job than plan 1; one of the files does not name its job."
            continue
        for what, name in (
            ("parameters", "num_parameters"),
            ("sequences per step", "global_batch_size"),
            ("tokens per sequence", "seq_length"),
            ("devices", "device_name"),
            ("network", "network"),
        ):
            mine, others = getattr(plan.setting, name), getattr(first.setting, name)
            if mine != others:
                yield f"{number}: other {what} than plan 1: {mine or 'measured'} instead of {others or 'measured'}."
        if len(plan.hosts) != len(first.hosts):
            yield f"{number}: {len(plan.hosts)} hosts instead of {len(first.hosts)}."


COMMAND = Subcommand(
    summary="Print plan files side by side.",
    add_arguments=add_arguments,
    run=run,
    examples=("pipette compare a.plan.json b.plan.json",),
)
"""For `main.COMMANDS`."""
