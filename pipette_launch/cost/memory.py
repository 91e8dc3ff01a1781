"""Peak bytes on each pipeline rank: an analytic sum, every term with its source.

Facts: memory.md section 4 ("Assembled"): the peak is the larger of the forward-backward part and of the optimizer step.
Not in it: what lies outside the model's tensors (context, communicators, workspaces, fragmentation; measured by the
warm-up as `Measurements.overhead_bytes`), bucket padding, CP ring buffers, unfused rotary embeddings.
"""

# M = micro-batches, V = model chunks of a rank.

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost import activations, experts
from pipette_launch.cost.parameters import Parameters, expert_dp, stage_parameters
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedules import num_warmup, schedule_table

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """Bytes on one pipeline rank at its peak, by kind."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept by the layers of all live micro-batches."""
    recompute: int
    """What a recomputed layer needs while its backward runs, once."""
    embedding: int
    head: int
    buffers: int
    """Pipeline receive and send tensors, and the buffer that all layers share."""
    optimizer_step: int
    """Temporaries of the optimizer step, when no activation lives any more."""

    @property
    def static(self) -> int:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The peak: static, and the larger of forward-backward and optimizer step."""
        passes = self.activations + self.recompute + self.embedding + self.head + self.buffers
        return self.static + max(passes, self.optimizer_step)


def peak_memory_bytes(job: Job, layout: Layout) -> tuple[MemoryParts, ...]:
    """Predict every pipeline rank's peak.

    Raises:
        LayoutError: the layout cuts the layers or the batch unevenly.

    """
    microbatches = layout.num_microbatches(job.batch.global_batch_size)
    chunk_bytes = chunk_activation_bytes(job, layout)
    recompute = max(recompute_working_set_bytes(job, layout, moe=moe) for moe in _kinds(job))
    input_bytes = activations.embedding_bytes(job, layout)
    only_first_chunk = (input_bytes,) + (0,) * (layout.vpp - 1)
    last = layout.pp - 1
    parts = []
    for rank, parameters in enumerate(stage_parameters(job.model, layout)):
        states, step = optimizer_bytes(job, parameters, layout)
        parts.append(
            MemoryParts(
                weights=parameters.count * job.model.dtype_bytes,
                gradients=parameters.count * gradient_bytes_per_parameter(job),
                optimizer=states,
                activations=peak_live_bytes(layout, rank, microbatches, chunk_bytes[rank :: layout.pp]),
                recompute=recompute,
                embedding=0 if rank else peak_live_bytes(layout, rank, microbatches, only_first_chunk),
                head=activations.head_bytes(job, layout) if rank == last else 0,
                buffers=buffer_bytes(job, layout),
                optimizer_step=step,
            )
        )
    return tuple(parts)


def peak_live_bytes(layout: Layout, rank: int, num_microbatches: int, chunk_bytes_V: tuple[int, ...]) -> int:
    """Most bytes that a rank's chunks hold for micro-batches whose backward is to come.

    1F1B: min(m, p - r) micro-batches. Interleaved: warm-up + 1 chunk passes, capped by their number, each with the
    bytes of its own chunk (memory.md section 4, megatron.md 8.3; schedules.py:762-786, 2093).
    """
    if layout.vpp == 1:
        return min(num_microbatches, layout.pp - rank) * chunk_bytes_V[0]
    group_size = layout.microbatch_group_size or layout.pp
    chunks_M = _chunk_order(layout.vpp, num_microbatches, group_size)
    weights_V = np.array(chunk_bytes_V, dtype=np.int64)
    forward = np.cumsum(weights_V[chunks_M])
    backward = np.concatenate(([0], np.cumsum(weights_V[layout.vpp - 1 - chunks_M])))
    ahead = num_warmup(layout.pp, layout.vpp, group_size, rank)
    done = np.maximum(np.arange(len(forward)) - ahead, 0)
    return int((forward - backward[done]).max())


def chunk_activation_bytes(job: Job, layout: Layout) -> tuple[int, ...]:
    """What each chunk's layers keep for one micro-batch, in model order, with the layout's recompute."""
    model = job.model
    kept = [activations.kept_bytes(job, layout, moe=moe) for moe in (False, bool(model.num_experts))]
    whole_input = activations.residual_bytes(model, layout)
    seen: dict[tuple[int, ...], int] = {}
    chunks = []
    first = 0
    for layers in layout.chunk_layers(model.num_layers):
        kinds = model.moe_layer_freq[first : first + layers] or (0,) * layers
        first += layers
        if kinds not in seen:
            seen[kinds] = _after_full_recompute([kept[kind] for kind in kinds], layout, whole_input)
        chunks.append(seen[kinds])
    chunks[-1] += activations.prediction_bytes(job, layout)
    return tuple(chunks)


def recompute_working_set_bytes(job: Job, layout: Layout, *, moe: bool) -> int:
    """What recompute brings back for a while: the unit that is run again (memory.md section 4: one layer, once)."""
    if layout.recompute.granularity == "none":
        return 0
    layer = activations.layer_activations(job, layout, moe=moe)
    if layout.recompute.granularity == "selective":
        return layer.recomputed(activations.recompute_modules(layout), moe=moe)
    at_once = min(layout.recompute.num_layers, max(layout.chunk_layers(job.model.num_layers)))
    return layer.total * (at_once if layout.recompute.method == "uniform" else 1)


def optimizer_bytes(job: Job, parameters: Parameters, layout: Layout) -> tuple[int, int]:
    """Optimizer states of one rank, and the temporaries of its step.

    Adam keeps 8 bytes a parameter and, for 2-byte weights, an fp32 copy of 4; SGD keeps one momentum of 4. The
    distributed optimizer shards them over dp*cp, experts over their own data-parallel group (memory.md 3 and 4,
    megatron.md 8.2: 6 + 12/(d*c)). Temporaries: torch's foreach Adam, which runs without TransformerEngine, 4 bytes;
    gradients that are not fp32 are copied to fp32, 4 bytes. Optimizers other than Adam and SGD are counted as Adam.
    """
    model = job.model
    resident = resident_parameters(parameters, layout)
    copy = 0 if model.params_dtype == "fp32" else _FP32_BYTES
    states = _FP32_BYTES if job.optimizer == "sgd" else 2 * _FP32_BYTES
    step = 0 if model.transformer_impl == "transformer_engine" or job.optimizer == "sgd" else _FP32_BYTES
    if gradient_bytes_per_parameter(job) != _FP32_BYTES:
        step += _FP32_BYTES
    return resident * (copy + states), resident * step


def resident_parameters(parameters: Parameters, layout: Layout) -> int:
    """Count the parameters whose optimizer state one rank holds; the distributed optimizer shards them."""
    if not layout.use_distributed_optimizer:
        return parameters.count
    return -(-parameters.dense // (layout.dp * layout.cp)) + -(-parameters.expert // expert_dp(layout))


def gradient_bytes_per_parameter(job: Job) -> int:
    """Return 4 for fp32 accumulation, which bf16 forces unless reduced in bf16; 2 for fp16 (megatron.md 4.3, 8.2)."""
    if job.grad_reduce_in_bf16 or job.model.params_dtype == "fp16":
        return 2
    return _FP32_BYTES


def buffer_bytes(job: Job, layout: Layout) -> int:
    """One receive and one send tensor of the pipeline, and Megatron's global buffer (megatron.md 8.4).

    The buffer is as large as its largest user: the gathered input of sequence parallelism, the tokens that the
    all-gather dispatcher gathers, or local attention's scores.
    """
    residual = activations.residual_bytes(job.model, layout)
    pipeline = 2 * residual if layout.pp > 1 else 0
    gathered = residual * layout.tp if layout.sequence_parallel and layout.tp > 1 else 0
    dispatched = experts.gather_buffer_bytes(job, layout)
    return pipeline + max(gathered, dispatched, activations.attention_scores_bytes(job.model, layout))


def _kinds(job: Job) -> tuple[bool, ...]:
    """Which of dense (False) and MoE (True) layers the model has."""
    return tuple(sorted({bool(kind) for kind in job.model.moe_layer_freq})) or (False,)


def _after_full_recompute(sizes: list[int], layout: Layout, layer_input: int) -> int:
    """Keep one input per unit: units of k layers, or each of the chunk's first k layers (megatron.md 8.3)."""
    recompute = layout.recompute
    if recompute.granularity != "full":
        return sum(sizes)
    if recompute.method == "uniform":
        return -(-len(sizes) // recompute.num_layers) * layer_input
    again = min(recompute.num_layers, len(sizes))
    return again * layer_input + sum(sizes[again:])


@lru_cache(maxsize=1024)
def _chunk_order(vpp: int, num_microbatches: int, group_size: int) -> NDArray[np.int64]:
    return np.array([chunk for _, chunk in schedule_table(vpp, num_microbatches, group_size)], dtype=np.int64)
