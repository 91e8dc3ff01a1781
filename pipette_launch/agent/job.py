"""One job on one node: torchrun's own run, with Pipette's agent instead of torch's agent."""

from __future__ import annotations

import os
import resource
from argparse import Namespace
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.launcher import api as launcher

from pipette_launch.agent import endpoint, rendezvous, signals, signature, workers
from pipette_launch.agent.elastic import PipetteAgent
from pipette_launch.agent.first_meeting import MeetingPlace
from pipette_launch.launch.cache import default_root
from pipette_launch.launch.metrics import MetricsFile
from pipette_launch.launch.node_controller import FileWriter, NodeController, PrivateFolder
from pipette_launch.launch.options import Options
from pipette_launch.text import say

OWN_FILES, AGENT_FILES = 256, 4
"""Open files of a launcher without connections, and largest number of connections from another agent."""
MONITOR = "FT_RANK_MONITOR_IPC_SOCKET"
"""Socket of the process by which NVIDIA's ft_launcher watches one worker."""


def launch(args: Namespace, options: Options, *, advice: str = "") -> None:
    """Run a job; return if the job succeeded, else raise as torchrun does. `advice` ends errors about missing nodes."""
    folder = PrivateFolder()
    metrics = MetricsFile(options.metrics_file, script=options.script, keeps=not options.only_looks)
    has_failed = True
    writer = FileWriter()
    metrics.begin()
    try:
        run(
            args,
            lambda settings: NodeController(
                options,
                folder,
                least_nodes=settings.least_nodes,
                node_rank=settings.node_rank,
                metrics=metrics,
                writer=writer,
            ),
            advice=advice,
            secret_folder=default_root(),
        )
        has_failed = False
    finally:
        writer.submit(partial(metrics.ended, failed=has_failed))
        writer.finish()
        folder.remove()


def run(
    args: Namespace,
    make_controller: Callable[[rendezvous.RendezvousSettings], NodeController],
    *,
    advice: str = "",
    secret_folder: Path | None = None,
) -> None:
    """Run a job as torchrun would, with Pipette's agent instead of torch's; all code around the agent is torch's own.

    `advice` is the last sentence of error messages about launchers that fail to meet. `secret_folder` is the folder for
    the user's secret; None if the user has no home folder.
    """
    drop_shared_monitor(os.environ, num_workers=torchrun.determine_local_world_size(args.nproc_per_node))
    if not rendezvous.becomes_standalone(args):
        endpoint.await_name(rendezvous.endpoint_of(args), patience_s=rendezvous.connect_seconds(args))
    endpoint.note_unknown_address(args.local_addr)
    settings = rendezvous.settings_of(args, advice=advice)
    allow_connections(settings.most_nodes, torchrun.determine_local_world_size(args.nproc_per_node))
    signer = signature.find(secret_folder, os.environ, most_nodes=settings.most_nodes)
    controller = make_controller(settings)
    agent: PipetteAgent | None = None
    termination = signals.Termination()

    def make_agent(*words: Any, **more: Any) -> PipetteAgent:
        nonlocal agent
        agent = PipetteAgent(
            *words,
            **more,
            controller=controller,
            rendezvous_settings=settings,
            place=place,
            termination=termination,
            signer=signer,
        )
        return agent

    with (
        signals.ended(lambda: _running(agent) if agent else set()),
        signals.passed_on(lambda: bool(agent and agent.is_training), lambda: _workers(agent) if agent else None),
        _in_place_of(multiprocessing, "_terminate_process_handler", termination.handle),
        _in_place_of(launcher, "LocalElasticAgent", make_agent),
    ):
        try:
            store, holds_store = endpoint.open_store(settings)
            place = MeetingPlace(store, settings, holds_store=holds_store)
            rendezvous.take_over(args, settings)
            torchrun.run(args)  # type: ignore[no-untyped-call]
        finally:
            signer.end()


def allow_connections(num_nodes: int, num_workers: int) -> None:
    """Raise the limit of open files: one agent may hold the connections of all agents and of all workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OWN_FILES + num_nodes * (AGENT_FILES + num_workers)
    most = needed if hard == resource.RLIM_INFINITY else hard
    if needed > most:
        say(f"{num_nodes} nodes may need {needed} open files, but the limit is {most}; raise it with ulimit -Hn")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, most), hard))


def drop_shared_monitor(environ: MutableMapping[str, str], *, num_workers: int) -> None:
    """Remove ft_launcher's rank monitor from the environment if a node has several workers.

    The monitor serves one worker at a time. The other workers would wait three minutes for the monitor before failing.
    """
    if num_workers > 1 and environ.pop(MONITOR, None) is not None:
        say(
            f"{MONITOR} is not passed on to the workers: ft_launcher gave this launcher a rank monitor, which cannot "
            f"watch {num_workers} workers"
        )


def _running(agent: PipetteAgent) -> set[int]:
    """Return the process ids of the workers that have not ended; empty if workers run a function."""
    context = agent._pcontext  # noqa: SLF001
    is_started = isinstance(context, SubprocessContext)
    return {one.pid for one in workers.processes(context).values() if one.returncode is None} if is_started else set()


def _workers(agent: PipetteAgent) -> set[int] | None:
    """Return the process ids of the workers that run; None before the first phase."""
    context = agent._pcontext  # noqa: SLF001
    if context is None:
        return set() if agent.has_begun else None
    # The id of an ended worker may belong to another process by now.
    return set(context.pids().values()) & {child.pid for child in psutil.Process().children()}


@contextmanager
def _in_place_of(module: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Replace a name in a torch module while the block runs."""
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)
