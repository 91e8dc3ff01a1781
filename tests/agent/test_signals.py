"""SIGUSR1 and SIGUSR2 to a launcher: for its workers, and never its own end by default."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from end_to_end import jobs
from torch.distributed.elastic.multiprocessing.api import SignalException

from pipette_launch.agent.signals import ORPHANS_END, PASSED_ON, Termination, passed_on, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]
# A call that returns while Python ends, which the last object of the module draws out.
SCRIPT = """
import contextlib, datetime, sys, time
from torch.distributed import HashStore
from pipette_launch.agent.signals import end_at_once
from pipette_launch.agent.store import within

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


# Two workers write to one pipe, unbuffered: a line that is one write stays whole.
SAVES = """
import os, signal, subprocess, sys, time
def save(number, frame):
    os.write(1, f"saved on {signal.Signals(number).name}\\n".encode())
    helper.kill()
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
signal.signal(signal.SIGUSR2, save)
helper = subprocess.Popen(["sleep", "60"])
os.write(1, b"up\\n")
while helper.poll() is None:
    time.sleep(0.05)
sys.exit("the helper got the signal, too")
"""


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_workers_save_and_the_launcher_ends_well(tmp_path: Path) -> None:
    """A signal to the launcher alone reaches each worker, not what it started; all exit with 0, and so does the job."""
    script = tmp_path / "saves_in_this_test.py"
    script.write_text(SAVES)
    launcher = jobs.start(tmp_path, ["--nproc-per-node=2", "--pipette-cache=off", script])
    assert launcher.stdout is not None
    assert ["up\n", "up\n"] == [launcher.stdout.readline() for _ in range(2)]

    launcher.send_signal(signal.SIGUSR2)
    done = jobs.finish(launcher, 40)

    assert (0, "saved on SIGUSR2\n" * 2) == (done.code, done.out), done.err
    assert "pipette-launch: SIGUSR2 goes on to the workers\n" in done.err
    assert [] == jobs.left_behind("saves_in_this_test.py")


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_before_the_training_it_ends_the_launcher(tmp_path: Path) -> None:
    """Where there are no workers yet (here it waits for another node), the launcher dies of the signal, with a word."""
    port = jobs.free_port()
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=is_host=1"]
    launcher = jobs.start(tmp_path, [*meeting, "--pipette-cache=off", jobs.ECHO])
    while not any(str(port) in line for line in listening()):
        assert launcher.poll() is None, launcher.communicate()

    launcher.send_signal(signal.SIGUSR2)
    done = jobs.finish(launcher, 40)

    assert -signal.SIGUSR2 == done.code
    assert done.err.endswith("pipette-launch: SIGUSR2 ended the job before workers started\n")


def listening() -> list[str]:
    """The ports on which somebody listens, of /proc/net."""
    found = []
    for name in ("tcp", "tcp6"):
        rows = [line.split() for line in Path("/proc/net", name).read_text().splitlines()[1:]]
        found += [str(int(row[1].rsplit(":", 1)[1], 16)) for row in rows if row[3] == "0A"]
    return found


def test_the_phase_decides() -> None:
    """During the training the workers get the signal, before it torch's code does; afterwards all is as before."""
    before = [signal.getsignal(number) for number in PASSED_ON]
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    is_training = [True]
    with passed_on(lambda: is_training[0], lambda: [worker.pid]):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert -signal.SIGUSR1 == worker.wait()
        is_training[0] = False
        with pytest.raises(SignalException, match="SIGUSR2 came before the training"):
            os.kill(os.getpid(), signal.SIGUSR2)

    assert before == [signal.getsignal(number) for number in PASSED_ON]


def test_a_signal_is_remembered_if_python_drops_its_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that runs while an object is deleted can lose the exception, but the next look raises it again."""
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    termination = Termination()
    termination.check()
    monkeypatch.setattr(Deleted, "__del__", lambda _self: termination.handle(signal.SIGTERM))

    Deleted()

    assert 1 == len(lost)
    with pytest.raises(SignalException, match="got signal: 15") as raised:
        termination.check()
    assert signal.SIGTERM == raised.value.sigval


def test_a_signal_that_comes_while_workers_start_is_raised_afterwards() -> None:
    """The next look at the workers raises it; a worker that is forked meanwhile ends at once by its own signal."""
    termination = Termination()
    termination.held_by = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            termination.handle(signal.SIGTERM)
        except SignalException:
            os._exit(7)
        os._exit(0)

    termination.handle(signal.SIGTERM)
    _, status = os.waitpid(child, 0)

    assert 7 == os.waitstatus_to_exitcode(status)
    with pytest.raises(SignalException, match="got signal: 15"):
        termination.check()


class Deleted:
    """An object that does something when it is deleted."""

    def __del__(self) -> None: ...


def test_an_ignored_signal_stays_ignored() -> None:
    """A launcher that was started with a signal ignored (`trap '' USR1`) hears nothing of it."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with passed_on(lambda: False, list):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signal.SIG_IGN is signal.getsignal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_does_not_signal_its_siblings() -> None:
    """A child that has inherited the handler dies of the signal itself, as it would under torchrun."""
    asked: list[int] = []
    with passed_on(lambda: True, lambda: asked):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        _, status = os.waitpid(child, 0)

    assert signal.SIGUSR1 == os.WTERMSIG(status)


def test_orphans_end_and_the_process_that_has_the_id_of_an_ended_worker_is_spared() -> None:
    """The list of workers is up to a second old. The start of a process distinguishes it from an ended worker."""
    sleeps = ["sleep", "600"]
    worker, other = (subprocess.Popen(sleeps, start_new_session=True) for _ in range(2))
    try:
        assert started(worker.pid)
        known = f"1:2\n{worker.pid}:{started(worker.pid)} {other.pid}:{int(started(other.pid)) - 1}\n"
        subprocess.run(["/bin/sh", "-c", ORPHANS_END], input=known, text=True, timeout=20, check=True)

        assert -signal.SIGKILL == worker.wait(10)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.2)
    finally:
        for one in (worker, other):
            one.kill()
            one.wait()


def test_the_children_of_an_orphan_that_has_ended_end_too() -> None:
    """Its id stays reserved while its session has a process, so the file of the id is missing."""
    worker = subprocess.Popen(["/bin/sh", "-c", "sleep 600 & echo $!"], stdout=-1, text=True, start_new_session=True)
    known = f"{worker.pid}:{started(worker.pid)}\n"
    assert worker.stdout is not None
    child = psutil.Process(int(worker.stdout.readline()))
    worker.wait(10)
    worker.stdout.close()
    subprocess.run(["/bin/sh", "-c", ORPHANS_END], input=known, text=True, timeout=20, check=True)

    child.wait(10)
