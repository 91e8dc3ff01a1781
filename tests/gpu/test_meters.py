"""Memory of a real device: what the meter counts, what waits to be given back, what does not fit."""

import subprocess
import sys

import pytest
from gpu.fresh import HELD_MIB, MIB, hold, in_a_fresh_process, uuid

from pipette_launch import megatron
from pipette_launch.probe.health import inventory
from pipette_launch.probe.health.inventory import await_memory
from pipette_launch.probe.instruments import CudaMeter

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(220)]


def test_the_peak_counts_what_was_freed_again_and_not_what_was_there() -> None:
    """64 MiB that live only during the work are the peak; 32 MiB held before are told apart."""
    import torch

    meter = CudaMeter(uuid())
    held = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda")
    peak = meter.peak(lambda: torch.ones(64 * MIB, dtype=torch.uint8, device="cuda").sum().item())

    assert 64 * MIB <= peak.allocator_bytes <= 66 * MIB
    assert peak.idle_bytes >= held.numel()
    assert peak.reserved_bytes >= peak.allocator_bytes + peak.idle_bytes


def test_context_and_communicators_are_outside_the_allocator() -> None:
    """Each adds to the overhead; a fresh process has none; libraries' workspaces lie inside."""
    found = in_a_fresh_process("overhead")

    assert found["untouched"] < 50 * MIB
    assert 100 * MIB < found["context"] < 2048 * MIB
    assert found["context"] <= found["cublas"] <= found["communicator"]
    assert found["workspaces"] > 0


def test_what_others_hold_is_not_counted() -> None:
    """512 MiB and the context of a process that was there before are not this one's."""
    found = in_a_fresh_process("beside_others")

    assert 64 * MIB <= found["allocator"] < 70 * MIB
    assert found["device"] < 2048 * MIB


def test_a_devices_memory_is_awaited_and_its_holder_named() -> None:
    """While another process holds half a GiB the wait ends with its number; once it has died, with nothing."""
    before = inventory.host(name="here", address="", num_devices=1, device="cuda")
    holder = hold()
    try:
        full = await_memory(before, deadline_s=2.0)
    finally:
        holder.kill()
        holder.wait()

    assert "still holds" in full[0]
    assert inventory.device_used_bytes(uuid()) >= 0
    assert () == await_memory(before, deadline_s=30.0)
    # In some virtual machines the driver names no processes.
    assert len(full) == 1 or any(f"process {holder.pid} " in line for line in full[1:])
    assert HELD_MIB > 0


def test_a_stage_holds_what_abstract_execution_says_and_one_too_large_runs_out() -> None:
    """Within 5 %; the stage that runs out is an answer, and what comes after it is measured as before."""
    found = in_a_fresh_process("stages")

    assert [False, True, False] == found["ran_out"], found["notes"]
    first, _, again = found["allocated"]
    assert pytest.approx(found["abstract"], rel=0.05) == first - found["workspaces"]
    assert pytest.approx(first, rel=0.01) == again
    assert all(device > reserved for device, reserved in zip(found["device"], found["reserved"], strict=True))


def test_torchs_own_words_are_recognised_as_out_of_memory() -> None:
    """What a worker prints when CUDA has no memory left is explained so."""
    code = "import torch; torch.empty(1 << 50, dtype=torch.uint8, device='cuda')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert 1 == done.returncode
    why = megatron.explain_failure(done.stderr)
    assert why is not None
    assert why.ran_out_of_memory
