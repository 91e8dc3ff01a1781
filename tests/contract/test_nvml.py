"""Contract with nvidia-ml-py: every function, constant and bit that we rely on is in the installed binding."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pynvml
import pytest

from pipette_launch.cli import machine_checks
from pipette_launch.probe.health import inventory
from pipette_launch.probe.health import nvml as driver

SOURCES = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (inventory, driver, machine_checks))
ASKED = {f"nvmlDeviceGet{name}" for name in re.findall(r'ask\("(\w+)"', SOURCES)}
NAMED = set(re.findall(r"\bnvml[A-Z]\w+(?=[(\"])", SOURCES))


@pytest.mark.parametrize("name", sorted(ASKED | NAMED))
def test_every_question_is_known_to_the_binding(name: str) -> None:
    """A name that no binding has would be answered by None for ever, in silence."""
    assert hasattr(pynvml, name)


def test_memory_is_asked_with_a_version() -> None:
    """Version 2 tells what the driver reserves; the errors that hide a device have these names."""
    assert ["handle", "version"] == [*inspect.signature(pynvml.nvmlDeviceGetMemoryInfo).parameters]
    assert ["version", "total", "reserved", "free", "used"] == [name for name, _ in pynvml.c_nvmlMemory_v2_t._fields_]
    assert {pynvml.NVMLError} == {getattr(pynvml, name).__base__ for name in driver.HIDDEN}


def test_the_search_for_names_finds_them() -> None:
    """The list above is not empty by a slip of the pattern."""
    assert {"nvmlDeviceGetRemappedRows", "nvmlDeviceGetNvLinkState"} <= ASKED
    assert {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetHandleByUUID"} <= NAMED
    assert len(ASKED) >= 12
    assert len(ASKED | NAMED) >= 30


@pytest.mark.parametrize("reason", driver.CLOCK_REASONS)
def test_reasons_have_nvmls_bits(reason: str) -> None:
    """A bit under another name would accuse healthy devices."""
    assert 1 << driver.CLOCK_REASONS.index(reason) == getattr(pynvml, f"nvmlClocksEventReason{reason}")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("CLOCK_SM", "NVML_CLOCK_SM"),
        ("TEMPERATURE_GPU", "NVML_TEMPERATURE_GPU"),
        ("ERRORS_UNCORRECTED", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
        ("ECC_VOLATILE", "NVML_VOLATILE_ECC"),
        ("ECC_AGGREGATE", "NVML_AGGREGATE_ECC"),
        ("MAX_NVLINKS", "NVML_NVLINK_MAX_LINKS"),
        ("NVLINK_DOWN", "NVML_NVLINK_STATE_INACTIVE"),
    ],
)
def test_constants_are_nvmls(ours: str, theirs: str) -> None:
    """Numbers of our own, because a binding may lack the name; at least 18 links, as many as Hopper has."""
    if ours == "MAX_NVLINKS":
        assert driver.MAX_NVLINKS >= getattr(pynvml, theirs) >= 18
    else:
        assert getattr(driver, ours) == getattr(pynvml, theirs)


def test_remapped_rows_come_as_four() -> None:
    """Correctable, uncorrectable, pending, failed: the order in which they are unpacked."""
    source = inspect.getsource(pynvml.nvmlDeviceGetRemappedRows)

    assert "(c_corr.value, c_unc.value, c_bpending.value, c_bfailure.value)" in source
