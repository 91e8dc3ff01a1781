"""The rendezvous handler as torch made it, which the agent asks only when it says so."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from pipette_launch.agent.sync.peer_watch import answers
from pipette_launch.agent.sync.store import StoreGone, TorchCall, within
from pipette_launch.agent.sync.waiting import Waiting
from pipette_launch.defaults import HOST_SILENCE_S
from pipette_launch.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousInfo

    from pipette_launch.agent.sync.rendezvous import RendezvousSettings

ANSWER_S = 1.0
"""How long torch's rendezvous is asked: where its host is silent, torch's own call never returns."""
PLACES_S = 90.0
"""How long the nodes may take to get their places; torch's own limit is a minute, and holds where the store answers."""
HOST_GONE_S = 60.0
"""After how long in vain the host of the rendezvous counts as gone: as long as torch itself tries to connect to it."""
LOOK_S = 10.0
GLANCE_S = 1.0
"""Seconds between two looks at the state of torch's rendezvous, which is in this process."""
Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


class AgentStoreHandler(RendezvousHandler):
    """Passes on what torch's loop asks, but for what the agents find out among themselves."""

    def __init__(
        self, inner: RendezvousHandler, settings: RendezvousSettings, *, is_round_over: Callable[[], bool]
    ) -> None:
        """Begin.

        Args:
            inner: torch's.
            settings: where its store is.
            is_round_over: whether the agents are to meet again, whoever waits in torch's rendezvous.

        """
        self._inner = inner
        self._is_round_over = is_round_over
        self._host = settings.store_elsewhere() if inner.get_backend() == "c10d" else None
        self._waiting = Waiting(inner, settings)

    @property
    def use_agent_store(self) -> bool:
        """True whatever the environment says: RANK 0's agent hosts a store in every phase."""
        return True

    def get_backend(self) -> str:
        """See torch."""
        return self._inner.get_backend()

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch, whose call never returns where a wire is cut while it waits for the store's answer.

        Raises:
            RendezvousConnectionError: the store was asked in vain for `HOST_GONE_S`.
            ClusterError: too few nodes came in time, or the job ended without this one.

        """
        began_s = time.monotonic()
        try:
            return self._met(began_s)
        except RendezvousTimeoutError as error:
            missing = self._waiting.missing(time.monotonic() - began_s)
            raise ClusterError(f"the nodes cannot meet: {missing}") from error
        except (RendezvousGracefulExitError, RendezvousClosedError, RendezvousConnectionError) as error:
            if self._waiting.is_spare:
                raise ClusterError(
                    "the job has ended with its own nodes, and this launcher took no part in it"
                ) from error
            if isinstance(error, RendezvousConnectionError):
                raise
            raise ClusterError(
                f"the job with --rdzv-id {self._inner.get_run_id()} has ended before this launcher joined it, and its "
                "id cannot be used again; start all launchers of a job together, and give each job an id of its own"
            ) from error

    def _met(self, began_s: float) -> RendezvousInfo:
        call = TorchCall(self._join)
        answered_s = looked_s = began_s
        while not call.returns_within(min(GLANCE_S, LOOK_S)):
            now_s = time.monotonic()
            self._waiting.look(now_s - began_s)
            if now_s - looked_s < LOOK_S:
                continue
            looked_s = now_s
            if self._host is None or answers(self._host, within_s=HOST_SILENCE_S):
                answered_s = time.monotonic()
            elif time.monotonic() - answered_s > HOST_GONE_S:
                raise RendezvousConnectionError(
                    f"{self._host.address}:{self._host.port} was there, and has not answered for {HOST_GONE_S:.0f} s"
                )
        met = call.answer()
        self._waiting.is_spare = False
        return met

    def _join(self) -> RendezvousInfo:
        self._waiting.announce()
        return self._inner.next_rendezvous()

    def is_closed(self) -> bool:
        """See torch."""
        return self._asked(self._inner.is_closed, otherwise=False)

    def set_closed(self) -> None:
        """See torch."""
        self._asked(self._inner.set_closed, otherwise=None)

    def num_nodes_waiting(self) -> int:
        """Tell torch's loop to restart the workers: a node that waits to join is taken in at the next restart only."""
        return int(self._is_round_over())

    def num_nodes_joining(self) -> int:
        """How many nodes wait in torch's rendezvous, as far as it can be reached."""
        return self._asked(self._inner.num_nodes_waiting, otherwise=0)

    def get_run_id(self) -> str:
        """See torch."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """See torch; a launcher that took no part does not close the job of others."""
        return not self._waiting.is_spare and self._asked(self._inner.shutdown, otherwise=False)

    def _asked(self, do: Callable[[], Answer], *, otherwise: Answer) -> Answer:
        """Ask torch's rendezvous; the job goes on where its host is gone."""
        try:
            return within(ANSWER_S, do)
        except (TimeoutError, RuntimeError, RendezvousError) as error:
            logger.info("torch's rendezvous cannot be reached: %s", error)
            return otherwise

    def __getattr__(self, name: str) -> Any:
        """Whatever else a backend offers."""
        return getattr(self._inner, name)


def first_meeting(assign: Callable[[], Answer], join: Callable[[], None]) -> Answer:
    """Let torch give the nodes their places, and then the agents learn of each other.

    Raises:
        ClusterError: the store of torch's rendezvous is lost on the way; torch waits for ever on a dead connection.

    """
    try:
        places = within(PLACES_S, assign)
        join()
    except (TimeoutError, DistError, StoreGone) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise ClusterError(
            f"the nodes have met, and then lost each other: {why}; look at the host of the rendezvous, its agent and "
            f"the network between it and the other nodes"
        ) from error
    return places
