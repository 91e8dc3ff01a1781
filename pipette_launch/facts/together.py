"""Which ranks a job's flags demand inside one host or one NVLink domain, and degrees for which that is impossible.

The groups that matter are consecutive ranks in both of Megatron's rank orders: a tensor-parallel group begins at a
multiple of tp, and an expert group (EP and ETP together) at a multiple of ep*etp. That LOCAL_RANK is RANK modulo the
devices of a host, which these libraries take for granted too, holds for every plan on GPUs.

- Userbuffers (`--tp-comm-overlap`): each tensor-parallel group inside a host. TransformerEngine from 2.2 on is assumed;
  before, it wanted the ranks of each host to be consecutive.
- DeepEP (`--moe-token-dispatcher-type flex`): RANK / 8 of the expert group is its network rank and RANK % 8 its NVLink
  rank, so every 8 consecutive ranks lie inside a host; a smaller group does as a whole. Only groups of the sizes for
  which DeepEP holds settings can start.
- HybridEP and NCCL EP (`--moe-flex-dispatcher-backend`): the same with as many ranks as an NVLink domain holds, of
  which every expert group must have equally many in each domain that it touches.
"""

from __future__ import annotations

from pipette_launch.errors import LayoutError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.machines.rooms import RankBlock, Rooms
from pipette_launch.facts.model import ModelSpec
from pipette_launch.facts.performance import PerformanceOptions, flag_of

DEEPEP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Ranks of an expert group for which DeepEP has settings (`Buffer.get_dispatch_config`)."""
DEEPEP_NVLINK = 8
BY_DOMAIN = {"hybridep": "HybridEP", "ncclep": "NCCL EP"}
"""Backends of the flex dispatcher that go by NVLink domains; any other is DeepEP."""


def blocks_of(model: ModelSpec, options: PerformanceOptions, layout: Layout, rooms: Rooms) -> tuple[RankBlock, ...]:
    """Return what a layout must keep together on GPUs; raises LayoutError where these rooms cannot hold it so."""
    found = [tensor_block(options, layout.tp, rooms)]
    if model.num_experts:
        found.append(expert_block(options, layout.ep * layout.etp, rooms))
    return tuple(block for block in found if block)


def tensor_block(options: PerformanceOptions, tp: int, rooms: Rooms) -> RankBlock | None:
    """Return what tensor parallelism must keep together, or None; raises LayoutError where no host can hold it."""
    if not options.tp_comm_overlap or tp == 1:
        return None
    flag = flag_of("tp_comm_overlap")
    if rooms.devices_per_host % tp:
        raise LayoutError(f"{flag} needs tp groups that fill hosts of {rooms.devices_per_host}")
    return RankBlock(size=tp, room="host", kind="tensor-parallel", asked_by=flag)


def expert_block(options: PerformanceOptions, group: int, rooms: Rooms) -> RankBlock | None:
    """Return what the flex dispatcher must keep together, or None; raises LayoutError where no room can hold it.

    Args:
        options: of the job.
        group: ranks of an expert group, ep*etp.
        rooms: where they may lie.

    """
    dispatcher = options.moe_token_dispatcher_type
    if dispatcher != "flex" or group == 1:
        return None
    backend = options.moe_flex_dispatcher_backend
    if backend in BY_DOMAIN and not options.moe_enable_deepep:
        return _block_in_a_domain(BY_DOMAIN[backend], group, rooms)
    size, devices = min(group, DEEPEP_NVLINK), rooms.devices_per_host
    if group not in DEEPEP_SIZES:
        raise LayoutError(f"DeepEP has no settings for groups of ep*etp={group}")
    if devices % size:
        raise LayoutError(f"DeepEP needs blocks of {size} ranks of ep*etp that fill hosts of {devices}")
    return RankBlock(size=size, room="host", kind="expert-parallel", asked_by="DeepEP")


def _block_in_a_domain(asked_by: str, group: int, rooms: Rooms) -> RankBlock | None:
    """Keep an expert group inside a domain, or on whole domains of one size."""
    if not rooms.domain_H:
        return None
    sizes = rooms.domain_devices
    kind = "expert-parallel"
    # Between the hosts of a domain links are as within, so that a group which fills a host's part gains nothing beyond.
    if rooms.devices_per_host % group == 0:
        return RankBlock(size=group, room="host", kind=kind, asked_by=asked_by)
    size = group if len(sizes) > 1 else min(group, *sizes)
    if group % size or any(devices % size for devices in sizes):
        shown = " and ".join(map(str, sorted(sizes)))
        raise LayoutError(f"{asked_by} needs groups of ep*etp that fill NVLink domains of {shown}, or whole domains")
    alone = size == rooms.devices_per_host
    return RankBlock(size=size, room="host" if alone else "domain", kind=kind, asked_by=asked_by)
