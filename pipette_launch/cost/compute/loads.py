"""What a pass asks of a device, in its own terms: products, attention, bytes moved, casts and kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from pipette_launch.cost.layers import attention
from pipette_launch.facts.job import ITERATION, PerformanceOptions
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec

_ACCUMULATED_BYTES = 8
"""fp32 gradient of each weight, read and written for each micro-batch (gradient accumulation fusion)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """`count` matrix products of m x k by k x n."""

    m: float
    n: float
    k: float
    count: float = 1.0
    is_linear: bool = False
    """Whether it is of a linear of Transformer Engine, which can run in FP8 or FP4."""
    rate: float = 1.0
    """Against that of one such product by itself: grouped ones are slower."""

    @property
    def flops(self) -> float:
        """Multiply-adds counted as 2."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one pass of one part asks of the device."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0.0
    """Of flash attention, which runs at a rate of its own."""
    exponentials: float = 0.0
    """Of flash attention's softmax: one for each score, and again backward."""
    moved_bytes: float = 0.0
    """Read and written by kernels that compute next to nothing."""
    scan_bytes: float = 0.0
    """Read and written by the scan of Mamba-2 layers, whose kernels have a rate of their own."""
    cast_elements: float = 0.0
    """Of linears' inputs and gradients, where these run in FP8 or FP4."""
    kernels: float = 0.0

    def __add__(self, other: Load) -> Load:
        """Run one after the other."""
        return Load(
            products=self.products + other.products,
            attention_flops=self.attention_flops + other.attention_flops,
            exponentials=self.exponentials + other.exponentials,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            scan_bytes=self.scan_bytes + other.scan_bytes,
            cast_elements=self.cast_elements + other.cast_elements,
            kernels=self.kernels + other.kernels,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassLoads:
    """The three passes of a part; one that asks for nothing is left out."""

    forward: Load = Load()
    input_grad: Load = Load()
    weight_grad: Load = Load()

    def __add__(self, other: PassLoads) -> PassLoads:
        """Run one after the other."""
        return PassLoads(
            forward=self.forward + other.forward,
            input_grad=self.input_grad + other.input_grad,
            weight_grad=self.weight_grad + other.weight_grad,
        )

    def without_launches(self, share: float) -> PassLoads:
        """Take off the part of the kernels that a CUDA graph launches."""
        return PassLoads(
            **{
                one.name: replace(load, kernels=(1 - share) * load.kernels)
                for one in fields(self)
                for load in [getattr(self, one.name)]
            }
        )


def is_captured(options: PerformanceOptions, what: str) -> bool:
    """Whether a CUDA graph launches a part of the step."""
    graphs = options.graphs
    if graphs.impl == ITERATION:
        return what == ITERATION
    # Under the names of 0.18 and later modules are not priced: hybrid models of NVIDIA's came out worse with them.
    return graphs.impl != "none" and what in options.cuda_graph_scope


def mlp(model: ModelSpec, layout: Layout, ffn_hidden_size: int) -> PassLoads:
    """One dense MLP of the given width."""
    tokens = attention.tokens(model, layout)
    width = ffn_hidden_size // layout.tp
    gates = 2 if model.gated_linear_unit else 1
    matrices = matrix(tokens, gates * width, model.hidden_size) + matrix(tokens, model.hidden_size, width)
    return matrices + activation(tokens * width * model.dtype_bytes, gates)


def activation(one_bytes: float, gates: int) -> PassLoads:
    """Apply a function to a tensor of `one_bytes`, or (2 gates) to one of two and multiply by the other."""
    return PassLoads(
        forward=Load(moved_bytes=(gates + 1) * one_bytes, kernels=2),
        input_grad=Load(moved_bytes=(2 * gates + 1) * one_bytes, kernels=2),
    )


def matrix(
    tokens: float, outputs: float, inputs: float, *, count: float = 1.0, is_linear: bool = True, rate: float = 1.0
) -> PassLoads:
    """One weight matrix: y = xW forward, dx = dy W' and dW = x' dy backward, added to the gradient of the step.

    Args:
        tokens: rows of x.
        outputs: columns of W.
        inputs: rows of W.
        count: matrices of this shape, each with so many tokens.
        is_linear: see `Product`.
        rate: see `Product`.

    """
    shapes = ((tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens))
    forward, input_grad, weight_grad = (
        (Product(m=m, n=n, k=k, count=count, is_linear=is_linear, rate=rate),) for m, n, k in shapes
    )
    cast = count * tokens if is_linear else 0.0
    return PassLoads(
        forward=Load(products=forward, cast_elements=cast * inputs, kernels=1.5),
        input_grad=Load(products=input_grad, cast_elements=cast * outputs, kernels=1.5),
        weight_grad=Load(products=weight_grad, moved_bytes=_ACCUMULATED_BYTES * outputs * inputs * count, kernels=2),
    )
