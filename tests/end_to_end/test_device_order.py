"""A device order that a plan keeps is checked by the job's own agents before training."""

from pathlib import Path

import pytest
from end_to_end.jobs import ECHO, MODEL, ROOT, plan, plan_file, warm_pipette

from pipette_launch.facts import Layout

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
STAND_IN = """
import os, runpy, sys
if "pipette_launch" in sys.orig_argv:
    # Slots of a CPU count as GPUs.
    from dataclasses import replace
    from pipette_launch.launch import coordinator
    needs_check = coordinator.needs_check
    coordinator.needs_check = lambda plan, choice: needs_check(replace(plan, device_kind="cuda"), choice)
if "pipette_launch.probe.order_check" in sys.orig_argv and os.environ.get("WRONG") == os.environ["RANK"]:
    sys.stderr.write("all_gather of 8 MiB returned 16 instead of 0 at element 0\\n")
    os._exit(1)
if "pipette_patches.run" in sys.orig_argv:
    sys.argv = sys.orig_argv[sys.orig_argv.index("--") + 1 :]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("wrong", "visible", "words"),
    [
        ("", "1,0", "NCCL was checked with the device order 1,0: all-gather and reduce-scatter"),
        ("1", "", "devices stay in order inside hosts: with the device order 1,0 all_gather of 8 MiB returned 16"),
    ],
)
def test_an_order_is_checked_before_training(tmp_path: Path, wrong: str, visible: str, words: str) -> None:
    """The script starts once, with the order if all values came back in place, else with devices in order."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    path = plan_file(tmp_path, plan(Layout(pp=2), (1, 0)))
    flags = ("--nproc-per-node", "2", "--pipette-plan", path)
    words_of_job = (*flags, ECHO, *MODEL, "--train-iters", "1")
    done = warm_pipette(tmp_path, *words_of_job, PYTHONPATH=f"{tmp_path}:{ROOT}:{ROOT / 'patches'}", WRONG=wrong)

    assert 0 == done.code, done.err
    # The screen of the plan breaks lines.
    assert words in " ".join(done.err.split())
    assert "checking NCCL with the device order 1,0" in done.err
    assert [visible] * 2 == [worker["CUDA_VISIBLE_DEVICES"] for worker in done.workers.values()]
