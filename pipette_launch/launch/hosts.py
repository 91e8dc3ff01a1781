"""The hosts of a round: nodes describe their machines, and a policy leaves out sick hosts and spare hosts."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from pipette_launch import megatron
from pipette_launch.errors import ClusterError, PipetteError, UsageError
from pipette_launch.facts import Host, Layout, Measurements
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.layout import Degrees
from pipette_launch.facts.messages import NodeRecord, RunTraining, best_left_out
from pipette_launch.launch.options import OnSick, Options
from pipette_launch.probe.health import inventory
from pipette_launch.text import joined, plural

logger = logging.getLogger(__name__)
AS_TORCHRUN = "training with your own configuration as torchrun would"
SHOWN_HOSTS = 32


def described(record: NodeRecord, address: str, device: Literal["auto", "cuda", "cpu"]) -> NodeRecord:
    """Add a description of this machine and its devices of one kind to a record, or the error that prevented it."""
    try:
        record = replace(record, versions=inventory.versions())
        host = inventory.host(
            name=os.environ.get("PIPETTE_NODE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            address=address,
            num_devices=record.num_slots,
            device=device,
        )
        notes = inventory.lost_gpus() if host.devices[0].kind == "cuda" else ()
        return replace(record, host=host, conditions=inventory.conditions(host), notes=notes)
    except PipetteError as error:
        return replace(record, trouble=str(error), is_misuse=isinstance(error, UsageError))
    except Exception as error:
        # The driver may be broken. torchrun does not query the driver, so the job may still train.
        logger.exception("this machine cannot be described")
        return replace(record, trouble=f"the machine cannot be described: {type(error).__name__}: {error}")


def in_order(records: Sequence[NodeRecord]) -> Sequence[NodeRecord]:
    """Return the nodes in torchrun's order: by --node-rank if all nodes have this flag, else by rendezvous rank."""
    by_rank = min(record.node_rank for record in records) >= 0
    return sorted(records, key=lambda record: record.node_rank) if by_rank else records


