"""Times of the device model: limits, hand-computed cases, and the formats of FP8 and FP4."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from facts_for_tests import fine_grained_model, tiny_job, tiny_model
from graph_spellings import LOCAL, SPELLINGS, TE, flags_of
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.communication.exchanges import step_traffic
from pipette_launch.cost.compute.device_model import (
    Precision,
    device_s,
    gradient_s_per_byte,
    imagined,
    matmul_efficiency,
    modelled_compute,
    optimizer_s_per_parameter,
    pass_s,
    published,
    published_error,
)
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.layers.attention import Attention
from pipette_launch.cost.layers.ends import head_loads
from pipette_launch.cost.layers.kinds import attention_core_share, kind_loads
from pipette_launch.cost.layers.loads import Load, Product
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.cost.step.step_bounds import BoundColumns
from pipette_launch.errors import FactError
from pipette_launch.facts import Batch, HybridLayers, Job, Layout, Recompute
from pipette_launch.facts.devices import (
    KNOWN_DEVICES,
    DeviceSpec,
    Efficiency,
    Link,
)
from pipette_launch.facts.fabric import UNIFORM, FabricSpec, Tier
from pipette_launch.facts.files import table
from pipette_launch.facts.layout import LayoutColumns
from pipette_launch.facts.measurements import Measurements, without_hosts
from pipette_launch.facts.model import LatentAttention, ModelSpec

LINK = Link(latency_s=1e-6, bytes_per_s=100e9)
DEVICE = DeviceSpec(
    name="test device",
    flops_per_s={"bf16": 100e12, "fp8": 200e12},
    memory_bytes_per_s=1e12,
    memory_bytes=16 << 30,
    within_host=LINK,
    between_hosts=LINK,
    efficiency=Efficiency(
        matmul_share=0.5,
        narrow_shares={"fp8": 0.4},
        half_size=100,
        attention_share=0.25,
        memory_share=0.5,
        launch_s=1e-5,
    ),
    exponentials_per_s=1e12,
    source="Made up.",
)
BF16 = Precision(dtype="bf16")
sizes = st.integers(min_value=1, max_value=1 << 17)


def precision(*flags: str, device: DeviceSpec = DEVICE, implementation: str = "transformer_engine") -> Precision:
    """The formats of a job of 4 layers with these flags."""
    model = tiny_model(params_dtype="bf16", transformer_impl=implementation)
    return Precision.of(tiny_job(model=model, performance_flags=flags), device)


def test_pass_is_worked_out_by_hand() -> None:
    """2e9 FLOPs at 50 % / 1.3 of 100T, 1e9 at 25 %, 1e8 bytes at half of 1 TB/s: 292 us, unless 30 kernels."""
    load = Load(products=(Product(m=1000, n=1000, k=1000),), attention_flops=1e9, moved_bytes=1e8, kernels=3)

    assert pass_s(DEVICE, BF16, load) == pytest.approx(292e-6)
    assert pass_s(DEVICE, BF16, replace(load, kernels=30)) == pytest.approx(300e-6)
    assert pass_s(DEVICE, BF16, replace(load, exponentials=1e7)) == pytest.approx(302e-6)


def test_a_scan_moves_its_bytes_at_its_own_share() -> None:
    """1e8 bytes at a fifth of 1 TB/s, where a device says so; else as all other bytes."""
    load = Load(scan_bytes=1e8)
    slow = replace(DEVICE, efficiency=replace(DEVICE.efficiency, scan_share=0.2))

    assert pass_s(slow, BF16, load) == pytest.approx(500e-6)
    assert pass_s(DEVICE, BF16, load) == pytest.approx(200e-6)
    with pytest.raises(FactError, match="scan_share"):
        replace(DEVICE.efficiency, scan_share=0.0)


@given(m=sizes, n=sizes, k=sizes)
def test_efficiency_lies_between_0_and_its_limit(m: int, n: int, k: int) -> None:
    """A product that is longer in a dimension is never less efficient, and never faster."""
    small, large = Product(m=m, n=n, k=k), Product(m=2 * m, n=n, k=k)

    assert 0 < matmul_efficiency(DEVICE, "bf16", small) <= matmul_efficiency(DEVICE, "bf16", large) <= 0.5
    assert pass_s(DEVICE, BF16, Load(products=(small,))) < pass_s(DEVICE, BF16, Load(products=(large,)))


def test_linears_alone_run_narrow_and_are_cast() -> None:
    """2e9 FLOPs at 40 % / 1.3 of 200T, 6 bytes for each of 1e6 elements at 0.5 TB/s: 32.5 and 12 us."""
    fp8 = precision("--fp8-format hybrid", "--fp8-recipe tensorwise")
    linear = Product(m=1000, n=1000, k=1000, is_linear=True)

    assert Precision(dtype="bf16", narrow="fp8", cast_bytes=6.0, narrow_layers=1.0) == fp8
    assert device_s(DEVICE, fp8, Load(products=(linear,), cast_elements=1e6)) == pytest.approx(44.5e-6)
    assert device_s(DEVICE, BF16, Load(products=(linear,), cast_elements=1e6)) == pytest.approx(52e-6)
    other = Load(products=(replace(linear, is_linear=False),), attention_flops=1e9)
    assert device_s(DEVICE, fp8, other) == device_s(DEVICE, BF16, other)


def test_layers_that_stay_in_16_bits_count_as_such() -> None:
    """The first and the last of four: half of the linears."""
    mixed = precision("--fp8-format e4m3", "--fp8-recipe mxfp8", "--first-last-layers-bf16")
    load = Load(products=(Product(m=1000, n=1000, k=1000, is_linear=True),), cast_elements=1e6)
    whole = mixed._replace(narrow_layers=1.0)

    assert 0.5 == mixed.narrow_layers
    mean_s = (device_s(DEVICE, whole, load) + device_s(DEVICE, BF16, load)) / 2
    assert device_s(DEVICE, mixed, load) == pytest.approx(mean_s)


def test_one_copy_serves_both_products_on_blackwell() -> None:
    """Scales of the whole tensor serve both products; blocks along rows do not serve columns."""
    hopper, blackwell = (KNOWN_DEVICES[name] for name in ("H100-SXM", "B200"))
    tensorwise = ("--fp8-format hybrid", "--fp8-recipe tensorwise")
    blocks = ("--fp8-format e4m3", "--fp8-recipe mxfp8")

    assert 1.0 == precision(*tensorwise, device=hopper).cast_bytes - precision(*tensorwise, device=blackwell).cast_bytes
    assert precision(*blocks, device=hopper) == precision(*blocks, device=blackwell)


def test_fp4_goes_before_and_a_device_without_it_says_so() -> None:
    """As Megatron excludes FP8 beside it."""
    narrow = precision("--fp4-format e2m1")
    load = Load(products=(Product(m=1000, n=1000, k=1000, is_linear=True),))

    assert "fp4" == narrow.narrow
    assert device_s(KNOWN_DEVICES["B200"], narrow, load) < device_s(KNOWN_DEVICES["B200"], BF16, load)
    with pytest.raises(FactError, match="no known peak for fp4"):
        device_s(DEVICE, narrow, load)


def test_megatrons_own_layers_have_no_narrow_format() -> None:
    """Only Transformer Engine multiplies in FP8."""
    assert BF16 == precision("--fp8-format hybrid", implementation="local")


GPU = DeviceSpec(
    name="test device",
    flops_per_s={"bf16": 100e12, "fp32": 50e12},
    memory_bytes_per_s=1e12,
    memory_bytes=16 << 30,
    within_host=Link(latency_s=1e-6, bytes_per_s=100e9),
    between_hosts=Link(latency_s=1e-5, bytes_per_s=20e9, shared_by=2),
    efficiency=Efficiency(matmul_share=0.5, half_size=100, attention_share=0.25, memory_share=0.5, launch_s=1e-5),
    source="Made up.",
)


def job(**changes: object) -> Job:
    """A GPT of 4 layers with 8 samples a step on 4 devices."""
    return tiny_job(model=tiny_model(params_dtype="bf16", **changes))


@pytest.mark.parametrize("backend", ["flash", "unfused", "local"])
@pytest.mark.parametrize("moe", [False, True])
def test_layer_flops_are_those_of_the_model(backend: str, moe: bool) -> None:
    """The forward of all ranks adds up to the model's FLOPs; flash attention skips half of its part."""
    model = tiny_model(
        params_dtype="bf16",
        transformer_impl="transformer_engine",
        attention_backend=backend,
        add_bias_linear=False,
        **({"num_experts": 4, "moe_layer_freq": (1,) * 4} if moe else {}),
    )
    layout = Layout(tp=2, etp=2, sequence_parallel=True, micro_batch_size=3)
    forward = kind_loads(tiny_job(model=model), layout, "moe_layer" if moe else "layer").forward
    core = 4.0 * model.seq_length * 64
    expected = (
        3
        * 32
        * (model.kind_flops_per_token("moe_layer" if moe else "layer") - core * (0.5 if backend == "flash" else 0))
    )

    assert expected == 2 * (sum(product.flops for product in forward.products) + forward.attention_flops)


