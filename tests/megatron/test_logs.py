"""Iteration and memory lines of every release are read, and failures are explained."""

from __future__ import annotations

import pytest

from pipette_launch.facts.messages import Failure
from pipette_launch.megatron import (
    Iteration,
    MemoryLine,
    exception_in,
    explain_failure,
    failure_of,
    parse_iteration,
    parse_memory,
    why_no_plan_helps,
)

LINE_0_14 = (
    " [2025-07-01 12:00:00] iteration        3/      10 | consumed samples:           96 | elapsed time per iteration "
    "(ms): 1234.5 | learning rate: 1.500000E-04 | global batch size:    32 | lm loss: 1.062345E+01 | loss scale: 1.0 | "
    "grad norm: 2.345 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
LINE_0_16 = (
    " [2026-01-05 12:00:00.123456] iteration      100/  500000 | consumed samples:       102400 | elapsed time per "
    "iteration (ms): 250.0 | throughput per GPU (TFLOP/s/GPU): 410.2 | energy per GPU (J/iter/GPU): 120.1 | power per "
    "GPU (W/GPU): 480.2 | learning rate: 3.000000E-04 | global batch size:  1024 | lm loss: 2.500000E+00 | load "
    "balancing loss: 1.0E+00 | loss scale: 1.0 | grad norm: 0.5 | number of skipped iterations:   0 | number of nan "
    "iterations:   0 |"
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (LINE_0_14, Iteration(iteration=3, total=10, step_time_s=1.2345, loss="1.062345E+01")),
        (LINE_0_16, Iteration(iteration=100, total=500000, step_time_s=0.25, loss="2.500000E+00")),
        ("[default7]:" + LINE_0_16, Iteration(iteration=100, total=500000, step_time_s=0.25, loss="2.500000E+00")),
        (
            LINE_0_14.replace(" lm loss: 1.062345E+01 |", ""),
            Iteration(iteration=3, total=10, step_time_s=1.2345, loss=None),
        ),
        (LINE_0_14.replace("1.062345E+01", "INF"), Iteration(iteration=3, total=10, step_time_s=1.2345, loss="INF")),
        (" validation loss at iteration 10 | lm loss value: 1.0E+00 | lm loss PPL: 2.7E+00 |", None),
        ("", None),
    ],
)
def test_iteration_lines(line: str, expected: Iteration | None) -> None:
    """Each field is found by its name; a NaN loss is a missing field; other lines give None."""
    assert expected == parse_iteration(line)


@pytest.mark.parametrize(
    "sizes",
    [
        "allocated: 1024.5 | max allocated: 2048.0 | reserved: 2100.0 | max reserved: 3000.0",
        "allocated: 1024.50 | max allocated: 2048.00 | reserved: 2100.00 | max reserved: 3000.00 | total device memory",
    ],
    ids=["old", "new"],
)
def test_memory_lines(sizes: str) -> None:
    """Megatron's MB are 2^20 bytes, and text behind the last field is ignored."""
    mib = 1 << 20
    expected = MemoryLine(
        rank=6,
        iteration=2,
        allocated_bytes=1024 * mib + mib // 2,
        max_allocated_bytes=2048 * mib,
        reserved_bytes=2100 * mib,
        max_reserved_bytes=3000 * mib,
    )

    assert expected == parse_memory(f"[default6]:[Rank 6] (after 2 iterations) memory (MB) | {sizes}")


@pytest.mark.parametrize("line", ["", LINE_0_14, "[Rank 0] (before save_checkpoint for iteration 5) memory (MB) |"])
def test_other_lines_tell_no_memory(line: str) -> None:
    """Only memory lines of a training step are read."""
    assert parse_memory(line) is None


WRITTEN = "--lr x --micro-batch-size 2 --seed=y --typo 3".split()
GIVEN = "--lr x --micro-batch-size 4 --seed=y --typo 3 --recompute-modules moe".split()


def why(failure: Failure, *before: Failure) -> str:
    """Return the sentence about a failure."""
    return why_no_plan_helps(failure, before=before, written=WRITTEN, given=GIVEN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Traceback:\n  File\nKeyError: 'a'\nValueError: no\n", "ValueError: no"),
        ("[rank3]: torch.x.DistError: gone\n[rank3]:[W1] Warning: not destroyed", "torch.x.DistError: gone"),
        ("AssertionError\n", "AssertionError"),
        ("Exception ignored in: <function f>\nerror: no\n  ValueError: cited\n", ""),
    ],
)
def test_finds_the_exception(text: str, expected: str) -> None:
    """The last exception counts, without the rank that torch prints before it."""
    assert expected == exception_in(text)


@pytest.mark.parametrize(
    "cause",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/data'",
        "AssertionError: One or both of the .idx and .bin files cannot be found at the path prefix /no/such/data",
        "ModuleNotFoundError: No module named 'tensorstore'",
        "ImportError: cannot import name 'x' from 'y'",
    ],
)
def test_what_is_missing_is_missing_under_every_plan(cause: str) -> None:
    """No plan can create a missing file or module."""
    assert "the missing file or module is missing under every plan" == why(failure_of(cause))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "FT_RANK_MONITOR_IPC_SOCKET env variable should be set in a process that is running RankMonitorClient",
            "--enable-ft-package needs a rank monitor beside each rank",
        ),
        (
            "ValueError: checkpointing save dir must be set to enable fault tolerance",
            "--enable-ft-package needs --save",
        ),
    ],
)
def test_what_the_fault_tolerance_package_lacks(text: str, expected: str) -> None:
    """No plan brings a rank monitor or a folder, and the sentence names the program that would."""
    failure = explain_failure(text)

    assert failure is not None
    assert failure.cause.startswith(expected)
    assert "the missing file or module is missing under every plan" == why(failure)


