"""Which attention runs, as Megatron and TransformerEngine settle it."""

import pytest
from megatron_lines import job

from pipette_launch.errors import MegatronError

A100, H100, V100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB"


def backend(*flags: str, device_name: str = "", **environment: str) -> str:
    """Read the backend of the small job."""
    return job(*flags, environment=environment, device_name=device_name).model.attention_backend


@pytest.mark.parametrize(
    ("flags", "device_name", "expected"),
    [
        ("--bf16", A100, "flash"),
        ("--bf16 --deterministic-mode", A100, "flash"),
        ("--bf16", H100, "fused"),
        ("--bf16", "NVIDIA B200", "fused"),
        ("--fp16", V100, "unfused"),
        ("", H100, "unfused"),
        ("--bf16", "", "auto"),
        ("--bf16 --attention-backend flash", H100, "flash"),
        ("--bf16 --attention-backend fused", A100, "fused"),
        ("--bf16 --transformer-impl local", A100, "auto"),
    ],
)
def test_auto_is_what_transformer_engine_chooses(flags: str, device_name: str, expected: str) -> None:
    """By element type and GPU; a backend that is named stays, and so does auto where nothing is known."""
    assert expected == backend(flags, device_name=device_name)


@pytest.mark.parametrize(("capability", "expected"), [(7, "unfused"), (8, "flash"), (9, "fused"), (12, "fused")])
def test_a_described_device_has_the_attention_of_its_capability(capability: int, expected: str) -> None:
    """The name of a device that a file describes says nothing of it."""
    assert expected == job("--bf16", device_name="Gaudi 9", capability=capability).model.attention_backend


def test_a_switch_that_agrees_changes_nothing() -> None:
    """Megatron would set it to the same value."""
    assert backend("--bf16", device_name=H100, NVTE_FUSED_ATTN="1") == "fused"
    assert backend("--bf16 --attention-backend flash", NVTE_FUSED_ATTN="0", NVTE_FLASH_ATTN="1") == "flash"


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ("--bf16", {"NVTE_FLASH_ATTN": "0"}, r"NVTE_FLASH_ATTN=0 .*for which Megatron demands 1"),
        ("--bf16 --attention-backend fused", {"NVTE_FLASH_ATTN": "1"}, r"NVTE_FLASH_ATTN=1 .*demands 0"),
    ],
)
def test_an_environment_that_megatron_refuses(flags: str, environment: dict[str, str], message: str) -> None:
    """Megatron asserts; the error says which variable and what to do."""
    with pytest.raises(MegatronError, match=message):
        backend(flags, **environment)


def test_an_unknown_backend() -> None:
    """The error names the choices."""
    with pytest.raises(MegatronError, match=r"'xformers' .*flash, fused, unfused, local, auto"):
        backend("--bf16 --attention-backend xformers")
