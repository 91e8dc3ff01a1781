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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipette_launch.cost.communication.collectives import Kind, chunk_share, num_steps
from pipette_launch.cost.communication.groups import group_sizes
from pipette_launch.cost.compute.device_work import (
    GRADIENT_PASSES,
    core_attention_loads,
    embedding_loads,
    head_loads,
    is_flash,
    kind_loads,
    prediction_loads,
)
from pipette_launch.cost.compute.loads import Load, PassLoads, Product
from pipette_launch.cost.layers.parameters import shard_copies, step_bytes_per_parameter
from pipette_launch.errors import FactError
from pipette_launch.facts.accelerators import DeviceSpec
from pipette_launch.facts.cluster import Cluster, Device, Host, Links
from pipette_launch.facts.fabric import UNIFORM, FabricSpec
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import CollectiveTime, ComputeCase, ComputeTime, Measurements, Part, Samples
from pipette_launch.facts.model import KINDS_WITH_EXPERTS, LayerKind
from pipette_launch.megatron.performance import performance_options
from pipette_launch.text import rate_text

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


_COLLECTIVES: tuple[Kind, ...] = ("all_reduce", "all_gather", "all_to_all")


def case_of(layout: Layout) -> ComputeCase:
    """Return the shape of computation that a layout runs on each slot."""
    return ComputeCase(tp=layout.tp, cp=layout.cp, micro_batch_size=layout.micro_batch_size)


def imagined(
    job: Job,
    device: DeviceSpec,
    *,
    num_hosts: int,
    devices_per_host: int,
    layouts: Iterable[Layout],
    fabric: FabricSpec = UNIFORM,
) -> Measurements:
    """Return what the warm-up would measure on equal hosts of one device type, to be priced by the ordinary Predictor.

    Args:
        job: whose model is computed.
        device: type of all devices; see `facts.machines.known_devices.known_devices`.
        num_hosts: hosts of the allocation.
        devices_per_host: devices of each.
        layouts: those that will be priced; their shapes of computation and group sizes are covered.
        fabric: what lies between the hosts.

    Raises:
        FactError: the numbers are not positive, there is no layout, the device has no peak for the model's type, or
            the fabric is none of so many hosts.

    """
    chosen = tuple(layouts)
    if num_hosts < 1 or devices_per_host < 1 or not chosen:
        raise FactError(
            f"an imagined cluster needs hosts, devices and a layout, got {num_hosts} hosts of {devices_per_host} "
            f"devices and {len(chosen)} layouts"
        )
    cluster = imagined_cluster(device, num_hosts=num_hosts, devices_per_host=devices_per_host, fabric=fabric)
    return Measurements(
        cluster=cluster,
        compute=modelled_compute(job, device, chosen),
        collectives=tuple(_collective_times(device, cluster, chosen, shard_copies(job))),
        memory=(),
        overhead_bytes=0,
        versions={},
        taken_at="1970-01-01T00:00:00Z",
        phase_s={},
        notes=assumptions(job, device, fabric, num_hosts),
        optimizer_s_per_parameter=optimizer_s_per_parameter(device, job),
        gradient_s_per_byte=gradient_s_per_byte(device),
        step_s=device.efficiency.step_s,
        host_bytes_per_s=device.host_bytes_per_s,
    )


def modelled_compute(job: Job, device: DeviceSpec, layouts: Iterable[Layout]) -> tuple[ComputeTime, ...]:
    """Return the times of every part of the model in each shape of computation that the layouts have, by the model.

    How many experts lie on a rank, and so how few tokens each has, is no part of such a shape: parts with experts stand
    there once more for each way to share them, where there are several.
    """
    kinds = frozenset((*job.model.layer_kinds, *job.model.prediction_kinds))
    first: dict[ComputeCase, Layout] = {}
    shares: dict[tuple[ComputeCase, int, int], Layout] = {}
    for layout in layouts:
        first.setdefault(case_of(layout), layout)
        shares.setdefault((case_of(layout), layout.ep, layout.etp), layout)
    found = [time for case in sorted(first) for time in _compute_times(job, device, first[case], kinds)]
    if job.model.num_experts and len(shares) > len(first):
        with_experts = kinds.intersection(KINDS_WITH_EXPERTS)
        for key in sorted(shares):
            times = _compute_times(job, device, shares[key], with_experts, shared=True)
            found += [replace(time, ep=key[1], etp=key[2]) for time in times]
    return tuple(found)


