"""How long a device of a known type takes for what a pass asks of it.

seconds of a pass = max(host, device), with
    host   = kernels * launch_s
    device = sum over products of flops / (peak * share) * (1 + half_size * (1/m + 1/n + 1/k))
             + attention flops / (peak * attention_share) + exponentials / their rate
             + bytes / (bandwidth * memory_share) + bytes of the scan / (bandwidth * scan_share)

Peak and share of a product are those of the format in which it runs. With FP8 or FP4 these are the linears of
Transformer Engine inside transformer layers; each casts its input once forward and the gradient of its output once
backward, each as a copy by rows and one by columns. Everything else stays in 16 bits: attention's products, embedding,
output layer, router, norms, activations, dispatch, and what reduces gradients (megatron-core, fp8_utils.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.cost.compute.device_work import GRADIENT_PASSES
from pipette_launch.cost.compute.loads import Load, Product
from pipette_launch.cost.layers.optimizer import step_bytes_per_parameter
from pipette_launch.facts.accelerators import DeviceSpec
from pipette_launch.facts.job import Job
from pipette_launch.megatron.performance import performance_options

CAST_BYTES = {"delayed": 4.0, "tensorwise": 6.0, "blockwise": 4.1, "mxfp8": 4.1, "fp4": 5.1, "custom": 4.1}
"""Read and written to cast one 16-bit element, by recipe (TransformerEngine v2.18, pytorch/csrc/quantizer.cpp): read to
cast, two narrow copies with their scales, and read once more for the largest value where scaling is not delayed and the
scale is that of the whole tensor. Casts that pass in a norm's own kernel are not taken off."""
_ONE_COPY_BYTES = 1.0
"""What a recipe with one scale a tensor saves where one copy serves both products, as Blackwell's do."""
_ONE_SCALE = ("delayed", "tensorwise")
_BLACKWELL = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The formats in which a job computes."""

    dtype: str
    """Of all that is not narrow."""
    narrow: str = ""
    """`fp8` or `fp4`, of the linears of transformer layers; empty where they run as all else."""
    cast_bytes: float = 0.0
    """Moved to bring one element into the narrow format."""
    narrow_layers: float = 0.0
    """Share of the layers whose linears run narrow."""

    @classmethod
    def of(cls, job: Job, device: DeviceSpec) -> Precision:
        """Read them from the job's flags."""
        model, options = job.model, performance_options(job)
        if model.transformer_impl != "transformer_engine" or not (options.fp8 or options.fp4):
            return cls(dtype=model.params_dtype)
        recipe = "fp4" if options.fp4 else options.fp8_recipe
        is_blackwell = (device.compute_capability or 0) >= _BLACKWELL
        one_copy = _ONE_COPY_BYTES if is_blackwell and recipe in _ONE_SCALE else 0.0
        wide = options.num_layers_at_start_in_bf16 + options.num_layers_at_end_in_bf16
        return cls(
            dtype=model.params_dtype,
            narrow="fp4" if options.fp4 else "fp8",
            cast_bytes=CAST_BYTES[recipe] - one_copy,
            narrow_layers=max(0.0, 1 - wide / model.num_layers) if options.first_last_layers_bf16 else 1.0,
        )


def pass_s(device: DeviceSpec, precision: Precision, load: Load) -> float:
    """Seconds of one pass of one part."""
    return max(host_s(device, load), device_s(device, precision, load))


def host_s(device: DeviceSpec, load: Load) -> float:
    """Seconds in which the host asks for all kernels of a pass."""
    return load.kernels * device.efficiency.launch_s


def device_s(device: DeviceSpec, precision: Precision, load: Load) -> float:
    """Seconds of a pass on a device that never waits for the host."""
    attention_s = load.attention_flops / (device.peak_flops_per_s(precision.dtype) * device.efficiency.attention_share)
    attention_s += load.exponentials / device.exponentials_per_s
    narrow_share = precision.narrow_layers if precision.narrow else 0.0
    moved_bytes = load.moved_bytes + narrow_share * precision.cast_bytes * load.cast_elements
    products_s = 0.0
    for product in load.products:
        share = narrow_share if product.is_linear else 0.0
        products_s += (1 - share) * product_s(device, precision.dtype, product) if share < 1 else 0.0
        products_s += share * product_s(device, precision.narrow, product) if share else 0.0
    scan_s = load.scan_bytes / (device.memory_bytes_per_s * scan_share(device))
    return products_s + attention_s + moved_bytes * moved_byte_s(device) + scan_s


def product_s(device: DeviceSpec, dtype: str, product: Product) -> float:
    """Seconds of a matrix product in a format."""
    return product.flops / (device.peak_flops_per_s(dtype) * matmul_efficiency(device, dtype, product) * product.rate)


def matmul_efficiency(device: DeviceSpec, dtype: str, product: Product) -> float:
    """Share of the peak that a product reaches, above 0 and at most that of its format."""
    efficiency = device.efficiency
    ends = 1 / product.m + 1 / product.n + 1 / product.k
    return efficiency.share_of(dtype) / (1 + efficiency.half_size * ends)


def scan_share(device: DeviceSpec) -> float:
    """Share of the memory bandwidth that the scan of Mamba-2 layers reaches."""
    return device.efficiency.scan_share or device.efficiency.memory_share


def optimizer_s_per_parameter(device: DeviceSpec, job: Job) -> float:
    """Seconds of the optimizer's step for each parameter whose state a device holds."""
    return step_bytes_per_parameter(job) * moved_byte_s(device)


def gradient_s_per_byte(device: DeviceSpec) -> float:
    """Seconds that clearing, checking and scaling take once a step for each byte of gradients that a device holds."""
    return GRADIENT_PASSES * moved_byte_s(device)


def moved_byte_s(device: DeviceSpec) -> float:
    """Seconds to read or write a byte in a kernel that computes next to nothing."""
    return 1 / (device.memory_bytes_per_s * device.efficiency.memory_share)
