"""Shows what is amiss with machines and links, in a line or two each, the sick ones first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipette_launch.facts.health.verdict import Verdict
from pipette_launch.report.draw import plural, text

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_VERDICTS = 5


def health(verdicts: Sequence[Verdict], *, where: str = "cluster.json") -> Iterator[RenderableType]:
    """A sentence for each of the first few; devices of one host that have the same kind of fault share one.

    Args:
        verdicts: in any order.
        where: what has the rest.

    """
    from rich.table import Table

    groups: dict[tuple[bool, str, str, str], list[Verdict]] = {}
    for one in sorted(verdicts, key=lambda verdict: not verdict.is_sick):
        groups.setdefault((one.is_sick, one.host, one.other_host, one.kind), []).append(one)
    for shared in [*groups.values()][:MOST_VERDICTS]:
        more = len(shared) - 1
        also = f" ({more} more {plural('device', more)} of {shared[0].host} likewise)" if more else ""
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_row(text("!", "bold red") if shared[0].is_sick else text("•", "dim"), text(shared[0].words() + also))
        yield row
    rest = len(groups) - MOST_VERDICTS
    if rest > 0:
        sick = sum(key[0] for key in [*groups][MOST_VERDICTS:])
        of_them = f", {sick} of them sick" if sick else ""
        yield text(f"… and {rest} more {plural('finding', rest)}{of_them}, in {where}", "dim")
