"""Next action of a job after a round, decided from the agents' reports without clock, files or processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pipette_launch import megatron
from pipette_launch.facts import Choice, Plan
from pipette_launch.facts.messages import Decision, Failure, NodeRecord, RunTraining
from pipette_launch.facts.plan import from_candidate, refit
from pipette_launch.text import seconds_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """All workers of all nodes succeeded, so the job is finished."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Continue with the same candidate: the same ranks and arguments, and a new rendezvous store."""

    proven: bool
    """True if the candidate has completed training steps before."""
    restarts_left: int = 0
    reason: str = ""
    """Reason why the workers start again. Empty = only nodes on standby changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TryNext:
    """The candidate cannot start, so run the next candidate. The user's own configuration is the last candidate."""

    attempt: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UseFallback:
    """Hosts were lost or came back, so run an earlier plan, fitted to the present hosts."""

    plan: Plan
    """Plan whose first candidate runs next, without candidates that could not start."""
    proven: bool
    """True if the plan's first candidate has trained before on the same number of hosts."""
    lost: tuple[tuple[str, str], ...]
    """Pairs of a lost host and the reason, which may be an empty text."""
    came_back: tuple[str, ...]
    put_in: tuple[str, ...]
    """Hosts that were on standby and train now."""

    @property
    def changes(self) -> str:
        """Sentence that names the lost hosts, the hosts that came back, and the hosts that replace others."""
        in_place = _listed(self.put_in, "takes its place", "take their places") if self.lost else ""
        changes = [lost_words(self.lost), _listed(self.came_back, "is back", "are back"), in_place]
        return ", ".join(filter(None, changes))

    @property
    def reason(self) -> str:
        """Return the changes of hosts, and the job's new number of nodes, layout and step time."""
        runs = self.plan.chosen
        return (
            f"{self.changes}; going on with {len(self.plan.hosts)} of {len(self.plan.known_hosts)} "
            f"nodes: {runs.layout.words()}, {seconds_text(runs.step_time_s)} a step predicted"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Measure the hosts, because the hosts have no plan or an outdated plan."""

    reason: str
    anew: bool = False
    """True if earlier measurements are no longer valid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """End the job, because the script would fail under every plan."""

    reason: str


Step: TypeAlias = Finish | Keep | TryNext | UseFallback | Measure | GiveUp


def decide(
    records: Sequence[NodeRecord],
    hosts: Sequence[str],
    held: Decision | None,
    *,
    written: Sequence[str] = (),
    lost: Mapping[str, str] | None = None,
    least_nodes: int = 1,
) -> Step:
    """Decide how a new round continues with the plan of the last round and its decision `held` (None = no last round).

    The job keeps a plan while all hosts with workers are present, even if a host on standby leaves. A lost host decides
    before the reports of other hosts, because workers there died only due to the loss. A lost host and a plan that
    cannot start do not count as restarts (--max-restarts). Every other failure counts. `hosts` has the unique host name
    of each record, `written` the user's own arguments, and `lost` the reason for each lost host.
    """
    before = tuple(held.names.values()) if held else ()
    waited = {node.host for node in held.standby} if held else set()
    gone = tuple((host, (lost or {}).get(host, "")) for host in before if host not in hosts)
    if len(hosts) < least_nodes:
        left = f"{len(hosts)} {'node is' if len(hosts) == 1 else 'nodes are'} left"
        return GiveUp(reason="; ".join(filter(None, [lost_words(gone), f"{left}, and --nnodes needs {least_nodes}"])))
    if held is None:
        return Measure(reason="")
    slowed = next((record.slowed for record in records if record.slowed), "")
    if not isinstance(held, RunTraining) or (slowed and all(host in waited for host, _ in gone)):
        return Measure(reason=lost_words(gone) or slowed, anew=bool(slowed))
    proven = held.proven or any(
        record.verdict == "after-first-iteration" for record in records if record.attempt == held.attempt
    )
    if not Counter(held.hosts) <= Counter(hosts) <= Counter(before):
        fitted = _refitted(held, hosts, least_nodes)
        if fitted is None:
            changed = f"the hosts changed from {', '.join(sorted(before))} to {', '.join(sorted(hosts))}"
            why = lost_words(tuple(one for one in gone if one[1]))
            return Measure(reason="; ".join(filter(None, [why, changed])))
        if set(fitted.hosts) != set(held.hosts):
            return UseFallback(
                plan=fitted,
                proven=proven and len(fitted.hosts) == len(held.hosts),
                lost=gone,
                came_back=tuple(host for host in hosts if host not in before),
                put_in=tuple(host for host in fitted.hosts if host in waited),
            )
    return _on_same_hosts(records, hosts, held, proven=proven, written=written)


def _refitted(held: RunTraining, hosts: Sequence[str], least_nodes: int) -> Plan | None:
    """Fit the present plan or one of its fallback plans to the present hosts; return None if no plan fits."""
    if held.plan is None:
        return None
    # Leave out a host that was on standby and is not in the plan, because this host is sick.
    known, waited = set(held.plan.known_hosts), {node.host for node in held.standby}
    ran = from_candidate(held.plan, held.attempt)
    fitted = refit(ran, [host for host in hosts if host in known or host not in waited])
    return fitted if fitted and len(fitted.hosts) >= least_nodes else None


def lost_words(lost: Sequence[tuple[str, str]]) -> str:
    """Name the lost hosts, each with the reason. The text is empty if no host is lost."""
    return ", ".join(f"{host} is lost ({why})" if why else f"{host} is lost" for host, why in lost)


def _listed(hosts: Sequence[str], does: str, do: str) -> str:
    return f"{' and '.join(hosts)} {does if len(hosts) == 1 else do}" if hosts else ""


def _on_same_hosts(
    records: Sequence[NodeRecord], hosts: Sequence[str], held: RunTraining, *, proven: bool, written: Sequence[str]
) -> Finish | Keep | TryNext | GiveUp:
    """Decide from the end of the last attempt, if all hosts of the attempt are present."""
    ended = [record for record in records if record.attempt == held.attempt]
    ran = [record for record, host in zip(records, hosts, strict=True) if host in held.hosts]
    if all(record in ended and record.verdict == "done" for record in ran):
        return Finish()
    died = [record for record in ended if record.verdict == "before-first-iteration"]
    if died and not proven and held.plan is not None and held.choice is not None:
        return _after_death(_failures(died), held.plan, held, written)
    failures = _failures(ended)
    leaner = _leaner(failures, held)
    if leaner is not None:
        return leaner
    if not (failures or died):
        return Keep(proven=proven, restarts_left=held.restarts_left)
    sentence = failures[0].sentence if failures else "the job died"
    if held.restarts_left == 0:
        return GiveUp(reason=f"{sentence}; --max-restarts is used up")
    return Keep(
        proven=proven,
        restarts_left=held.restarts_left - 1,
        # Without a plan the reason stays empty, so that the launcher prints no more than torchrun.
        reason=f"{sentence}; starting again under the same plan" if held.plan else "",
    )


def _leaner(failures: Sequence[Failure], held: RunTraining) -> TryNext | None:
    """Return the next candidate that needs less memory, if a plan that has trained ran out of memory. Otherwise None.

    Each candidate is tried once, so the number of changes is limited. A change of candidate does not count as a
    restart.
    """
    short = next((failure for failure in failures if failure.ran_out_of_memory), None)
    if short is None or held.plan is None or held.choice is None:
        return None
    candidates = held.plan.candidates()
    attempt = _next_attempt(candidates, held.attempt, needs_less=True)
    return TryNext(attempt=attempt, reason=short.sentence) if attempt < len(candidates) else None


def _failures(ended: Sequence[NodeRecord]) -> list[Failure]:
    return sorted({record.failure for record in ended if record.failure}, key=lambda one: one.sentence)


def _after_death(
    failures: Sequence[Failure], plan: Plan, held: RunTraining, written: Sequence[str]
) -> TryNext | GiveUp:
    """Continue with the next candidate, unless the script would die under every plan."""
    candidates = plan.candidates()
    layout = candidates[held.attempt].layout
    is_other = layout not in {candidate.layout for candidate in candidates[: held.attempt]}
    before = held.failures if is_other else ()
    hopeless = why_to_give_up(failures, before=before, written=written, given=held.script_arguments)
    if hopeless:
        return GiveUp(reason=hopeless)
    short = any(failure.ran_out_of_memory for failure in failures)
    attempt = _next_attempt(candidates, held.attempt, needs_less=short)
    return TryNext(attempt=attempt, reason=failures[0].sentence if failures else "the job died")


def why_to_give_up(
    failures: Sequence[Failure], *, before: Sequence[Failure], written: Sequence[str], given: Sequence[str] | None
) -> str:
    """Return why a script that died before its first iteration would die under every plan. Empty = a plan may help.

    `written` are the user's own arguments, and `given` the arguments that the script got (None = the user's own).
    """
    if any(failure.ran_out_of_memory for failure in failures):
        return ""
    for failure in failures:
        why = megatron.why_no_plan_helps(failure, before=before, written=written, given=given)
        if why:
            return f"{failure.sentence}; no other plan is tried: {why}"
    return ""


def _next_attempt(candidates: Sequence[Choice], attempt: int, *, needs_less: bool) -> int:
    """Return the index of the next candidate (with less memory if `needs_less`), or the number of candidates."""
    held = max(candidates[attempt].memory.need_bytes)
    for index in range(attempt + 1, len(candidates)):
        if not needs_less or max(candidates[index].memory.need_bytes) < held:
            return index
    return len(candidates)
