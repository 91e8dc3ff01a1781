"""Tasks of one node: one is the agent, the others exit with its code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

import pytest

from pipette_launch.errors import ClusterError
from pipette_launch.launch.slurm import tasks

OTHER = """
import os, sys
from pipette_launch.launch.slurm.tasks import await_agent
os.sched_setaffinity(0, {int(sys.argv[2])})
sys.exit(await_agent(sys.argv[1]))
"""
AGENT = """
import os, sys, time
from pipette_launch.launch.slurm.tasks import Siblings
cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(cores)})
siblings = Siblings()
with siblings.told():
    siblings.open(sys.argv[1], 1)
    while os.sched_getaffinity(0) != cores:
        time.sleep(0.02)
    exec(sys.argv[2])
"""
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("pass", 0),
        ("sys.exit(2)", 2),
        ("raise ValueError", 1),
        # The code of a process that a signal has ended is no exit code.
        ("os.kill(os.getpid(), 9)", 1),
    ],
)
def test_the_others_exit_with_the_agents_code(end: str, expected: int) -> None:
    """However the agent ends, its sibling ends too, and the agent had its sibling's cores."""
    name, last_core = uuid.uuid4().hex, max(os.sched_getaffinity(0))
    other = subprocess.Popen([sys.executable, "-c", OTHER, name, str(last_core)])
    agent = subprocess.Popen([sys.executable, "-c", AGENT, name, end], stderr=subprocess.DEVNULL)

    assert expected == other.wait()
    assert agent.wait() in (expected, -9)


def test_a_task_without_an_agent_gives_up() -> None:
    """When task 0 never comes, the others say so and how else to start."""
    times_s = iter([0.0, 1.0, 301.0])
    before = {number: signal.getsignal(number) for number in tasks.NOT_OUR_END}
    try:
        with pytest.raises(ClusterError, match="task 0 of this node did not start in 300 s"):
            tasks.await_agent(uuid.uuid4().hex, clock=lambda: next(times_s))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
