"""Tests of the check that collectives return shares in the order of ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_rules.bus_order import BusOrder
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.probe.links.rank_codes import Mismatch, check_order

SIZES_BYTES = (128, 1024)
LIMIT_S = 60.0
TWO_RANKS = """
import sys
import torch.distributed as dist
from pipette_launch.probe.links.rank_codes import check_order
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
print(check_order("cpu", sizes_bytes=(1 << 20,)))
dist.destroy_process_group()
"""


def test_devices_in_order_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's order of devices is the order of ranks there."""
    assert [None] * 4 == BusOrder((0, 1, 2, 3), monkeypatch).run(lambda: check_order("cpu", sizes_bytes=SIZES_BYTES))


@given(st.permutations(range(4)).filter(lambda order: order != [0, 1, 2, 3]))
def test_any_other_order_of_devices_fails(device_R: list[int]) -> None:
    """At least one rank sees a wrong value, whatever the permutation."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = BusOrder(device_R, monkeypatch).run(lambda: check_order("cpu", sizes_bytes=SIZES_BYTES))

    assert any(found)


def test_a_mismatch_names_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two swapped devices: rank 0 finds the first element of rank 1's share, 16 elements on."""
    found = BusOrder((1, 0), monkeypatch).run(lambda: check_order("cpu", sizes_bytes=(128,)))
    first = Mismatch(collective="all_gather", size_bytes=128, position=0, expected=0, found=16)

    assert [first, first] == found
    assert "all_gather of 0 MiB returned 16 instead of 0 at element 0" == first.words()


def test_a_wrong_sum_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce-scatter is checked where all-gather is right."""
    host = BusOrder((1, 0), monkeypatch)
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda full, *_, **__: full.copy_(torch.arange(len(full))))
    found = host.run(lambda: check_order("cpu", sizes_bytes=(128,)))

    # A sum of two ranks is twice the position, and 1 for the ranks.
    assert Mismatch(collective="reduce_scatter", size_bytes=128, position=0, expected=1, found=33) == found[0]


@pytest.mark.processes
def test_gloo_passes(tmp_path: Path) -> None:
    """Two processes over gloo, which has no such order."""
    words = [sys.executable, "-c", TWO_RANKS, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]

    assert ["None\n", "None\n"] == [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
