"""Model of known device types, which predicts the measurements that a warm-up would make.

seconds of a pass = max(host, device), for all layers together, with
    host   = kernels * launch_s
    device = sum over products of flops / (peak * share) * (1 + half * half_size * (1/m + 1/n + 1/k))
             + attention flops / (peak * attention_share) + exponentials / their rate
             + bytes / (bandwidth * memory_share) + bytes of the scan / (bandwidth * scan_share)

Peak and share depend on the number format of a product. With FP8 or FP4, Transformer Engine's linears inside
transformer layers run in FP8 or FP4. A linear casts its input once in the forward and its output's gradient once in the
backward. Each cast to FP8 or FP4 makes a copy by rows and a copy by columns. The output layer does so too under
`--fp8-output-proj`. All other work stays in 16 bits: attention's products, embedding, router, norms, activations,
dispatch, and the reduction of gradients (megatron-core, fp8_utils.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipette_launch.cost.communication.collectives import chunk_share, num_steps
from pipette_launch.cost.communication.exchanges import group_sizes
from pipette_launch.cost.layers.attention import Attention, is_flash
from pipette_launch.cost.layers.block import compute_dtype
from pipette_launch.cost.layers.ends import depth_loads, embedding_loads, head_loads
from pipette_launch.cost.layers.kinds import kind_loads
from pipette_launch.cost.layers.loads import Collective, Load, PassLoads, Product
from pipette_launch.cost.layers.parameters import shard_copies, step_bytes_per_parameter
from pipette_launch.cost.layers.sparse import Sparse
from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Cluster, Device, Host, Links
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.devices import DeviceSpec
from pipette_launch.facts.fabric import UNIFORM, FabricSpec
from pipette_launch.facts.files import table
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import CollectiveTime, ComputeCase, ComputeTime, Measurements, Part, Samples
from pipette_launch.facts.model import BLOCKS, KINDS_WITH_EXPERTS, LayerKind, ModelSpec
from pipette_launch.text import rate_text

CAST_BYTES = {"delayed": 4.0, "tensorwise": 6.0, "blockwise": 4.1, "mxfp8": 4.1, "fp4": 5.1, "custom": 4.1}
"""Bytes read and written to cast one 16-bit element, by recipe (TransformerEngine v2.18, pytorch/csrc/quantizer.cpp):
one read and two narrow copies with their scales. If one scale belongs to the whole tensor and is not delayed, a second
read finds the tensor's largest value. A cast to FP8 or FP4 inside a norm's own kernel counts like any cast, although it
needs no extra read."""
_ONE_COPY_BYTES = 1.0
"""Bytes saved for each cast element on Blackwell by recipes with one scale per tensor, because forward and backward
read the same narrow copy."""
_ONE_SCALE = ("delayed", "tensorwise")
_BLACKWELL = 10
_GRADIENT_PASSES = 4
"""Number of times that a step reads or writes each byte of the gradient buffers, which every rank holds whole. Each
step clears the gradient buffers (megatron-core, DistributedDataParallel.zero_grad_buffer), reads them to find NaN, and
divides them by the number of replicas (ParamAndGradBuffer, start_grad_sync; not with one replica)."""
_COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "all_to_all")


class Precision(NamedTuple):
    """Number formats in which a job computes."""

    dtype: str
    """Number format of all work that does not run in the format `narrow`."""
    narrow: str = ""
    """`fp8` or `fp4` for the linears of transformer layers; empty if they run in `dtype`."""
    cast_bytes: float = 0.0
    """Bytes moved to cast one element to the narrow format."""
    narrow_layers: float = 0.0
    """Share of the layers whose linears run in the format `narrow`."""

    @classmethod
    def of(cls, job: Job, device: DeviceSpec) -> Precision:
        """Read the number formats from the job's flags."""
        model, options = job.model, job.options
        narrow = compute_dtype(job)
        if narrow == model.params_dtype:
            return cls(model.params_dtype)
        recipe = "fp4" if options.fp4 else options.fp8_recipe
        is_blackwell = (device.compute_capability or 0) >= _BLACKWELL
        one_copy = _ONE_COPY_BYTES if is_blackwell and recipe in _ONE_SCALE else 0.0
        wide = options.num_layers_at_start_in_bf16 + options.num_layers_at_end_in_bf16
        layers = max(0.0, 1 - wide / model.num_layers) if options.first_last_layers_bf16 else 1.0
        return cls(model.params_dtype, narrow, CAST_BYTES[recipe] - one_copy, layers)


