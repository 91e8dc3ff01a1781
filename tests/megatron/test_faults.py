"""Which deaths are the plan's, and which come under every plan."""

from __future__ import annotations

import pytest

from pipette_launch.megatron import exception_in, why_no_plan_helps

WRITTEN = "--lr x --micro-batch-size 2 --seed=y --typo 3".split()
GIVEN = "--lr x --micro-batch-size 4 --seed=y --typo 3 --recompute-modules moe".split()


def why(cause: str, *, before: str = "") -> str:
    """What is said of a death."""
    return why_no_plan_helps(cause, before=[before], written=WRITTEN, given=GIVEN)


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
    """The last one, without the rank that torch puts before it."""
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
    """No layout makes a file or a module."""
    assert "what is missing is missing under every plan" == why(cause)


@pytest.mark.parametrize(
    "cause",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: '/c/iter_0000010/mp_rank_02/model_optim_rng.pt'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/torchinductor_me/x.py'",
        "out of memory: NCCL's buffers",
        "NCCL failed",
        "AssertionError",
        "ValueError: this script refuses --pipeline-model-parallel-size 2",
        "RuntimeError: [gloo] Connection closed by peer",
        "",
    ],
)
def test_what_another_plan_may_spare(cause: str) -> None:
    """Memory, a layout's own files and refusals, ranks that miss another: also the second time."""
    assert "" == why(cause, before=cause)


def test_an_exception_under_two_layouts_is_the_scripts() -> None:
    """It must be the same to the letter."""
    assert "it is the same under two layouts" == why("KeyError: 'a'", before="KeyError: 'a'")
    assert "" == why("KeyError: 'a'", before="KeyError: 'b'")


@pytest.mark.parametrize(
    ("cause", "is_own"),
    [
        ("the script refuses a flag: --lr: invalid float value: 'x'", True),
        ("the script refuses a flag: --seed/-s: invalid int value: 'y'", True),
        ("the script does not know the flags --typo 3", True),
        ("the script refuses a flag: --micro-batch-size: invalid choice: 4", False),
        ("the script refuses a flag: --recompute-modules: invalid choice: 'moe'", False),
        ("the script does not know the flags --recompute-modules moe", False),
    ],
)
def test_words_of_the_users_are_refused_under_every_plan(cause: str, is_own: bool) -> None:
    """Those that the plan wrote, or whose value it changed, are the plan's."""
    assert ("the words that the script refuses are your own" if is_own else "") == why(cause)