@pytest.mark.parametrize(("q_lora_rank", "query_weights"), [(None, 64 * 4 * 24), (32, 64 * 32 + 32 * 4 * 24)])
def test_latent_attention_flops(q_lora_rank: int | None, query_weights: int) -> None:
    """Latents of 48 + 8, four heads of 16 + 8 channels of query and 20 of value, on one rank: counted by hand."""
    latent = LatentAttention(
        q_lora_rank=q_lora_rank, kv_lora_rank=48, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=20
    )
    model = tiny_model(params_dtype="bf16", transformer_impl="transformer_engine", latent_attention=latent)
    forward = kind_loads(tiny_job(model=model), Layout(), "layer").forward
    weights = query_weights + 64 * (48 + 8) + 48 * 4 * (16 + 20) + 4 * 20 * 64 + 2 * 64 * 256

    assert sum(product.flops for product in forward.products) == 2 * 32 * weights
    assert forward.attention_flops == 32 * 32 * 4 * (24 + 20)


def test_weight_gradient_costs_what_the_forward_does() -> None:
    """Every weight matrix is multiplied once in each of the three passes; scores and context have no weights."""
    loads = kind_loads(job(), Layout(tp=2), "layer")
    weight = sum(product.flops for product in loads.weight_grad.products)

    assert weight == 2 * 32 * (4 * 64 * 64 + 2 * 64 * 256) / 2
    assert sum(product.flops for product in loads.input_grad.products) - weight == 2 * (
        sum(product.flops for product in loads.forward.products) - weight
    )


