"""Number formats are refused on GPUs whose chip cannot compute them."""

from __future__ import annotations

import pytest
from megatron_lines import job

from pipette_launch.errors import MegatronError

NVFP4 = "--fp4-format e2m1"


@pytest.mark.parametrize(
    ("words", "device", "capability", "message"),
    [
        (
            "--fp8-format hybrid",
            "A100-80GB",
            8,
            "--fp8-format hybrid: A100-80GB does not compute in FP8, which needs compute capability 8.9; remove",
        ),
        ("--fp8-format e4m3", "NVIDIA GeForce RTX 3090", None, "RTX 3090 does not compute in FP8, which"),
        ("--fp8-format e4m3", "V100-SXM2-32GB", 7, "V100-SXM2-32GB does not compute in FP8"),
        ("--fp8-format e4m3", "mine", 7, "mine does not compute in FP8"),
        (
            "--fp8-format e4m3 --fp8-recipe mxfp8",
            "NVIDIA H100 80GB HBM3",
            None,
            "--fp8-format e4m3 and --fp8-recipe mxfp8: NVIDIA H100 80GB HBM3 does not compute in FP8 (mxfp8), which",
        ),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "L40S", 8, "FP8 (blockwise), which needs compute capability 9.0"),
        (NVFP4, "H200-SXM", 9, "--fp4-format e2m1: H200-SXM does not compute in FP4, which needs"),
    ],
)
def test_a_format_that_the_chip_lacks_is_refused(words: str, device: str, capability: int, message: str) -> None:
    """With flags, device, the capability it needs and a remedy."""
    with pytest.raises(MegatronError) as caught:
        job(words, for_prediction=True, device_name=device, capability=capability)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "device", "capability"),
    [
        ("--fp8-format hybrid", "H100-SXM", 9),
        ("--fp8-format hybrid", "L40S", 8),
        ("--fp8-format hybrid", "NVIDIA GeForce RTX 4090", None),
        ("--fp8-format hybrid", "unknown", None),
        ("--fp8-format hybrid", "mine, like Ada", 8),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "H20-SXM", 9),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "GB200-NVL72", 10),
        (NVFP4, "B200", 10),
        ("--fp8-recipe mxfp8", "A100-80GB", 8),
    ],
)
def test_other_formats_are_read(words: str, device: str, capability: int) -> None:
    """Those that the chip computes, and those of GPUs of which too little is known."""
    assert job(words, for_prediction=True, device_name=device, capability=capability).model.num_layers