def assumptions(
    job: Job, device: DeviceSpec, fabric: FabricSpec = UNIFORM, num_hosts: int | None = None
) -> tuple[str, ...]:
    """Say in sentences what an imagined measurement rests on."""
    efficiency, inside = device.efficiency, device.within_host
    peak = f"{device.peak_flops_per_s(job.model.params_dtype) / 1e12:.0f} TFLOP/s ({job.model.params_dtype})"
    memory = rate_text(device.memory_bytes_per_s)
    links = (
        f"Links within hosts: {inside.latency_s * 1e6:g} us, {rate_text(inside.fair_bytes_per_s)} each.",
        f"Links between hosts: {fabric.words(device, num_hosts)}. {fabric.source}",
        *filter(None, [fabric.domain_words(device, num_hosts or 1)]),
    )
    return (
        f"Nothing was measured: times come from a model of {device.name}. {device.source}",
        f"Matrix products reach {efficiency.matmul_share:.0%} of {peak}, half if a side is {efficiency.half_size:g}.",
        *_narrow_words(job, device),
        *_window_words(job),
        f"Flash attention's products reach {efficiency.attention_share:.0%} of {peak}.",
        f"Norms, activations, losses and the optimizer move bytes at {efficiency.memory_share:.0%} of {memory}.",
        *(
            [f"The scan of Mamba layers moves bytes at {scan_share(device):.0%} of {memory}."]
            if job.model.hybrid
            else []
        ),
        f"Each kernel costs the host {efficiency.launch_s * 1e6:g} us; a pass takes the longer of host and device.",
        f"Between two steps the device waits {efficiency.step_s * 1e3:g} ms for the host.",
        *links,
        *_host_words(job, device),
        "Collectives are rings; a group with several members on each host uses the links of all of them.",
        *([] if fabric.compute_factor else ["All devices are equally fast."]),
        *fabric.laggards(),
    )


def _narrow_words(job: Job, device: DeviceSpec) -> Iterator[str]:
    precision = Precision.of(job, device)
    if precision.narrow:
        share, peak = device.efficiency.share_of(precision.narrow), device.peak_flops_per_s(precision.narrow)
        yield (
            f"Matrix products of transformer layers reach {share:.0%} of {peak / 1e12:.0f} TFLOP/s "
            f"({precision.narrow}), and casts move {precision.cast_bytes:g} bytes an element."
        )


def _window_words(job: Job) -> Iterator[str]:
    windows = [window for window in job.model.attention_windows if window]
    if windows and is_flash(job.model):
        yield (
            f"{len(windows)} of {job.model.num_layers} layers attend to a window of {max(windows)} tokens; each layer "
            f"is priced at the mean of all."
        )


def _host_words(job: Job, device: DeviceSpec) -> Iterator[str]:
    if performance_options(job).fine_grained_activation_offloading and device.host_bytes_per_s:
        yield f"Activations go to the host and come back at {rate_text(device.host_bytes_per_s)} each way."


def imagined_cluster(
    device: DeviceSpec, *, num_hosts: int, devices_per_host: int, fabric: FabricSpec = UNIFORM
) -> Cluster:
    """Return hosts of equal devices, with the device's usual links within and the fabric's between them."""
    inside = device.within_host
    within = Links.uniform(devices_per_host, latency_s=inside.latency_s, bandwidth_bytes_per_s=inside.fair_bytes_per_s)
    one = Device(
        kind="cuda",
        uuid="",
        name=device.name,
        memory_total_bytes=device.memory_bytes,
        memory_free_bytes=device.memory_bytes,
    )
    devices_HD = [
        tuple(replace(one, uuid=f"imagined-{host}-{local}") for local in range(devices_per_host))
        for host in range(num_hosts)
    ]
    return Cluster(
        hosts=tuple(
            Host(name=name, address="", cores=devices_per_host, devices=devices)
            for name, devices in zip(fabric.host_names(num_hosts), devices_HD, strict=True)
        ),
        between_hosts=fabric.links(num_hosts, device),
        within_host=(within,) * num_hosts,
        slot_speed=fabric.slot_speed(num_hosts, devices_per_host),
        imagined=device,
    )


