"""Torch's rendezvous is asked with limits, and its faults become sentences."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from torch.distributed import DistStoreError

from pipette_launch.agent.sync import rendezvous_handler
from pipette_launch.agent.sync.rendezvous_handler import first_meeting
from pipette_launch.agent.sync.store import StoreGone
from pipette_launch.errors import ClusterError


def failing(error: Exception) -> Callable[[], None]:
    """A call that raises."""

    def fail() -> None:
        raise error

    return fail


def test_torchs_places_are_passed_on() -> None:
    """And then the agents learn of each other."""
    done: list[str] = []

    assert 7 == first_meeting(lambda: 7, lambda: done.append("joined"))
    assert ["joined"] == done


@pytest.mark.parametrize(
    ("assign", "join", "why"),
    [
        (failing(DistStoreError("wait timeout after 60000ms\nmore")), lambda: None, "wait timeout after 60000ms; look"),
        (lambda: 7, failing(StoreGone("silent for 5 s")), "silent for 5 s; look at the host of the rendezvous"),
        (lambda: time.sleep(1.0), lambda: None, "no answer within 0.1 s; look"),
    ],
)
def test_a_rendezvous_that_breaks_off_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, assign: Callable[[], int], join: Callable[[], None], why: str
) -> None:
    """Whether its store fails, hangs, or is gone for the agents."""
    monkeypatch.setattr(rendezvous_handler, "PLACES_S", 0.1)

    with pytest.raises(ClusterError, match=f"the nodes have met, and then lost each other: {why}"):
        first_meeting(assign, join)
