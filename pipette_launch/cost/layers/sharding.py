"""What FSDP shards over the data-parallel ranks, and what stands whole beside the shards.

FSDP = megatron/core/distributed/fsdp/src/megatron_fsdp of core_v0.16.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.cost.layers.activations import computes_in_fp8
from pipette_launch.cost.layers.parameters import unit_parameters
from pipette_launch.facts.job import SHARDS_GRADIENTS, Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec
from pipette_launch.megatron.performance import performance_options

_LEAST_UNIT = 1_000_000_000
"""Parameters that wait for their reduction at once where no flag says how many (FSDP megatron_fsdp.py:375-399)."""
_BUCKET = 40_000_000
"""Parameters of a bucket where layers are no units (distributed_data_parallel.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """What each data-parallel rank holds a share of: experts over their own ranks, everything else over dp * cp."""

    weights: bool
    """Layers are gathered for each pass of each micro-batch, and dropped behind it."""
    gradients: bool
    """They are reduced in every micro-batch."""
    states: bool
    keeps_ends: bool
    """Embedding and head are gathered once a step and stay."""
    gathers_twice: bool
    """In the backward once more."""


def sharding_of(job: Job) -> Sharding | None:
    """Read how the job's own flags shard it; None without FSDP.

    Megatron-FSDP: FSDP param_and_grad_buffer.py:1846-1865. torch FSDP2 wraps layers, embedding and head, each a unit
    (megatron/core/distributed/torch_fully_sharded_data_parallel.py).
    """
    options = performance_options(job)
    if options.use_megatron_fsdp:
        strategy = options.data_parallel_sharding_strategy
        return Sharding(
            weights=strategy == "optim_grads_params",
            gradients=strategy in SHARDS_GRADIENTS,
            states=strategy != "no_shard",
            keeps_ends=True,
            gathers_twice=True,
        )
    if options.use_torch_fsdp2:
        twice = options.torch_fsdp2_reshard_after_forward
        return Sharding(weights=True, gradients=True, states=True, keeps_ends=False, gathers_twice=twice)
    return None


def shard_copies(job: Job) -> int:
    """Count the copies of what Megatron-FSDP shards, each over its share of the data-parallel ranks."""
    options = performance_options(job)
    return options.num_distributed_optimizer_instances if options.use_megatron_fsdp else 1


def layer_weight_bytes(job: Job) -> tuple[int, int]:
    """Return the bytes of a layer's parameter in a shard, and in what is gathered.

    With `--fp8-param-gather` both are FP8; MXFP8 has one shard for rows and one for columns, and gathers the rows for
    the forward and the columns for the backward. torch FSDP2 gathers no FP8 (arguments.py, validate_args).
    """
    options = performance_options(job)
    wide = job.model.dtype_bytes
    if not (options.use_megatron_fsdp and options.fp8_param_gather and computes_in_fp8(job)):
        return wide, wide
    return 2 if options.fp8_recipe == "mxfp8" else 1, 1


def end_parameters(model: ModelSpec, layout: Layout) -> tuple[int, int]:
    """Count the parameters outside the layers on one rank: of the embedding, and of head and final norm."""
    unit = unit_parameters(model, layout)
    depth = sum(unit.layers[kind].dense for kind in model.prediction_kinds)
    return unit.embedding.dense, unit.head.dense + unit.prediction.dense - model.prediction_copies * depth


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Bytes that stand whole beside the shards."""

    weights: int = 0
    """Layers at work or gathered ahead, and the ends of the model."""
    gradients: int = 0
    """When the backward reaches the last layer: of that layer, of the head, and of an embedding that is the head."""
    layer_gradients: int = 0
    """Of one layer."""
    layer_weights: int = 0
    """Of one layer that is gathered."""
    waiting: int = 0
    """So many further layers' gradients wait for their reduction, while as many layers as before are gathered."""
    waiting_at_end: int = 0
    """So many more wait while gathered layers become fewer, one for each, as none is left to gather ahead."""


def whole_beside_shards(job: Job, layout: Layout, gradient: int) -> Whole:
    """Count what one rank of a sharded job holds whole; `gradient` bytes for each gradient.

    Megatron-FSDP gathers layers ahead until they have half of `--suggested-communication-unit-size`, and frees reduced
    gradients only before the next bucket's reduction, once more than so many parameters wait; `--fsdp-double-buffer`
    keeps two layers of each (FSDP param_and_grad_buffer.py:3084-3131, 3493-3560, 651-800). A weight that embedding and
    head share is reduced when the backward is over (megatron_fsdp.py:767). torch FSDP2 holds two units of each.
    """
    sharding = sharding_of(job)
    if sharding is None or not sharding.gradients:
        return Whole()
    options, model = performance_options(job), job.model
    units = unit_parameters(model, layout)
    layer = max(units.layers[kind].count for kind in model.layer_kinds)
    embedding, head = end_parameters(model, layout)
    _, gathered = layer_weight_bytes(job)
    if not options.use_megatron_fsdp:
        both = layer + max(layer, head)
        return Whole(weights=both * gathered, gradients=both * gradient)
    num_layers = model.num_layers + model.mtp_num_layers
    if not sharding.weights:
        return _whole_buckets(job, num_layers * layer + embedding + head, layer, gradient)
    last_ends = head if model.untie_embeddings_and_output_weights else head + embedding
    size = options.suggested_communication_unit_size or max(_LEAST_UNIT, 2 * layer)
    ahead, waiting, own = -(-(size // 2) // layer), 1 + max(0, size - head) // layer, 1
    if options.fsdp_double_buffer or options.nccl_ub:
        ahead, waiting, own = 1, 0, min(2, num_layers)
    at_once = 1 + min(ahead, num_layers - 1)
    waiting = min(waiting, num_layers - own)
    early = min(waiting, num_layers - at_once)
    return Whole(
        weights=layer * at_once * gathered + (embedding + head) * model.dtype_bytes,
        gradients=(own * layer + last_ends) * gradient,
        layer_gradients=layer * gradient,
        layer_weights=layer * gathered,
        waiting=early,
        waiting_at_end=waiting - early,
    )


def _whole_buckets(job: Job, total: int, layer: int, gradient: int) -> Whole:
    """Count whole gradients where layers are no units: in buckets, or all in one unless their reduction overlaps.

    That flag stays as the user has it under FSDP. `--ddp-bucket-size` and `--ddp-num-buckets` are left out, and that
    buckets grow beyond 40 replicas.
    """
    bucket = min(_BUCKET, total) if job.own.overlap_grad_reduce else total
    size = performance_options(job).suggested_communication_unit_size or _LEAST_UNIT
    waiting = min((1 + size // bucket) * bucket, total - bucket)
    return Whole(gradients=bucket * gradient, layer_gradients=layer * gradient, waiting=waiting // layer)
