"""The blocks of layers, and the data types that describe the cost of a block.

A layer kind is an entry of `kinds.KINDS`: one or two blocks, each behind a norm and beside a residual connection. A
block is a class (`Attention`, `Mlp`, `Experts`, `Mamba`) that states its parameters, kept activations, work for the
device, and exchanges between ranks. Every size is for one micro-batch on one rank.
"""

# S = stages (model chunks) in model order.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

from pipette_launch.facts.job import ITERATION, Job, PerformanceOptions
from pipette_launch.facts.layout import Ints, Layout
from pipette_launch.facts.measurements import CollectiveKind
from pipette_launch.facts.model import LayerKind, ModelSpec
from pipette_launch.megatron.performance import performance_options

FP32_BYTES = 4
MASK_BYTES = 1
_GRADIENT_BYTES = 8
"""Bytes moved for each weight in a micro-batch, because its fp32 gradient is read and written (gradient accumulation
fusion)."""


def tokens(model: ModelSpec, layout: Layout) -> int:
    """Return T = s * b / cp, the tokens of a micro-batch on one rank before sequence parallelism splits them."""
    return model.seq_length * layout.micro_batch_size // layout.cp


def local_tokens(model: ModelSpec, layout: Layout) -> int:
    """Return a rank's tokens in norms, router and dispatcher: T, or T / tp with sequence parallelism."""
    return tokens(model, layout) // (layout.tp if layout.sequence_parallel else 1)


def residual_bytes(model: ModelSpec, layout: Layout) -> int:
    """Bytes of one T x h tensor, split over tp by sequence parallelism (Korthikanti et al. 2022, section 4.2)."""
    return (
        model.dtype_bytes * tokens(model, layout) * model.hidden_size // (layout.tp if layout.sequence_parallel else 1)
    )


def stream_bytes(job: Job, layout: Layout) -> int:
    """Return the bytes of the tensor between layers: fp32 with `--fp32-residual-connection`, else the model's type."""
    residual = residual_bytes(job.model, layout)
    if not performance_options(job).fp32_residual_connection:
        return residual
    return residual * FP32_BYTES // job.model.dtype_bytes


def computes_in_fp8(job: Job) -> bool:
    """Return True if TransformerEngine multiplies in FP8 and keeps the inputs of its matrices in 1 byte an element."""
    return job.model.transformer_impl == "transformer_engine" and performance_options(job).fp8 is not None


def matrix_input_bytes(job: Job) -> int:
    """Bytes of one element of a matrix's kept input: 1 in FP8, without scales (TE, module/grouped_linear.py)."""
    return 1 if computes_in_fp8(job) else job.model.dtype_bytes


def dropout_mask_bytes(model: ModelSpec, layout: Layout) -> int:
    """Bytes of the dropout mask behind one block."""
    return residual_bytes(model, layout) // model.dtype_bytes * MASK_BYTES if model.hidden_dropout > 0 else 0


