"""Base class and data types of the blocks of a layer, such as attention, Mamba mixer, MLP, and experts.

A layer has one or two blocks, each behind a norm and beside a residual connection. All counts of bytes are for one
micro-batch on one rank.
"""

# Letters of array axes: S = stages (model chunks) in model order.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipette_launch.cost.layers.loads import Exchange, PassLoads
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Ints, Layout

FP32_BYTES = 4
MASK_BYTES = 1


def residual_bytes(job: Job, layout: Layout) -> int:
    """Bytes of one T x h tensor, split over tp by sequence parallelism (Korthikanti et al. 2022, section 4.2)."""
    return Sizes(job, layout).residual_bytes


def narrow_bits(job: Job) -> float:
    """Return the bits of one element in FP8 or FP4, or 0 if TransformerEngine does not multiply in these formats.

    The scales of NVFP4 take one byte for 16 elements. The scales of FP8 are left out.
    """
    options = job.options
    if job.model.transformer_impl != "transformer_engine":
        return 0
    return 4.5 if options.fp4 else 8 if options.fp8 else 0


def compute_dtype(job: Job) -> str:
    """Return the format in which layers multiply their matrices: `fp8` or `fp4`, else the format of the weights."""
    if not narrow_bits(job):
        return job.model.params_dtype
    return "fp8" if narrow_bits(job) == 8 else "fp4"


def narrow_layers(job: Job) -> tuple[bool, ...]:
    """Return for each layer if it may use FP8 or FP4 (MC fp8_utils.py, is_first_last_bf16_layer)."""
    options, count, start, end = job.options, job.model.num_layers, 0, 0
    if options.first_last_layers_bf16:
        start, end = options.num_layers_at_start_in_bf16, options.num_layers_at_end_in_bf16
    return tuple(start <= layer < count - end for layer in range(count))


def in_bf16(job: Job) -> Job:
    """Return the job without FP8 and FP4."""
    return replace(job, options=replace(job.options, fp8=None, fp4=None))


def has_narrow_copies(job: Job) -> bool:
    """Return True if a matrix keeps a narrow copy of an input that another operation keeps in 16 bits.

    FP8 keeps such copies with delayed scaling only, and FP4 keeps none (MC transformer/attention.py,
    transformer/moe/shared_experts.py, `set_save_original_input`; TE from 2.6 and 2.7 on).
    """
    options = job.options
    return narrow_bits(job) > 0 and options.fp8_recipe == "delayed" and not options.fp4


def as_matrix_input(job: Job, size_bytes: int) -> int:
    """Return the bytes of a tensor, given in the model's type, that is kept as the input of a matrix.

    TransformerEngine keeps the input only in the format of the product (TE, module/linear.py, grouped_linear.py).
    """
    return int(size_bytes * (narrow_bits(job) or 8 * job.model.dtype_bytes) / (8 * job.model.dtype_bytes))


