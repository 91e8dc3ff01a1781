"""Gradients and optimizer states, by precision, sharding and kind."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.optimizer import (
    buffered_parameters,
    gradient_bytes_per_parameter,
    optimizer_bytes,
    resident_parameters,
    state_bytes_per_parameter,
    step_bytes_per_parameter,
)
from pipette_launch.facts import Job, Layout

SHARDED = Layout(dp=4, use_distributed_optimizer=True)


def job(*flags: str, **changes: object) -> Job:
    """A bf16 GPT."""
    model = {"params_dtype": "bf16", "transformer_impl": "transformer_engine", "attention_backend": "fused"}
    return tiny_job(model=tiny_model(**(model | changes)), performance_flags=flags)


@pytest.mark.parametrize(
    ("changes", "layout", "expected"),
    [
        # bf16 with fp32 gradients: 18 bytes, or 6 + 12/d.
        ({}, Layout(dp=4), (2, 4, 12, 0)),
        ({}, Layout(dp=4, use_distributed_optimizer=True), (2, 4, 3, 0)),
        # dp * cp shards, not dp.
        ({}, Layout(dp=2, cp=2, use_distributed_optimizer=True), (2, 4, 3, 0)),
        # torch's own Adam holds 4 more for each parameter it steps.
        ({"transformer_impl": "local"}, Layout(dp=4), (2, 4, 12, 4)),
        ({"transformer_impl": "local"}, Layout(dp=4, use_distributed_optimizer=True), (2, 4, 3, 1)),
        # fp16 gradients are copied to fp32 for the step: 20 bytes, or 4 + 16/d.
        ({"params_dtype": "fp16"}, Layout(dp=4), (2, 2, 12, 4)),
        ({"params_dtype": "fp32"}, Layout(dp=4), (4, 4, 8, 0)),
        ({"params_dtype": "fp32"}, Layout(dp=4, use_distributed_optimizer=True), (4, 4, 2, 0)),
    ],
)
def test_bytes_of_a_parameter(changes: dict[str, object], layout: Layout, expected: tuple[int, ...]) -> None:
    """Weight, gradient, optimizer, step, by precision."""
    this = job(**changes)
    states, step = optimizer_bytes(this, 1000, 0, layout)

    assert (this.model.dtype_bytes, gradient_bytes_per_parameter(this), states / 1000, step / 1000) == expected


def test_gradients_reduced_in_bf16() -> None:
    """2 bytes in the buffer, 4 more for the step."""
    this = replace(job(), grad_reduce_in_bf16=True)

    assert gradient_bytes_per_parameter(this) == 2
    assert optimizer_bytes(this, 10, 0, Layout()) == (120, 40)


def test_sgd_keeps_one_momentum() -> None:
    """4 bytes and the fp32 copy, no temporaries."""
    assert optimizer_bytes(replace(job(), optimizer="sgd"), 10, 0, Layout()) == (80, 0)


def test_experts_shard_over_their_own_group() -> None:
    """With dp 4, ep 2: dense states over four ranks, experts over two; a rest is rounded up."""
    layout = Layout(dp=4, ep=2, use_distributed_optimizer=True)

    assert optimizer_bytes(job(), 10, 10, layout)[0] == 12 * (3 + 5)


def test_fp16_gradients_in_fp32_when_asked() -> None:
    """`--accumulate-allreduce-grads-in-fp32` doubles the buffer and spares the copy."""
    this = job("--accumulate-allreduce-grads-in-fp32", params_dtype="fp16")

    assert gradient_bytes_per_parameter(this) == 4
    assert optimizer_bytes(this, 10, 0, Layout()) == (120, 0)


def test_instances_of_the_distributed_optimizer_shard_by_themselves() -> None:
    """Two instances on four ranks: two shards each."""
    this = job("--num-distributed-optimizer-instances 2")

    assert resident_parameters(this, 1000, 0, SHARDED) == 500
    assert resident_parameters(job(), 1000, 0, SHARDED) == 250


@pytest.mark.parametrize(
    ("flags", "dtype", "expected"),
    [
        # Two fp32 moments, and two bytes that complete the bf16 weight to fp32.
        ((), "bf16", 10),
        (("--exp-avg-dtype bf16", "--exp-avg-sq-dtype fp8"), "bf16", 5),
        (("--main-params-dtype fp16",), "bf16", 10),
        ((), "fp16", 12),
    ],
)
def test_precision_aware_optimizer(flags: tuple[str, ...], dtype: str, expected: int) -> None:
    """Bytes of its states for one parameter."""
    assert state_bytes_per_parameter(job("--use-precision-aware-optimizer", *flags, params_dtype=dtype)) == expected


@pytest.mark.parametrize(
    ("flags", "changes", "expected"),
    [
        # The gradient twice, three states and back, the weight written.
        ((), {}, 8 + 24 + 2),
        # The weight is its own fp32 copy.
        ((), {"params_dtype": "fp32"}, 8 + 16 + 8),
        # The fp32 copy of the gradient is read.
        ((), {"params_dtype": "fp16"}, 8 + 24 + 2),
        # The weight is the upper half of its fp32 copy, and is read too.
        (("--use-precision-aware-optimizer",), {}, 8 + 16 + 4 + 4),
        # One moment is copied to fp32 and back.
        (("--use-precision-aware-optimizer", "--exp-avg-dtype bf16"), {}, 8 + 16 + 4 + 4 + 2 * (2 + 4)),
    ],
)
def test_bytes_that_a_step_moves(flags: tuple[str, ...], changes: dict[str, object], expected: int) -> None:
    """Read and written for one parameter, by the types of gradients and states."""
    assert step_bytes_per_parameter(job(*flags, **changes)) == expected


def test_narrow_states_are_copied_for_the_step() -> None:
    """To fp32, dense and expert parameters one after the other; what completes a weight is not copied."""
    flags = ("--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype fp8")

    assert optimizer_bytes(job(*flags), 10, 30, Layout()) == (40 * 5, 30 * 8)
    assert optimizer_bytes(job("--use-precision-aware-optimizer"), 10, 0, Layout()) == (100, 0)


def test_states_on_the_host() -> None:
    """All of them, or a part."""
    assert optimizer_bytes(job("--optimizer-cpu-offload"), 10, 0, Layout())[0] == 0
    part = job("--optimizer-cpu-offload", "--optimizer-offload-fraction 0.25")
    assert optimizer_bytes(part, 10, 0, Layout())[0] == 90


@pytest.mark.parametrize(
    ("flags", "layout", "expected"),
    [
        ((), Layout(dp=4), 1000),
        # A multiple of lcm(4, 128), of lcm(12, 128) = 384, of 2^16.
        ((), SHARDED, 1024),
        ((), Layout(dp=6, cp=2, use_distributed_optimizer=True), 1152),
        (("--ddp-pad-buckets-for-high-nccl-busbw",), SHARDED, 65536),
    ],
)
def test_buckets_are_padded_for_equal_shards(flags: tuple[str, ...], layout: Layout, expected: int) -> None:
    """Only the distributed optimizer cuts them."""
    assert buffered_parameters(job(*flags), 1000, 0, layout) == expected
