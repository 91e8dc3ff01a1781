"""An agent that the others went on without comes back with nothing of what it went by before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from pipette_launch.agent.elastic import PipetteAgent
from pipette_launch.agent.phases.attempt import Attempt
from pipette_launch.agent.sync.membership import LEFT_OUT, REJOIN, Rejoin
from pipette_launch.facts.messages import Decision


@pytest.mark.parametrize(("why", "keeps"), [(LEFT_OUT, False), (REJOIN, True)])
def test_what_an_agent_brings_along(monkeypatch: pytest.MonkeyPatch, why: str, keeps: bool) -> None:
    """Should it decide for all, an old decision would take the place of theirs, and an old failure cost a restart."""
    old = Decision(phase="train", tokens=("a",), hosts=("a",), num_slots=(1,))
    failed = Attempt(index=0, ended="before-first-iteration")
    brought: list[tuple[Decision | None, Attempt]] = []

    def meet() -> Any:
        brought.append((agent._decision, agent._attempt))
        if len(brought) == 1:
            raise Rejoin(why)
        return old, None

    agent = PipetteAgent.__new__(PipetteAgent)
    agent.__dict__.update(
        _decision=old, _attempt=failed, _is_same_round=False, _membership=SimpleNamespace(has_joined=False), _meet=meet
    )
    monkeypatch.setattr(PipetteAgent, "_apply", lambda *_: None)
    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", lambda *_: None)
    agent._rendezvous(SimpleNamespace())  # type: ignore[arg-type]

    assert [(old, failed), (old, failed) if keeps else (None, Attempt())] == brought