def recompute_modules(layout: Layout) -> tuple[str, ...]:
    """Return the modules that selective recompute runs again; Megatron's default is the attention core."""
    if layout.recompute.granularity != "selective":
        return ()
    return layout.recompute.modules or ("core_attn",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Number of parameters on one rank."""

    dense: int = 0
    """Number of parameters outside experts, whose gradients are reduced over dp * cp."""
    expert: int = 0
    """Number of parameters of experts, whose gradients are reduced over the expert data-parallel group."""

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(dense=self.dense + other.dense, expert=self.expert + other.expert)

    def __mul__(self, count: int) -> Parameters:
        return Parameters(dense=self.dense * count, expert=self.expert * count)

    @property
    def count(self) -> int:
        """Number of dense and expert parameters together."""
        return self.dense + self.expert


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes that a block or a layer keeps for its backward."""

    layer_input: int = 0
    """Bytes of the input of the first block, the only tensor that full recompute keeps."""
    attention_norm: int = 0
    attention: int = 0
    """Bytes of query, key, value and context of attention, or of all tensors that a Mamba mixer keeps."""
    latent_projections: int = 0
    """Bytes of query, key and value of multi-latent attention."""
    core_attention: int = 0
    """Bytes of softmax statistics (flash and fused attention), or of probabilities with their dropout mask and dropped
    copy."""
    delta_norm: int = 0
    """Bytes of the normed output of a gated delta network, and of the input of its output projection."""
    mlp_input: int = 0
    """Bytes of the input of an MLP or expert block."""
    mlp_norm: int = 0
    mlp: int = 0
    """Bytes of the first matrix's output; for experts also of the first matrix's input, and of router and dispatch."""
    mlp_activation: int = 0
    """Bytes of the second matrix's input."""
    shared_experts: int = 0
    dropout_masks: int = 0
    fuses_attention_norm: bool = False
    """True if the norm is part of the next matrix's kernel, so that recompute of the norm alone is impossible."""
    fuses_mlp_norm: bool = False
    has_experts: bool = False

    def __add__(self, other: Activations) -> Activations:
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return Activations(**{name: a | b if isinstance(a, bool) else a + b for name, a, b in pairs})

    @property
    def total(self) -> int:
        """Bytes that the block keeps without recompute."""
        return sum(getattr(self, name) for name in self.__slots__ if not name.startswith(("fuses", "has")))

    def recomputed(self, modules: tuple[str, ...]) -> int:
        """Bytes of activations that are not kept if these modules (by Megatron's names) are recomputed.

        TransformerEngine's dense layers compute their norms inside the matrices' kernels. In TransformerEngine's dense
        layers, recompute of `layernorm` saves no bytes, and recompute of `mlp` also saves the norm's bytes
        (transformer_layer.py:379-447 of core_v0.16.1).
        """
        whole_mlp, moe = self.mlp + self.mlp_activation, self.has_experts
        saved_by_module = {
            "core_attn": self.core_attention,
            "layernorm": (not self.fuses_attention_norm) * self.attention_norm
            + (not self.fuses_mlp_norm) * self.mlp_norm,
            "moe_act": self.mlp_activation if moe else 0,
            "mlp": 0 if moe else whole_mlp + self.fuses_mlp_norm * self.mlp_norm,
            "moe": whole_mlp + self.shared_experts if moe else 0,
            "shared_experts": self.shared_experts,
            "mla_up_proj": self.latent_projections,
            "gdn_norm_out": self.delta_norm,
        }
        names = set(modules) - ({"shared_experts", "moe_act"} if "moe" in modules else set())
        return sum(saved_by_module.get(name, 0) for name in names)


class Sizes:
    """Tensor sizes that all blocks of a layer share."""

    def __init__(self, job: Job, layout: Layout) -> None:
        self.job, self.layout = job, layout
        self.model, self.options = job.model, job.options
        model = job.model
        self.tokens = model.seq_length * layout.micro_batch_size // layout.cp
        """Number of tokens of a rank before sequence parallelism splits the tokens: T = s * b / cp."""
        shards = layout.tp if layout.sequence_parallel else 1
        self.local_tokens = self.tokens // shards
        """Number of tokens of a rank in norms, router and dispatcher: T, or T / tp with sequence parallelism."""
        self.residual_bytes = model.dtype_bytes * self.tokens * model.hidden_size // shards
        """Bytes of one T x h tensor, split over tp by sequence parallelism (Korthikanti et al. 2022, section 4.2)."""
        self.dropout_mask_bytes = 0
        """Bytes of the dropout mask behind one block."""
        if model.hidden_dropout > 0:
            self.dropout_mask_bytes = self.residual_bytes // model.dtype_bytes * MASK_BYTES
        self.gates = 2 if model.gated_linear_unit else 1
        """Output width of an MLP's first matrix, in multiples of the MLP's width: 2 for gated units, else 1."""
        self.uses_te = model.transformer_impl == "transformer_engine"

    def stream_bytes(self) -> int:
        """Bytes of the tensor between layers, in fp32 with `--fp32-residual-connection`, else in the model's type."""
        wide = self.options.fp32_residual_connection
        return self.residual_bytes * FP32_BYTES // self.model.dtype_bytes if wide else self.residual_bytes


class Block(Sizes, ABC):
    """Base class for the blocks of a layer.

    A method counts the block's norm only if its docstring names the norm.
    """

    graph_parts: tuple[str, ...] = ()
    """Parts of the block, in order, that CUDA graphs can hold, by Megatron's names (`CudaGraphs.captured`)."""
    recompute_module = ""
    """Megatron's name of the block as a module of selective recompute; empty if the block cannot be recomputed."""

    def __init__(self, job: Job, layout: Layout, domain: int = 1) -> None:
        """Size the block; `domain` is the number of slots in one NVLink domain, on which its exchanges depend."""
        super().__init__(job, layout)
        self.domain = domain

    @abstractmethod
    def parameters(self) -> Parameters:
        """Count the parameters on one rank."""

    def matrices(self) -> int:
        """Count the parameters of the linears, biases included, of which FP8 keeps copies."""
        return self.parameters().count

    @abstractmethod
    def activations(self) -> Activations:
        """Count the bytes that the block keeps for its backward, with norm, the norm's input and dropout mask."""

    @abstractmethod
    def backward_bytes(self) -> int:
        """Count the bytes that the block's backward needs for a while, beyond the layer's kept activations."""

    @abstractmethod
    def loads(self) -> PassLoads:
        """Return the work of the block's passes for the device."""

    def loads_of_parts(self) -> dict[str, PassLoads]:
        """Return the work of the block's passes for the device, for each of `graph_parts`, in their order."""
        (only,) = self.graph_parts
        return {only: self.loads()}

    def module_flops(self) -> dict[str, float]:
        """Return the forward FLOPs per token of each module of the block that selective recompute can name."""
        return {}

    def column_flops(self) -> float:
        """Return the forward FLOPs per token of one column-parallel matrix; 0 without such a matrix."""
        return 0.0

    def is_cut_by_tp(self) -> bool:
        """Return True if tensor parallelism cuts the block, so that each pass needs one exchange."""
        return True

    def column_inputs(self) -> tuple[int, ...]:
        """Return the width of the input of each column-parallel matrix, if tensor parallelism cuts the block."""
        return (self.model.hidden_size,)

    def exchanges(self, _once_S: Ints, _again_S: Ints) -> Iterator[Exchange]:
        """Yield the collectives of the block except the collectives around row- and column-parallel matrices.

        `once_S` counts the blocks of this class on each stage, and `again_S` counts the blocks that recompute runs
        again.
        """
        yield from ()
