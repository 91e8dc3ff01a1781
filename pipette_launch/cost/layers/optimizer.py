"""Bytes of gradients and of the optimizer on one rank: states that stay, and temporaries of its step; and its seconds.

6 + 12/(d*c) bytes a parameter for bf16, fp32 gradients and Adam (Rajbhandari et al. 2020, ZeRO, section 5.1).
MC = megatron/core of core_v0.16.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.layers.parameters import expert_dp
from pipette_launch.cost.layers.sharding import layer_weight_bytes, sharding_of
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Ints, Layout, LayoutColumns
from pipette_launch.facts.measurements import Measurements
from pipette_launch.megatron.performance import performance_options

Floats = NDArray[np.float64]
IntOrInts = int | Ints
_FP32_BYTES = 4
_STATE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_REMAINDER_BYTES = 2
_SHARD_ALIGNMENT = 128
_BUSBW_ALIGNMENT = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class OnceAStep:
    """What a slot of speed 1 does once a step, after its gradients are reduced or before its first pass."""

    optimizer_s_per_parameter: float
    gradient_s_per_byte: float
    host_s: float

    @classmethod
    def of(cls, measurements: Measurements) -> OnceAStep:
        """Take what was measured; what was not counts as 0 s."""
        return cls(
            optimizer_s_per_parameter=measurements.optimizer_s_per_parameter or 0.0,
            gradient_s_per_byte=measurements.gradient_s_per_byte,
            host_s=measurements.step_s,
        )

    def seconds(self, resident: Ints, gradient_bytes: Ints) -> Floats:
        """Price ranks that step `resident` parameters, and hold so many bytes of gradients whoever steps them."""
        return self.optimizer_s_per_parameter * resident + self.gradient_s_per_byte * gradient_bytes + self.host_s


def gradient_bytes_per_parameter(job: Job) -> int:
    """Return 4 for fp32 accumulation, which bf16 forces unless reduced in bf16; 2 for fp16.

    torch FSDP2 reduces and keeps gradients in the weights' type.
    """
    if performance_options(job).use_torch_fsdp2:
        return job.model.dtype_bytes
    if job.model.params_dtype == "fp16":
        return _FP32_BYTES if performance_options(job).accumulate_allreduce_grads_in_fp32 else 2
    return 2 if job.grad_reduce_in_bf16 else _FP32_BYTES


def buffered_parameters(job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns) -> Ints:
    """Count the elements of the flat buffers for weights and gradients, padded so that all shards are equal.

    With the distributed optimizer a bucket ends at a multiple of lcm(d*c, 128), and of 2^16 too with
    `--ddp-pad-buckets-for-high-nccl-busbw` (MC distributed/param_and_grad_buffer.py:638-666). Counted as one bucket for
    the dense and one for the experts' parameters; that each parameter starts at a multiple of 64 is left out.
    """
    parts = padded(job, dense, layout.dp * layout.cp) + padded(job, expert, expert_dp(layout))
    return np.where(layout.use_distributed_optimizer, parts, dense + expert)


def weight_bytes(
    job: Job, dense: IntOrInts, expert: IntOrInts, ends: IntOrInts, layout: Layout | LayoutColumns
) -> Ints:
    """Count the bytes of the weights that one rank keeps: all of its own, or under FSDP a shard.

    Args:
        job: its flags say whether weights are sharded.
        dense: parameters of one rank that are no experts.
        expert: its experts.
        ends: of the dense ones those outside the layers, which are never in FP8.
        layout: who shares them.

    """
    sharding = sharding_of(job)
    if sharding is None or not sharding.weights:
        return buffered_parameters(job, dense, expert, layout) * job.model.dtype_bytes
    replicas = layout.dp * layout.cp
    layers = shard(job, dense - ends, replicas) + shard(job, expert, expert_dp(layout))
    return layers * layer_weight_bytes(job)[0] + shard(job, ends, replicas) * job.model.dtype_bytes


def held_gradients(job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns) -> Ints:
    """Count the gradients that one rank keeps from micro-batch to micro-batch, without padding."""
    sharding = sharding_of(job)
    if sharding is None or not sharding.gradients:
        return np.asarray(dense + expert)
    return shard(job, dense, layout.dp * layout.cp) + shard(job, expert, expert_dp(layout))


def resident_parameters(job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns) -> Ints:
    """Count the parameters whose optimizer state one rank holds.

    The distributed optimizer shards them over d*c, experts over their own data-parallel group; with
    `--num-distributed-optimizer-instances` each instance shards for itself, unless FSDP shards states over all.
    """
    sharding, options = sharding_of(job), performance_options(job)
    across = options.use_megatron_fsdp and options.outer_dp_sharding_strategy == "optim"
    parts = shard(job, dense, layout.dp * layout.cp, across=across)
    parts = parts + shard(job, expert, expert_dp(layout), across=across)
    return np.where(sharding.states if sharding else layout.use_distributed_optimizer, parts, dense + expert)


def padded(job: Job, counts: IntOrInts, num_shards: IntOrInts) -> Ints:
    """Pad buckets of so many elements for so many shards; see `buffered_parameters`."""
    extra = _BUSBW_ALIGNMENT if performance_options(job).ddp_pad_buckets_for_high_nccl_busbw else 1
    multiple = np.lcm(np.lcm(num_shards, _SHARD_ALIGNMENT), extra)
    return np.asarray(-(-counts // multiple) * multiple)


def shard(job: Job, counts: IntOrInts, num_shards: IntOrInts, *, across: bool = False) -> Ints:
    """Give one rank its share of so many elements, rounded up, `across` all instances of the optimizer or within one.

    See `resident_parameters`.
    """
    instances = 1 if across else performance_options(job).num_distributed_optimizer_instances
    return np.asarray(-(-counts // np.maximum(1, num_shards // instances)))


def optimizer_bytes(job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns) -> tuple[Ints, Ints]:
    """Count the optimizer's states on one rank, and the temporaries of its step.

    Temporaries: torch's foreach Adam, which runs without TransformerEngine, 4 bytes a parameter; gradients that are not
    fp32 are copied to fp32, 4 bytes. The precision-aware optimizer copies each state that is not fp32 to fp32 instead,
    of all parameters of its group at once; dense and expert parameters are stepped one after the other (TE 2.8,
    optimizers/fused_adam.py, step). Optimizers other than Adam and SGD are counted as Adam.
    """
    resident = resident_parameters(job, dense, expert, layout)
    options = performance_options(job)
    offloaded = options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0
    states = np.rint(resident * (state_bytes_per_parameter(job) * (1 - offloaded))).astype(np.int64)
    step = 0 if job.model.transformer_impl == "transformer_engine" or job.optimizer == "sgd" else _FP32_BYTES
    if gradient_bytes_per_parameter(job) != _FP32_BYTES and not options.use_precision_aware_optimizer:
        step += _FP32_BYTES
    groups = (resident_parameters(job, dense, 0, layout), resident_parameters(job, 0, expert, layout))
    copies = _FP32_BYTES * sum(size != _FP32_BYTES for size in _chosen_state_bytes(job))
    return states, resident * step + np.maximum(*groups) * copies


def state_bytes_per_parameter(job: Job) -> int:
    """Bytes of the optimizer's states for one parameter that it holds.

    Adam keeps two moments of 4 bytes and, for 2-byte weights, an fp32 copy of 4; SGD keeps one momentum of 4. The
    precision-aware optimizer keeps moments in chosen types, and of a bf16 weight's fp32 copy only the lower half, as
    the weight itself is the upper one (MC optimizer/__init__.py:365-390, optimizer_config.py:192, 351-384).
    """
    wide = job.model.params_dtype == "fp32"
    if job.optimizer == "sgd":
        return _FP32_BYTES + (0 if wide else _FP32_BYTES)
    if not performance_options(job).use_precision_aware_optimizer:
        return 2 * _FP32_BYTES + (0 if wide else _FP32_BYTES)
    return sum(_chosen_state_bytes(job)) + (_REMAINDER_BYTES if _keeps_remainders(job) else 0)


def step_bytes_per_parameter(job: Job) -> int:
    """Bytes that the optimizer's step reads and writes for one parameter that it holds.

    Its gradient is read for the norm and for the step, each state is read and written, the weight is written: 8 + 24 +
    2 for Adam on 16-bit weights. A weight that is all or half of its own fp32 copy is read too. A state in a chosen
    type is copied to fp32 first, and back (see `optimizer_bytes`). Only the precision-aware optimizer reads gradients
    that are not fp32 as they are; others read the fp32 copy, and making that is not counted.
    """
    is_aware = performance_options(job).use_precision_aware_optimizer
    gradient = gradient_bytes_per_parameter(job) if is_aware else _FP32_BYTES
    is_own_copy = job.model.params_dtype == "fp32" or _keeps_remainders(job)
    weight = (2 if is_own_copy else 1) * job.model.dtype_bytes
    copied = sum(2 * (size + _FP32_BYTES) for size in _chosen_state_bytes(job) if size != _FP32_BYTES)
    narrow = sum(_FP32_BYTES - size for size in _chosen_state_bytes(job))
    return 2 * gradient + 2 * (state_bytes_per_parameter(job) + narrow) + weight + copied


def _keeps_remainders(job: Job) -> bool:
    """Whether a bf16 weight is the upper half of its fp32 copy, of which the optimizer keeps the lower one alone."""
    options = performance_options(job)
    wide = _STATE_BYTES.get(options.main_params_dtype, _FP32_BYTES) == _FP32_BYTES
    return options.use_precision_aware_optimizer and job.model.params_dtype == "bf16" and wide


def _chosen_state_bytes(job: Job) -> tuple[int, ...]:
    """Bytes of each state in a type that the precision-aware optimizer was given: moments, and whole fp32 copies."""
    options = performance_options(job)
    if not options.use_precision_aware_optimizer or job.optimizer == "sgd":
        return ()
    types = [options.exp_avg_dtype, options.exp_avg_sq_dtype]
    if job.model.params_dtype != "fp32" and not _keeps_remainders(job):
        types.append(options.main_params_dtype)
    return tuple(_STATE_BYTES.get(dtype, _FP32_BYTES) for dtype in types)
