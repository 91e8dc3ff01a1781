"""The commands of the workers under a decision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import nodes, tiny_job, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from launch.worlds import plan

from pipette_launch.errors import MegatronError, UsageError
from pipette_launch.facts import ComputeCase, Layout, files
from pipette_launch.facts.messages import RunTraining
from pipette_launch.facts.schedule import ScheduleFile, schedule_of
from pipette_launch.launch.commands import (
    SIZE_LIMITS_BYTES,
    WorkerCommand,
    message_sizes_bytes,
    own_script,
    probe_options,
    training,
)
from pipette_launch.launch.options import Options


def nowhere() -> Path:
    """Fail, because a command without a schedule needs no folder."""
    raise AssertionError("a folder was made")


def script(*arguments: str) -> WorkerCommand:
    """A script as torchrun would run it."""
    return WorkerCommand(entrypoint="python", arguments=arguments, environment={})


def test_sizes_of_a_gpt_by_hand() -> None:
    """4096 tokens of 4096 bf16 numbers are 32 MiB; eight tensor ranks send an eighth each."""
    model = tiny_model(seq_length=4096, hidden_size=4096, params_dtype="bf16")
    cases = [ComputeCase(tp=tp, cp=1, micro_batch_size=1) for tp in (1, 8)]

    assert (8, 4 << 20, 16 << 20, 32 << 20) == message_sizes_bytes(replace(tiny_job(8), model=model), cases, "cuda")


@given(
    tp=st.sampled_from((1, 2, 4)),
    size=st.sampled_from((1, 2, 16)),
    hidden=st.sampled_from((8, 512, 16384)),
    kind=st.sampled_from(("cpu", "cuda")),
)
def test_sizes_stay_within_limits(tp: int, size: int, hidden: int, kind: str) -> None:
    """Any model gets four ascending sizes, and the tiny one is far from the others."""
    job = replace(tiny_job(1), model=tiny_model(hidden_size=hidden))
    found = message_sizes_bytes(job, [ComputeCase(tp=tp, cp=1, micro_batch_size=size)], kind)  # type: ignore[arg-type]
    least, most = SIZE_LIMITS_BYTES[kind]

    assert 4 == len(set(found))
    assert list(found) == sorted(found)
    assert least <= found[1]
    assert found[-1] <= most


def test_a_file_that_cannot_be_written_stops_before_the_warm_up() -> None:
    """Otherwise the measurements of a minute would be lost."""
    options = Options(
        script="train.py", script_arguments=(), runs_python=True, is_module=False, probe_to=Path("/dev/null/x")
    )

    with pytest.raises(UsageError, match="--pipette-probe /dev/null/x: cannot be written"):
        probe_options(tiny_job(1), (), options=options, known=None, num_training=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"runs_python": False}, "a job with --no-python is not planned"),
        ({"script": "run_recipe.py", "script_arguments": ("model.seq_length=4096",)}, "pipette plan"),
    ],
)
def test_a_script_that_cannot_be_played_is_refused_before_the_warm_up(words: dict[str, Any], message: str) -> None:
    """The reason has the way out, if there is one."""
    with pytest.raises(MegatronError, match=message):
        own_script(replace(OPTIONS, **words))


def test_a_script_that_runs_as_a_function_is_played() -> None:
    """Torchrun's `--run-path` and the warm-up run the same file."""
    assert ("train.py",) == own_script(replace(OPTIONS, runs_python=False, is_function=True))
    assert ("-m", "train.py") == own_script(replace(OPTIONS, is_module=True))


OPTIONS = Options(script="train.py", script_arguments=("--lr", "1"), runs_python=True, is_module=False)
DECISION = RunTraining(nodes=nodes("a", num_slots=2), plan=None)


def test_own_configuration_is_torchruns_own_command() -> None:
    """Without a plan nothing is added, removed or reordered."""
    words = ("-u", "train.py", "--lr", "1")

    assert words == training(DECISION, OPTIONS, script(*words), folder=nowhere).arguments


def test_arguments_are_exchanged() -> None:
    """Only words after the script's name change; torchrun's own words before it stay."""
    planned = replace(DECISION, script_arguments=("--lr", "1", "--micro-batch-size", "2"), environment={"A": "1"})

    given = script("-u", "train.py", "--local-rank=${local_rank}", "--lr", "1")
    command = training(planned, OPTIONS, given, folder=nowhere)

    assert ("-u", "train.py", "--local-rank=${local_rank}", "--lr", "1", "--micro-batch-size", "2") == command.arguments
    assert {"A": "1"} == command.environment


def test_patches_go_before_the_script() -> None:
    """The wrapper runs the script, or the module, with the same words."""
    patched = replace(DECISION, patches=("cpu_backend",))

    command = training(patched, OPTIONS, script("-u", "-m", "train.py", "--lr", "1"), folder=nowhere)

    assert "-u -m pipette_patches.run --patch cpu_backend -- -m train.py --lr 1" == " ".join(command.arguments)


def test_a_schedule_goes_with_the_script_as_a_file(tmp_path: Path) -> None:
    """The patch that executes it comes last, and a variable names the file."""
    order = ScheduleFile.of(schedule_of(Layout(pp=2), 2))
    made = plan(Layout(pp=2), hosts=("a",))
    scheduled = replace(
        DECISION, plan=replace(made, chosen=replace(made.chosen, order=order)), patches=("cpu_backend",)
    )

    command = training(scheduled, OPTIONS, script("-u", "train.py", "--lr", "1"), folder=lambda: tmp_path)

    assert "--patch cpu_backend --patch schedules --" in " ".join(command.arguments)
    assert order == files.read(Path(command.environment["PIPETTE_SCHEDULE"]), ScheduleFile)
