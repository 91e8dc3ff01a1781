"""The table of what became of trainings into which faults came."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.faults.cases import FAULTS, PHASES
from benchmarks.faults.run import Result


def table(results: Sequence[Result], conditions: Sequence[str]) -> list[str]:
    """Return lines of Markdown: a row for each phase and fault, a column for each host."""
    hosts = sorted({result.case.host for result in results})
    false = sum(len(result.false_alarms) for result in results)
    told = (
        f"{len(results)} trainings on four laboratory hosts of one slot, 400 Mbit/s, `--nnodes 3:4 --max-restarts 3`, "
        f"a checkpoint every 5 iterations; {'; '.join(conditions)}. {sum(result.is_well for result in results)} "
        f"survived or ended with the right words; healthy hosts that were taken for lost: {false}."
    )
    return [
        told,
        "",
        f"| phase | fault | {' | '.join(hosts)} | words |",
        f"|---|---|{'---|' * len(hosts)}---|",
        *(_row(results, phase, fault, hosts) for phase in PHASES for fault in FAULTS if _of(results, phase, fault)),
    ]


def _of(results: Sequence[Result], phase: str, fault: str, host: str | None = None) -> list[Result]:
    return [
        result
        for result in results
        if (result.case.phase, result.case.fault) == (phase, fault) and host in (None, result.case.host)
    ]


def _row(results: Sequence[Result], phase: str, fault: str, hosts: Sequence[str]) -> str:
    cells = [_cell(_of(results, phase, fault, host)) for host in hosts]
    words = next((result.words for result in _of(results, phase, fault) if result.words), "")
    return f"| {phase} | {fault} | {' | '.join(cells)} | {words.replace('|', '/')[:140]} |"


def _cell(results: Sequence[Result]) -> str:
    parts = []
    for ended in sorted({result.ended for result in results}):
        alike = [result for result in results if result.ended == ended]
        seconds = [result.recovered_s for result in alike if result.recovered_s is not None]
        times = f" ({len(alike)} times)" if len(alike) > 1 else ""
        parts.append(f"{ended}{times}{f', {statistics.median(seconds):.1f} s' if seconds else ''}")
    bad = sum(not result.is_well for result in results)
    return "; ".join(parts) + (f" **{bad} bad**" if bad else "")
