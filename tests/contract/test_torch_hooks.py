"""Borrowed ground: the private hooks of torch's elastic agent that ours wraps are still there."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import api, local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousHandler, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.launcher import api as launcher

from pipette_launch.agent import nodes_list

AGENT = local_elastic_agent.LocalElasticAgent


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_assign_worker_ranks", ["self", "store", "group_rank", "group_world_size", "spec"]),
        ("_rendezvous", ["self", "worker_group"]),
        ("_start_workers", ["self", "worker_group"]),
        ("_stop_workers", ["self", "worker_group"]),
        ("_monitor_workers", ["self", "worker_group"]),
        ("_initialize_workers", ["self", "worker_group"]),
        ("_restart_workers", ["self", "worker_group"]),
        ("_invoke_run", ["self", "role"]),
        ("_exit_barrier", ["self"]),
    ],
)
def test_agent_hooks(name: str, parameters: list[str]) -> None:
    """Each hook exists with the parameters that we take or pass on."""
    found = list(inspect.signature(inspect.unwrap(getattr(AGENT, name))).parameters)

    assert parameters == found[: len(parameters)]


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
    """launch_agent asks torch's registry for it, where ours turns errors into sentences."""
    assert inspect.getsource(launcher.launch_agent).count("rdzv_registry.get_rendezvous_handler(") == 1


def test_the_state_of_a_meeting_can_be_read() -> None:
    """Lines about missing nodes, and launchers too many, come from torch's own state of the rendezvous."""
    source = inspect.getsource(dynamic_rendezvous.DynamicRendezvousHandler.__init__)
    state = dynamic_rendezvous._RendezvousState()

    assert [name for name in ("_this_node", "_store", "_state_holder") if f"self.{name} = " not in source] == []
    assert ({}, set(), set()) == (state.participants, state.redundancy_list, state.wait_list)
    assert "addr" in inspect.signature(dynamic_rendezvous._NodeDesc).parameters


def test_the_list_of_nodes_can_be_renewed_by_a_few() -> None:
    """The private names exist by which a few agents renew all nodes, and by which one node writes for all.

    The names were also found in the files of torch 2.6.0, 2.7.1, 2.8.0, 2.9.1, 2.10.0, 2.11.0, 2.12.0 and 2.14.0.
    """
    handler = dynamic_rendezvous.DynamicRendezvousHandler
    backend = C10dRendezvousBackend(HashStore(), "job")  # type: ignore[arg-type]
    opened = handler.from_backend("job", backend._store, backend, 1, 2)
    steps = inspect.getsource(dynamic_rendezvous._DistributedRendezvousOpExecutor)
    holder = inspect.getsource(dynamic_rendezvous._BackendRendezvousStateHolder)

    assert nodes_list.is_known(opened)
    assert "self._keep_alive()" in inspect.getsource(handler._keep_alive_weak)
    assert [f"self.{name}" for name in ("_state", "_node", "_record(") if f"self.{name}" not in steps] == []
    assert "if self._dirty" in holder
    assert "self._last_sync_time >= " in holder
    assert "if self._bootstrap_store_info is None" in inspect.getsource(handler.next_rendezvous)
    assert list(inspect.signature(dynamic_rendezvous._NodeDesc).parameters) == ["addr", "pid", "local_id"]
    assert TCPStore("localhost", 0, is_master=True, wait_for_workers=False).has_extended_api()
