"""Jobs that cannot be planned: their hosts get an order by measured links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from launch.worlds import options, records

from pipette_launch.facts import Links, files
from pipette_launch.facts.messages import Decision
from pipette_launch.launch.cache import CLUSTER
from pipette_launch.launch.coordinator import Coordinator
from pipette_launch.probe.messages import WarmupOrder

FAST_GB = ((0, 1, 4, 4), (1, 0, 4, 4), (4, 4, 0, 1), (4, 4, 1, 0))
FOREIGN = ("--lr", "0.1")


def beginning(folder: Path, *words: str, **changes: Any) -> Coordinator:
    """Return a coordinator of a script without Megatron's flags."""
    asked = options(arguments=(*FOREIGN, *words), cache=folder / "cache", **changes)
    return Coordinator(asked, lambda: folder / CLUSTER, judge=lambda *_: ())


def ordered(one: Coordinator, warmup: Decision) -> Decision:
    """Return the decision after a warm-up in which two links were slow."""
    order = files.loads(WarmupOrder, warmup.order, "order")
    between = Links(latency_s=np.zeros((4, 4)), bandwidth_bytes_per_s=np.array(FAST_GB) * 2e9)
    cluster = replace(tiny_cluster(4), hosts=order.hosts, between_hosts=between)
    files.write(one.measured_at(), replace(tiny_measurements(cluster), compute=()))
    return one.after_warmup(warmup, "")


def test_links_are_measured_and_order_the_hosts(tmp_path: Path) -> None:
    """Ranks of a host stay together, on hosts in the order of the fastest ring; the reason has the gain."""
    one = beginning(tmp_path)
    warmup = one.decide(records(4), None)
    made = ordered(one, warmup)

    assert ("warmup", True) == (warmup.phase, warmup.only_links)
    assert "lacks --num-layers" in warmup.reason
    assert ("train", None, None) == (made.phase, made.plan, made.script_arguments)
    assert ("node0", "node2", "node1", "node3") == made.host_order
    assert [(0, 1), (4, 5), (2, 3), (6, 7)] == [made.ranks_of(token) for token in made.tokens]
    assert "in the order node0, node2, node1, node3 (assumption: all ranks exchange data in a ring)" in made.reason
    assert "the slowest link in use has 8 GB/s instead of 2 GB/s" in made.reason


def test_the_next_start_measures_nothing(tmp_path: Path) -> None:
    """Links in the cache give the same order at once, in any order of the nodes."""
    one = beginning(tmp_path)
    first = ordered(one, one.decide(records(4), None))
    again = beginning(tmp_path).decide(records(4), None)

    assert "train" == again.phase
    assert first.host_order == again.host_order


def test_stated_degrees_are_used(tmp_path: Path) -> None:
    """The words name the stated degrees, and a pipeline over all hosts needs no ring."""
    one = beginning(tmp_path, "model.pipeline_model_parallel_size=4")
    made = ordered(one, one.decide(records(4), None))

    assert "(tp1 pp4 dp2, as your flags say)" in made.reason


@pytest.mark.parametrize("knows_links", [True, False])
def test_a_loss_measures_nothing(tmp_path: Path, *, knows_links: bool) -> None:
    """The remaining hosts are ordered by known links. A new first node without them keeps the order."""
    one = beginning(tmp_path)
    held = ordered(one, one.decide(records(4), None))
    leader = one if knows_links else beginning(tmp_path)
    left = [replace(record, attempt=0, verdict="after-first-iteration") for record in records(4)[1:]]
    after = leader.decide(left, held, {"node0": "silent for 8 s"})

    assert ("train", ("node1", "node2", "node3")) == (after.phase, after.hosts)
    assert (() if knows_links else ("node2", "node1", "node3")) == after.host_order
    assert ("on the remaining hosts in the same order" in after.reason) is not knows_links
    assert sorted(rank for token in after.tokens for rank in after.ranks_of(token)) == [*range(6)]


def test_a_restart_keeps_the_order(tmp_path: Path) -> None:
    """Workers that died start again with the same ranks."""
    one = beginning(tmp_path)
    held = ordered(one, one.decide(records(4), None))
    again = one.decide([replace(one_node, attempt=0) for one_node in records(4)], held)

    assert ("train", held.host_order) == (again.phase, again.host_order)


@pytest.mark.parametrize(
    ("count", "words", "changes"),
    [
        (2, (), {}),
        (4, ("--dataloader-type", "external"), {}),
        (4, (), {"host_order": "given"}),
    ],
)
def test_the_given_order_stays(tmp_path: Path, count: int, words: tuple[str, ...], changes: dict[str, Any]) -> None:
    """Two hosts, ranks that are bound to hosts, and the user's wish need no measuring."""
    decision = beginning(tmp_path, *words, **changes).decide(records(count), None)

    assert ("train", ()) == (decision.phase, decision.host_order)
    assert "training with your own configuration as torchrun would" in decision.reason


def test_a_script_that_cannot_be_played_is_not_planned(tmp_path: Path) -> None:
    """No warm-up begins that would find nothing: the hosts get an order by links."""
    asked = replace(options(cache=tmp_path / "cache"), runs_python=False)
    decision = Coordinator(asked, lambda: tmp_path / CLUSTER, judge=lambda *_: ()).decide(records(4), None)

    assert ("warmup", True) == (decision.phase, decision.only_links)
    assert "a job with --no-python is not planned" in decision.reason


def test_a_search_without_a_plan_orders_the_hosts_by_what_was_measured(tmp_path: Path) -> None:
    """After a whole warm-up without a plan, its links give the order, and nothing is measured again."""
    one = Coordinator(options(cache=tmp_path / "cache"), lambda: tmp_path / CLUSTER, judge=lambda *_: ())
    warmup = one.decide(records(4), None)
    order = files.loads(WarmupOrder, warmup.order, "order")
    between = Links(latency_s=np.zeros((4, 4)), bandwidth_bytes_per_s=np.array(FAST_GB) * 2e9)
    cluster = replace(tiny_cluster(4), hosts=order.hosts, between_hosts=between)
    short = tuple(
        replace(one_host, devices=tuple(replace(device, memory_free_bytes=1) for device in one_host.devices))
        for one_host in order.hosts
    )
    files.write(one.measured_at(), tiny_measurements(replace(cluster, hosts=short), order.cases))

    made = one.after_warmup(warmup, "")

    assert ("train", None) == (made.phase, made.plan)
    assert ("node0", "node2", "node1", "node3") == made.host_order


def test_a_failed_warmup_trains_as_torchrun_would(tmp_path: Path) -> None:
    """The order of the hosts is not worth a failure."""
    one = beginning(tmp_path)
    made = one.after_warmup(one.decide(records(4), None), "a worker hangs")

    assert ("train", ()) == (made.phase, made.host_order)
    assert "a worker hangs; training with your own configuration as torchrun would" == made.reason
