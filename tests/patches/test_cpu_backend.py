"""Stock megatron-core and its training programs run on CPUs over gloo, and torch is unchanged afterwards."""

import argparse
import inspect
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm

from patches import patched
from pipette_patches import registry
from pipette_patches.cpu_backend import (
    EMULATED_BF16,
    TORCH,
    _allow_no_cuda,
    _alone,
    _compile_for_this_python,
    _for_cpu,
    _keeping_steps,
    _one_by_one,
    _with_first_state,
    _with_own_steps,
    _without_kernels,
    has_bf16_instructions,
    say_once,
)
from pipette_patches.replacements import owner_of

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parents[0] / "tiny_gpt.py"


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
    flags = ("--standalone", f"--nproc-per-node={num_processes}")
    done = subprocess.run(
        warm.torchrun(*flags, script=[WORKER, json.dumps(cases)]),
        env=warm.environment([ROOT, ROOT / "patches"]),
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


def test_nobody_waits_for_a_collective_of_one() -> None:
    """A collective of one rank leaves its tensor unchanged and does not call the backend, except for a handle."""
    asked: list[tuple[object, bool]] = []

    def original(_tensor: object, _op: object = "sum", group: object = None, async_op: bool = False) -> str:
        asked.append((group, async_op))
        return "work"

    group = object()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "get_world_size", lambda one: 1 if one is group else 2)
        all_reduce = _alone(original)
        values = torch.ones(2)

        assert all_reduce(values, group=group) is None
        assert "work" == all_reduce(values, group=group, async_op=True)
        assert "work" == all_reduce(values)

    assert [(group, True), (None, False)] == asked
    assert [1.0, 1.0] == values.tolist()


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_collectives_name_their_group_and_handle_as_expected(name: str) -> None:
    """The patch reads `group` and `async_op` by name, wherever they stand."""
    assert {"group", "async_op"} <= set(inspect.signature(getattr(torch.distributed, name)).parameters)


# Megatron's own name for a gather, which torch 2.13 calls old.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_coalesced_gathers_that_nobody_waits_for_are_started_one_by_one() -> None:
    """Each has a handle of its own, and all bring their values; gloo is never given several at once."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        coalesce = _one_by_one(torch.distributed._coalescing_manager)
        shards, wholes = [torch.full((3,), float(k)) for k in range(4)], [torch.zeros(3) for _ in range(4)]
        with coalesce(async_ops=True) as manager:
            for shard, whole in zip(shards, wholes, strict=True):
                torch.distributed.all_gather_into_tensor(whole, shard, async_op=True)
        manager.wait()
        total = torch.ones(2)
        with coalesce(async_ops=True) as summing:
            torch.distributed.all_reduce(total, async_op=True)
        summing.wait()
    finally:
        torch.distributed.destroy_process_group()

    assert (4, 1) == (len(manager.works), len(summing.works))
    assert [shard.tolist() for shard in shards] == [whole.tolist() for whole in wholes]
    assert [1.0, 1.0] == total.tolist()


def distributed_optimizer() -> Any:
    """Stand for Megatron's distributed optimizer: a torch Adam over two shards, and where each shard is."""
    shards = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    adam = torch.optim.AdamW(shards, lr=0.1)
    return SimpleNamespace(optimizer=adam, model_param_group_index_map={"a": (0, 0), "b": (0, 1)}, shards=shards)


def test_the_state_is_there_before_the_first_step() -> None:
    """Megatron, which counts the steps in Adam's state, finds one count: zero; a second look changes nothing."""
    optimizer = distributed_optimizer()
    state_dict = _with_first_state(lambda this: this.optimizer.state_dict())
    first = state_dict(optimizer)
    second = state_dict(optimizer)

    assert {state["step"].item() for state in first["state"].values()} == {0.0}
    assert [state["exp_avg"].shape for state in first["state"].values()] == [(2,), (3,)]
    assert second["state"][0]["exp_avg"] is first["state"][0]["exp_avg"]


def test_the_given_state_trains_as_torchs_own() -> None:
    """Zero moments and zero steps are what torch would have made in the first step."""
    prepared, plain = distributed_optimizer(), distributed_optimizer()
    _with_first_state(lambda this: this.optimizer.state_dict())(prepared)
    for optimizer in (prepared, plain):
        for shard in optimizer.shards:
            shard.grad = torch.full_like(shard, 0.5)
        optimizer.optimizer.step()

    assert prepared.shards[0].tolist() == plain.shards[0].tolist()


def test_every_parameter_counts_its_own_steps_after_a_load() -> None:
    """One shared counter would be advanced once for each parameter."""
    optimizer = distributed_optimizer()

    def load(this: Any, step: float) -> None:
        shared = torch.tensor(step)
        for shard in this.shards:
            this.optimizer.state[shard] = {
                "step": shared,
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }
            shard.grad = torch.ones_like(shard)

    _with_own_steps(load)(optimizer, 3.0)
    optimizer.optimizer.step()

    assert [4.0, 4.0] == [optimizer.optimizer.state[shard]["step"].item() for shard in optimizer.shards]


