"""Borrowed ground: the private hooks of torch's elastic agent that ours wraps are still there."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import api, local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousHandlerRegistry
from torch.distributed.launcher import api as launcher

from pipette_launch.agent.elastic import PipetteAgent
from pipette_launch.agent.rendezvous import Rendezvous

AGENT = local_elastic_agent.LocalElasticAgent


HOOKS = {
    "_invoke_run": ["self", "role"],
    "_rendezvous": ["self", "worker_group"],
    "_start_workers": ["self", "worker_group"],
}
"""Private methods of torch's agent that ours overrides."""
CALLED = {
    "_initialize_workers": ["self", "worker_group"],
    "_monitor_workers": ["self", "worker_group"],
    "_stop_workers": ["self", "worker_group"],
}
"""Other private methods of torch's agent that ours calls."""


@pytest.mark.parametrize(("name", "parameters"), (HOOKS | CALLED).items(), ids=HOOKS | CALLED)
def test_agent_hooks(name: str, parameters: list[str]) -> None:
    """Each method exists with the parameters that we take or pass on."""
    found = list(inspect.signature(inspect.unwrap(getattr(AGENT, name))).parameters)

    assert parameters == found[: len(parameters)]


def test_three_hooks_are_overridden() -> None:
    """A new override of a private method of torch has to be listed here."""
    methods = {name for name, value in vars(PipetteAgent).items() if inspect.isfunction(value)}

    assert {*HOOKS, "run", "__init__"} == {name for name in methods if hasattr(AGENT, name)}


def test_the_agent_is_named_once() -> None:
    """launch_agent looks the agent's class up in its own module, where ours is put in its place."""
    assert launcher.LocalElasticAgent is AGENT
    assert inspect.getsource(launcher.launch_agent).count("LocalElasticAgent(") == 1


def test_run_ends_in_elastic_launch() -> None:
    """Torchrun's run hands the job to elastic_launch, and elastic_launch to launch_agent."""
    assert "elastic_launch(" in inspect.getsource(torchrun.run)
    assert "launch_agent(" in inspect.getsource(launcher.elastic_launch)


def test_sizes_are_read_by_torchrun() -> None:
    """What a bad --nnodes or --nproc-per-node raises is known before torchrun raises it."""
    assert (1, 2) == torchrun.parse_min_max_nnodes("1:2")
    assert 3 == torchrun.determine_local_world_size("3")
    with pytest.raises(RuntimeError):
        torchrun.parse_min_max_nnodes("1:2:3")
    with pytest.raises(ValueError, match="two"):
        torchrun.determine_local_world_size("two")


@pytest.mark.parametrize(
    ("owner", "attributes"),
    [
        (api.Worker(local_rank=0), ["global_rank", "role_rank", "world_size", "role_world_size"]),
        (LogsDest(), ["stdouts", "stderrs"]),
    ],
    ids=["Worker", "LogsDest"],
)
def test_fields_that_are_set(owner: Any, attributes: list[str]) -> None:
    """The fields that we overwrite exist."""
    assert [name for name in attributes if hasattr(owner, name)] == attributes


def test_state_that_is_used() -> None:
    """The agent's own state that we read or correct is set in its constructor."""
    source = inspect.getsource(api.SimpleElasticAgent.__init__) + inspect.getsource(AGENT.__init__)

    for name in ("_remaining_restarts", "_worker_group", "_logs_specs"):
        assert f"self.{name}" in source


def test_workers_are_ordinary_processes() -> None:
    """What started them lists them by local rank, each with its Popen."""
    assert "self.subprocess_handlers[local_rank]" in inspect.getsource(SubprocessContext)
    assert "self.proc: Popen" in inspect.getsource(SubprocessHandler)
    assert "self._pcontext" in inspect.getsource(AGENT.__init__)


def test_abstract_methods_are_all_passed_on() -> None:
    """Our proxies implement exactly what torch's interfaces ask for."""
    assert RendezvousHandler.__abstractmethods__ == {
        "get_backend",
        "next_rendezvous",
        "is_closed",
        "set_closed",
        "num_nodes_waiting",
        "get_run_id",
        "shutdown",
    }
    assert LogsSpecs.__abstractmethods__ == {"reify", "root_log_dir"}
    assert issubclass(DefaultLogsSpecs, LogsSpecs)


def test_the_rendezvous_is_opened_by_the_registry() -> None:
    """launch_agent asks torch's registry for it, where ours has a name of its own."""
    assert inspect.getsource(launcher.launch_agent).count("rdzv_registry.get_rendezvous_handler(") == 1
    assert RendezvousHandlerRegistry().register("pipette", Rendezvous) is None
