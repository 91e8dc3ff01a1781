"""Runs torchrun's own `run`, with our agent in the place of its agent."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import registry
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api as launcher

from pipette_launch.agent import orphans, signals, worker_health
from pipette_launch.agent.elastic import PipetteAgent
from pipette_launch.agent.sync import endpoint, rendezvous
from pipette_launch.agent.sync.meeting_flags import becomes_standalone, connect_seconds, endpoint_of, is_file
from pipette_launch.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator, MutableMapping

    from pipette_launch.agent.controller import Controller
    from pipette_launch.agent.sync.rendezvous import RendezvousSettings

MONITOR = "FT_RANK_MONITOR_IPC_SOCKET"
"""Where a worker of NVIDIA's ft_launcher reaches the process that watches it, which serves one worker at a time."""


def run(args: Namespace, conduct: Callable[[RendezvousSettings], Controller], *, advice: str = "") -> None:
    """Run a job as torchrun would, with a controller.

    Everything that torchrun does between its parser and its agent (and after it: error files, the rendezvous' end,
    exit codes) is torch's own code, of the installed version. `advice` is the end of a sentence
    about launchers that do not meet as their flags describe.
    """
    drop_shared_monitor(os.environ, num_workers=torchrun.determine_local_world_size(args.nproc_per_node))
    if args.rdzv_backend in ("static", "c10d") and not becomes_standalone(args) and not is_file(args):
        endpoint.await_name(endpoint_of(args), patience_s=connect_seconds(args))
    endpoint.note_unknown_address(args.local_addr)
    conf = str(args.rdzv_conf or "")
    place = rendezvous.settle(args, advice=advice)
    endpoint.await_store(place)
    controller = conduct(place)
    agents: list[PipetteAgent] = []

    def make_agent(*words: Any, **settings: Any) -> PipetteAgent:
        agents.append(PipetteAgent(*words, **settings, controller=controller, rendezvous_settings=place))
        return agents[-1]

    with (
        orphans.ended(lambda: _running(agents[0]) if agents else set()),
        signals.passed_on(lambda: controller.is_training, lambda: _workers(agents[0]) if agents else None),
        _in_place_of(launcher, "LocalElasticAgent", make_agent),
        _in_place_of(registry, "get_rendezvous_handler", _explaining(registry.get_rendezvous_handler, place, conf)),
    ):
        torchrun.run(args)  # type: ignore[no-untyped-call]


def drop_shared_monitor(environ: MutableMapping[str, str], *, num_workers: int) -> None:
    """Keep several workers off the one rank monitor of an ft_launcher that runs us as its worker.

    All but the first would wait three minutes for it and fail; without the variable they fail at once, with a sentence.
    """
    if num_workers > 1 and environ.pop(MONITOR, None) is not None:
        sys.stderr.write(
            f"pipette-launch: {MONITOR} is not passed on: it names the rank monitor that ft_launcher gave this "
            f"launcher, and cannot watch {num_workers} workers\n"
        )


def _running(agent: PipetteAgent) -> set[int]:
    """Return the process ids of the workers that have not ended; none where they run a function."""
    context = agent._pcontext  # noqa: SLF001
    if not isinstance(context, SubprocessContext):
        return set()
    return {one.pid for one in worker_health.processes(context).values() if one.returncode is None}


def _workers(agent: PipetteAgent) -> set[int] | None:
    """Return the process ids of the workers that still run; None before the agent has started any."""
    context = agent._pcontext  # noqa: SLF001
    if context is None:
        return None
    # The id of a worker that has ended may be another process's by now.
    return set(context.pids().values()) & {child.pid for child in psutil.Process().children()}


def _explaining(make: Callable[[Any], Any], settings: RendezvousSettings, conf: str) -> Callable[[Any], Any]:
    """Turn the ways in which torch cannot open a rendezvous into sentences."""

    def made(parameters: Any) -> Any:
        try:
            return make(parameters)
        except RendezvousError as error:
            raise ClusterError(endpoint.explained(error, settings)) from error
        except (ValueError, ImportError) as error:
            words = f"--rdzv-backend {parameters.backend}"
            if "not registered" in str(error):
                words = f"{words}: torch has no such rendezvous; give c10d (the script itself chooses nccl or gloo)"
            else:
                words = f"{words} --rdzv-conf {conf}: {error}" if conf else f"{words}: {error}"
            raise UsageError(words) from error

    return made


@contextmanager
def _in_place_of(module: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Put a function of ours where `launch_agent` looks for torch's; it is named there and nowhere else."""
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)