def test_a_shards_state_does_not_turn_the_steps_back() -> None:
    """The step counter of the parameter groups stays, if the shard's state has no counter or an old one."""
    optimizer = distributed_optimizer()
    for shard in optimizer.shards:
        optimizer.optimizer.state[shard] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(shard)}

    def copy_all(this: Any, model_param: str, tensors: dict[str, Any]) -> None:
        group, order = this.model_param_group_index_map[model_param]
        state = this.optimizer.state[this.optimizer.param_groups[group]["params"][order]]
        for name, tensor in state.items():
            tensor.copy_(tensors[name])

    set_states = _keeping_steps(copy_all)
    set_states(optimizer, "a", {"exp_avg": torch.full((2,), 7.0)})
    set_states(optimizer, "b", {"exp_avg": torch.full((3,), 8.0), "step": torch.tensor(0.0)})
    states = [optimizer.optimizer.state[shard] for shard in optimizer.shards]

    assert [3.0, 3.0] == [state["step"].item() for state in states]
    assert [7.0, 8.0] == [state["exp_avg"][0].item() for state in states]


def test_a_gpu_machines_flags_become_a_cpus_before_megatron_checks_them(caplog: pytest.LogCaptureFixture) -> None:
    """Each change logs one line; flags that a CPU supports stay, and missing flags stay missing."""
    say_once.cache_clear()
    args = argparse.Namespace(distributed_backend="nccl", transformer_impl="local", fp8="hybrid", hidden_size=64)
    with caplog.at_level(logging.WARNING):
        seen = _for_cpu(lambda checked, defaults: (vars(checked).copy(), defaults))(args, {"a": 1})

    assert seen == (
        {"distributed_backend": "gloo", "transformer_impl": "local", "fp8": None, "hidden_size": 64},
        {"a": 1},
    )
    assert caplog.messages == ["cpu_backend: distributed_backend nccl -> gloo", "cpu_backend: fp8 hybrid -> None"]


def test_a_warning_is_said_once_and_by_rank_0_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of many processes is no louder than one."""
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        say_once("one")
        say_once("one")
        monkeypatch.setenv("RANK", "1")
        say_once("two")

    assert caplog.messages == ["cpu_backend: one"]


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile", True),
        ("flags\t\t: fpu avx2 avx512f amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("flags\t\t: fpu avx2 fma", False),
    ],
)
def test_bf16_instructions_are_read_from_the_kernel(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    """The kernel lists the instructions of x86 and Arm CPUs under different names."""
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{cpuinfo}\n")

    assert expected is has_bf16_instructions(file)


@pytest.mark.parametrize(
    ("dtype", "has_instructions", "expected"),
    [
        (torch.bfloat16, False, [f"cpu_backend: {EMULATED_BF16}"]),
        (torch.bfloat16, True, []),
        (torch.float32, False, []),
    ],
)
def test_a_bf16_job_on_a_cpu_that_emulates_bf16_is_warned(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    has_instructions: bool,
    expected: list[str],
) -> None:
    """The warning names the flag that makes such a job slow."""
    say_once.cache_clear()
    monkeypatch.setattr("pipette_patches.cpu_backend.has_bf16_instructions", lambda: has_instructions)
    with caplog.at_level(logging.WARNING):
        _without_kernels(lambda _config: None)(SimpleNamespace(params_dtype=dtype))

    assert expected == caplog.messages


def test_megatrons_own_switch_lets_it_start_without_cuda() -> None:
    """The caller's arguments pass through; only the switch is set."""
    started = _allow_no_cuda(lambda *args, **kwargs: (args, kwargs))("provider", allow_no_cuda=False, args_defaults={})

    assert started == (("provider",), {"allow_no_cuda": True, "args_defaults": {}})


def test_helpers_are_not_compiled_where_they_are_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megatron-core that brings its compiled helpers needs no make."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    called: list[Any] = []
    _compile_for_this_python(lambda: called.append(1))()

    assert called == []


def test_helpers_are_compiled_for_the_running_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make gets this Python's suffix and include folder, and MAKEFLAGS is restored afterwards."""
    pytest.importorskip("pybind11")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setenv("MAKEFLAGS", "-s")
    told: list[str] = []
    _compile_for_this_python(lambda: told.append(os.environ["MAKEFLAGS"]))()

    assert told[0].startswith("-s -- LIBEXT=.cpython-")
    assert "pybind11/include\\ -I" in told[0]
    assert os.environ["MAKEFLAGS"] == "-s"
