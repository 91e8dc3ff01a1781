"""A worker for the tests: runs whole stages with megatron-core and prints their memory as one line of JSON."""

import json
import sys
import time
import warnings
from functools import partial
from typing import Any

import torch.distributed as dist
from oracle.one_rank import program_from_flags
from patches.stage_cases import CASES, SHARDED, TIMED, job_of

from pipette_launch.facts import Layout
from pipette_patches.whole_stage import run_stage
from pipette_patches.workload import WorkloadError, load


class ThreadTime:
    """A stopwatch of this thread's processor time."""

    mark = staticmethod(time.thread_time)

    def seconds(self, before: float, after: float) -> float:
        """Return the difference."""
        return after - before

    def check_speed(self) -> None:
        """Take every speed as equal."""


def refusal() -> str:
    """The message of a stage that cannot be."""
    layout = Layout(tp=3)
    try:
        run_stage(job_of({}, layout), layout, 0, device_kind="cpu", program=program_from_flags)
    except WorkloadError as error:
        return str(error)
    return "not refused"


def main() -> None:
    """Run every case."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    original = P2PCommunicator._communicate
    found: dict[str, Any] = {}
    for name, case in (CASES | SHARDED).items():
        job, watch = job_of(case.changes, case.layout, case.flags), ThreadTime() if name in TIMED else None
        began_s = time.thread_time()
        program = partial(program_from_flags, pp_rank=case.pp_rank)
        run = run_stage(job, case.layout, case.pp_rank, device_kind="cpu", program=program, stopwatch=watch)
        found[name] = {"peak": run.tally_bytes, "parts": run.parts, "times": run.times}
        found[name]["whole_s"] = time.thread_time() - began_s
    found["refusal"] = refusal()
    found["group left"] = dist.is_initialized()
    found["original back"] = P2PCommunicator._communicate is original
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    load("cpu")
    main()
