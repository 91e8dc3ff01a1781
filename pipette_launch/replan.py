"""A pure decision from what the agents report to what becomes of the plan: keep it, try the next, give up, measure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipette_launch import megatron

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipette_launch.facts import Choice, Plan
    from pipette_launch.facts.messages.failure import Failure
    from pipette_launch.facts.messages.round import Decision, NodeRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Go on with the same candidate: same ranks, same arguments, fresh store."""

    proven: bool
    """It has trained before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TryNext:
    """The candidate cannot start: run the next one, at last the user's own configuration."""

    attempt: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """No plan can start this script: end the job."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """There is no plan for these hosts yet."""

    reason: str


def decide(
    records: Sequence[NodeRecord], hosts: Sequence[str], held: Decision | None, *, written: Sequence[str] = ()
) -> Keep | TryNext | GiveUp | Measure:
    """Decide what a new round does with the plan of the round before.

    A plan is kept while all hosts that it runs on are there, and no host is new; one on standby may go.

    Args:
        records: one for each agent of the new round.
        hosts: their host names, made unique.
        held: what the round before had decided; None in the first round.
        written: the user's own words for the script.

    """
    if held is None or held.phase != "train":
        return Measure(reason="")
    if not Counter(held.hosts) <= Counter(hosts) <= Counter((*held.hosts, *held.standby_hosts)):
        before = (*held.hosts, *held.standby_hosts)
        return Measure(reason=f"the hosts changed from {', '.join(sorted(before))} to {', '.join(sorted(hosts))}")
    ended = [record for record in records if record.attempt == held.attempt]
    proven = held.proven or any(record.verdict == "after-first-iteration" for record in ended)
    died = [record for record in ended if record.verdict == "before-first-iteration"]
    if died and not proven and held.plan is not None and held.choice is not None:
        failures = {record.failure for record in died if record.failure}
        return _after_death(sorted(failures, key=lambda one: one.sentence), held.plan, held, written)
    return Keep(proven=proven)


def _after_death(failures: Sequence[Failure], plan: Plan, held: Decision, written: Sequence[str]) -> TryNext | GiveUp:
    """Go on to the next candidate, unless the script would die under every plan."""
    short = any(failure.kind == "out-of-memory" for failure in failures)
    candidates = plan.candidates()
    layout = candidates[held.attempt].layout
    is_other = layout not in {candidate.layout for candidate in candidates[: held.attempt]}
    before = held.failures if is_other else ()
    hopeless = why_to_give_up(failures, before=before, written=written, given=held.script_arguments)
    if hopeless:
        return GiveUp(reason=hopeless)
    attempt = _next_attempt(candidates, held.attempt, needs_less=short)
    return TryNext(attempt=attempt, reason=failures[0].sentence if failures else "the job died")


def why_to_give_up(
    failures: Sequence[Failure], *, before: Sequence[Failure], written: Sequence[str], given: Sequence[str] | None
) -> str:
    """Say why a script that died before its first iteration would die under every plan; empty where one may help.

    Args:
        failures: how it died, one of each node.
        before: the same of deaths under other layouts.
        written: the user's own words for the script.
        given: the words that it was given; None for the user's own.

    """
    if any(failure.kind == "out-of-memory" for failure in failures):
        return ""
    for failure in failures:
        why = megatron.why_no_plan_helps(failure, before=before, written=written, given=given)
        if why:
            return f"{failure.sentence}; no other plan is tried: {why}"
    return ""


def _next_attempt(candidates: Sequence[Choice], attempt: int, *, needs_less: bool) -> int:
    """The next candidate, of those that need less memory if that ran out; past the last, the user's own."""
    held = max(candidates[attempt].peak_memory_bytes)
    for index in range(attempt + 1, len(candidates)):
        if not needs_less or max(candidates[index].peak_memory_bytes) < held:
            return index
    return len(candidates)
