"""A warm Python does what Python does, sooner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm as warm_jobs
from labs import needs_lab

from benchmarks.netlab import Lab, topology
from benchmarks.netlab.compare import TORCHRUN, environment, launched, train
from benchmarks.netlab.warm import WarmPython

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]
needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="netlab: a warm Python needs Linux")
ROOT = Path(__file__).parent.parent.parent
WHAT = """
import os, sys
print(sys.argv, __name__, __spec__ and __spec__.name, sys.path[0], sys.executable == sys.orig_argv[0], os.getcwd())
print(os.environ.get("HELLO"), os.environ.get("SITE"), sorted(vars()))
print([type(stream.buffer).__name__ for stream in (sys.stdin, sys.stdout, sys.stderr)])
print(sys.path[1:], sys.stdout.encoding, sys.stdout.line_buffering, sys.stderr.line_buffering, os.umask(0))
print(os.getsid(0) == os.getpid(), sys.stdin.read(), end="")
sys.exit(len(sys.argv))
"""
SCRIPT = [
    "examples/pretrain_gpt.py", "--num-layers=2", "--hidden-size=64", "--num-attention-heads=4", "--seq-length=64",
    "--max-position-embeddings=64", "--micro-batch-size=1", "--global-batch-size=4", "--train-iters=8", "--lr=0.001",
    "--transformer-impl=local", "--no-persist-layer-norm", "--distributed-backend=gloo", "--log-interval=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def warm() -> WarmPython:
    """The one that all tests share."""
    return warm_jobs.python()


def variables(**more: str) -> dict[str, str]:
    """What a training's processes have."""
    before = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**before, **environment(), **more}


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
@pytest.mark.parametrize("kind", ["code", "script", "module"])
def test_a_program_finds_what_it_would_find(warm: WarmPython, tmp_path: Path, kind: str, unbuffered: list[str]) -> None:
    """Words, path, folder, variables, streams, a sitecustomize and the exit code are as under a real interpreter."""
    (tmp_path / "what.py").write_text(WHAT)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os, sys; os.environ['SITE'] = str(sys.orig_argv[1:])")
    program = {"code": ["-c", WHAT], "script": ["what.py"], "module": ["-m", "what"]}[kind]

    def told(python: str) -> tuple[int, str, str]:
        """What a program says of itself."""
        words = [python, *unbuffered, *program, "a", "-b"]
        env = variables(HELLO="you", PYTHONPATH=f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}")
        done = subprocess.run(
            words, cwd=tmp_path, env=env, input="bye", capture_output=True, text=True, check=False,
            start_new_session=True,
        )  # fmt: skip
        return done.returncode, done.stdout.replace(python, "PYTHON"), done.stderr

    before = warm.cold_starts()
    real, forked = told(sys.executable), told(warm.path)

    assert 3 == real[0]
    assert real == forked
    assert before == warm.cold_starts()


