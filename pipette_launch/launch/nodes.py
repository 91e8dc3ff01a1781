"""What the nodes of a round say of themselves, as the job's hosts."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pipette_launch.errors import ClusterError, PipetteError, UsageError
from pipette_launch.probe.health import inventory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipette_launch.agent.controller import Node
    from pipette_launch.facts import Host
    from pipette_launch.facts.health import DeviceCondition
    from pipette_launch.facts.messages import NodeRecord


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this machine says of itself."""

    versions: dict[str, str]
    host: Host | None = None
    """None where it could not be described; `trouble` then says why."""
    conditions: tuple[DeviceCondition, ...] = ()
    notes: tuple[str, ...] = ()
    """Troubles that stop no plan, such as GPUs that are lost."""
    trouble: str = ""
    is_misuse: bool = False
    """Whether the trouble is that a flag asks for what this machine does not have."""


def described(node: Node, device: Literal["auto", "cuda", "cpu"]) -> Machine:
    """Describe this machine.

    Args:
        node: what torchrun knows of it.
        device: `auto`, `cuda` or `cpu`.

    """
    machine = Machine(versions={})
    try:
        machine = Machine(versions=inventory.versions())
        host = inventory.host(
            name=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            address=node.address,
            num_devices=node.num_slots,
            device=device,
        )
        notes = inventory.lost_gpus() if host.devices[0].kind == "cuda" else ()
        return replace(machine, host=host, conditions=inventory.conditions(host), notes=notes)
    except PipetteError as error:
        return replace(machine, trouble=str(error), is_misuse=isinstance(error, UsageError))
    except Exception as error:
        # A driver in disorder, for one: torchrun would not have asked it.
        logger.exception("this machine cannot be described")
        return replace(machine, trouble=f"the machine cannot be described: {type(error).__name__}: {error}")


def in_order(records: Sequence[NodeRecord]) -> Sequence[NodeRecord]:
    """Put nodes in torchrun's own order: by --node-rank where it counts, else as they met."""
    by_rank = min(record.node_rank for record in records) >= 0
    return sorted(records, key=lambda record: record.node_rank) if by_rank else records


def unique_names(records: Sequence[NodeRecord], held: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Name the hosts of a round: by name, with the address or a number where names are equal.

    Args:
        records: one for each host.
        held: names from the round before, by token; they stay, or the loss of one host would rename others.

    """
    here = {record.token for record in records}
    names = {token: name for token, name in (held or {}).items() if token in here}
    for record, name in zip(records, _unique(records), strict=True):
        unique, number = name, 1
        while record.token not in names and unique in names.values():
            number += 1
            unique = f"{name}#{number}"
        names.setdefault(record.token, unique)
    return tuple(names[record.token] for record in records)


def _unique(records: Sequence[NodeRecord]) -> list[str]:
    plain = [record.host.name if record.host else record.token for record in records]
    shared = {name for name, count in Counter(plain).items() if count > 1}
    named = [
        f"{name}@{record.host.address}" if name in shared and record.host else name
        for name, record in zip(plain, records, strict=True)
    ]
    seen: Counter[str] = Counter()
    unique = []
    for name in named:
        seen[name] += 1
        unique.append(f"{name}#{seen[name]}" if named.count(name) > 1 else name)
    return unique


def hosts_of(records: Sequence[NodeRecord], names: Sequence[str]) -> tuple[Host, ...]:
    """Return the job's hosts under unique names.

    Raises:
        ClusterError: no plan can use this set of nodes.
        UsageError: a flag asks for what one of them does not have.

    """
    for record, name in zip(records, names, strict=True):
        if record.trouble:
            raise (UsageError if record.is_misuse else ClusterError)(f"{name}: {record.trouble}")
    counts = {name: record.num_slots for record, name in zip(records, names, strict=True)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ClusterError(
            f"the nodes lend unequal numbers of slots ({listed}); give every node the same --nproc-per-node, "
            f"at most {min(counts.values())}"
        )
    for what, values in (
        ("script and arguments", [record.script_digest for record in records]),
        ("versions", [str(sorted((record.versions | {"driver": ""}).items())) for record in records]),
    ):
        others = [name for name, value in zip(names, values, strict=True) if value != values[0]]
        if others:
            raise ClusterError(
                f"{what} differ between {names[0]} and {', '.join(others)}; start the same on every node"
            )
    ranks = [record.node_rank for record in records]
    if len(set(ranks)) < len(ranks) and min(ranks) >= 0:
        raise ClusterError(f"two nodes have the same --node-rank: {sorted(ranks)}")
    hosts = [record.host for record in records if record.host]
    _check_shared_gpus(hosts)
    agents = Counter((host.name, host.address) for host in hosts)
    parts = [_part(host, agents[host.name, host.address]) for host in hosts]
    return tuple(replace(part, name=name) for part, name in zip(parts, names, strict=True))


def _check_shared_gpus(hosts: Sequence[Host]) -> None:
    """Raise ClusterError where two launchers of one machine use the same GPU: NCCL refuses that in the training."""
    users = Counter(
        (host.name, host.address, device.uuid) for host in hosts for device in host.devices if device.kind == "cuda"
    )
    for (name, _, uuid), count in users.items():
        if count > 1:
            raise ClusterError(
                f"{count} launchers on {name} use {uuid}; start one launcher per machine (srun --ntasks-per-node=1), "
                "or give each its own GPUs by CUDA_VISIBLE_DEVICES"
            )


def notes_of(records: Sequence[NodeRecord], names: Sequence[str]) -> tuple[str, ...]:
    """Return notes about the nodes that stop no plan.

    Drivers may differ: an upgrade rolls through a cluster for days, and the training runs on both.
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


def _part(host: Host, num_agents: int) -> Host:
    """What an agent may use of a machine that it shares: each has told of all its memory. GPUs are nobody else's."""
    return replace(
        host,
        devices=tuple(
            replace(
                device,
                memory_total_bytes=device.memory_total_bytes // num_agents,
                memory_free_bytes=device.memory_free_bytes // num_agents,
            )
            if device.kind == "cpu"
            else device
            for device in host.devices
        ),
    )


def joined(*sentences: str) -> str:
    """Join what there is to say; some of it may be empty."""
    return "; ".join(sentence for sentence in sentences if sentence)
