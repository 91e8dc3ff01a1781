"""The rendezvous handler as torch made it, with what the agent needs to know about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import RendezvousHandler

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo


class AgentStoreHandler(RendezvousHandler):
    """Passes everything on, and says that workers are only clients of the store that their agents host."""

    def __init__(self, inner: RendezvousHandler) -> None:
        self._inner = inner

    @property
    def use_agent_store(self) -> bool:
        """True whatever the environment says: RANK 0's agent hosts a store in every phase."""
        return True

    def get_backend(self) -> str:
        """See torch."""
        return self._inner.get_backend()

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch."""
        return self._inner.next_rendezvous()

    def is_closed(self) -> bool:
        """See torch."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """See torch."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """See torch."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """See torch."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """See torch."""
        return self._inner.shutdown()

    def __getattr__(self, name: str) -> Any:
        """Whatever else a backend offers."""
        return getattr(self._inner, name)