def both(warm: WarmPython, *words: str, cwd: Path | None = None) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of a command line under a real interpreter and under a warm one."""
    return [
        (done.returncode, done.stdout, done.stderr)
        for python in (sys.executable, warm.path)
        for done in [
            subprocess.run([python, *words], env=variables(), capture_output=True, text=True, check=False, cwd=cwd)
        ]
    ]


def test_buffers_are_written_at_the_end(warm: WarmPython, tmp_path: Path) -> None:
    """A program that freezes its objects, as pipette-launch does, loses no text of a stream or of an open file."""
    program = "import gc, sys; file = open(sys.argv[1], 'w'); gc.freeze(); print('to a pipe'); file.write('to a file')"

    found = both(warm, "-c", program, str(tmp_path / "written"))

    assert [(0, "to a pipe\n", "")] * 2 == found
    assert "to a file" == (tmp_path / "written").read_text()


def test_an_error_is_shown_as_python_shows_it(warm: WarmPython, tmp_path: Path) -> None:
    """The traceback begins in the program, words given to exit are printed, and so on."""
    (tmp_path / "fails.py").write_text("def fail():\n    1 / 0\nfail()\n")

    for words in (["fails.py"], ["-c", "raise SystemExit('so it ends')"], ["-c", "import os; os.abort()"]):
        real, forked = both(warm, *words, cwd=tmp_path)
        assert 0 != real[0]
        assert real == forked


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGSEGV])
@pytest.mark.parametrize("catches", [False, True])
def test_a_signal_reaches_the_program(warm: WarmPython, number: signal.Signals, catches: bool) -> None:
    """It ends by it, or as its handler says, and the parent sees just that."""
    catch = f"signal.signal({int(number)}, lambda *_: sys.exit(7)); " if catches else ""
    words = ["-c", f"import signal, sys, time; {catch}print('ready', flush=True); time.sleep(60)"]
    codes = []
    for python in (sys.executable, warm.path):
        with subprocess.Popen(
            [python, *words], env=variables(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            assert "ready\n" == process.stdout.readline()
            process.send_signal(number)
            codes.append(process.wait(timeout=30))

    assert [7 if catches else -number] * 2 == codes


def test_what_waits_for_the_end_runs(warm: WarmPython, tmp_path: Path) -> None:
    """Threads are waited for, exit functions run, files that were left open are written out."""
    code = (
        "import atexit, threading, time; left = open('left', 'w'); left.write('words'); "
        "atexit.register(print, 'last'); threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"
    )

    real, forked = both(warm, "-c", code, cwd=tmp_path)

    assert (0, "thread\nlast\n", "") == real == forked
    assert "words" == (tmp_path / "left").read_text()


def begun(python: str, code: str = "pass") -> tuple[subprocess.Popen[str], int]:
    """A program that sleeps, and the process that it really is."""
    words = [python, "-c", f"import os, time; print(os.getpid(), flush=True); {code}; time.sleep(600)"]
    process = subprocess.Popen(words, env=variables(), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def ended(process: subprocess.Popen[str]) -> int:
    """How it ended, soon."""
    with process:
        return process.wait(timeout=30)


def is_gone(pid: int) -> bool:
    """Whether a process ends soon."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_whoever_dies_takes_the_other_along(warm: WarmPython) -> None:
    """SIGKILL to the client, to its group, or to the fork ends both, and nobody else."""
    spared, _ = begun(warm.path)
    for kill in ("client", "group", "fork"):
        client, fork = begun(warm.path)
        assert client.pid != fork
        if kill == "group":
            os.killpg(client.pid, signal.SIGKILL)
        else:
            os.kill(client.pid if kill == "client" else fork, signal.SIGKILL)
        assert -signal.SIGKILL == ended(client)
        assert is_gone(fork)
    assert spared.poll() is None
    spared.kill()
    ended(spared)


def test_a_worker_tethered_to_its_agent_dies_with_it(warm: WarmPython) -> None:
    """The wish to die with one's parent is for the client's parent, not for the server."""
    inner = (
        "from pipette_launch.probe.lockstep import end_with_parent; import os, time; "
        "end_with_parent(); print(os.getpid(), flush=True); time.sleep(600)"
    )
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)"
    agent, _ = begun(warm.path, outer)
    assert agent.stdout is not None
    worker = int(agent.stdout.readline())

    time.sleep(0.5)
    agent.kill()

    assert is_gone(worker)
    ended(agent)


def test_all_end_with_the_block() -> None:
    """No process of a warm Python outlives it."""
    with WarmPython() as python:
        client, fork = begun(python)
        folder = Path(python).parent

    assert is_gone(fork)
    assert -signal.SIGKILL == ended(client)
    assert not folder.exists()