@given(mbs=st.sampled_from([1, 2, 4, 8]), tp=st.sampled_from([1, 2, 4]))
def test_more_tokens_are_never_faster(mbs: int, tp: int) -> None:
    """Time grows at most in proportion, because efficiency rises."""
    layouts = [Layout(tp=tp, micro_batch_size=size) for size in (mbs, 2 * mbs)]
    found = imagined(job(), GPU, num_hosts=1, devices_per_host=tp, layouts=layouts)

    for part in ("layer", "embedding", "head"):
        small, large = sorted(
            (time for time in found.compute if time.part == part), key=lambda time: time.case.micro_batch_size
        )
        once, twice = (
            (time.forward.median_s, time.input_grad.median_s + time.weight_grad.median_s) for time in (small, large)
        )
        for less, more in zip(once, twice, strict=True):
            assert less * (1 - 1e-12) <= more <= 2 * less * (1 + 1e-12)


def test_short_kernels_leave_the_device_idle() -> None:
    """A tiny layer takes as long as its launches; a large one leaves nothing idle."""
    found = imagined(job(), GPU, num_hosts=1, devices_per_host=2, layouts=[Layout(dp=2)])
    tiny = next(time for time in found.compute if time.part == "layer")
    large_job = job(hidden_size=8192, ffn_hidden_size=32768, kv_channels=2048, seq_length=4096)
    large = next(
        time
        for time in imagined(large_job, GPU, num_hosts=1, devices_per_host=2, layouts=[Layout(dp=2)]).compute
        if time.part == "layer"
    )
    kernels = kind_loads(job(), Layout(dp=2), "layer").forward.kernels

    assert tiny.forward.median_s == kernels * 1e-5
    assert 0.9 * tiny.forward.median_s < tiny.forward_idle_s < tiny.forward.median_s
    assert (large.forward_idle_s, large.backward_idle_s) == (0, 0)