def _compute_times(
    job: Job, device: DeviceSpec, layout: Layout, kinds: frozenset[LayerKind], *, shared: bool = False
) -> Iterator[ComputeTime]:
    """Time every part of the model, or with `shared` those that have experts; `kinds` are those of its layers."""
    case, precision = case_of(layout), Precision.of(job, device)
    parts: dict[Part, PassLoads] = {kind: kind_loads(job, layout, kind) for kind in sorted(kinds)}
    if job.model.mtp_num_layers and (not shared or kinds.intersection(job.model.prediction_kinds)):
        parts["prediction"] = prediction_loads(job, layout)
    if not shared:
        parts |= {
            "embedding": embedding_loads(job, layout),
            "head": head_loads(job, layout),
            "core_attention": core_attention_loads(job.model, layout),
        }
    for name, loads in parts.items():
        # The two passes of a backward run as one: the host is ahead in one of them while the other is short.
        backward = loads.input_grad + loads.weight_grad
        backward_s = pass_s(device, precision, backward)
        backward_device_s = device_s(device, precision, backward)
        weight_device_s = device_s(device, precision, loads.weight_grad)
        weight_s = backward_s * (weight_device_s / backward_device_s if backward_device_s else 0.0)
        yield ComputeTime(
            case=case,
            part=name,
            slot=0,
            forward=Samples(values_s=(pass_s(device, precision, loads.forward),)),
            input_grad=Samples(values_s=(backward_s - weight_s,)),
            weight_grad=Samples(values_s=(weight_s,)),
            forward_idle_s=max(host_s(device, loads.forward) - device_s(device, precision, loads.forward), 0.0),
            backward_idle_s=max(host_s(device, backward) - backward_device_s, 0.0),
        )


def _collective_times(
    device: DeviceSpec, cluster: Cluster, layouts: Sequence[Layout], instances: int
) -> Iterator[CollectiveTime]:
    """Price rings of equal steps; between hosts each member of a host brings its own share of the network cards.

    A group of one size may lie on as few hosts as possible, doubled up to one member a host. An all-to-all is not a
    ring: each member sends its pieces for other hosts through its own share alone, while those for its own host pass
    inside.
    """
    latency_s_HH = np.asarray(cluster.between_hosts.latency_s)
    byte_s_HH = cluster.between_hosts.seconds_per_byte()
    inside_latency_s, inside_byte_s = device.within_host.latency_s, 1 / device.within_host.fair_bytes_per_s
    shapes = {(one.tp, one.cp, one.ep, one.etp, one.dp, one.pp): one for one in layouts}
    groups = [(*group_sizes(layout, instances=instances).values(), min(layout.pp, 2)) for layout in shapes.values()]
    sizes = {size for each in groups for size in each}
    for size in sorted(sizes - {1}):
        fewest, most = -(-size // cluster.devices_per_host), min(size, len(cluster.hosts))
        doubled = (fewest << power for power in range(most.bit_length()))
        for hosts in sorted({most, *(spans for spans in doubled if spans <= most)}):
            first, second = np.arange(hosts), np.roll(np.arange(hosts), -1)
            slots = [
                host * cluster.devices_per_host + local for host in range(hosts) for local in range(-(-size // hosts))
            ]
            members = max(1, size // hosts)
            for kind in _COLLECTIVES:
                steps = num_steps(kind, size)
                latency_s, step_byte_s = inside_latency_s, inside_byte_s
                if hosts > 1:
                    latency_s = max(latency_s, float(latency_s_HH[first, second].max()))
                    step_byte_s = max(inside_byte_s, float(byte_s_HH[first, second].max()) / members)
                byte_s = steps * chunk_share(kind, size) * step_byte_s
                if hosts > 1 and kind == "all_to_all":
                    worst_byte_s = float(byte_s_HH[:hosts, :hosts].max())
                    byte_s = max((members - 1) * inside_byte_s, (size - members) * worst_byte_s) / size
                yield CollectiveTime(
                    kind=kind,
                    slots=tuple(slots[:size]),
                    latency_s=steps * latency_s,
                    seconds_per_byte=byte_s,
                    spread=0.0,
                    sizes_bytes=(),
                )
