"""Loads of a layer's passes: their work for the device, and the collectives inside these passes."""

# Letters of array axes: S = stages (model chunks) in model order.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from pipette_launch.facts.layout import Ints
from pipette_launch.facts.measurements import CollectiveKind
from pipette_launch.facts.model import LayerKind

_GRADIENT_BYTES = 8
"""Bytes moved for each weight in a micro-batch, because gradient accumulation fusion reads and writes the weight's fp32
gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Group of `count` matrix products of m x k by k x n."""

    m: float
    n: float
    k: float
    count: float = 1.0
    is_linear: bool = False
    """True for a linear of Transformer Engine, which can run in FP8 or FP4."""
    half: float = 1.0
    """Factor on the device's `half_size`, above 1 only for products of routed experts."""

    @property
    def is_routed(self) -> bool:
        """True for a product of routed experts."""
        return self.half > 1

    @property
    def flops(self) -> float:
        """Floating-point operations; a multiply-add counts as 2."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Work of one pass for the device."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0.0
    """FLOPs of flash attention; devices have a separate rate for them."""
    exponentials: float = 0.0
    """Number of exponentials in flash attention's softmax: one for each score, in the forward and again in the
    backward."""
    moved_bytes: float = 0.0
    """Bytes read and written by kernels whose time is the time of moving bytes, such as norms and activations."""
    scan_bytes: float = 0.0
    """Bytes read and written by the scan of Mamba-2; devices move these bytes at a separate rate."""
    cast_elements: float = 0.0
    """Number of elements of inputs and gradients of linears, which are cast if the linears run in FP8 or FP4."""
    kernels: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class PassLoads:
    """Work of forward, input gradient and weight gradient of a layer or of another part of the model."""

    forward: Load = Load()
    input_grad: Load = Load()
    weight_grad: Load = Load()

    def __add__(self, other: PassLoads) -> PassLoads:
        return PassLoads(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def launched(self, times: float) -> PassLoads:
        """Return the same work for the device, with the number of kernels that the host launches times `times`."""
        loads = {name: getattr(self, name) for name in self.__slots__}
        return PassLoads(**{name: replace(load, kernels=times * load.kernels) for name, load in loads.items()})


def matrix(
    rows: float, outputs: float, inputs: float, *, count: float = 1.0, is_linear: bool = True, half: float = 1.0
) -> PassLoads:
    """Return the work of y = xW in the forward, and of dx = dy W' and dW = x' dy with accumulation in the backward.

    Tensor x has `rows` tokens and `inputs` columns, and tensor y has `outputs` columns. The result is for `count`
    matrices, each with its own tokens. `Product` explains `is_linear` and `half`.
    """
    shapes = ((rows, outputs, inputs), (rows, inputs, outputs), (outputs, inputs, rows))
    forward, input_grad, weight_grad = (
        (Product(m=m, n=n, k=k, count=count, is_linear=is_linear, half=half),) for m, n, k in shapes
    )
    cast = count * rows if is_linear else 0.0
    return PassLoads(
        forward=Load(products=forward, cast_elements=cast * inputs, kernels=1.5),
        input_grad=Load(products=input_grad, cast_elements=cast * outputs, kernels=1.5),
        weight_grad=Load(products=weight_grad, moved_bytes=_GRADIENT_BYTES * outputs * inputs * count, kernels=2),
    )


Collective: TypeAlias = Literal[CollectiveKind, "send"]
Group: TypeAlias = Literal["tp", "cp", "ep", "etp", "ep_etp", "shard", "expert_shard"]
"""A field of `communication.exchanges.Groups`."""
OfLayer: TypeAlias = tuple[Literal["forward", "backward"], LayerKind]
Behind: TypeAlias = Literal["core_attention_s", "input_grad_s", "weight_grad_s", "forward_s", "other_layer_s"] | OfLayer
"""Name of the compute that hides a collective: a field of `Hiding`, or the pass of a layer of one kind."""


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
    """Seconds of the forward of one column-parallel matrix, which hides chunks of exchanges under
    `--tp-comm-overlap`."""
    other_layer_s: float = 0.0
    """A quarter of a layer's forward and backward seconds, which hides one token exchange of another micro-batch."""
    layers_s: Mapping[OfLayer, float] = field(default_factory=dict)
    """Seconds of the forward and of the backward with recompute, for a layer of each kind. Each pass of a layer hides
    exchanges of the next layer's weights and of the previous layer's gradients."""

    def seconds(self, behind: Behind) -> float:
        """Return the seconds of compute that `behind` names; 0 s if the seconds of this pass are unknown."""
        return self.layers_s.get(behind, 0.0) if isinstance(behind, tuple) else float(getattr(self, behind))


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective inside the passes of a micro-batch."""

    kind: Collective
    group: Group
    size_bytes: float
    """Bytes of the full tensor on one rank, defined as in `CollectiveTime`."""
    forward: tuple[float, ...]
    """Number of these collectives in the forward of each stage."""
    backward: tuple[float, ...]
    """Number of these collectives in the backward of each stage."""
    behind: Behind | None = None
    """Compute that hides each of these collectives; None if no compute hides them."""
    behind_share: float = 1.0
    """Share of the compute named by `behind` that can hide this collective."""
    hidden_s: float = 0.0
    """Seconds of each collective that compute can hide, taken from a `Hiding`."""

    @classmethod
    def of(
        cls,
        kind: Collective,
        group: Group,
        size_bytes: float,
        forward_S: Ints,
        backward_S: Ints,
        behind: Behind | None = None,
        share: float = 1.0,
    ) -> Exchange:
        """Return an `Exchange` from arrays of its counts on each stage.

        The fields of `Exchange` explain the arguments.
        """
        forward, backward = tuple(map(float, forward_S)), tuple(map(float, backward_S))
        return cls(kind, group, float(size_bytes), forward, backward, behind, share)

    @property
    def part(self) -> str:
        """Name of the part of a step to which the collective belongs (`StepTime.breakdown_s`)."""
        names = {"tp": "tensor_parallel", "cp": "context_parallel"}
        return "data_parallel" if self.is_sharding else names.get(self.group, "expert_parallel")

    @property
    def is_sharding(self) -> bool:
        """True if the collective moves weights or gradients, whose size does not grow with the micro-batch."""
        return self.group in ("shard", "expert_shard")
