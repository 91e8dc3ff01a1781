"""Tests of the check of a device order."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
import warm
from gpu_rules import cuda_devices
from gpu_rules.bus_order import BusOrder
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import LIMIT_S, ROOT

from pipette_launch.agent.workers import visible_devices
from pipette_launch.facts.co_location import bindings
from pipette_launch.probe import order_check
from pipette_launch.probe.order_check import check_order

SIZES_BYTES = (128, 1024)
TWO_RANKS = """
import sys
import torch.distributed as dist
from pipette_launch.probe.order_check import check_order
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
print(check_order("cpu", sizes_bytes=(1 << 20,)))
dist.destroy_process_group()
"""


def test_devices_in_order_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's order of devices equals the order of ranks."""
    assert [""] * 4 == BusOrder((0, 1, 2, 3), monkeypatch).run(lambda: check_order("cpu", sizes_bytes=SIZES_BYTES))


@given(st.permutations(range(4)).filter(lambda order: order != [0, 1, 2, 3]))
def test_any_other_order_of_devices_fails(device_R: list[int]) -> None:
    """With any permutation at least one rank finds a wrong value."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = BusOrder(device_R, monkeypatch).run(lambda: check_order("cpu", sizes_bytes=SIZES_BYTES))

    assert any(found)


def test_a_mismatch_names_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two swapped devices: rank 0 finds the first element of rank 1's share, 16 elements further."""
    found = BusOrder((1, 0), monkeypatch).run(lambda: check_order("cpu", sizes_bytes=(128,)))

    assert ["all_gather of 0 MiB returned 16 instead of 0 at element 0"] * 2 == found


def test_a_wrong_sum_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce-scatter is checked even if all-gather is right."""
    host = BusOrder((1, 0), monkeypatch)
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda full, *_, **__: full.copy_(torch.arange(len(full))))
    found = host.run(lambda: check_order("cpu", sizes_bytes=(128,)))

    # A sum of two ranks is twice the position, and 1 for the ranks.
    assert "reduce_scatter of 0 MiB returned 33 instead of 1 at element 0" == found[0]


@pytest.mark.processes
def test_gloo_passes(tmp_path: Path) -> None:
    """Two processes over gloo, which has no device order."""
    words = [warm.python().path, "-c", TWO_RANKS, str(tmp_path / "store")]
    env = warm.environment([ROOT])
    ranks = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True, env=env) for rank in range(2)]

    assert ["\n", "\n"] == [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]


@pytest.fixture
def port() -> Iterator[int]:
    """Host a store like the agent's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the environment of rank 3 of four, with a private store."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(order_check, "connect_store", lambda *_: dist.HashStore())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_wrong_value_is_the_last_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The worker fails, and its last line is for the user."""
    wrong = "all_gather of 8 MiB returned 16 instead of 0 at element 0"
    monkeypatch.setattr(order_check, "check_order", lambda *_, **__: wrong)

    assert 1 == order_check.main(["cpu", "1", "3"])
    assert "all_gather of 8 MiB returned 16 instead of 0 at element 0 on rank 3\n" == capsys.readouterr().err


@pytest.mark.usefixtures("alone")
def test_whatever_breaks_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A communicator that cannot be opened also fails the check."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("NCCL error\nin ring.cc")

    monkeypatch.setattr(order_check, "check_order", broken)

    assert 1 == order_check.main(["cpu", "1", "3"])
    assert "RuntimeError: NCCL error in ring.cc\n" == capsys.readouterr().err


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("ranks", "is_numa_bound", "is_virtual"),
    [
        pytest.param((0, 2, 1, 3), False, False, id="devices permuted"),
        pytest.param((0, 2, 1, 3), False, True, id="one visible device"),
        pytest.param((0, 2, 1, 3), True, False, id="numa binding keeps devices"),
        pytest.param((0, 4, 2, 6), False, False, id="two ranks of one residue"),
    ],
)
def test_each_rank_is_checked_on_the_device_that_trains_it(
    ranks: tuple[int, ...], is_numa_bound: bool, is_virtual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local rank and visible devices decide, as in the training."""
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(order_check, "check_order", lambda *_, **__: "")
    bound = bindings(ranks, keep_devices=is_numa_bound)
    visible = visible_devices(None, bound).get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    found = {}
    for local, binding in enumerate(bound):
        # torch, local_elastic_agent.py, _set_local_rank_env.
        seen = [visible[local]] if is_virtual else visible
        taken = cuda_devices.install(monkeypatch, seen)
        monkeypatch.setenv("RANK", str(binding.rank))
        monkeypatch.setenv("LOCAL_RANK", "0" if is_virtual else str(local))
        assert 0 == order_check.main(["cuda", "1", *map(str, ranks)])
        found[binding.rank] = int(seen[taken[-1]])

    assert {rank: device for device, rank in enumerate(ranks)} == found


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("tp", "sizes"), [(1, [4]), (2, [4, 2]), (4, [4]), (8, [4])])
def test_tensor_parallel_groups_are_checked_too(tp: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may use another algorithm for them; the first wrong value counts."""
    checked: list[int] = []
    wrong = "all_gather of 8 MiB returned 16 instead of 0 at element 0"

    def check_order(*_: object, group: object = None, **__: object) -> str:
        checked.append(dist.get_world_size(group))  # type: ignore[arg-type]
        return wrong if len(checked) == len(sizes) else ""

    monkeypatch.setattr(order_check, "check_order", check_order)
    # gloo would wait for the others.
    monkeypatch.setitem(order_check.BACKENDS, "cpu", "fake")

    assert 1 == order_check.main(["cpu", str(tp), "0", "1", "2", "3"])
    assert sizes == checked


@pytest.mark.processes
def test_each_host_is_checked_by_itself(port: int) -> None:
    """Two hosts of two workers over gloo, one with its ranks in another order."""
    workers = []
    for rank, ranks in enumerate((("0", "2"), ("3", "1"), ("0", "2"), ("3", "1"))):
        told = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**warm.environment([ROOT]), **told, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        words = warm.command("pipette_launch.probe.order_check", "cpu", "2", *ranks)
        workers.append(subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True))

    assert [""] * 4 == [worker.communicate(timeout=LIMIT_S)[1] for worker in workers]
    assert [0] * 4 == [worker.returncode for worker in workers]
