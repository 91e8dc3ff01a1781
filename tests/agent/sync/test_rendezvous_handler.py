"""Torch's rendezvous is asked with limits, and its faults become sentences."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from pipette_launch.agent.sync import rendezvous_handler
from pipette_launch.agent.sync.rendezvous import RendezvousSettings
from pipette_launch.agent.sync.rendezvous_handler import AgentStoreHandler, first_meeting
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


HERE = RendezvousSettings(endpoint="localhost:0", node_rank=-1, may_host_store=True)
ELSEWHERE = RendezvousSettings(endpoint="10.0.0.1:29500", node_rank=-1, may_host_store=False)


class Rendezvous:
    """Stands for torch's: its answer comes after so many seconds."""

    def __init__(self, seconds: float, backend: str = "c10d") -> None:
        self.seconds = seconds
        self.backend = backend

    def get_backend(self) -> str:
        """Name torch's own."""
        return self.backend

    def next_rendezvous(self) -> str:
        """Answer late."""
        time.sleep(self.seconds)
        return "places"


@pytest.mark.parametrize(
    ("settings", "backend", "there"),
    [
        (HERE, "c10d", [False]),
        (ELSEWHERE, "etcd-v2", [False]),
        (ELSEWHERE, "c10d", [True]),
        (ELSEWHERE, "c10d", [False, True]),
    ],
    ids=["own", "no store of torch's", "there", "there again"],
)
def test_a_long_wait_for_other_nodes_goes_on(
    monkeypatch: pytest.MonkeyPatch, settings: RendezvousSettings, backend: str, there: list[bool]
) -> None:
    """While the store answers, now and then."""
    looks = iter([*there, *there[-1:] * 99])
    monkeypatch.setattr(rendezvous_handler, "answers", lambda _host, within_s: next(looks))
    monkeypatch.setattr(rendezvous_handler, "LOOK_S", 0.02)
    monkeypatch.setattr(rendezvous_handler, "HOST_GONE_S", 0.1)
    handler = AgentStoreHandler(Rendezvous(0.3, backend), settings, is_round_over=bool)

    assert "places" == handler.next_rendezvous()


def test_a_store_that_is_gone_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own call waits for ever on a connection whose wire was cut."""
    monkeypatch.setattr(rendezvous_handler, "answers", lambda _host, within_s: False)
    monkeypatch.setattr(rendezvous_handler, "LOOK_S", 0.02)
    monkeypatch.setattr(rendezvous_handler, "HOST_GONE_S", 0.1)
    handler = AgentStoreHandler(Rendezvous(2.0), ELSEWHERE, is_round_over=bool)
    began_s = time.monotonic()

    with pytest.raises(RendezvousConnectionError, match=r"10.0.0.1:29500 was there, and has not answered for 0 s"):
        handler.next_rendezvous()

    assert time.monotonic() - began_s < 1
