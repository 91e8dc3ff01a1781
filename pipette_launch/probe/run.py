"""One warm-up worker: `python -m pipette_launch.probe.run OPTIONS.json`, in torchrun's environment.

All workers walk through the phases together (see `phases`); rank 0 decides when one ends, gathers what the others found
through the agent's store, and writes the Measurements.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipette_launch.errors import ProbeError
from pipette_launch.facts import files
from pipette_launch.probe.harness import START, Budget, Conductor, Progress, Seat, seat_of
from pipette_launch.probe.options import GroupShape, ProbeOptions, group_shapes
from pipette_launch.probe.parent_death import end_with_parent

__all__ = ["GroupShape", "ProbeOptions", "group_shapes", "main"]

logger = logging.getLogger(__name__)
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def main(arguments: Sequence[str]) -> int:
    """Be one warm-up worker; returns the exit code, and says on stderr in one line why it failed."""
    started_s = time.perf_counter()
    progress: Progress | None = None
    try:
        (path,) = arguments
        seat = seat_of(os.environ)
        options = files.read(Path(path), ProbeOptions)
        # Not LOCAL_RANK: torchrun's --virtual-local-rank makes that 0 everywhere.
        local = seat.rank % options.devices_per_host
        progress = Progress(folder=Path(options.progress_dir), local_rank=local)
        progress.announce(progress.phase)
        _work(options, seat, progress, started_s)
    except Exception as error:
        # Whatever it is, the agent needs one line and an exit code.
        phase = progress.phase if progress else "start"
        reason = f"warm-up worker {os.environ.get('RANK', '?')} failed in phase {phase}: {_one_line(error)}"
        logger.debug("%s", reason, exc_info=True)
        sys.stderr.write(f"pipette: {reason}\n")
        if progress is not None:
            progress.fail(reason)
        return 1
    return 0


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if not isinstance(error, ProbeError) else text


def _work(options: ProbeOptions, seat: Seat, progress: Progress, started_s: float) -> None:
    _check(options, seat)
    device = options.hosts[seat.rank // options.devices_per_host].devices[progress.local_rank]
    sys.path[:0] = options.python_path
    # Only now torch: a bad order is answered at once.
    import torch

    from pipette_launch.probe.compute.peak_memory import meter as meter_of
    from pipette_launch.probe.phases import Phases
    from pipette_patches.workload import layers

    # Before anything touches the device: the meter remembers what others hold there.
    meter = meter_of(device.kind, device.uuid)
    if device.kind == "cuda":
        torch.cuda.set_device(progress.local_rank if torch.cuda.device_count() > 1 else 0)
    # The most expensive import of a warm-up on CPU: it is the same whatever is measured.
    layers.load(options.device_kind)
    store = _store(seat, options)
    conductor = Conductor(
        store=store,
        rank=seat.rank,
        world_size=seat.world_size,
        timeout_s=options.timeout_s,
        progress=progress,
        name_of=options.slot_name,
    )
    # Imports end at different times; the deadline of a phase should not have to cover that.
    conductor.meet()
    # Imports and the rendezvous are the same whatever is measured, so the budget begins here.
    now_s = time.perf_counter()
    progress.phase_s[START] = now_s - started_s
    phases = Phases(
        options=options,
        rank=seat.rank,
        conductor=conductor,
        progress=progress,
        budget=Budget(started_s=now_s, budget_s=options.budget_s, clock=time.perf_counter),
        meter=meter,
    )
    phases.alone()
    with _process_group(store, conductor, seat, options):
        phases.together()
    phases.alone_again()
    progress.announce("report")
    found = phases.report()
    if found is not None:
        files.write(Path(options.output), found)
    progress.announce("done")


def _check(options: ProbeOptions, seat: Seat) -> None:
    """The agent's environment and its order must speak of the same job."""
    if seat.world_size != options.num_slots or not 0 <= seat.rank < seat.world_size:
        raise ProbeError(
            f"RANK={seat.rank} WORLD_SIZE={seat.world_size} do not fit "
            f"{len(options.hosts)} hosts of {options.devices_per_host} devices"
        )


def _store(seat: Seat, options: ProbeOptions) -> Any:
    """The agent's store; without an agent's, rank 0 hosts one."""
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(
        seat.master_addr,
        seat.master_port,
        seat.world_size,
        is_master=seat.rank == 0 and not seat.agent_hosts_store,
        timeout=timedelta(seconds=options.timeout_s),
        wait_for_workers=False,
    )
    return PrefixStore("pipette/warm-up", store)


@contextmanager
def _process_group(store: Any, conductor: Conductor, seat: Seat, options: ProbeOptions) -> Iterator[None]:
    """The world's communicator, for links and collectives; compute needs the process to itself."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore

    # No device_id: it would make NCCL split subgroups off the world, which asks for non-members too.
    # Nor should the deadline of a connection cover what is left of the others' compute.
    conductor.meet()
    dist.init_process_group(
        BACKENDS[options.device_kind],
        store=PrefixStore("world", store),
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(seconds=options.timeout_s),
    )
    yield
    # Not on failure: peers may be gone, and NCCL would wait for them; the process ends anyway.
    dist.destroy_process_group()


if __name__ == "__main__":
    end_with_parent()
    # torch and megatron-core warn of optional libraries and of deprecations; nothing of it concerns a measurement.
    warnings.simplefilter("ignore")
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # After a failure, destructors of communicators would wait for peers that are gone.
    os._exit(code)