def test_attention_core_lies_within_the_layer() -> None:
    """Selective recompute of it costs less than the layer, and without flash more than its share of the FLOPs."""
    long = job(seq_length=4096, max_position_embeddings=4096, hidden_size=1024, ffn_hidden_size=4096, kv_channels=256)
    layout = Layout(recompute=Recompute(granularity="selective"))
    found = imagined(long, GPU, num_hosts=1, devices_per_host=1, layouts=[layout])
    seconds = {time.part: time.forward.median_s for time in found.compute}
    again_s = ComputeTable(long, found).chunk_passes(layout)[0].recompute_s

    assert again_s == pytest.approx(4 * seconds["core_attention"])
    assert attention_core_share(long) < seconds["core_attention"] / seconds["layer"] < 1


def test_a_depth_of_prediction_takes_longer_than_its_layer_and_its_head() -> None:
    """It looks words up, joins and projects beside them; models without one have no such part."""
    parts = [
        {time.part: time.forward.median_s for time in modelled_compute(job(mtp_num_layers=depths), GPU, [Layout()])}
        for depths in (0, 2)
    ]

    assert "prediction" not in parts[0]
    assert 1 < parts[1]["prediction"] / (parts[1]["layer"] + parts[1]["head"]) < 1.5


def test_a_transformer_written_as_a_pattern_costs_the_same() -> None:
    """With kernels that the host launches slowly, attention and experts of one block wait together."""
    shape = {"num_experts": 4, "moe_ffn_hidden_size": 128, "transformer_impl": "transformer_engine"}
    shape |= {"add_bias_linear": False, "attention_backend": "flash", "params_dtype": "bf16"}
    plain = tiny_model(**shape, moe_layer_freq=(1,) * 4)
    pattern = HybridLayers(
        pattern="*E" * 4, mamba_state_dim=16, mamba_num_heads=8, mamba_head_dim=16, mamba_num_groups=4
    )
    hybrid = tiny_model(**shape, num_layers=8, moe_layer_freq=(0, 1) * 4, hybrid=pattern)
    whole, halves = (
        {time.part: time for time in modelled_compute(tiny_job(model=model), DEVICE, [Layout()])}
        for model in (plain, hybrid)
    )

    parts = [halves[name] for name in ("attention_layer", "expert_layer")]
    backward_s = [one.input_grad.median_s + one.weight_grad.median_s for one in (*parts, whole["moe_layer"])]
    assert sum(one.forward.median_s for one in parts) == pytest.approx(whole["moe_layer"].forward.median_s)
    assert sum(backward_s[:2]) == pytest.approx(backward_s[2])
    assert sum(one.forward_idle_s for one in parts) == pytest.approx(whole["moe_layer"].forward_idle_s)


def test_the_output_layer_runs_in_fp8_by_its_own_flag() -> None:
    """The head's product is in FP8 only with --fp8-output-proj, and its norm and loss stay in 16 bits."""
    fp8 = ("--fp8-format hybrid", "--fp8-recipe delayed")
    model = tiny_model(params_dtype="bf16", transformer_impl="transformer_engine", vocab_size=100_000)
    plain, narrow = (
        tiny_job(model=model, performance_flags=flags, megatron_version="0.18.0")
        for flags in (fp8, (*fp8, "--fp8-output-proj"))
    )
    loads = [head_loads(one, Layout()).forward for one in (plain, narrow)]
    rows, depth = (getattr(loads[0].products[0], side) for side in "mk")

    assert [False, True] == [load.products[0].is_linear for load in loads]
    assert loads[0].moved_bytes == loads[1].moved_bytes
    assert device_s(DEVICE, precision(*fp8), loads[1]) < device_s(DEVICE, precision(*fp8), loads[0])
    assert rows * depth == loads[1].cast_elements


@pytest.mark.parametrize("pattern", ["M*-M", "*MM-"])
def test_attention_hides_the_ring_of_a_pattern_that_begins_with_another_layer(pattern: str) -> None:
    """If no core was timed, its share of FLOPs gives its part of an attention layer's busy time, behind any layer."""
    hybrid = HybridLayers(pattern=pattern, mamba_state_dim=16, mamba_num_heads=8, mamba_head_dim=16, mamba_num_groups=4)
    one = tiny_job(model=tiny_model(params_dtype="bf16", num_layers=4, hybrid=hybrid))
    layout = Layout(cp=2, dp=2)
    found = imagined(one, GPU, num_hosts=1, devices_per_host=4, layouts=[layout])
    without = replace(found, compute=tuple(time for time in found.compute if time.part != "core_attention"))
    (time,) = [time for time in found.compute if time.part == "attention_layer"]
    forward_s = time.forward.median_s - time.forward_idle_s
    share = attention_core_share(one, "attention_layer")

    assert share > 0
    assert share * forward_s == pytest.approx(ComputeTable(one, without).hiding(layout).core_attention_s)