def test_random_numbers_are_not_those_of_the_server(warm: WarmPython) -> None:
    """Two processes draw different numbers, torch's among them."""
    words = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    first, second = (both(warm, "-c", words) for _ in range(2))

    drawn = [line.split() for _, line, _ in (*first, *second)]
    assert [4, 4, 4] == [len(set(column)) for column in zip(*drawn, strict=True)]


def test_open_files_are_handed_over(warm: WarmPython) -> None:
    """A pipe beyond the standard streams has the same number there, and ends when the program closes it."""
    reader, writer = os.pipe()
    words = [warm.path, "-c", f"import os, time; os.write({writer}, b'hello'); os.close({writer}); time.sleep(600)"]
    with subprocess.Popen(words, env=variables(), pass_fds=[writer]) as process, os.fdopen(reader, "rb") as pipe:
        os.close(writer)
        assert b"hello" == pipe.read()
        assert process.poll() is None
        process.kill()


def test_what_no_fork_can_imitate_runs_cold(warm: WarmPython, tmp_path: Path) -> None:
    """Unknown options, other threads and another megatron-core are a real interpreter's business, and are told."""
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "script.py").write_text("import sys; print('torch' in sys.modules, sys.executable)")
    patched = ["-m", "pipette_patches.run", "--patch", "cpu_backend", "--", "script.py"]
    script = ["script.py"]
    runs = [(["-X", "utf8", *script], {}), (script, {"OMP_NUM_THREADS": "2"}), (patched, {}), (script, {})]
    before = len(warm.cold_starts())
    told = [
        subprocess.run(
            [warm.path, *words], cwd=tmp_path, env=variables(**more), capture_output=True, text=True, check=True
        ).stdout.strip()
        for words, more in runs
    ]
    cold = warm.cold_starts()[before:]

    assert [f"False {sys.executable}", f"False {sys.executable}"] == told[:2]
    assert told[2].endswith(sys.executable)
    assert f"True {warm.path}" == told[3]
    assert [
        "a command line that only Python understands",
        "another OMP_NUM_THREADS",
        f"megatron.core in {tmp_path}",
    ] == [line.partition(":")[0].replace(" comes first", "") for line in cold]


def test_megatron_is_there_before_the_program_is(warm: WarmPython, tmp_path: Path) -> None:
    """Under the patch a program finds megatron-core imported and patched; without it, it finds torch alone."""
    (tmp_path / "look.py").write_text(
        "import sys, torch; from pipette_patches import registry\n"
        "print('megatron.core.optimizer' in sys.modules, registry.applied(), torch.cuda.current_device.__module__)"
    )
    patched = ["-m", "pipette_patches.run", "--patch", "cpu_backend", "--", "look.py"]
    (_, real, _), (_, forked, _) = both(warm, *patched, cwd=tmp_path)
    _, (_, plain, _) = both(warm, "look.py", cwd=tmp_path)

    assert real.startswith("False ('cpu_backend',)")
    assert real.replace("False", "True", 1) == forked
    assert plain.startswith("False ()")


@needs_lab
def test_a_training_prints_the_same_losses_sooner(warm: WarmPython) -> None:
    """Loss by loss the same digits, under torchrun and under pipette-launch, and less time around the steps."""
    with Lab(topology.uniform(2, rate_mbit=500)) as lab:
        before = len(warm.cold_starts())
        words = [*TORCHRUN, *SCRIPT]
        real = train(lab, words, python=sys.executable)
        forked, again = (train(lab, words, python=warm.path) for _ in range(2))
        ours = train(lab, [*launched(lab.folder / "plans", 10.0), *SCRIPT], python=warm.path)
        assert () == warm.cold_starts()[before:]
    for name, one in (("real", real), ("warm", forked), ("pipette-launch", ours)):
        print(f"{name:15} step {one.steady_s(3) * 1e3:.1f} ms, whole {one.wall_s:.1f} s")

    assert 8 == len(real.losses)
    assert real.losses == forked.losses == again.losses
    assert 8 == len(ours.losses)
    assert forked.wall_s < real.wall_s / 2
