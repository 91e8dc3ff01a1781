"""The table of deadlines: in the code, in the documents, and for a large start on slow storage."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from pipette_launch import defaults
from pipette_launch.defaults import (
    ALARM_REPORT_S,
    COLD_RANKS_PER_S,
    END_S,
    MEMORY_FREE_S,
    PEER_WAIT_S,
    START_S,
    TRIAL_REPORT_S,
    Deadline,
)
from pipette_launch.probe.messages import wait_s

ROOT = Path(__file__).parents[1]
DEADLINES = {name: value for name, value in vars(defaults).items() if isinstance(value, Deadline)}
HOSTS, RANKS = 4096, 4096 * 8
AT_LEAST = 1.5
"""Deadline divided by the seconds of its messages, at least. The seconds are of two cores that all launchers share."""


def test_the_documents_have_every_deadline() -> None:
    """The table in docs/reliability.md is the table of the code, row by row."""
    rows = [
        f"| {one.waits_for} | {one:g} s | "
        f"{'' if one.ranks_per_s == math.inf else f'1 s for {one.ranks_per_s:,g} ranks'} | {one.when_passed} |"
        for one in DEADLINES.values()
    ]
    table = (ROOT / "docs" / "reliability.md").read_text().split("## Deadlines")[1].split("\n## ")[0]

    assert rows == [line for line in table.splitlines() if re.match(r"\| .* s \| ", line)]


@pytest.mark.parametrize("name", DEADLINES)
def test_every_deadline_is_used(name: str) -> None:
    """A deadline that no code uses would be a wrong row of the documents."""
    sources = (*(ROOT / "pipette_launch").rglob("*.py"), *(ROOT / "patches").rglob("*.py"))
    text = "".join(path.read_text() for path in sources if path.name != "defaults.py")

    assert len(re.findall(rf"\b{name}\b", text)) > 1


@pytest.mark.parametrize("first_s", [5.0, 120.0, 390.0])
def test_imports_of_4096_ranks_may_end_five_minutes_apart(first_s: float) -> None:
    """The first worker still waits for the last worker, whose progress message and warm-up are not overdue then."""
    ranks, last_s, budget_s = 4096, first_s + 300, 60.0
    left_s = START_S.of(ranks) - first_s

    assert first_s + wait_s(ranks, left_s) > last_s
    assert wait_s(ranks, START_S.of(ranks)) > last_s
    assert wait_s(ranks, START_S.of(ranks)) + wait_s(ranks, budget_s) > last_s + budget_s


def seconds(phase: str, *, last: bool = False) -> float:
    """Return the seconds of a phase with 4,096 hosts, from the 2,048 hosts of scale.md and the growth that it states.

    The seconds are those of the clock on two cores that the first agent shared with all played agents, in the longer of
    a cold and a cached start. `last` selects the last agent instead of the first.
    """
    rows = (ROOT / "benchmarks" / "results" / "scale.md").read_text()
    numbers = (
        rf"^\| {phase} \| 2,048 \| ([\d.]+) s \| ([\d.]+) s .*\n"
        rf"(?:\| {phase} \| 4,096 .*\n)?\| {phase} \| \*\*growth\*\* \| N\^(\S+) \| N\^(\S+) "
    )
    found = [[float(one) for one in row] for row in re.findall(numbers, rows, re.MULTILINE)]
    assert found
    return max(row[last] * (HOSTS / 2048) ** row[2 + last] for row in found)


# A phase that scale.md does not have, with 4,096 hosts on the same machine: the first launcher reads reports of 8
# workers each and names the cause.
REPORTS_READ_S = 0.5
WORKERS_END_S = END_S + MEMORY_FREE_S
LOCAL = (
    "NAME_S CONNECT_S HOST_SILENCE_S FIRST_ANSWER_S HAND_ON_S PROBE_S PROOF_S "
    "NEWS_S SCONTROL_S RECIPE_S END_S STOPPED_S SIGNALLED_S MEMORY_FREE_S FILES_S SIGN_S HUNG_S "
    "PASS_S ADVISER_START_S"
).split()
"""Waits for one process, one connection or one program, whose length does not depend on the number of hosts."""
OF_ALL_HOSTS = {
    # At a meeting the other launchers end their workers, and then send their records.
    "PEER_WAIT_S": (WORKERS_END_S, seconds("meet")),
    "GOODBYE_S": (0.0, seconds("end")),
    "ALARM_REPORT_S": (0.0, seconds("end warm-up", last=True)),
    "VERDICT_S": (ALARM_REPORT_S.of(RANKS), REPORTS_READ_S),
    "TRIAL_REPORT_S": (WORKERS_END_S, seconds("end warm-up", last=True)),
    "NEXT_S": (TRIAL_REPORT_S, seconds("meet")),
    # Imports of all ranks; the wait for another worker begins when the first worker has started.
    "START_S": (RANKS / COLD_RANKS_PER_S, 0.0),
    "WORKER_WAIT_S": (RANKS / COLD_RANKS_PER_S, 0.0),
    "FIRST_ITERATION_S": (RANKS / COLD_RANKS_PER_S, 0.0),
}
"""Other waits that each wait contains, and seconds that 4,096 hosts of 8 ranks need for its messages."""


def test_each_deadline_is_compared_with_4096_hosts() -> None:
    """A new deadline is the wait for a single thing, or is compared with the time that all hosts need."""
    assert sorted(DEADLINES) == sorted([*LOCAL, *OF_ALL_HOSTS])
    assert all(DEADLINES[name].ranks_per_s == math.inf for name in LOCAL)


@pytest.mark.parametrize("name", OF_ALL_HOSTS)
def test_4096_hosts_need_less_than_a_deadline(name: str) -> None:
    """A wait of 4,096 hosts lasts half as long again as their messages, after the waits that it contains."""
    contained_s, messages_s = OF_ALL_HOSTS[name]

    assert DEADLINES[name].of(RANKS) > contained_s + AT_LEAST * messages_s


def test_a_launcher_waits_for_a_decision_longer_than_the_first_launcher_for_records() -> None:
    """The last of 4,096 launchers gets the decision, which may contain a search, in two waits for another launcher."""
    assert 2 * PEER_WAIT_S > max(seconds(phase, last=True) for phase in ("meet", "lose"))