def pass_s(device: DeviceSpec, precision: Precision, load: Load) -> float:
    """Return the seconds of one pass of a layer or of another part of the model."""
    return max(host_s(device, load), device_s(device, precision, load))


def host_s(device: DeviceSpec, load: Load) -> float:
    """Return the seconds in which the host launches all kernels of a pass."""
    return load.kernels * device.efficiency.launch_s


def device_s(device: DeviceSpec, precision: Precision, load: Load) -> float:
    """Return the seconds of a pass on a device that never waits for the host."""
    efficiency = device.efficiency
    attention_s = load.attention_flops / (device.peak_flops_per_s(precision.dtype) * efficiency.attention_share)
    attention_s += load.exponentials / device.exponentials_per_s
    narrow_share = precision.narrow_layers if precision.narrow else 0.0
    moved_bytes = load.moved_bytes + narrow_share * precision.cast_bytes * load.cast_elements
    products_s = 0.0
    for product in load.products:
        share = narrow_share if product.is_linear else 0.0
        for dtype, part in ((precision.dtype, 1 - share), (precision.narrow, share)):
            if part > 0:
                rate = device.peak_flops_per_s(dtype) * matmul_efficiency(device, dtype, product)
                products_s += part * (product.flops / rate)
    scan_s = load.scan_bytes / (device.memory_bytes_per_s * _scan_share(device))
    return products_s + attention_s + moved_bytes * _moved_byte_s(device) + scan_s


def matmul_efficiency(device: DeviceSpec, dtype: str, product: Product) -> float:
    """Return the share of the peak FLOP/s that a matrix product reaches in a number format."""
    efficiency = device.efficiency
    ends = 1 / product.m + 1 / product.n + 1 / product.k
    return efficiency.share_of(dtype) / (1 + efficiency.half_size * product.half * ends)


def _scan_share(device: DeviceSpec) -> float:
    return device.efficiency.scan_share or device.efficiency.memory_share


def _moved_byte_s(device: DeviceSpec) -> float:
    return 1 / (device.memory_bytes_per_s * device.efficiency.memory_share)


def optimizer_s_per_parameter(device: DeviceSpec, job: Job) -> float:
    """Return the seconds of the optimizer's step for each parameter whose state a device holds."""
    return step_bytes_per_parameter(job) * _moved_byte_s(device)


def gradient_s_per_byte(device: DeviceSpec) -> float:
    """Return the seconds for each byte of gradients, which a step clears, checks and scales once."""
    return _GRADIENT_PASSES * _moved_byte_s(device)


