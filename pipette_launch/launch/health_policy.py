"""Policy for sick hosts and spare hosts (`--pipette-on-sick`, `--pipette-spares`), which decides by verdicts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from pipette_launch.facts import Host
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.messages import Decision
from pipette_launch.launch.options import OnSick
from pipette_launch.text import plural

MEASURED = ("slow-device", "slow-host", "slow-link")
"""Kinds of verdicts that only a warm-up can give. The drivers give the other verdicts at each start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """Decision of the policy: hosts that run no workers, and the reasons."""

    leave_out: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    """Reasons of the ruling, one sentence each, for the user."""
    stops: bool = False
    """True if the job must not train."""
    spares: tuple[str, ...] = ()
    """Hosts that run no workers until another host is lost."""

    @property
    def on_standby(self) -> tuple[str, ...]:
        """All hosts without workers: hosts that are left out, and spares."""
        return (*self.leave_out, *self.spares)


WhyNot: TypeAlias = Callable[[tuple[str, ...]], str]
"""Function that returns why the job cannot run on the given hosts alone, or an empty text if the job can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The user's settings for sick hosts and spares. Methods get all hosts' names in torchrun's order."""

    on_sick: OnSick
    spares: int = 0
    least_nodes: int = 1
    """MIN of --nnodes."""
    is_static: bool = False
    """True if the rendezvous waits for all nodes and ignores --nnodes."""

    def rule(self, verdicts: Sequence[Verdict], hosts: Sequence[str], why_not: WhyNot) -> Ruling:
        """Decide which sick hosts run no workers."""
        sick = [verdict for verdict in verdicts if verdict.is_sick and verdict.host in hosts]
        words = tuple(verdict.words() for verdict in sick)
        if not sick or self.on_sick == "warn":
            return Ruling(reasons=words)
        if self.on_sick == "fail":
            return Ruling(reasons=(*words, "the job stops, because of --pipette-on-sick=fail"), stops=True)
        out = hosts_to_leave(sick, hosts)
        rest = tuple(host for host in hosts if host not in out)
        named, them = ", ".join(out), "it" if len(out) == 1 else "them"
        hindrance = self._too_few(len(rest), len(hosts)) or why_not(rest)
        if hindrance:
            start = "add a spare node"
            if 0 < len(rest) < self.least_nodes:
                backend = "--rdzv-backend c10d " if self.is_static else ""
                start = f"start with {backend}--nnodes {len(rest)}:{len(hosts)}"
            remedy = f"{start}, or keep {them} out of the job with sbatch --exclude={','.join(out)}"
            return Ruling(
                reasons=(*words, f"{named} cannot be excluded: {hindrance}; {remedy}; the job goes on with {them}")
            )
        does = "runs no workers and waits" if len(out) == 1 else "run no workers and wait"
        return Ruling(
            leave_out=out, reasons=(*words, f"{named} {does} on standby, because of --pipette-on-sick=exclude")
        )

    def _too_few(self, left: int, total: int) -> str:
        if left >= max(self.least_nodes, 1):
            return ""
        if left == 0:
            return "no healthy node would be left"
        return f"{left} of {total} nodes would be left, and --nnodes needs at least {self.least_nodes}"

    def with_spares(self, ruling: Ruling, verdicts: Sequence[Verdict], hosts: Sequence[str], why_not: WhyNot) -> Ruling:
        """Choose spares among the remaining hosts: sick hosts first, then the last hosts in torchrun's order."""
        count, least = self.spares, self.least_nodes
        if not count or ruling.stops:
            return ruling
        left = [host for host in hosts if host not in ruling.leave_out]
        num_spares = max(min(count, len(left) - max(least, 1)), 0)
        sick = hosts_to_leave([one for one in verdicts if one.is_sick and one.host in left], left)
        order = sorted(left, key=lambda host: (host not in sick, -left.index(host)))
        spares = tuple(host for host in left if host in order[:num_spares])
        words: tuple[str, ...] = ()
        if num_spares < count:
            has = f"the job has {num_spares} {plural('spare', num_spares)}"
            words = (f"--pipette-spares {count}: --nnodes needs {least} of {len(left)} nodes, so {has}",)
        hindrance = why_not(tuple(host for host in left if host not in spares)) if spares else ""
        if hindrance:
            words = (f"--pipette-spares {count}: the job has no spare: without {', '.join(spares)} {hindrance}",)
            return replace(ruling, reasons=(*ruling.reasons, *words))
        if spares:
            does = "stands by as a spare" if len(spares) == 1 else "stand by as spares"
            words = (*words, f"{', '.join(spares)} {does}, because of --pipette-spares")
        return replace(ruling, spares=spares, reasons=(*ruling.reasons, *words))


def measured(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Return the verdicts that only a warm-up can give."""
    return tuple(verdict for verdict in verdicts if verdict.kind in MEASURED)


def small_holders(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """Name processes that hold a little memory of a healthy device, which training may lack."""
    return tuple(verdict.words() for verdict in verdicts if verdict.kind == "busy" and not verdict.is_sick)


def hosts_to_leave(sick: Sequence[Verdict], hosts: Sequence[str]) -> tuple[str, ...]:
    """Return few hosts whose absence removes all these faults. Without one of its two hosts, a slow link is gone.

    The next host is always the host with most of the remaining slow links; among equals the last in torchrun's order.
    """
    out = {verdict.host for verdict in sick if not verdict.other_host}
    links = [(verdict.host, verdict.other_host) for verdict in sick if verdict.other_host]
    while links := [link for link in links if not out & {*link}]:
        counts = Counter(host for link in links for host in link)
        out.add(max((host for host in hosts if host in counts), key=lambda host: (counts[host], hosts.index(host))))
    return tuple(host for host in hosts if host in out)


def apart(bare: Decision, hosts: tuple[Host, ...], ruling: Ruling) -> tuple[Decision, tuple[Host, ...]]:
    """Put the ruling's hosts on standby. Return the decision and the hosts that remain for training."""
    rest = tuple(host for host in hosts if host.name not in ruling.on_standby)
    return bare.leaving_out(ruling.on_standby), rest
