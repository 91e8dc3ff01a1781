"""Changes of cpu_backend to Megatron-LM's own programs, function by function."""

import argparse
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipette_patches.cpu_backend import (
    EMULATED_BF16,
    _allow_no_cuda,
    _compile_for_this_python,
    _for_cpu,
    _without_kernels,
    has_bf16_instructions,
    say_once,
)


def test_a_gpu_machines_flags_become_a_cpus_before_megatron_checks_them(caplog: pytest.LogCaptureFixture) -> None:
    """Each change logs one line; flags that a CPU supports stay, and missing flags stay missing."""
    say_once.cache_clear()
    args = argparse.Namespace(distributed_backend="nccl", transformer_impl="local", fp8="hybrid", hidden_size=64)
    with caplog.at_level(logging.WARNING):
        seen = _for_cpu(lambda checked, defaults: (vars(checked).copy(), defaults))(args, {"a": 1})

    assert seen == (
        {"distributed_backend": "gloo", "transformer_impl": "local", "fp8": None, "hidden_size": 64},
        {"a": 1},
    )
    assert caplog.messages == ["cpu_backend: distributed_backend nccl -> gloo", "cpu_backend: fp8 hybrid -> None"]


def test_a_warning_is_said_once_and_by_rank_0_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of many processes is no louder than one."""
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        say_once("one")
        say_once("one")
        monkeypatch.setenv("RANK", "1")
        say_once("two")

    assert caplog.messages == ["cpu_backend: one"]


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile", True),
        ("flags\t\t: fpu avx2 avx512f amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("flags\t\t: fpu avx2 fma", False),
    ],
)
def test_bf16_instructions_are_read_from_the_kernel(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    """The kernel lists the instructions of x86 and Arm CPUs under different names."""
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{cpuinfo}\n")

    assert expected is has_bf16_instructions(file)


@pytest.mark.parametrize(
    ("dtype", "has_instructions", "expected"),
    [
        (torch.bfloat16, False, [f"cpu_backend: {EMULATED_BF16}"]),
        (torch.bfloat16, True, []),
        (torch.float32, False, []),
    ],
)
def test_a_bf16_job_on_a_cpu_that_emulates_bf16_is_warned(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    has_instructions: bool,
    expected: list[str],
) -> None:
    """The warning names the flag that makes such a job slow."""
    say_once.cache_clear()
    monkeypatch.setattr("pipette_patches.cpu_backend.has_bf16_instructions", lambda: has_instructions)
    with caplog.at_level(logging.WARNING):
        _without_kernels(lambda _config: None)(SimpleNamespace(params_dtype=dtype))

    assert expected == caplog.messages


def test_megatrons_own_switch_lets_it_start_without_cuda() -> None:
    """The caller's arguments pass through; only the switch is set."""
    started = _allow_no_cuda(lambda *args, **kwargs: (args, kwargs))("provider", allow_no_cuda=False, args_defaults={})

    assert started == (("provider",), {"allow_no_cuda": True, "args_defaults": {}})


def test_helpers_are_not_compiled_where_they_are_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megatron-core that brings its compiled helpers needs no make."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    called: list[Any] = []
    _compile_for_this_python(lambda: called.append(1))()

    assert called == []


def test_helpers_are_compiled_for_the_running_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make gets this Python's suffix and include folder, and MAKEFLAGS is restored afterwards."""
    pytest.importorskip("pybind11")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setenv("MAKEFLAGS", "-s")
    told: list[str] = []
    _compile_for_this_python(lambda: told.append(os.environ["MAKEFLAGS"]))()

    assert told[0].startswith("-s -- LIBEXT=.cpython-")
    assert "pybind11/include\\ -I" in told[0]
    assert os.environ["MAKEFLAGS"] == "-s"
