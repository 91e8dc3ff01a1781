"""What a device takes for a load: limits, hand-computed cases, and the formats of FP8 and FP4."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.compute.device_time import Precision, device_s, matmul_efficiency, pass_s
from pipette_launch.cost.compute.loads import Load, Product
from pipette_launch.errors import FactError
from pipette_launch.facts.accelerators import DeviceSpec, Efficiency, Link
from pipette_launch.facts.known_devices import known_devices

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
    """Of a job of 4 layers with these flags."""
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
    """And a product that is longer in a dimension is never less efficient, nor faster."""
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
    whole = replace(mixed, narrow_layers=1.0)

    assert 0.5 == mixed.narrow_layers
    mean_s = (device_s(DEVICE, whole, load) + device_s(DEVICE, BF16, load)) / 2
    assert device_s(DEVICE, mixed, load) == pytest.approx(mean_s)


def test_one_copy_serves_both_products_on_blackwell() -> None:
    """Where the scale is that of the whole tensor: blocks along rows are none along columns."""
    hopper, blackwell = (known_devices()[name] for name in ("H100-SXM", "B200"))
    tensorwise = ("--fp8-format hybrid", "--fp8-recipe tensorwise")
    blocks = ("--fp8-format e4m3", "--fp8-recipe mxfp8")

    assert 1.0 == precision(*tensorwise, device=hopper).cast_bytes - precision(*tensorwise, device=blackwell).cast_bytes
    assert precision(*blocks, device=hopper) == precision(*blocks, device=blackwell)


def test_fp4_goes_before_and_a_device_without_it_says_so() -> None:
    """As Megatron excludes FP8 beside it."""
    narrow = precision("--fp4-format e2m1")
    load = Load(products=(Product(m=1000, n=1000, k=1000, is_linear=True),))

    assert "fp4" == narrow.narrow
    assert device_s(known_devices()["B200"], narrow, load) < device_s(known_devices()["B200"], BF16, load)
    with pytest.raises(FactError, match="no known peak for fp4"):
        device_s(DEVICE, narrow, load)


def test_megatrons_own_layers_have_no_narrow_format() -> None:
    """Only Transformer Engine multiplies in FP8."""
    assert BF16 == precision("--fp8-format hybrid", implementation="local")
