"""The launcher ends with its own exit code while torch's stores are called."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]
# A call that returns while Python ends, which the last object of the module draws out.
SCRIPT = """
import contextlib, datetime, sys, time
from torch.distributed import HashStore
from pipette_launch.agent.leaving import end_at_once
from pipette_launch.agent.sync.store import within

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)

slow = Slow()
with contextlib.suppress(TimeoutError):
    within(0.1, lambda: HashStore().wait(["nothing"], datetime.timedelta(seconds=1)))
try:
    print("the end")
    {last}
finally:
    end_at_once()
"""


@pytest.mark.parametrize(
    ("last", "code", "told"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("raise KeyError('what')", 1, "KeyError: 'what'\n"),
    ],
)
def test_a_call_that_returns_late_aborts_nothing(last: str, code: int, told: str) -> None:
    """Exit code and last words are those that the process would have had."""
    command = [sys.executable, "-c", SCRIPT.format(last=last)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)

    assert (code, "the end\n") == (done.returncode, done.stdout)
    assert done.stderr.endswith(told)