def layers_s(job: Job) -> float:
    """Seconds of forward and backward of all layers of a micro-batch on a device whose host launches kernels slowly."""
    machines = imagined(job, DEVICE, num_hosts=1, devices_per_host=1, layouts=[Layout()])
    (passes,) = ComputeTable(job, machines).chunk_passes(Layout())
    return passes.forward_s + passes.backward_s


MAMBA = HybridLayers(pattern="MEM*M-ME", mamba_state_dim=16, mamba_num_heads=8, mamba_head_dim=16, mamba_num_groups=4)
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"num_experts": 4, "moe_ffn_hidden_size": 128, "moe_layer_freq": (0, 1, 1, 1), "add_bias_linear": False},
    "hybrid": {"num_experts": 4, "moe_ffn_hidden_size": 128, "add_bias_linear": False, "num_layers": 8}
    | {"moe_layer_freq": (0, 1, 0, 0, 0, 0, 0, 1), "hybrid": MAMBA},
}
"""Models of each kind, in bf16 by Transformer Engine."""


def shaped_job(shape: str, version: str = "0.20.0", words: str = "", **changes: object) -> Job:
    """A job with a model of `SHAPES`."""
    fields = {"transformer_impl": "transformer_engine", "attention_backend": "flash", "params_dtype": "bf16"}
    model = tiny_model(**{**fields, **SHAPES[shape], **changes})
    return tiny_job(model=model, megatron_version=version, performance_flags=flags_of(words))


@pytest.mark.parametrize("meaning", SPELLINGS)
def test_equal_graphs_have_equal_seconds(meaning: str) -> None:
    """The release and the spelling of a flag do not change the price of graphs."""
    seconds = {layers_s(shaped_job("dense", *each)) for each in SPELLINGS[meaning]}

    assert 1 == len(seconds)


