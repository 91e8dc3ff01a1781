"""Tests of when earlier links are no longer believed, of the note on the passes, and of ranks that measure together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from facts_for_tests import tiny_cluster
from torch.distributed import HashStore

from pipette_launch.facts import Samples
from pipette_launch.probe.harness import Line, Lockstep
from pipette_launch.probe.links.adaptive import Adapted, Lines, Measure, Pass, in_step
from pipette_launch.probe.links.estimate import estimate
from pipette_launch.probe.links.sampling import Pair, Round
from pipette_launch.probe.options import LinkSamples


def adapted(new: int, changed: Sequence[Pair], *, is_settled: bool = True) -> Adapted:
    """Passes in which so many links were measured again."""
    lines = {(0, 1): Line(0.0, 1e-9)}
    return Adapted(
        estimate=estimate(len(tiny_cluster(2, 1).hosts), lines),
        lines=lines,
        passes=(Pass(asked=new, new=new, rounds=2),),
        changed=tuple(changed),
        is_settled=is_settled,
    )


@pytest.mark.parametrize(
    ("new", "changed", "among_many", "among_few"),
    [
        (8, [], False, False),
        (2, [(0, 1)], False, True),
        (8, [(0, 1), (1, 2)], False, True),
        (7, [(0, 1), (1, 2)], True, True),
        (0, [], False, True),
    ],
)
def test_earlier_links_are_stale_if_many_have_changed(
    new: int, changed: list[Pair], among_many: bool, among_few: bool
) -> None:
    """More than a quarter of those that were measured again, and more than one; of few hosts a single one."""
    found = adapted(new, changed)

    assert among_many == found.is_stale(are_few=False)
    assert among_few == found.is_stale(are_few=True)


def test_what_the_passes_did_is_said() -> None:
    """How much was measured in how many rounds, what had changed, and whether the plans wanted more."""
    whole = "links: 8 pairs of hosts that plans would use, measured in 2 rounds"

    assert whole == adapted(8, []).words()
    assert (
        f"{whole}, 1 of them changed since; the rounds were spent before the plans stopped asking for more"
    ) == adapted(8, [(0, 1)], is_settled=False).words()


def sent(rank: int, rounds: Sequence[Round]) -> list[LinkSamples]:
    """What a rank sends in these rounds, with times that name it."""
    peers = [other for one in rounds for pair in one for other in pair if rank in pair and other != rank]
    samples = Samples(values_s=(1.0 + rank,))
    return [LinkSamples(source=rank, target=peer, sizes_bytes=(8,), samples=(samples,)) for peer in peers]


def merged(links: Sequence[LinkSamples]) -> Lines:
    """One device on each host: slots are hosts."""
    return {(link.source, link.target): Line(0.0, link.samples[0].median_s) for link in links}


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_all_ranks_measure_what_rank_0_chooses(turns: int) -> None:
    """Every rank goes through the same rounds, rank 0 gets everybody's links, and all of them come back at its end."""
    store = HashStore()
    rounds: tuple[Round, ...] = (((0, 1), (2, 3)), ((0, 2),))
    heard: dict[int, list[Sequence[Round]]] = {rank: [] for rank in range(4)}
    ends: dict[int, object] = {}

    def decide(measure: Measure) -> list[Lines]:
        return [measure(rounds) for _ in range(turns)]

    def work(rank: int) -> None:
        def take(some: Sequence[Round]) -> list[LinkSamples]:
            heard[rank].append(tuple(some))
            return sent(rank, some)

        lockstep = Lockstep(store=store, rank=rank, world_size=4, timeout_s=10)
        ends[rank] = in_step(lockstep, take, merged, decide, patience_s=1.0)

    run_all([lambda rank=rank: work(rank) for rank in range(4)])  # type: ignore[misc]

    expected = {(0, 1): 1.0, (1, 0): 2.0, (2, 3): 3.0, (3, 2): 4.0, (0, 2): 1.0, (2, 0): 3.0}
    assert [[rounds] * turns] * 4 == list(heard.values())
    assert [{pair: Line(0.0, value) for pair, value in expected.items()}] * turns == ends[0][1]  # type: ignore[attr-defined]
    assert [2 * turns, turns, 2 * turns, turns] == [len(ends[rank][0]) for rank in range(4)]  # type: ignore[attr-defined]
    assert all(ends[rank][1] is None for rank in (1, 2, 3))  # type: ignore[attr-defined]


def run_all(works: Sequence[Callable[[], None]]) -> None:
    """Run everything at the same time, and to its end."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
