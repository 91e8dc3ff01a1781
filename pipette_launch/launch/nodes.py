"""The nodes of a round: each node describes its machine, and the deciding node turns the descriptions into hosts."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pipette_launch.errors import ClusterError, PipetteError, UsageError
from pipette_launch.facts import Host
from pipette_launch.facts.messages import NodeRecord
from pipette_launch.probe.health import inventory

logger = logging.getLogger(__name__)


def described(record: NodeRecord, address: str, device: Literal["auto", "cuda", "cpu"]) -> NodeRecord:
    """Add a description of this machine with its devices of one kind to a record, or the reason why that failed."""
    try:
        record = replace(record, versions=inventory.versions())
        host = inventory.host(
            name=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            address=address,
            num_devices=record.num_slots,
            device=device,
        )
        notes = inventory.lost_gpus() if host.devices[0].kind == "cuda" else ()
        return replace(record, host=host, conditions=inventory.conditions(host), notes=notes)
    except PipetteError as error:
        return replace(record, trouble=str(error), is_misuse=isinstance(error, UsageError))
    except Exception as error:
        # For example, the driver is broken. torchrun does not query the driver, so the job may still train.
        logger.exception("this machine cannot be described")
        return replace(record, trouble=f"the machine cannot be described: {type(error).__name__}: {error}")


def in_order(records: Sequence[NodeRecord]) -> Sequence[NodeRecord]:
    """Return the nodes in torchrun's order: by --node-rank if all nodes have this flag, else by rendezvous rank."""
    by_rank = min(record.node_rank for record in records) >= 0
    return sorted(records, key=lambda record: record.node_rank) if by_rank else records


def unique_names(records: Sequence[NodeRecord], held: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return a unique name for each host. Equal names are extended by the address or a number.

    Names `held` in the last round, by token, stay, so that the loss of a host does not rename other hosts.
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

    Raises ClusterError if the nodes differ in a way that no plan allows, and UsageError if a node lacks something
    that a flag needs.
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
                f"{what} differ between {names[0]} and {', '.join(others)}; start the same on every node"
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


def joined(*sentences: str) -> str:
    """Join the sentences that are not empty."""
    return "; ".join(filter(None, sentences))
