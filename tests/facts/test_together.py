"""What must lie together, by the flags, the degrees and the machines."""

from __future__ import annotations

import pytest
from facts_for_tests import tiny_model

from pipette_launch.errors import LayoutError
from pipette_launch.facts import Layout
from pipette_launch.facts.machines.rooms import Rooms
from pipette_launch.facts.performance import PerformanceOptions
from pipette_launch.facts.together import blocks_of, expert_block

HGX = Rooms(devices_per_host=8, domain_H=tuple(range(16)))
RACKS = Rooms(devices_per_host=4, domain_H=(0,) * 16 + (1,) * 16)
UNEVEN = Rooms(devices_per_host=4, domain_H=(0,) * 18 + (1,) * 14)
BLIND = Rooms(devices_per_host=4)
OVERLAP = PerformanceOptions(tp_comm_overlap=True)


def flex(backend: str = "deepep", *, deepep: bool = False) -> PerformanceOptions:
    """The flex dispatcher with a backend."""
    dispatcher = "flex"
    return PerformanceOptions(
        moe_token_dispatcher_type=dispatcher, moe_flex_dispatcher_backend=backend, moe_enable_deepep=deepep
    )


@pytest.mark.parametrize(
    ("options", "layout", "expected"),
    [
        (PerformanceOptions(), Layout(tp=8, dp=8, ep=8), ()),
        (OVERLAP, Layout(dp=64), ()),
        (OVERLAP, Layout(tp=4, dp=16), ((4, "host"),)),
        (flex(), Layout(dp=64), ()),
        (flex(), Layout(dp=64, ep=16), ((8, "host"),)),
    ],
)
def test_what_lies_together_on_hosts(
    options: PerformanceOptions, layout: Layout, expected: tuple[tuple[int, str], ...]
) -> None:
    """Of experts only where the model has any."""
    found = blocks_of(tiny_model(num_experts=64, moe_layer_freq=(1,) * 4), options, layout, HGX)

    assert expected == tuple((block.size, block.room) for block in found)
    assert all(block.kind == "tensor-parallel" for block in blocks_of(tiny_model(), options, layout, HGX))


@pytest.mark.parametrize(
    ("options", "group", "rooms", "expected"),
    [
        (flex(), 4, HGX, (4, "host")),
        (flex(), 8, HGX, (8, "host")),
        (flex(), 64, HGX, (8, "host")),
        (flex(), 3, HGX, "DeepEP has no settings for groups of ep*etp=3"),
        (flex(), 4, RACKS, (4, "host")),
        (flex(), 8, RACKS, "DeepEP needs blocks of 8 ranks of ep*etp that fill hosts of 4"),
        (flex("hybridep", deepep=True), 8, RACKS, "DeepEP needs blocks"),
        (flex("hybridep"), 4, HGX, (4, "host")),
        (flex("hybridep"), 32, HGX, (8, "host")),
        (flex("hybridep"), 12, HGX, "HybridEP needs groups of ep*etp that fill NVLink domains of 8, or whole domains"),
        (flex("hybridep"), 2, RACKS, (2, "host")),
        (flex("hybridep"), 8, RACKS, (8, "domain")),
        (flex("hybridep"), 64, RACKS, (64, "domain")),
        (flex("ncclep"), 128, RACKS, (64, "domain")),
        (flex("ncclep"), 96, RACKS, "NCCL EP needs groups of ep*etp that fill NVLink domains of 64, or whole domains"),
        (flex("hybridep"), 8, UNEVEN, (8, "domain")),
        (flex("hybridep"), 64, UNEVEN, "HybridEP needs groups of ep*etp that fill NVLink domains of 56 and 72, or"),
        (flex("hybridep"), 64, BLIND, None),
    ],
)
def test_the_blocks_of_each_dispatcher(
    options: PerformanceOptions, group: int, rooms: Rooms, expected: tuple[int, str] | str | None
) -> None:
    """DeepEP goes by hosts and 8 ranks, HybridEP and NCCL EP by NVLink domains; unknown domains refuse nothing."""
    if isinstance(expected, str):
        with pytest.raises(LayoutError) as caught:
            expert_block(options, group, rooms)
        assert expected in str(caught.value)
    else:
        block = expert_block(options, group, rooms)
        assert expected == (block and (block.size, block.room))


def test_userbuffers_want_hosts_that_are_filled() -> None:
    """Three ranks fill no host of eight, sixteen none either."""
    for tp in (3, 16):
        with pytest.raises(LayoutError, match="--tp-comm-overlap needs tp groups that fill hosts of 8"):
            blocks_of(tiny_model(), OVERLAP, Layout(tp=tp, dp=8), HGX)
