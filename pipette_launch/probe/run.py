"""One warm-up worker: `python -m pipette_launch.probe.run ORDER.json`, in torchrun's environment.

All workers run the phases in `phases.py` together. Rank 0 decides when a phase ends, gathers results through the
agent's store, and writes the Measurements. If the order has no job, workers time only links, and import no Megatron.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipette_launch.errors import ProbeError
from pipette_launch.facts import files
from pipette_launch.probe.health.nvml import is_same_device
from pipette_launch.probe.lockstep import Budget, Lockstep, WorkerPlace, end_with_parent, worker_place
from pipette_launch.probe.messages import WarmupOrder
from pipette_launch.probe.progress import START, Progress
from pipette_launch.text import printable

if TYPE_CHECKING:
    from pipette_launch.probe.compute.benches import LayerBench

logger = logging.getLogger(__name__)
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def main(arguments: Sequence[str]) -> int:
    """Run one warm-up worker; returns the exit code, and prints one line on stderr if it fails."""
    started_s = time.perf_counter()
    progress: Progress | None = None
    try:
        (path,) = arguments
        place = worker_place(os.environ)
        options = files.read(Path(path), WarmupOrder)
        # Compute the local rank from RANK, because --virtual-local-rank sets LOCAL_RANK to 0 on every worker.
        local = place.rank % options.devices_per_host
        progress = Progress(
            folder=Path(options.progress_dir), local_rank=local, limit_s=options.wait_s(options.start_left_s())
        )
        progress.announce(progress.phase)
        _work(options, place, progress, started_s)
    except Exception as error:
        # The agent needs one line and an exit code for any error, so every exception is caught.
        phase = progress.phase if progress else START
        kind = "" if isinstance(error, ProbeError) else f"{type(error).__name__}: "
        text = " ".join(str(error).split())
        reason = f"warm-up worker {os.environ.get('RANK', '?')} failed in phase {phase}: {kind}{text}"
        logger.debug("%s", reason, exc_info=True)
        sys.stderr.write(f"pipette: {printable(reason)}\n")
        if progress is not None:
            progress.fail(reason)
        return 1
    return 0


def _work(options: WarmupOrder, place: WorkerPlace, progress: Progress, started_s: float) -> None:
    if place.world_size != options.num_slots or not 0 <= place.rank < place.world_size:
        raise ProbeError(
            f"RANK={place.rank} WORLD_SIZE={place.world_size} do not fit "
            f"{len(options.hosts)} hosts of {options.devices_per_host} devices"
        )
    sys.path[:0] = options.python_path
    # torch is imported after the checks, so that a bad order fails at once.
    import torch.distributed as dist

    from pipette_launch.probe.phases import Phases

    layers, workspace_bytes = (None, 0) if options.job is None else _first_lap(options, place.rank, progress)
    if options.device_kind == "cuda":
        use_device(progress.local_rank, options.device(place.rank).uuid)
    lockstep = _met(options, place, progress, started_s)
    now_s = time.perf_counter()
    progress.phase_s[START] = now_s - started_s
    phases = Phases(
        options=options,
        layers=layers,
        lockstep=lockstep,
        budget=Budget(started_s=now_s, budget_s=options.budget_s, clock=time.perf_counter),
        workspace_bytes=workspace_bytes,
    )
    phases.alone()
    # The barrier comes first, because the deadline of a connection does not allow for late compute phases.
    lockstep.barrier(phases.budget.left_s())
    _open_group(options, lockstep)
    phases.together()
    # Skip this call after a failure, because NCCL would wait for peers that are gone, and the process ends anyway.
    dist.destroy_process_group()
    phases.alone_again()
    progress.announce("report")
    found = phases.report()
    if found is not None:
        files.write(Path(options.output), found)
    progress.announce("done")


def _first_lap(options: WarmupOrder, slot: int, progress: Progress) -> tuple[LayerBench, int]:
    """Import Megatron and run the reference case once; returns the slot's bench and the bytes of workspaces.

    The budget begins after this step and the rendezvous, because the time of imports and compilation does not depend on
    the agent's order.
    """
    from pipette_launch.probe.compute.benches import LayerBench
    from pipette_launch.probe.compute.own_script import OwnScript
    from pipette_launch.probe.instruments import meter as meter_of
    from pipette_patches import workload

    device = options.device(slot)
    # Create the meter before this process uses the device, because the meter subtracts the memory of other processes.
    meter = meter_of(options.device_kind, device.uuid)
    if options.device_kind == "cuda":
        use_device(progress.local_rank, device.uuid)
    progress.step(0, 0, "imports")
    workload.load(options.device_kind)
    progress.step(0, 0, "first lap")
    bench = LayerBench(options=options, slot=slot, meter=meter, script=OwnScript.of(options))
    return bench, bench.first_lap()


def _open_group(options: WarmupOrder, lockstep: Lockstep) -> None:
    """Open the communicator of all ranks."""
    import torch.distributed as dist

    # Pass no device_id. With a device_id NCCL splits subgroups off the world, and ranks outside a subgroup must make
    # the call too.
    world, backend = dist.PrefixStore("world", lockstep.store), BACKENDS[options.device_kind]
    # Deadline for reading NCCL's id from the store, and for the watchdog of the group.
    timeout = timedelta(seconds=options.wait_s())
    dist.init_process_group(backend, store=world, rank=lockstep.rank, world_size=lockstep.world_size, timeout=timeout)


def _met(options: WarmupOrder, place: WorkerPlace, progress: Progress, started_s: float) -> Lockstep:
    """Wait until all workers have started, so that the deadlines of phases need not cover late imports."""
    from torch.distributed import PrefixStore

    def left_s() -> float:
        return options.start_left_s(time.perf_counter() - started_s)

    lockstep = Lockstep(
        store=PrefixStore("pipette/warm-up", connect_store(place, timedelta(seconds=options.wait_s(left_s())))),
        rank=place.rank,
        world_size=place.world_size,
        timeout_s=options.timeout_s,
        progress=progress,
        name_of=options.slot_name,
    )
    lockstep.barrier(left_s())
    return lockstep


def use_device(local_rank: int, uuid: str) -> None:
    """Select the device that the training's worker will use; raises ProbeError if NVML described another device."""
    import torch

    torch.cuda.set_device(local_rank if torch.cuda.device_count() > 1 else 0)
    ordinal = torch.cuda.current_device()
    found = getattr(torch.cuda.get_device_properties(ordinal), "uuid", None)
    if not is_same_device(uuid, found):
        raise ProbeError(
            f"CUDA's device {ordinal} is GPU-{found}, and NVML's is {uuid}: they count in different orders; set "
            f"CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the devices by UUID in CUDA_VISIBLE_DEVICES"
        )


def connect_store(place: WorkerPlace, timeout: timedelta) -> Any:
    """Connect to the agent's store. If the agent hosts no store, rank 0 hosts a store."""
    from torch.distributed import TCPStore

    return TCPStore(
        place.master_addr,
        place.master_port,
        place.world_size,
        is_master=place.rank == 0 and not place.agent_hosts_store,
        timeout=timeout,
        wait_for_workers=False,
    )


def run_as_worker(program: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run the program of a worker, and end this process with the exit code that the program returns."""
    end_with_parent()
    # torch and megatron-core warn about optional libraries and deprecations, which do not concern a measurement.
    warnings.simplefilter("ignore")
    code = program(sys.argv[1:])
    # The agent keeps the output of a failed warm-up in files, to which Python writes when a buffer is full or flushed.
    for stream in (sys.stdout, sys.stderr):
        # The user's script may have closed the stream.
        with suppress(OSError, ValueError):
            stream.flush()
    # After a failure, destructors of communicators would wait for peers that are gone.
    os._exit(code)


if __name__ == "__main__":
    run_as_worker(main)
