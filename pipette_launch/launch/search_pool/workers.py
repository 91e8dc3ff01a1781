"""The processes of one node that help with a search."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

from pipette_launch.errors import FileFormatError
from pipette_launch.facts import files
from pipette_launch.launch.search_pool.crew import THIS_NODE, deal
from pipette_launch.launch.search_pool.messages import Batch, Done, as_line

logger = logging.getLogger(__name__)


class Hands:
    """A helper (see `agent.controller.Helper`) that deals its batches to processes of this machine.

    None of its calls waits: every process has a thread that talks to it, so that no process that hangs holds up the
    agent, which must hear signals.
    """

    name = THIS_NODE

    def __init__(self, order_file: Path, count: int) -> None:
        self._hands = [_Hand(order_file) for _ in range(count)]
        self._given: list[tuple[_Hand, range]] = []
        self._found: dict[int, Done] = {}
        self._num_tasks = 0

    def size(self) -> int:
        """How many processes are ready to work."""
        return sum(hand.is_ready for hand in self._hands)

    def give(self, batch: str) -> None:
        """Take a batch; the last one must have been answered."""
        order = files.loads(Batch, batch, "a batch of tasks")
        ready = [hand for hand in self._hands if hand.is_ready]
        self._num_tasks = len(order.tasks)
        self._found = {}
        self._given = [
            (hand, part) for hand, part in zip(ready, deal(self._num_tasks, len(ready)), strict=True) if part
        ]
        for hand, part in self._given:
            hand.give(Batch(left_s=order.left_s, tasks=tuple(order.tasks[index] for index in part)))

    def answer(self) -> str | None:
        """What came of the batch, once all processes have answered or ended; None before."""
        for index, (hand, part) in enumerate(self._given):
            if index not in self._found and (done := hand.answer()) is not None:
                self._found[index] = done if len(done.tried) == len(part) else Done(tried=(), trouble=done.trouble)
        if len(self._found) < len(self._given):
            return None
        tried = {
            task: words
            for index, (_, part) in enumerate(self._given)
            for task, words in zip(part, self._found[index].tried, strict=False)
        }
        troubles = [done.trouble for done in self._found.values() if done.trouble]
        troubles += [] if self._given else ["no helping process is left"]
        return files.dumps(
            Done(tried=tuple(tried.get(task) for task in range(self._num_tasks)), trouble="; ".join(troubles))
        )

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for hand in self._hands:
            hand.close()


class _Hand:
    """One process, and the thread that talks to it."""

    def __init__(self, order_file: Path) -> None:
        self.is_ready = self._is_closing = False
        self._inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pipette_launch.launch.search_pool.worker", str(order_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What goes wrong comes in its last line.
            stderr=subprocess.DEVNULL,
            text=True,
            # One process is one rank's share: more threads would only be in each other's way.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            # A Ctrl-C is the agent's business, which ends its helpers itself.
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._talk, name="pipette-hand", daemon=True)
        self._thread.start()

    def give(self, batch: Batch) -> None:
        """Let the process do a batch."""
        self._inbox.put(as_line(batch))

    def answer(self) -> Done | None:
        """What came of it, or of the process; None while it works."""
        try:
            return self._outbox.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the process."""
        self.is_ready, self._is_closing = False, True
        self._process.kill()
        self._inbox.put("")
        self._process.wait()
        self._thread.join()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()

    def _talk(self) -> None:
        self.is_ready = self._hear().trouble == ""
        while self.is_ready:
            line = self._inbox.get()
            if not line:
                return
            done = self._ask(line)
            self.is_ready = self.is_ready and not done.trouble
            self._outbox.put(done)

    def _ask(self, line: str) -> Done:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            return Done(tried=(), trouble=f"a helping process is gone ({error.strerror})")
        return self._hear()

    def _hear(self) -> Done:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            return files.loads(Done, line, "a helping process")
        except FileFormatError as error:
            why = str(error) if line else f"a helping process ended with exit code {self._process.wait()}"
            if not self._is_closing:
                logger.warning("%s", why)
            return Done(tried=(), trouble=why)


def processes_of(num_slots: int) -> int:
    """How many processes a node lends to a search: one for each of its ranks, as far as its cores go."""
    return max(1, min(num_slots, len(os.sched_getaffinity(0))))
