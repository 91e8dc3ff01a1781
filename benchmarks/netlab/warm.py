"""A Python that starts warm: processes are forked from an interpreter that has imported torch and megatron-core.

A training of seconds costs several times that in imports, in every launcher and worker. An executable that stands for
Python hands its command line, variables, files and signals to a server (warm_server), which forks; the fork moves to
the client's host (warm_fork). If a fork cannot imitate a start, a real interpreter runs it (`cold_starts` lists these).

Not as with a real interpreter: the process that a parent sees is not the one that computes (SIGSTOP stops only the
former, whose processor time is nought), hash seeds are the same in all forks, and `getppid` names the server. A signal
to a client that leads a process group goes to the whole group of its fork; at its end a fork runs what waits for that,
but does not take its modules apart.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import final

from benchmarks.netlab import warm_client
from benchmarks.netlab.compare import environment
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.system import LabError

HERE = Path(__file__).parent
FAMILIES = 2
MAX_FIRST_LINE = 255
"""Longest first line of a script in which the kernel finds the interpreter."""
CLIENT = """#!{python} -IS
import sys
sys.path.insert(0, {here!r})
import warm_client
del sys.path[0]
warm_client.main({settings!r})
"""


@final
class WarmPython:
    """An executable to use in place of `sys.executable`, also on the hosts of laboratories, while the block runs.

    Processes that it has started end with the block. One serves all hosts, and any number of laboratories.

    Args:
        lab: in whose folder it lives, if not in one of its own.
        megatron_lm: a checkout of Megatron-LM, whose scripts are to start warm instead of those on the installed
            megatron-core.

    Raises:
        LabError: the imports failed; the text contains the end of their output.

    """

    def __init__(self, lab: Lab | None = None, *, megatron_lm: Path | None = None) -> None:
        self._lab = lab
        self._megatron_lm = megatron_lm
        self._stack = ExitStack()
        self._folder = Path()
        self.path = ""
        """Path of the executable during the block."""

    def __enter__(self) -> str:
        with ExitStack() as stack:
            self._folder = Path(tempfile.mkdtemp(prefix="warm-", dir=self._lab.folder if self._lab else None))
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            families = self._serve(stack)
            self._stack = stack.pop_all()
        executable = self._folder / "python"
        executable.write_text(self._text(families))
        executable.chmod(0o755)
        self.path = str(executable)
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def cold_starts(self) -> tuple[str, ...]:
        """Command lines that a real interpreter had to run, each after its reason."""
        log = self._folder / "cold"
        return tuple(log.read_text().splitlines()) if log.exists() else ()

    def _serve(self, stack: ExitStack) -> Mapping[str, object]:
        """Start the server and wait until both families serve."""
        log = stack.enter_context((self._folder / "server.log").open("w+"))
        variables, modules = {**os.environ, **environment()}, []
        if self._megatron_lm is not None:
            variables["PYTHONPATH"] = f"{self._megatron_lm}:{variables['PYTHONPATH']}"
            modules = ["megatron.training"]
        # It ends with its standard input, that is, with this process, however that ends; the kernel ends its forks.
        server = stack.enter_context(
            subprocess.Popen(
                [sys.executable, HERE / "warm_server.py", self._folder, *modules],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        )
        stack.callback(server.kill)
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(FAMILIES)]
        if not all(lines):
            log.seek(0)
            raise LabError("the warm Python did not start: " + "".join(log.readlines()[-30:]))
        served = [json.loads(line) for line in lines]
        return {one["family"]: one for one in served}

    def _text(self, families: Mapping[str, object]) -> str:
        settings = {
            "python": sys.executable,
            "families": families,
            "early": warm_client.early({**os.environ, **environment()}),
            "log": str(self._folder / "cold"),
        }
        text = CLIENT.format(python=sys.executable, here=str(HERE), settings=settings)
        if text.index("\n") > MAX_FIRST_LINE:
            raise LabError(f"{sys.executable}: the path is too long for the first line of a script")
        return text
