"""Shows faults of machines: the verdicts of a warm-up, and what `pipette doctor` found on one machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from pipette_launch.facts.health import Checkup, Verdict
from pipette_launch.report.draw import Section, bullet, render, sheet, text
from pipette_launch.text import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_VERDICTS = 5
HEADINGS = {"stops": "Stops", "slows": "Slows", "fine": "Fine"}
UNSEEN = "not checked, because one machine alone cannot: clocks that differ between nodes, links, firewalls"


def health(
    verdicts: Sequence[Verdict], *, where: str = "cluster.json", most: int = MOST_VERDICTS
) -> Iterator[RenderableType]:
    """A sentence for each of the first few; devices of one host that have the same kind of fault share one.

    Args:
        verdicts: in any order.
        where: what has the rest.
        most: how many sentences.

    """
    from rich.table import Table

    groups: dict[tuple[bool, str, str, str], list[Verdict]] = {}
    for one in sorted(verdicts, key=lambda verdict: not verdict.is_sick):
        groups.setdefault((one.is_sick, one.host, one.other_host, one.kind), []).append(one)
    for shared in [*groups.values()][:most]:
        more = len(shared) - 1
        also = f" ({more} more {plural('device', more)} of {shared[0].host} likewise)" if more else ""
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_row(text("!", "bold red") if shared[0].is_sick else text("•", "dim"), text(shared[0].words() + also))
        yield row
    rest = len(groups) - most
    if rest > 0:
        sick = sum(key[0] for key in [*groups][most:])
        of_them = f", {sick} of them sick" if sick else ""
        yield text(f"… and {rest} more {plural('finding', rest)}{of_them}, in {where}", "dim")


def checkup_screen(
    checkup: Checkup, *, width: int | None = None, colour: bool | None = None, stream: TextIO | None = None
) -> str:
    """Show the findings, what would stop a job first.

    Args:
        checkup: of one machine.
        width: columns; None for the terminal's, 80 without one.
        colour: None for yes on a terminal only.
        stream: where it will be shown; None for stdout.

    """
    sections: list[Section] = [
        (heading, [bullet(one.words()) for one in checkup.findings if one.severity == severity])
        for severity, heading in HEADINGS.items()
    ]
    answer = "nothing here would stop a job" if checkup.is_fit else "a job would stop here"
    sections.append(("Answer", [text(f"{checkup.host}: {answer}"), text(UNSEEN, "dim")]))
    return render("pipette doctor", sheet(sections), width=width, colour=colour, stream=stream or sys.stdout)