def case_of(layout: Layout) -> ComputeCase:
    """Return the compute case of a layout, which is its tp, cp and micro-batch size."""
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
    """Return the measurements that a warm-up would make on equal hosts of one device type.

    The measurements cover the compute cases and the group sizes of the given layouts. FactError is raised without
    hosts, devices or layouts, if the device has no peak FLOP/s for the model's type, or if the fabric has another
    number of hosts.
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
    """Return the modelled times of each part of the model for each (tp, cp, micro-batch size) of the layouts.

    A compute case does not contain the number of experts on a rank, which decides the tokens of each expert. If the
    layouts have several (ep, etp), parts with experts are listed once more for each (ep, etp).
    """
    kinds = frozenset((*job.model.layer_kinds, *job.model.prediction_kinds))
    backwards = list(layouts)[::-1]
    # The reversed order lets the first layout of each compute case win.
    first = {case_of(layout): layout for layout in backwards}
    shares = {(case_of(layout), layout.ep, layout.etp): layout for layout in backwards}
    found = [time for case in sorted(first) for time in _compute_times(job, device, first[case], kinds)]
    if job.model.num_experts and len(shares) > len(first):
        with_experts = kinds & {*KINDS_WITH_EXPERTS}
        for key in sorted(shares):
            times = _compute_times(job, device, shares[key], with_experts, only_experts=True)
            found += [replace(time, ep=key[1], etp=key[2]) for time in times]
    return tuple(found)


class PublishedErrors(NamedTuple):
    """Errors of predictions for published runs of one kind of model, as shares of the measured value.

    The constants of each prediction were fitted to the rows of other models (`python -m benchmarks.validation
    --leave-model-out --record`).
    """

    kind: str
    rows: int
    models: int
    mean_error: float
    """Mean error of a step."""
    worst_model: str
    worst_error: float
    """Mean error of a step of the worst model."""
    pairs: int
    pairs_of: str
    """Kind of the models whose pairs of layouts were compared."""
    lead_error: float
    """Mean error of the lead of one layout over another."""


def published(job: Job) -> PublishedErrors:
    """Return the errors of predictions for published runs of this kind of model."""
    kind = (
        "hybrid models"
        if "mamba" in _blocks(job.model)
        else "models with experts"
        if job.model.num_experts
        else "dense models"
    )
    row = next(row for row in table("pipette_launch.facts", "published_errors") if row["kind"] == kind)
    return PublishedErrors(
        kind=kind,
        rows=int(row["rows"]),
        models=int(row["models"]),
        mean_error=float(row["mean_error"]),
        worst_model=row["worst_model"],
        worst_error=float(row["worst_error"]),
        pairs=int(row["pairs"]),
        pairs_of=row["pairs_of"],
        lead_error=float(row["lead_error"]),
    )


def published_error(job: Job) -> str:
    """Return a sentence about the error of predictions for published runs of this kind of model."""
    errors, unseen = published(job), [name for name, is_used in _unpublished(job.model).items() if is_used]
    return (
        f"Steps of {errors.models} published {errors.kind} ({errors.rows} runs) were predicted {errors.mean_error:.1%} "
        f"off in the mean, and {errors.worst_error:.1%} off for the worst model, {errors.worst_model}. "
        f"Fitted constants had not seen the predicted model."
    ) + (f" No published run had {' or '.join(unseen)}." if unseen else "")


def _blocks(model: ModelSpec) -> set[str]:
    return {block for kind in (*model.layer_kinds, *model.prediction_kinds) for block in BLOCKS[kind]}


def _unpublished(model: ModelSpec) -> dict[str, bool]:
    """Return parts of models that no published run had, and if the model has the part."""
    return {
        "gated delta networks": "delta" in _blocks(model),
        "sparse attention": model.sparse_attention is not None,
        "experts on latents": model.moe_latent_size > 0,
    }


def assumptions(
    job: Job, device: DeviceSpec, fabric: FabricSpec = UNIFORM, num_hosts: int | None = None
) -> tuple[str, ...]:
    """Return sentences about the assumptions behind imagined measurements."""
    efficiency, inside, precision = device.efficiency, device.within_host, Precision.of(job, device)
    peak = f"{device.peak_flops_per_s(job.model.params_dtype) / 1e12:.0f} TFLOP/s ({job.model.params_dtype})"
    memory = rate_text(device.memory_bytes_per_s)
    sentences = [
        f"Nothing was measured: times come from a model of {device.name}. {device.source}",
        published_error(job),
        f"Matrix products reach {efficiency.matmul_share:.0%} of {peak}, half if a side is {efficiency.half_size:g}.",
    ]
    if precision.narrow:
        share, narrow_peak = efficiency.share_of(precision.narrow), device.peak_flops_per_s(precision.narrow)
        sentences.append(
            f"Matrix products of transformer layers reach {share:.0%} of {narrow_peak / 1e12:.0f} TFLOP/s "
            f"({precision.narrow}), and casts move {precision.cast_bytes:g} bytes an element."
        )
    sizes = [window for window in job.model.attention_windows if window]
    if sizes and is_flash(job.model):
        sentences.append(
            f"Layers with a window of at most {max(sizes)} tokens: {len(sizes)} of {job.model.num_layers}; each layer "
            f"is priced as the mean of all layers."
        )
    sentences += [
        f"Flash attention's products reach {efficiency.attention_share:.0%} of {peak}.",
        f"Norms, activations, losses and the optimizer move bytes at {efficiency.memory_share:.0%} of {memory}.",
    ]
    if _blocks(job.model) & {"mamba", "delta"}:
        sentences.append(
            f"The scan of Mamba layers and gated delta networks moves bytes at {_scan_share(device):.0%} of {memory}."
        )
    if job.model.sparse_attention:
        sentences.append("Scores of sparse attention that torch computes are in fp32, 16 times slower than in 16 bits.")
    sentences += [
        f"Each kernel costs the host {efficiency.launch_s * 1e6:g} us; all layers take the longer of host and device.",
        f"Between two steps the device waits {efficiency.step_s * 1e3:g} ms for the host.",
        f"Links within hosts: {inside.latency_s * 1e6:g} us, {rate_text(inside.fair_bytes_per_s)} each.",
        f"Links between hosts: {fabric.words(device, num_hosts)}. {fabric.source}",
        fabric.domain_words(device, num_hosts or 1),
    ]
    sentences.append("Collectives are rings; a group with several members on each host uses the links of all of them.")
    if not fabric.compute_factor:
        sentences.append("All devices are equally fast.")
    return tuple(filter(None, (*sentences, *fabric.laggards())))


def imagined_cluster(
    device: DeviceSpec, *, num_hosts: int, devices_per_host: int, fabric: FabricSpec = UNIFORM
) -> Cluster:
    """Return hosts of equal devices, with the device's usual links within hosts and the fabric's between hosts."""
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
    job: Job, device: DeviceSpec, layout: Layout, kinds: frozenset[LayerKind], *, only_experts: bool = False
) -> Iterator[ComputeTime]:
    """Yield modelled times of these kinds of layers and of other parts; `only_experts` keeps parts with experts."""
    case, precision = case_of(layout), Precision.of(job, device)
    layers = {kind: kind_loads(job, layout, kind) for kind in sorted({*kinds, *job.model.layer_kinds})}
    parts: dict[Part, PassLoads] = {kind: layers[kind] for kind in sorted(kinds)}
    prediction = job.model.prediction_kinds
    if job.model.mtp_num_layers and (not only_experts or kinds.intersection(prediction)):
        depth = sum((kind_loads(job, layout, kind) for kind in prediction), PassLoads())
        parts["prediction"] = depth_loads(job, layout, depth)
    if not only_experts:
        parts["embedding"] = embedding_loads(job, layout)
        parts["head"] = head_loads(job, layout)
        parts["core_attention"] = (Sparse if job.model.sparse_attention else Attention)(job, layout).core_loads()
    shares = _waiting_shares(job, device, layers)
    for name, loads in parts.items():
        # Input gradient and weight gradient are priced as one pass, because the host launches the kernels of the next
        # gradient while the device still computes.
        passes = loads.forward, loads.input_grad + loads.weight_grad
        forward_device_s, backward_device_s = (device_s(device, precision, one) for one in passes)
        if name in kinds:
            idle_s = [share * host_s(device, one) for share, one in zip(shares, passes, strict=True)]
        else:
            idle_s = [pass_s(device, precision, one) - device_s(device, precision, one) for one in passes]
        forward_s, backward_s = forward_device_s + idle_s[0], backward_device_s + idle_s[1]
        weight_device_s = device_s(device, precision, loads.weight_grad)
        weight_s = backward_s * (weight_device_s / backward_device_s if backward_device_s else 0.0)
        yield ComputeTime(
            case=case,
            part=name,
            slot=0,
            forward=Samples(values_s=(forward_s,)),
            input_grad=Samples(values_s=(backward_s - weight_s,)),
            weight_grad=Samples(values_s=(weight_s,)),
            forward_idle_s=idle_s[0],
            backward_idle_s=idle_s[1],
        )


def _waiting_shares(job: Job, device: DeviceSpec, layers: Mapping[LayerKind, PassLoads]) -> tuple[float, float]:
    """Return the share of the host's launches for which devices wait, in forwards and backwards of the model's layers.

    `layers` has the work of a layer of each kind.

    The host launches kernels of later layers while the device computes, because CUDA's streams queue kernels (CUDA C++
    Programming Guide, asynchronous concurrent execution). So all layers together take the longer of two times: all
    their launches, and all their work on the device. Not in the formula: some dispatchers wait for the number of tokens
    of each expert (token_dispatcher.py, `_maybe_dtoh_and_synchronize`), which shortens the host's lead. In 154
    published steps of models with experts, this wait changes the mean error by at most 0.02 points.
    """
    precision, launch_s, busy_s = Precision.of(job, device), [0.0, 0.0], [0.0, 0.0]
    for kind, count in Counter(job.model.layer_kinds).items():
        loads = layers[kind]
        for index, load in enumerate((loads.forward, loads.input_grad + loads.weight_grad)):
            launch_s[index] += count * host_s(device, load)
            busy_s[index] += count * device_s(device, precision, load)
    forward, back = (max(0.0, 1 - busy / host) if host else 0.0 for host, busy in zip(launch_s, busy_s, strict=True))
    return forward, back


def _collective_times(
    device: DeviceSpec, cluster: Cluster, layouts: Sequence[Layout], instances: int
) -> Iterator[CollectiveTime]:
    """Yield modelled times of collectives; in a ring between hosts each member adds its own share of the network cards.

    For each group size the number of hosts doubles from the least possible number up to one member a host. In an
    all-to-all each member sends pieces to other NVLink domains through its own share of the network cards, and pieces
    to its own domain through the domain's links. If each pair of devices has links of its own, a member of a group in
    one host sends to all other members at the same time, also in rings (NCCL builds several rings).
    """
    latency_s_HH = np.asarray(cluster.between_hosts.latency_s)
    byte_s_HH = cluster.between_hosts.seconds_per_byte
    domain_hosts = Domains.of(cluster).smallest // cluster.devices_per_host
    inside_latency_s, inside_byte_s = device.within_host.latency_s, 1 / device.within_host.fair_bytes_per_s
    shapes = {(one.tp, one.cp, one.ep, one.etp, one.dp, one.pp): one for one in layouts}
    groups = [group_sizes(layout, instances=instances).values() for layout in shapes.values()]
    for size in sorted({size for each in groups for size in each} - {1}):
        fewest, most = -(-size // cluster.devices_per_host), min(size, len(cluster.hosts))
        doubled = (fewest << power for power in range(most.bit_length()))
        for hosts in sorted({most, *(spans for spans in doubled if spans <= most)}):
            first, second = np.arange(hosts), np.roll(np.arange(hosts), -1)
            per_host = range(-(-size // hosts))
            slots = [host * cluster.devices_per_host + local for host in range(hosts) for local in per_host]
            members = max(1, size // hosts)
            inside_links = size - 1 if hosts == 1 and device.has_paired_links else 1
            for kind in _COLLECTIVES:
                steps = num_steps(kind, size)
                latency_s, step_byte_s = inside_latency_s, inside_byte_s / inside_links
                if hosts > 1:
                    latency_s = max(latency_s, float(latency_s_HH[first, second].max()))
                    step_byte_s = max(inside_byte_s, float(byte_s_HH[first, second].max()) / members)
                byte_s = steps * chunk_share(kind, size) * step_byte_s
                if hosts > 1 and kind == "all_to_all":
                    worst_byte_s = float(byte_s_HH[:hosts, :hosts].max())
                    near = min(size, members * domain_hosts)
                    byte_s = max((near - 1) * inside_byte_s, (size - near) * worst_byte_s) / size
                yield CollectiveTime(
                    kind=kind,
                    slots=tuple(slots[:size]),
                    latency_s=steps * latency_s,
                    seconds_per_byte=byte_s,
                    spread=0.0,
                    sizes_bytes=(),
                )