def recompute_modules(layout: Layout) -> tuple[str, ...]:
    """Return the modules of selective recompute; Megatron's default is the attention core."""
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
        """Add the parameters of two parts."""
        return Parameters(dense=self.dense + other.dense, expert=self.expert + other.expert)

    def __mul__(self, count: int) -> Parameters:
        """Return the parameters of several equal parts."""
        return Parameters(dense=self.dense * count, expert=self.expert * count)

    @property
    def count(self) -> int:
        """Dense and expert parameters together."""
        return self.dense + self.expert


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes that a block or a layer keeps for its backward."""

    layer_input: int = 0
    """Input of an attention or Mamba block, which is all that full recompute keeps."""
    attention_norm: int = 0
    attention: int = 0
    """Query, key, value and context of attention, or all tensors that a Mamba mixer keeps."""
    latent_projections: int = 0
    """Query, key and value of multi-latent attention."""
    core_attention: int = 0
    """Softmax statistics (flash and fused attention), or probabilities, their mask and their dropped copy."""
    mlp_input: int = 0
    """Input of an MLP or expert block."""
    mlp_norm: int = 0
    mlp: int = 0
    """Output of the first matrix; experts also keep tensors of router and dispatch."""
    mlp_activation: int = 0
    """Input of the second matrix."""
    shared_experts: int = 0
    dropout_masks: int = 0
    fuses_attention_norm: bool = False
    """True if the norm is part of the next matrix's kernel, so that recompute of the norm alone is impossible."""
    fuses_mlp_norm: bool = False
    has_experts: bool = False

    def __add__(self, other: Activations) -> Activations:
        """Add the activations of two blocks of a layer."""
        return Activations(
            **{
                name: getattr(self, name) | getattr(other, name)
                if isinstance(getattr(self, name), bool)
                else getattr(self, name) + getattr(other, name)
                for name in self.__slots__
            }
        )

    @property
    def total(self) -> int:
        """All bytes of the block, without recompute."""
        return sum(getattr(self, name) for name in self.__slots__ if not name.startswith(("fuses", "has")))

    def recomputed(self, modules: tuple[str, ...]) -> int:
        """Bytes that selective recompute of these modules does not keep; modules by Megatron's names.

        TransformerEngine's dense layers compute their norms inside the matrices' kernels. In these layers recompute of
        `layernorm` saves nothing, and recompute of `mlp` also saves the norm (transformer_layer.py:379-447 of
        core_v0.16.1).
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
        }
        names = set(modules) - ({"shared_experts", "moe_act"} if "moe" in modules else set())
        return sum(saved_by_module.get(name, 0) for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """`count` matrix products of m x k by k x n."""

    m: float
    n: float
    k: float
    count: float = 1.0
    is_linear: bool = False
    """True for a linear of Transformer Engine, which can run in FP8 or FP4."""
    rate: float = 1.0
    """Speed relative to one large product; products of many experts have a rate below 1."""

    @property
    def flops(self) -> float:
        """Floating-point operations; a multiply-add counts as 2."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Work of one pass for the device."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0.0
    """FLOPs of flash attention, which has a rate of its own."""
    exponentials: float = 0.0
    """Number of exponentials of flash attention's softmax: one for each score, computed again in the backward."""
    moved_bytes: float = 0.0
    """Bytes read and written by kernels that compute almost nothing."""
    scan_bytes: float = 0.0
    """Bytes read and written by the scan of Mamba-2, which has a rate of its own."""
    cast_elements: float = 0.0
    """Number of elements of inputs and gradients of linears, which are cast if the linears run in FP8 or FP4."""
    kernels: float = 0.0

    def __add__(self, other: Load) -> Load:
        """Add the work of two parts that run one after the other."""
        return Load(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class PassLoads:
    """Work of a part's three passes: forward, input gradient, weight gradient."""

    forward: Load = Load()
    input_grad: Load = Load()
    weight_grad: Load = Load()

    def __add__(self, other: PassLoads) -> PassLoads:
        """Add the work of two parts that run one after the other."""
        return PassLoads(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def without_launches(self, share: float) -> PassLoads:
        """Remove the share of the kernels that a CUDA graph launches."""
        if not share:
            return self
        loads = {each.name: getattr(self, each.name) for each in fields(self)}
        return PassLoads(**{name: replace(load, kernels=(1 - share) * load.kernels) for name, load in loads.items()})


def is_captured(options: PerformanceOptions, module: str) -> bool:
    """Return True if a CUDA graph launches a module, or with `ITERATION` the whole step."""
    graphs = options.graphs
    if graphs.impl == ITERATION:
        return module == ITERATION
    # Names of modules from release 0.18 on are not priced, because predictions for NVIDIA's hybrid models became worse.
    return graphs.impl != "none" and module in options.cuda_graph_scope


def matrix(
    rows: float, outputs: float, inputs: float, *, count: float = 1.0, is_linear: bool = True, rate: float = 1.0
) -> PassLoads:
    """Return the work of one weight matrix: y = xW forward; dx = dy W' and dW = x' dy backward, dW added up.

    Args:
        rows: rows of x, the tokens.
        outputs: columns of W.
        inputs: rows of W.
        count: number of matrices of this shape, each with `rows` tokens.
        is_linear: True for a linear of Transformer Engine, which can run in FP8 or FP4.
        rate: speed relative to one large product.

    """
    shapes = ((rows, outputs, inputs), (rows, inputs, outputs), (outputs, inputs, rows))
    forward, input_grad, weight_grad = (
        (Product(m=m, n=n, k=k, count=count, is_linear=is_linear, rate=rate),) for m, n, k in shapes
    )
    cast = count * rows if is_linear else 0.0
    return PassLoads(
        forward=Load(products=forward, cast_elements=cast * inputs, kernels=1.5),
        input_grad=Load(products=input_grad, cast_elements=cast * outputs, kernels=1.5),
        weight_grad=Load(products=weight_grad, moved_bytes=_GRADIENT_BYTES * outputs * inputs * count, kernels=2),
    )


Collective: TypeAlias = Literal[CollectiveKind, "send"]
Group: TypeAlias = Literal["tp", "cp", "ep", "etp", "ep_etp", "shard", "expert_shard"]
"""A field of `communication.groups.Groups`."""
OfLayer: TypeAlias = tuple[Literal["forward", "backward"], LayerKind]
Behind: TypeAlias = Literal["core_attention_s", "input_grad_s", "weight_grad_s", "forward_s", "other_layer_s"] | OfLayer
"""Compute that hides a collective: a field of `Hiding`, or a pass of a whole layer of a kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hiding:
    """Seconds of compute of one layer that can hide a collective."""

    core_attention_s: float = 0.0
    """Seconds of scores and context in the forward, which hide the rings of context parallelism."""
    input_grad_s: float = 0.0
    """Seconds of the input gradient of one column-parallel matrix."""
    weight_grad_s: float = 0.0
    """Seconds of the weight gradient of one column-parallel matrix."""
    forward_s: float = 0.0
    """Seconds of the forward of one column-parallel matrix, which hides chunks of `--tp-comm-overlap`."""
    other_layer_s: float = 0.0
    """Seconds of a quarter of a layer's forward and backward. A quarter hides one token exchange of another
    micro-batch."""
    layers_s: Mapping[OfLayer, float] = field(default_factory=dict)
    """Seconds of one pass of a layer of each kind, the backward with recompute. This pass hides exchanges of the next
    layer's weights and of the previous layer's gradients."""

    def seconds(self, behind: Behind) -> float:
        """Return the seconds that `behind` names; 0 if they were not given."""
        return self.layers_s.get(behind, 0.0) if isinstance(behind, tuple) else float(getattr(self, behind))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One collective inside the passes of a micro-batch."""

    kind: Collective
    group: Group
    size_bytes: float
    """Bytes of the full tensor on one rank, defined as in `CollectiveTime`."""
    forward: tuple[float, ...]
    """Number of these collectives in the forward of each stage."""
    backward: tuple[float, ...]
    behind: Behind | None = None
    """Compute that hides each of these collectives; None if no compute hides them."""
    behind_share: float = 1.0
    """Share of the compute `behind` that can hide this collective."""
    hidden_s: float = 0.0
    """Hidden seconds of each collective, filled in from a `Hiding`."""

    @classmethod
    def of(
        cls,
        kind: Collective,
        group: Group,
        size_bytes: float,
        forward_S: Ints,
        backward_S: Ints,
        *,
        behind: Behind | None = None,
        share: float = 1.0,
    ) -> Exchange:
        """Return a collective from arrays of its counts on each stage; the fields explain the arguments."""
        forward, backward = (tuple(map(float, each_S.tolist())) for each_S in (forward_S, backward_S))
        return cls(
            kind=kind,
            group=group,
            size_bytes=float(size_bytes),
            forward=forward,
            backward=backward,
            behind=behind,
            behind_share=share,
        )

    @property
    def part(self) -> str:
        """Name of the part of a step to which the collective belongs (`StepTime.breakdown_s`)."""
        names = {"tp": "tensor_parallel", "cp": "context_parallel"}
        return "data_parallel" if self.is_sharding else names.get(self.group, "expert_parallel")

    @property
    def is_sharding(self) -> bool:
        """True if the collective moves weights or gradients, whose size does not grow with the micro-batch."""
        return self.group in ("shard", "expert_shard")


class Block(ABC):
    """A block of a layer, without its norm unless a method says otherwise."""

    graph_module = ""
    """Megatron's name of the block as a scope of CUDA graphs; empty if CUDA graphs have no scope for the block."""

    @abstractmethod
    def parameters(self, model: ModelSpec, layout: Layout) -> Parameters:
        """Count the parameters on one rank."""

    def matrices(self, model: ModelSpec, layout: Layout) -> int:
        """Count the parameters of the linears, biases included, of which FP8 keeps copies."""
        return self.parameters(model, layout).count

    @abstractmethod
    def shapes(self, model: ModelSpec, layout: Layout) -> set[tuple[int, int]]:
        """Return (outputs, inputs) of each linear for which TransformerEngine returns a dummy gradient."""

    @abstractmethod
    def activations(self, job: Job, layout: Layout) -> Activations:
        """Count the bytes kept for the backward, with the norm, its input and the dropout mask."""

    @abstractmethod
    def backward_bytes(self, job: Job, layout: Layout) -> int:
        """Count the bytes that the block's backward needs for a while, beyond the layer's kept activations."""

    @abstractmethod
    def loads(self, job: Job, layout: Layout) -> PassLoads:
        """Return the work for the device."""

    def module_flops(self, model: ModelSpec) -> dict[str, float]:  # noqa: ARG002
        """Return the forward FLOPs per token of each module of the block that selective recompute can name."""
        return {}

    @abstractmethod
    def column_flops(self, model: ModelSpec) -> float:
        """Return the forward FLOPs per token of one column-parallel matrix; 0 without one."""

    def is_cut_by_tp(self, model: ModelSpec) -> bool:  # noqa: ARG002
        """Return True if tensor parallelism cuts the block, which costs one exchange a pass."""
        return True

    def exchanges(
        self,
        job: Job,  # noqa: ARG002
        layout: Layout,  # noqa: ARG002
        once_S: Ints,  # noqa: ARG002
        again_S: Ints,  # noqa: ARG002
        domain: int,  # noqa: ARG002
    ) -> Iterator[Exchange]:
        """Yield the collectives of the block, without the collectives of tensor parallelism.

        `once_S` counts the blocks of this class on each stage, and `again_S` counts the blocks that full recompute runs
        again. `domain` is the number of slots that the fastest links join.
        """
        yield from ()
