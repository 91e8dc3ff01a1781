"""Stock megatron-core trains on CPUs over gloo, and torch is itself again afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from patches import patched
from pipette_patches import registry
from pipette_patches.cpu_backend import TORCH
from pipette_patches.replacements import owner_of

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).parents[1] / "tiny_gpt.py"


def torch_objects() -> list[Any]:
    """Every torch object that the patch replaces, as its owner keeps it."""
    found = []
    for replacement in TORCH:
        owner, name = owner_of(sys.modules[replacement.module], replacement.path)
        found.append(vars(owner).get(name, "inherited"))
    return found


def test_undo_apply_apply_undo_undo_gives_torch_back() -> None:
    """After the last undo every replaced object of torch is the very object that was there."""
    before = torch_objects()
    patched.revert("cpu_backend")
    registry.apply("cpu_backend")
    registry.apply("cpu_backend")
    during = torch_objects()
    patched.revert("cpu_backend")
    patched.revert("cpu_backend")
    after = torch_objects()

    assert all(now is then for now, then in zip(after, before, strict=True))
    assert all(now is not then for now, then in zip(during, before, strict=True))


def test_cuda_means_cpu() -> None:
    """Tensors asked for on a CUDA device, in any spelling, are on the CPU."""
    with patched.use("cpu_backend"):
        tensors = [
            torch.zeros(1, device="cuda"),
            torch.tensor([1.0], device="cuda:1", pin_memory=True),
            torch.empty(1, device=torch.cuda.current_device()),
            torch.ones(1).to(torch.device("cuda", 0)),
            torch.ones(1).to(device="cuda"),
            torch.ones(1).new_zeros(1, device="cuda"),
            torch.ones(1).cuda(0),
            torch.nn.Linear(1, 1).cuda().weight,
        ]

    assert {"cpu"} == {tensor.device.type for tensor in tensors}


def test_a_device_that_is_not_cuda_stays() -> None:
    """The patch moves nothing else: meta tensors stay meta."""
    with patched.use("cpu_backend"):
        kinds = [torch.zeros(1, device="meta").device.type, torch.ones(1).to("meta").device.type]

    assert kinds == ["meta", "meta"]


def test_type_strings_read_and_convert_as_cuda() -> None:
    """The optimizers' comparison with `torch.cuda.FloatTensor` holds, and the string converts back."""
    with patched.use("cpu_backend"):
        names = [torch.ones(1).type(), torch.ones(1).bfloat16().type()]
        half = torch.ones(1).type("torch.cuda.HalfTensor").dtype
        double = torch.ones(1).type(torch.float64).dtype

    assert names == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor"]
    assert (torch.float16, torch.float64) == (half, double)


def test_random_state_is_the_generators() -> None:
    """Saving and restoring the CUDA state repeats the same numbers."""
    with patched.use("cpu_backend"), torch.random.fork_rng(devices=[]):
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4, device="cuda")
        torch.cuda.set_rng_state(state)
        second = torch.rand(4, device="cuda")

    assert first.tolist() == second.tolist()


def test_events_measure_time() -> None:
    """Events measure a duration in milliseconds."""
    with patched.use("cpu_backend"):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        end.record()

    assert 0 < begin.elapsed_time(end) < 10_000


def losses(num_processes: int, cases: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Train the tiny GPT in separate processes, once for each case, and read the output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'patches'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(WORKER), json.dumps(cases)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" loss ") for line in done.stdout.splitlines() if " loss " in line]
    return {case: [float(loss) for name, loss in lines if name == case] for case in cases}


@pytest.mark.processes
def test_a_tiny_gpt_learns_in_every_parallel_way() -> None:
    """Each kind of parallelism that a CPU can do lowers the loss in five steps, and sequence parallelism is exact."""
    moe = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"}
    found = losses(
        2,
        {
            "tp": {"tp": 2},
            "tp sp": {"tp": 2, "config": {"sequence_parallel": True, "persist_layer_norm": True}},
            "pp": {"pp": 2},
            "pp vpp bf16": {"pp": 2, "vpp": 2, "bf16": True},
            "dp": {"distributed_optimizer": True, "overlap_grad_reduce": True},
            "ep": {"ep": 2, "distributed_optimizer": True, "config": moe},
        },
    )

    assert [len(steps) for steps in found.values()] == [5] * 6
    assert all(steps[-1] < steps[0] - 0.3 for steps in found.values()), found
    assert found["tp"] == found["tp sp"]


@pytest.mark.processes
def test_recomputing_changes_no_number() -> None:
    """Full recompute, and the selective kinds that crash without Transformer Engine, give the losses of neither."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    some = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    found = losses(
        1, {"none": {"config": dropout}, "full": {"config": full | dropout}, "some": {"config": some | dropout}}
    )

    assert found["none"] == found["full"] == found["some"]
    assert len(found["none"]) == 5