def unique_names(records: Sequence[NodeRecord], held: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return a unique name for each host. Equal names are extended by the address or a number.

    Hosts keep the names that they `held` in the last round, so that the loss of a host renames no other host.
    """
    here = {record.token for record in records}
    names = {token: name for token, name in (held or {}).items() if token in here}
    plain = [record.host.name if record.host else record.token for record in records]
    shared = {name for name, count in Counter(plain).items() if count > 1}
    addressed = [
        f"{name}@{record.host.address}" if name in shared and record.host else name
        for name, record in zip(plain, records, strict=True)
    ]
    seen: Counter[str] = Counter()
    for record, name in zip(records, addressed, strict=True):
        seen[name] += 1
        first = unique = f"{name}#{seen[name]}" if addressed.count(name) > 1 else name
        number = 1
        while record.token not in names and unique in names.values():
            number += 1
            unique = f"{first}#{number}"
        names.setdefault(record.token, unique)
    return tuple(names[record.token] for record in records)


def hosts_of(records: Sequence[NodeRecord], names: Sequence[str]) -> tuple[Host, ...]:
    """Return the job's hosts under unique names.

    Raises ClusterError if no plan allows the nodes' differences, and UsageError if a node lacks what a flag needs.
    """
    for record, name in zip(records, names, strict=True):
        if record.trouble:
            raise (UsageError if record.is_misuse else ClusterError)(f"{name}: {record.trouble}")
    counts = {name: record.num_slots for record, name in zip(records, names, strict=True)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ClusterError(
            f"the nodes have different numbers of slots ({listed}); give every node the same --nproc-per-node, "
            f"at most {min(counts.values())}"
        )
    for what, values in (
        ("script and arguments", [record.script_digest for record in records]),
        ("versions", [str(sorted((record.versions | {"driver": ""}).items())) for record in records]),
    ):
        others = [name for name, value in zip(names, values, strict=True) if value != values[0]]
        if others:
            raise ClusterError(
                f"{what} differ between {names[0]} and {', '.join(others)}; make them equal on every node"
            )
    ranks = [record.node_rank for record in records]
    if len(set(ranks)) < len(ranks) and min(ranks) >= 0:
        raise ClusterError(f"two nodes have the same --node-rank: {sorted(ranks)}")
    hosts = [record.host for record in records if record.host]
    _check_shared_gpus(hosts)
    agents = Counter((host.name, host.address) for host in hosts)
    shares = [_share(host, agents[host.name, host.address]) for host in hosts]
    return tuple(replace(share, name=name) for share, name in zip(shares, names, strict=True))


def _check_shared_gpus(hosts: Sequence[Host]) -> None:
    """Raise ClusterError if two launchers on one machine use the same GPU, because NCCL would refuse to train."""
    users = Counter(
        (host.name, host.address, device.uuid) for host in hosts for device in host.devices if device.kind == "cuda"
    )
    for (name, _, uuid), count in users.items():
        if count > 1:
            raise ClusterError(
                f"{count} launchers on {name} use {uuid}; start one launcher per machine (srun --ntasks-per-node=1), "
                "or give each its own GPUs by CUDA_VISIBLE_DEVICES"
            )


def _share(host: Host, num_agents: int) -> Host:
    """Divide a machine's CPU memory among its agents, because each agent reported the whole memory."""
    devices = (
        replace(
            device,
            memory_total_bytes=device.memory_total_bytes // num_agents,
            memory_free_bytes=device.memory_free_bytes // num_agents,
        )
        if device.kind == "cpu"
        else device
        for device in host.devices
    )
    return replace(host, devices=tuple(devices))


def notes_of(records: Sequence[NodeRecord], names: Sequence[str]) -> tuple[str, ...]:
    """Return notes about the nodes that do not prevent a plan.

    Different driver versions only give a note: upgrading a cluster takes days, and training runs on mixed versions.
    """
    drivers: dict[str, list[str]] = {}
    for record, name in zip(records, names, strict=True):
        drivers.setdefault(record.versions.get("driver", "none"), []).append(name)
    listed = ", ".join(
        f"{version} on {on[0] if len(on) == 1 else f'{len(on)} nodes'}" for version, on in sorted(drivers.items())
    )
    differ = (f"the NVIDIA drivers differ ({listed})",) if len(drivers) > 1 else ()
    own = (f"{name}: {note}" for record, name in zip(records, names, strict=True) for note in record.notes)
    return (*differ, *own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """Decision of the health policy: hosts that run no workers, and the reasons."""

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
    """The user's settings for sick hosts and spares. All methods expect all hosts' names in torchrun's order."""

    on_sick: OnSick
    spares: int = 0
    least_nodes: int = 1
    """MIN of --nnodes: fewest nodes that train."""
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
        hindrance = "no healthy node would be left"
        if rest:
            few = f"{len(rest)} of {len(hosts)} nodes would be left, and --nnodes needs at least {self.least_nodes}"
            hindrance = few if len(rest) < self.least_nodes else why_not(rest)
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
        reasons = list(ruling.reasons)
        if hindrance := why_not(tuple(host for host in left if host not in spares)) if spares else "":
            reasons.append(f"--pipette-spares {count}: the job has no spare: without {', '.join(spares)} {hindrance}")
            return replace(ruling, reasons=tuple(reasons))
        if num_spares < count:
            has = f"the job has {num_spares} {plural('spare', num_spares)}"
            reasons.append(f"--pipette-spares {count}: --nnodes needs {least} of {len(left)} nodes, so {has}")
        if spares:
            does = "stands by as a spare" if len(spares) == 1 else "stand by as spares"
            reasons.append(f"{', '.join(spares)} {does}, because of --pipette-spares")
        return replace(ruling, spares=spares, reasons=tuple(reasons))


def hosts_to_leave(sick: Sequence[Verdict], hosts: Sequence[str]) -> tuple[str, ...]:
    """Return few hosts without which all faults are gone. A slow link is gone without one of its two hosts."""
    out = {verdict.host for verdict in sick if verdict.other_host not in hosts}
    links = [(one.host, one.other_host) for one in sick if not out & {one.host, one.other_host}]
    out |= best_left_out(links, hosts).keys()
    return tuple(host for host in hosts if host in out)


def orders_hosts(options: Options, num_hosts: int) -> bool:
    """Return whether the hosts of a job that cannot be planned get an order by their links."""
    may_go_on = options.on_error != "fail" and not options.only_looks and options.host_order == "measured"
    # Two hosts have one link, so no order of two hosts is faster.
    return may_go_on and num_hosts > 2 and not megatron.binds_hosts(options.script_arguments)


def in_order_of_links(bare: RunTraining, measured: Measurements, options: Options) -> RunTraining:
    """Order the hosts of a training without a plan by their links; the reason of the decision has the gain."""
    # Import the search only here, because a start with a cached plan does not search.
    from pipette_launch.search.placement import order_hosts

    names, num_ranks = [host.name for host in measured.cluster.hosts], bare.num_ranks
    given_H = np.array([names.index(host) for host in bare.hosts])
    stated = megatron.stated_layout(options.script_arguments, num_ranks)
    layout = stated or Layout(dp=num_ranks)
    order_H, gain = order_hosts(measured, given_H, layout, margin=options.margin, seed=options.seed)
    ring = "all ranks exchange data in a ring"
    degrees = " ".join(word for name, word in layout.named_words().items() if name in Degrees._fields)
    assumed = f"({degrees}, as your flags say)" if stated else f"(assumption: {ring})"
    if not gain:
        reason = f"{AS_TORCHRUN}: measured links give no faster order of the hosts {assumed}"
        return replace(bare, reason=joined(bare.reason, reason))
    order = tuple(names[host] for host in order_H)
    listed = ", ".join(order[:SHOWN_HOSTS]) + (" and so on" if len(order) > SHOWN_HOSTS else "")
    reason = f"training with your own configuration, on the hosts in the order {listed} {assumed}: {gain}"
    return replace(bare, host_order=order, reason=joined(bare.reason, reason))


def in_held_order(bare: RunTraining, held: Sequence[str]) -> RunTraining:
    """Keep the order of the remaining hosts of a training without a plan; hosts that came later are last."""
    if not held:
        return replace(bare, reason=joined(bare.reason, AS_TORCHRUN))
    order = (*(host for host in held if host in bare.hosts), *(host for host in bare.hosts if host not in held))
    reason = "training with your own configuration, on the remaining hosts in the same order"
    return replace(bare, host_order=order, reason=joined(bare.reason, reason))