@pytest.mark.parametrize(
    "cause",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: '/c/iter_0000010/mp_rank_02/model_optim_rng.pt'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/torchinductor_me/x.py'",
        "AssertionError",
        "ValueError: this script refuses --pipeline-model-parallel-size 2",
        "RuntimeError: [gloo] Connection closed by peer",
        "",
    ],
)
def test_what_another_plan_may_spare(cause: str) -> None:
    """Another plan may avoid a lack of memory, of a layout's own files or of a lost rank, even after two failures."""
    assert "" == why(failure_of(cause), failure_of(cause))


def test_an_exception_under_two_layouts_is_the_scripts() -> None:
    """An exception under two layouts ends the job only if both texts are equal."""
    assert "two layouts ended with the same exception" == why(failure_of("KeyError: 'a'"), failure_of("KeyError: 'a'"))
    assert "" == why(failure_of("KeyError: 'a'"), failure_of("KeyError: 'b'"))


@pytest.mark.parametrize("text", ["CUBLAS_STATUS_ALLOC_FAILED", "NCCL error", "torch.OutOfMemoryError: no"])
def test_what_is_recognised_is_no_proof_against_all_plans(text: str) -> None:
    """A failure of memory or of a lost peer never ends the job, even if two layouts had the same one."""
    failure = explain_failure(text)

    assert failure is not None
    assert "" == why(failure, failure)


@pytest.mark.parametrize(
    ("text", "flags", "is_own"),
    [
        ("error: argument --lr: invalid float value: 'x'", ["--lr"], True),
        ("error: argument --seed/-s: invalid int value: 'y'", ["--seed", "-s"], True),
        ("error: unrecognized arguments: --typo 3", ["--typo"], True),
        ("error: argument --micro-batch-size: invalid choice: 4", ["--micro-batch-size"], False),
        ("error: argument --recompute-modules: invalid choice: 'moe'", ["--recompute-modules"], False),
        ("error: unrecognized arguments: --recompute-modules moe", ["--recompute-modules"], False),
    ],
)
def test_words_of_the_users_are_refused_under_every_plan(text: str, flags: list[str], is_own: bool) -> None:
    """Refused words of the user end the job; words that the plan wrote or changed do not."""
    failure = explain_failure(f"usage: pretrain_gpt.py\n{text}\n")

    assert failure is not None
    assert flags == list(failure.flags)
    assert ("the script refuses flags that you wrote" if is_own else "") == why(failure)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139",
            "out of memory: torch's allocator",
        ),
        ("torch.cuda.OutOfMemoryError: HIP out of memory", "out of memory: torch's allocator"),
        ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be", "out of memory: torch's allocator"),
        ("node1:12:12 [0] NCCL WARN Cuda failure 2 'out of memory'", "out of memory: NCCL"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out of memory: a CUDA library"),
        (
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
            "out of memory: the host",
        ),
        ("[rank1]: RuntimeError: could not create a primitive", "out of memory: a kernel of oneDNN"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.", "out of memory: the kernel"),
        ("Memory cgroup out of memory: Killed process 12 (python)", "out of memory: the kernel"),
        ("OSError: [Errno 28] No space left on device", "no space is left on the disk"),
        (
            "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0",
            "a checkpoint could not be written; its disk may be full",
        ),
        (
            "(TP, PP) mismatch after resume ((2, 2) vs (4, 1) from checkpoint): not supported for DistributedOptimizer",
            "the plan does not fit the checkpoint: its optimizer state cannot change TP or PP",
        ),
        (
            "Number of unpadded elements in each bucket need to be the same in current run (1) and checkpoint (2)",
            "the plan does not fit the checkpoint: its optimizer state was saved with other gradient buckets",
        ),
        (
            "AssertionError: Using ... require setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1",
            "CUDA_DEVICE_MAX_CONNECTIONS does not suit",
        ),
        ("global batch size (6) is not divisible by micro batch size (4)", "Megatron refuses this configuration"),
        ("pretrain_gpt.py: error: unrecognized arguments: --mine 3\n", "the script does not know the flags --mine 3"),
        ("pretrain_gpt.py: error: argument --lr: invalid float value: 'x'\n", "the script refuses a flag: --lr: inv"),
    ],
)
def test_failures_are_explained(text: str, start: str) -> None:
    """Each known text of torch, NCCL, the kernel, batch systems and Megatron has its own explanation."""
    failure = explain_failure(f"some line\n{text}\nanother line")

    assert failure is not None
    assert failure.cause.startswith(start)
    assert failure.ran_out_of_memory == start.startswith("out of memory")


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: could not create a primitive descriptor for a matmul primitive",
        "",
        "exiting program at iteration 5",
        "RNG state will be ignored",
        "number of parameters: 10",
        "loss is high",
    ],
)
def test_other_texts_are_not_explained(text: str) -> None:
    """Deliberate ends and harmless notices are not failures."""
    assert explain_failure(text) is None
