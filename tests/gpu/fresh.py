"""Work that needs a process in which CUDA was not touched before: `python -m gpu.fresh NAME` prints what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
HELD_MIB = 512


def in_a_fresh_process(name: str, **variables: str) -> dict[str, Any]:
    """Run one of the functions below; returns what it found, fails with its stderr."""
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "patches", "tests"))
    done = subprocess.run(
        [sys.executable, "-m", "gpu.fresh", name],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert 0 == done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def hold() -> subprocess.Popen[str]:
    """Start a process that holds 512 MiB of the device, and wait until it does."""
    code = f"import sys, torch; t = torch.ones({HELD_MIB} << 20, dtype=torch.uint8, device='cuda'); "
    code += "torch.cuda.synchronize(); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert "held\n" == holder.stdout.readline()
    return holder


def uuid() -> str:
    """Of the first device."""
    from pipette_launch.probe.health import inventory

    return inventory.host(name="here", address="", num_devices=1, device="cuda").devices[0].uuid


def overhead() -> dict[str, Any]:
    """What the meter tells of context, workspaces and a communicator, as they come."""
    from pipette_launch.probe.instruments import CudaMeter

    meter = CudaMeter(uuid())
    import torch
    import torch.distributed as dist

    untouched = meter.overhead_bytes()
    torch.zeros(1, device="cuda")
    with_context = meter.overhead_bytes()
    side = torch.randn(256, 256, device="cuda")
    torch.mm(side, side)
    with_cublas, workspaces = meter.overhead_bytes(), meter.workspace_bytes()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        dist.all_reduce(side)
        torch.cuda.synchronize()
        with_communicator = meter.overhead_bytes()
        dist.destroy_process_group()
    return {
        "untouched": untouched,
        "context": with_context,
        "cublas": with_cublas,
        "workspaces": workspaces,
        "communicator": with_communicator,
    }


def beside_others() -> dict[str, Any]:
    """What the meter counts of a device on which another process already holds memory."""
    from pipette_launch.probe.instruments import CudaMeter

    holder = hold()
    try:
        meter = CudaMeter(uuid())
        import torch

        peak = meter.peak(lambda: torch.ones(64 * MIB, dtype=torch.uint8, device="cuda").sum().item())
    finally:
        holder.kill()
        holder.wait()
    return {"allocator": peak.allocator_bytes, "device": peak.device_bytes}


def stages() -> dict[str, Any]:
    """Peaks of a stage that fits, of one that does not, and of the first again, by the warm-up's own probe."""
    from dataclasses import replace
    from types import SimpleNamespace

    from oracle.one_rank import program_from_flags
    from patches.stage_cases import LLAMA, job_of
    from torch.distributed import HashStore

    from pipette_launch.facts import ComputeCase, Layout
    from pipette_launch.facts.messages import StageCase
    from pipette_launch.probe.compute.benches import StageBench
    from pipette_launch.probe.health import inventory
    from pipette_launch.probe.instruments import CudaMeter
    from pipette_launch.probe.lockstep import Budget, Lockstep
    from pipette_launch.probe.messages import WarmupOrder
    from pipette_patches import workload

    host = inventory.host(name="here", address="", num_devices=1, device="cuda")
    meter = CudaMeter(host.devices[0].uuid)
    workload.load("cuda")
    layout = Layout(pp=4, dp=16, use_distributed_optimizer=True)
    changes = LLAMA | {"hidden_size": 1024, "ffn_hidden_size": 2816, "num_attention_heads": 8, "kv_channels": 128}
    job = job_of(changes, layout, ("--no-persist-layer-norm", "--no-rope-fusion"))
    small = replace(layout, micro_batch_size=2)
    # Scores of 8 heads over 2,048 samples of 128 tokens in bf16, some for each layer: many hundred GiB.
    huge = replace(layout, micro_batch_size=1 << 18)
    options = WarmupOrder(
        job=replace(job, batch=replace(job.batch, global_batch_size=16 * 8 << 18)),
        hosts=(host,),
        cases=(ComputeCase(tp=1, cp=1, micro_batch_size=1),),
        message_sizes_bytes=(8, 1 << 20, 16 << 20),
        output="",
        progress_dir="",
        script=("train.py",),
    )
    script: Any = SimpleNamespace(
        prepared=lambda job, layout, single_layers: program_from_flags(job, layout), captures=False
    )
    # No lap came before, so all that libraries keep counts.
    bench = StageBench(options=options, slot=0, meter=meter, script=script, workspace_bytes=1 << 40)
    bench.measure(
        [StageCase(layout=one, pp_rank=0) for one in (small, huge, small)],
        Lockstep(store=HashStore(), rank=0, world_size=1, timeout_s=60.0),
        Budget(started_s=0.0, budget_s=1.0, clock=lambda: 0.0),
    )
    from oracle.executor import Executor

    with Executor() as executor:
        (abstract,) = executor.execute(options.job, small, (0,))
    return {
        "ran_out": [one.ran_out for one in bench.found.stages],
        "allocated": [one.allocator_peak_bytes for one in bench.found.stages],
        "reserved": [one.reserved_peak_bytes for one in bench.found.stages],
        "device": [one.device_peak_bytes for one in bench.found.stages],
        "abstract": abstract.peak,
        "workspaces": meter.workspace_bytes(),
        "notes": bench.found.notes,
    }


def binding() -> dict[str, Any]:
    """The device that torch takes first in this process."""
    import torch

    found = torch.cuda.get_device_properties(0)
    return {"uuid": f"GPU-{found.uuid}", "name": found.name}


if __name__ == "__main__":
    functions = (overhead, beside_others, stages, binding)
    (chosen,) = (function for function in functions if function.__name__ == sys.argv[1])
    sys.stdout.write(json.dumps(chosen()) + "\n")
