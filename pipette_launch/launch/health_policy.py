"""What becomes of hosts with which something is amiss: `--pipette-on-sick`, decided from verdicts alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipette_launch.facts import Host
    from pipette_launch.facts.health import Verdict
    from pipette_launch.facts.messages import Decision
    from pipette_launch.launch.options import OnSick


MEASURED = ("slow-device", "slow-host", "slow-link")
"""Kinds of verdicts that only a warm-up can give; the others are given anew at each start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """What a policy makes of verdicts."""

    leave_out: tuple[str, ...] = ()
    """Hosts that are to run no workers."""
    reasons: tuple[str, ...] = ()
    """What to tell the user, one sentence each."""
    stops: bool = False
    """The job must not train."""
    spares: tuple[str, ...] = ()
    """Hosts that are to run no workers until another is lost."""

    @property
    def on_standby(self) -> tuple[str, ...]:
        """All hosts that are to run no workers."""
        return (*self.leave_out, *self.spares)


def rule(
    verdicts: Sequence[Verdict],
    hosts: Sequence[str],
    *,
    policy: OnSick,
    least_nodes: int,
    is_static: bool = False,
    why_not: Callable[[tuple[str, ...]], str],
) -> Ruling:
    """Apply a policy to what was found.

    Args:
        verdicts: of these hosts, sick or not.
        hosts: those that are to train, in torchrun's order.
        policy: what the user said.
        least_nodes: how few may train, MIN of --nnodes.
        is_static: whether the rendezvous is, which waits for all nodes whatever --nnodes says.
        why_not: says why the job cannot run on these hosts alone; empty where it can.

    """
    sick = [verdict for verdict in verdicts if verdict.is_sick and verdict.host in hosts]
    words = tuple(verdict.words() for verdict in sick)
    if not sick or policy == "warn":
        return Ruling(reasons=words)
    if policy == "fail":
        return Ruling(reasons=(*words, "the job stops, as --pipette-on-sick=fail asks"), stops=True)
    out = hosts_to_leave(sick, hosts)
    rest = tuple(host for host in hosts if host not in out)
    named, them = ", ".join(out), "it" if len(out) == 1 else "them"
    hindrance = _too_few(len(rest), len(hosts), least_nodes) or why_not(rest)
    if hindrance:
        backend = "--rdzv-backend c10d " if is_static else ""
        remedy = _remedy(out, f"{backend}--nnodes {len(rest)}:{len(hosts)}" if 0 < len(rest) < least_nodes else "")
        words += (f"{named} cannot be excluded: {hindrance}; {remedy}; the job goes on with {them}",)
        return Ruling(reasons=words)
    does = "runs no workers and waits" if len(out) == 1 else "run no workers and wait"
    return Ruling(leave_out=out, reasons=(*words, f"{named} {does} on standby, as --pipette-on-sick=exclude asks"))


def with_spares(
    ruling: Ruling,
    verdicts: Sequence[Verdict],
    hosts: Sequence[str],
    *,
    count: int,
    least_nodes: int,
    why_not: Callable[[tuple[str, ...]], str],
) -> Ruling:
    """Hold hosts back as spares, of those that are not left out: the sick ones first, else the last in order.

    Args:
        ruling: who is left out.
        verdicts: of these hosts, sick or not.
        hosts: in torchrun's order.
        count: how many spares the user wants.
        least_nodes: how few may train, MIN of --nnodes.
        why_not: says why the job cannot run on these hosts alone; empty where it can.

    """
    if not count or ruling.stops:
        return ruling
    left = [host for host in hosts if host not in ruling.leave_out]
    num_spares = max(min(count, len(left) - max(least_nodes, 1)), 0)
    sick = hosts_to_leave([one for one in verdicts if one.is_sick and one.host in left], left)
    order = sorted(left, key=lambda host: (host not in sick, -left.index(host)))
    spares = tuple(host for host in left if host in order[:num_spares])
    fewer = f"--pipette-spares {count}: --nnodes wants {least_nodes} of {len(left)} nodes, so {num_spares} stand by"
    words = (fewer,) if num_spares < count else ()
    hindrance = why_not(tuple(host for host in left if host not in spares)) if spares else ""
    if hindrance:
        words = (f"--pipette-spares {count}: no node stands by, since without {', '.join(spares)} {hindrance}",)
        return replace(ruling, reasons=(*ruling.reasons, *words))
    if spares:
        does = "stands by as a spare" if len(spares) == 1 else "stand by as spares"
        words = (*words, f"{', '.join(spares)} {does}, as --pipette-spares asks")
    return replace(ruling, spares=spares, reasons=(*ruling.reasons, *words))


def measured(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Return those that are worth remembering."""
    return tuple(verdict for verdict in verdicts if verdict.kind in MEASURED)


def small_holders(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """Name those who hold a little of a device: no sickness, and yet what a later job may run out of."""
    return tuple(verdict.words() for verdict in verdicts if verdict.kind == "busy" and not verdict.is_sick)


def hosts_to_leave(sick: Sequence[Verdict], hosts: Sequence[str]) -> tuple[str, ...]:
    """Name the hosts without which nothing of this is left; of a slow link one end will do.

    Ends are chosen greedily: the host of the most slow links that are left, of equals the last in torchrun's order.
    """
    out = {verdict.host for verdict in sick if not verdict.other_host}
    links = [(verdict.host, verdict.other_host) for verdict in sick if verdict.other_host]
    while links := [link for link in links if not out & {*link}]:
        counts = Counter(host for link in links for host in link)
        out.add(max((host for host in hosts if host in counts), key=lambda host: (counts[host], hosts.index(host))))
    return tuple(host for host in hosts if host in out)


def _too_few(left: int, total: int, least_nodes: int) -> str:
    if left >= max(least_nodes, 1):
        return ""
    if left == 0:
        return "no healthy node would be left"
    return f"{left} of {total} nodes would be left, and --nnodes wants at least {least_nodes}"


def _remedy(out: Sequence[str], flags: str) -> str:
    """Say what the user can do about it at the next start."""
    elsewhere = f"keep {'it' if len(out) == 1 else 'them'} out of the job with sbatch --exclude={','.join(out)}"
    return f"start with {flags}, or {elsewhere}" if flags else f"add a spare node, or {elsewhere}"


def apart(bare: Decision, hosts: tuple[Host, ...], ruling: Ruling) -> tuple[Decision, tuple[Host, ...]]:
    """Put the hosts that a ruling leaves out or holds back on standby; returns the decision and the other hosts."""
    rest = tuple(host for host in hosts if host.name not in ruling.on_standby)
    return bare.leaving_out(ruling.on_standby), rest