@pytest.mark.parametrize(("shape", "hidden_size"), [(shape, size) for shape in SHAPES for size in (64, 2048)])
def test_graphs_never_slow_a_job_down(shape: str, hidden_size: int) -> None:
    """Each set of captured parts, by each implementation, saves launches or nothing."""
    names = ("attn", "mlp", "mamba", "moe_router", "moe_preprocess", "moe")
    sets = [some for count in range(len(names) + 1) for some in combinations(names, count)]
    sizes = {"hidden_size": hidden_size, "kv_channels": hidden_size // 4}
    eager_s = layers_s(shaped_job(shape, **sizes))
    captured_s = [
        layers_s(
            shaped_job(shape, "0.20.0", f"{impl} --cuda-graph-modules {' '.join(some)}" if some else impl, **sizes)
        )
        for impl in (TE, LOCAL)
        for some in sets
    ]
    iteration_s = layers_s(shaped_job(shape, "0.20.0", "--cuda-graph-impl full_iteration", **sizes))

    assert max(captured_s) <= eager_s * (1 + 1e-12)
    assert iteration_s <= min(captured_s) * (1 + 1e-12)
    assert min(captured_s) < 0.9 * eager_s or hidden_size > 64


def test_the_host_launches_ahead_over_mamba_layers_too() -> None:
    """All layers of a pattern take as long together as their launches, although their device's shares differ."""
    job = shaped_job("hybrid", seq_length=2048, max_position_embeddings=2048, hidden_size=512, kv_channels=128)
    loads = [kind_loads(job, Layout(), kind).forward for kind in job.model.layer_kinds]
    launches_s, device = [load.kernels * 1e-5 for load in loads], [device_s(DEVICE, BF16, load) for load in loads]
    times = {time.part: time.forward.median_s for time in modelled_compute(job, DEVICE, [Layout()])}

    assert any(busy > launched for busy, launched in zip(device, launches_s, strict=True))
    assert sum(device) < sum(launches_s)
    assert sum(launches_s) == pytest.approx(sum(times[kind] for kind in job.model.layer_kinds))


def test_groups_across_hosts_use_all_cards() -> None:
    """A ring of 4 on 2 hosts has two shares of 10 GB/s, one member a host has one."""
    layouts = [Layout(dp=4), Layout(dp=2, tp=2)]
    found = imagined(job(), GPU, num_hosts=2, devices_per_host=2, layouts=layouts).collectives
    byte_s = {
        (len(time.slots), len({slot // 2 for slot in time.slots})): time.seconds_per_byte
        for time in found
        if time.kind == "all_gather"
    }

    assert byte_s == pytest.approx({(2, 1): 1 / 2 / 100e9, (2, 2): 1 / 2 / 10e9, (4, 2): 3 / 4 / 20e9})


def test_an_exchange_across_hosts_goes_through_each_members_own_card() -> None:
    """4 of 4 on 2 hosts: 2 of 4 pieces leave at 10 GB/s each, while the ring of the same group has both cards."""
    found = imagined(job(), GPU, num_hosts=2, devices_per_host=2, layouts=[Layout(dp=4)]).collectives
    byte_s = {time.kind: time.seconds_per_byte for time in found if len(time.slots) == 4}

    assert byte_s["all_to_all"] == pytest.approx(2 / 4 / 10e9)
    assert byte_s["all_gather"] == pytest.approx(3 / 4 / 20e9)


def test_a_group_uses_the_links_of_all_its_pairs() -> None:
    """Without a switch, a pair has one link of 100 GB/s, and each member of a group of 4 sends on three links."""
    device = replace(GPU, has_paired_links=True)
    found = imagined(job(), device, num_hosts=1, devices_per_host=4, layouts=[Layout(tp=2, dp=2), Layout(dp=4)])
    byte_s = {(time.kind, len(time.slots)): time.seconds_per_byte for time in found.collectives}

    assert 1 / 2 / 100e9 == pytest.approx(byte_s["all_gather", 2])
    assert 3 / 4 / 300e9 == pytest.approx(byte_s["all_gather", 4])
    assert 3 / 4 / 300e9 == pytest.approx(byte_s["all_to_all", 4])


def test_groups_across_tiers_are_as_slow_as_their_slowest_link() -> None:
    """Behind half of the uplinks a ring of four hosts takes twice as long; within a leaf nothing changes."""
    fabric = FabricSpec(source="-", tiers=(Tier(name="leaf", hosts_per_group=2), Tier(name="spine", share=0.5)))
    ring_s, step_s = [], []
    for one in (UNIFORM, fabric):
        found = imagined(job(), GPU, num_hosts=4, devices_per_host=1, layouts=[Layout(dp=4)], fabric=one)
        ring_s += [time.seconds_per_byte for time in found.collectives if time.kind == "all_gather"]
        step_s.append(Predictor(job(), found).step_time(Layout(dp=4), range(4)).breakdown_s["data_parallel"])

    assert ring_s[1] == pytest.approx(2 * ring_s[0])
    assert step_s[1] > 1.2 * step_s[0]


def test_predictor_prices_what_was_imagined() -> None:
    """Every layout asked for has a price, and the price is made of all parts."""
    layouts = [Layout(dp=4), Layout(tp=2, dp=2), Layout(pp=2, tp=2), Layout(pp=4, micro_batch_size=2)]
    found = imagined(job(), GPU, num_hosts=2, devices_per_host=2, layouts=layouts)
    predictor = Predictor(job(), found)

    for layout in layouts:
        assert predictor.can_price(layout)
        assert predictor.notes(layout) == ()
        assert predictor.step_time(layout, range(4)).total_s > 0


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    mbs=st.sampled_from([1, 2]),
    name=st.sampled_from(sorted(KNOWN_DEVICES)),
    sequence_parallel=st.booleans(),
    full=st.booleans(),
)
def test_no_step_beats_the_peak(tp: int, pp: int, mbs: int, name: str, sequence_parallel: bool, full: bool) -> None:
    """All devices together compute at most at their share of the peak, for every layout."""
    device = KNOWN_DEVICES[name]
    model = tiny_model(hidden_size=2048, ffn_hidden_size=8192, kv_channels=512, seq_length=1024, params_dtype="fp16")
    recompute = Recompute(granularity="full", method="uniform", num_layers=1) if full else Recompute(granularity="none")
    layout = Layout(
        tp=tp, pp=pp, dp=16 // tp // pp, micro_batch_size=mbs, sequence_parallel=sequence_parallel, recompute=recompute
    )
    this = tiny_job(model=model, batch=Batch(global_batch_size=64))
    found = imagined(this, device, num_hosts=2, devices_per_host=8, layouts=[layout])
    flops = 64 * 1024 * 4 * model.kind_flops_per_token("layer") * (4 if full else 3)
    fastest_s = flops / (16 * device.peak_flops_per_s("fp16") * device.efficiency.matmul_share)

    assert Predictor(this, found).step_time(layout, range(16)).total_s > fastest_s


@pytest.mark.parametrize("mtp_num_layers", [0, 1])
def test_a_layout_takes_as_long_beside_others_as_alone(mtp_num_layers: int) -> None:
    """Few experts on a rank, each with many tokens, are quicker than many: every share of them has its own price."""
    experts = {"num_experts": 8, "moe_layer_freq": (1,) * 4, "moe_ffn_hidden_size": 128}
    moe = job(**experts, seq_length=512, mtp_num_layers=mtp_num_layers)
    layouts = [Layout(dp=4, ep=ep) for ep in (1, 2, 4)]
    quick_host = replace(GPU, efficiency=replace(GPU.efficiency, launch_s=0.0))

    def measured(*imagined_ones: Layout) -> Measurements:
        return imagined(moe, quick_host, num_hosts=2, devices_per_host=2, layouts=imagined_ones)

    all_of_them = Predictor(moe, measured(*layouts))
    bounds_s = BoundColumns(moe, measured(*layouts)).of_columns(LayoutColumns.of(layouts))
    passes = [all_of_them.compute.chunk_passes(one)[0].backward_s for one in layouts]

    assert passes[0] > passes[1] > passes[2]
    for one, bound_s in zip(layouts, bounds_s, strict=True):
        step_s = all_of_them.step_time(one, range(4)).total_s
        assert step_s == Predictor(moe, measured(one)).step_time(one, range(4)).total_s
        assert max(bound_s, all_of_them.bound_s(one)) <= step_s


def test_assumptions_are_stated() -> None:
    """The notes report that nothing was measured, and list every assumed figure."""
    text = " ".join(imagined(job(), GPU, num_hosts=2, devices_per_host=2, layouts=[Layout(dp=4)]).notes)

    for words in ("Nothing was measured", "Made up.", "100 TFLOP/s (bf16)", "10 us", "100 GB/s", "10 GB/s", "rings"):
        assert words in text


def test_optimizer_moves_its_bytes() -> None:
    """34 bytes for each parameter of 16 bits, and each byte of all gradients four times, at half of 1 TB/s."""
    assert optimizer_s_per_parameter(GPU, job()) == 34 / 0.5e12
    assert gradient_s_per_byte(GPU) == 4 / 0.5e12


def test_what_is_done_once_a_step_is_in_the_price() -> None:
    """A rank of two replicas clears, checks and scales all its gradients, and waits for its host."""
    layout = Layout(dp=2, use_distributed_optimizer=True)
    gradients = step_traffic(job(), layout).gradient_bytes[0][0]
    step_s = []
    for host_s in (0.0, 0.25):
        device = replace(GPU, efficiency=replace(GPU.efficiency, step_s=host_s))
        found = imagined(job(), device, num_hosts=1, devices_per_host=2, layouts=[layout])
        free = replace(found, gradient_s_per_byte=0.0)
        step_s += [Predictor(job(), one).step_time(layout, range(2)).total_s for one in (found, free)]

    assert gradients > 0
    assert step_s[0] - step_s[1] == pytest.approx(4 * gradients / 0.5e12)
    assert step_s[2] - step_s[0] == pytest.approx(0.25)


@pytest.mark.parametrize(("biases", "passes"), [(False, 16), (True, 18)])
def test_gradients_that_meet_are_added_up(biases: bool, passes: int) -> None:
    """Two norms of 3, two residuals of 2, two sums of 3, and a bias sum each, over 32 x 64 elements of 2 bytes."""
    model = tiny_model(params_dtype="bf16", transformer_impl="transformer_engine", add_bias_linear=biases)
    layer = kind_loads(tiny_job(model=model), Layout(), "layer").input_grad
    activation = 3 * 32 * 256 * 2

    assert layer.moved_bytes == passes * 32 * 64 * 2 + activation


@pytest.mark.parametrize(("backend", "share"), [("flash", pytest.approx(0.5, abs=0.05)), ("unfused", 1.0)])
def test_windows_take_scores_off_where_none_is_written(backend: str, share: float) -> None:
    """Flash attention skips the scores outside a window; unfused attention writes all scores."""
    whole = tiny_model(params_dtype="bf16", transformer_impl="transformer_engine", attention_backend=backend)
    model = replace(whole, attention_windows=(1, 0) * (whole.num_layers // 2))
    all_of_it, seen = (Attention(tiny_job(model=each), Layout()).core_loads().forward for each in (whole, model))
    said = " ".join(imagined(tiny_job(model=model), GPU, num_hosts=1, devices_per_host=1, layouts=[Layout()]).notes)

    assert seen == all_of_it if share == 1 else seen.attention_flops / all_of_it.attention_flops == share
    assert ("Layers with a window of at most 1 tokens" in said) == (backend == "flash")


def test_nothing_cannot_be_imagined() -> None:
    """Neither no hosts, nor no layouts, nor a type without a peak."""
    with pytest.raises(FactError, match="0 hosts"):
        imagined(job(), GPU, num_hosts=0, devices_per_host=2, layouts=[Layout()])
    with pytest.raises(FactError, match="0 layouts"):
        imagined(job(), GPU, num_hosts=1, devices_per_host=1, layouts=[])
    with pytest.raises(FactError, match="no known peak for fp16"):
        imagined(
            tiny_job(model=tiny_model(params_dtype="fp16")),
            GPU,
            num_hosts=1,
            devices_per_host=1,
            layouts=[Layout()],
        )


def test_a_fused_cross_entropy_passes_over_the_logits_less_often() -> None:
    """Transformer Engine's own moves a fifth of the bytes; torch's fused one is priced as the plain one."""
    flags = ("--cross-entropy-loss-fusion",)
    plain, native, fused = (
        head_loads(tiny_job(model=tiny_model(params_dtype="bf16"), performance_flags=chosen), Layout())
        for chosen in ((), flags, (*flags, "--cross-entropy-fusion-impl te"))
    )

    assert plain == native
    assert plain.forward.products == fused.forward.products
    assert fused.forward.moved_bytes < 0.2 * plain.forward.moved_bytes


def test_an_imagined_cluster_knows_its_device() -> None:
    """Its figures come along, also to the hosts that are left, so that no name is looked up; it can be a key."""
    odd = replace(GPU, name="Voodoo", flops_per_s={"bf16": 1e12}, compute_capability=3)
    whole = imagined(job(), odd, num_hosts=2, devices_per_host=2, layouts=[Layout(dp=4)])

    for cluster in (whole.cluster, without_hosts(whole, ["host0"]).cluster):
        assert odd == cluster.spec
        assert 3 == cluster.compute_capability
        assert isinstance(hash(cluster), int)


@pytest.mark.parametrize(
    ("kind", "model"), [("dense models", tiny_model()), ("models with experts", fine_grained_model())]
)
def test_predictions_say_how_far_off_published_runs_were(kind: str, model: ModelSpec) -> None:
    """The note has the mean error and the worst model of the same kind of models, from the recorded file."""
    row = next(row for row in table("pipette_launch.facts", "published_errors") if row["kind"] == kind)
    found = published_error(tiny_job(model=model))

    assert (
        f"published {kind} ({row['rows']} runs) were predicted {float(row['mean_error']):.1%} off in the mean" in found
    )
    assert row["worst_model"] in found


def test_published_errors_are_numbers() -> None:
    """Leads of dense models were 4.5 % off, in 46 pairs of layouts, so callers compare numbers."""
    errors = published(tiny_job())

    assert ("dense models", 46, 0.045, 0.106) == (errors.kind, errors.pairs, errors.lead_error, errors.worst_error)
