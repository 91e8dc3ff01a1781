"""A plan that has trained is told from one that cannot start, on every node alike."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from pipette_launch.agent.phases.attempt import FirstIteration
from pipette_launch.agent.sync.store import RoundStore


def witnesses(count: int, *, proven: bool = False) -> list[FirstIteration]:
    """One for each node of a round."""
    store = HashStore()
    made = [FirstIteration() for _ in range(count)]
    for rank, witness in enumerate(made):
        witness.begin(RoundStore(store, rank, count, is_coordinator=rank == 0), proven=proven)
    return made


def test_an_iteration_is_known_everywhere() -> None:
    """The node that saw it tells the others; the next attempt begins with nothing seen."""
    first, second = witnesses(2)
    first.see()

    before = second.has_trained()
    first.share()
    first.share()

    assert (False, True, True) == (before, first.has_trained(), second.has_trained())
    first.begin(RoundStore(HashStore(), 0, 2, is_coordinator=True), proven=False)
    assert not first.has_trained()


def test_waits_a_moment_for_the_news() -> None:
    """A worker may die between the first iteration and the moment at which the last rank's agent tells of it."""
    first, second = witnesses(2)
    first.see()
    timer = threading.Timer(0.2, first.share)
    timer.start()

    assert second.has_trained(wait_s=5)
    timer.join()


def test_one_node_has_nobody_to_wait_for() -> None:
    """What it has not seen has not happened."""
    (only,) = witnesses(1)
    began_s = time.monotonic()

    assert not only.has_trained(wait_s=5)
    assert time.monotonic() - began_s < 1


def test_a_restart_is_proven() -> None:
    """What trained before the restart is no plan that cannot start."""
    (only,) = witnesses(1, proven=True)

    assert only.has_trained()


@pytest.mark.parametrize("trained", [True, False])
def test_the_first_word_counts(trained: bool) -> None:
    """All nodes hold the verdict of the one that spoke first."""
    first, second = witnesses(2)

    verdicts = [first.settle(trained=trained), second.settle(trained=not trained)]

    assert ["after-first-iteration" if trained else "before-first-iteration"] * 2 == verdicts


def test_a_lost_store_leaves_what_was_seen_here() -> None:
    """When the store went with its host the node judges alone, and the job ends as under torchrun."""

    class Gone(HashStore):
        def _raise(self, *_: object) -> None:
            raise RuntimeError("connection reset")

        check = add = set = compare_set = _raise  # type: ignore[assignment]

    alone = FirstIteration()
    alone.begin(RoundStore(Gone(), 1, 2, is_coordinator=False), proven=False)
    silent = alone.has_trained(wait_s=1)
    alone.see()

    assert (False, True) == (silent, alone.has_trained())
    assert "after-first-iteration" == alone.settle(trained=True)
