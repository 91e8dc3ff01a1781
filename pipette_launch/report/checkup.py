"""Shows what on one machine would stop or slow a job."""

from __future__ import annotations

import sys
from typing import TextIO

from pipette_launch.facts.health.checkup import Checkup
from pipette_launch.report.draw import Section, bullet, render, sheet, text

HEADINGS = {"stops": "Stops", "slows": "Slows", "fine": "Fine"}
UNSEEN = "not looked at, because one machine cannot tell: clocks that differ between nodes, links, firewalls"


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
