"""What the workers print, passed on untouched and read along the way, so that the launcher sees the first iteration."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import select
import selectors
import struct
import termios
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_BYTES = 1 << 16
FOLLOW_S = 0.2
HOLD_S = 0.15
"""How long the console waits for the end of a line; a prompt or a progress bar has none."""
TAIL_LINES = 60
MOST_LINE_BYTES = 8192
"""Of a line that is read along the way; the console gets the whole of it."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class _Source:
    """A stream of one worker, and who hears its lines."""

    hear: Callable[[str], None]
    copy_to: int | None = None
    unfinished: bytes = b""
    held: bytes = b""
    """The begun line that the console has not got yet."""
    held_until_s: float = math.inf


@dataclass(kw_only=True, slots=True)
class _File(_Source):
    """A stream that goes to a file; torch makes the file when the worker starts."""

    path: Path
    opened: IO[bytes] | None = None


class Streams:
    """Reads the workers' streams in a thread of its own, one line at a time.

    A stream that would go to the console goes through a pipe and is copied to the console, nothing added or left out.
    It is copied in whole lines, so that two workers' lines do not mix; a line without an end is copied after `HOLD_S`.
    A stream that the user had redirected to a file is followed in that file.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()
        self._writers: dict[int, int] = {}
        self._files: list[_File] = []
        self._tails: dict[int, deque[str]] = {}
        self._bell, self._ring = os.pipe()
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._loop, name="pipette-streams", daemon=True)
        self._is_open = True

    def lines_pipe(self, *, copy_to: int | None) -> str:
        """Return the path of a pipe whose lines `on_line` hears; `copy_to` is a file descriptor for every byte."""
        return self._pipe(_Source(hear=self._on_line, copy_to=copy_to))

    def tail_pipe(self, local_rank: int, *, copy_to: int | None) -> str:
        """Return the path of a pipe whose last lines are kept as that worker's."""
        return self._pipe(_Source(hear=self._keep(local_rank), copy_to=copy_to))

    def lines_file(self, path: str) -> None:
        """Let `on_line` hear what is written to a file."""
        self._files.append(_File(path=Path(path), hear=self._on_line))

    def tail_file(self, local_rank: int, path: str) -> None:
        """Keep the last lines of a file as that worker's."""
        self._files.append(_File(path=Path(path), hear=self._keep(local_rank)))

    def start(self) -> None:
        """Begin to read; call it before the workers start."""
        self._thread.start()

    def tail(self, local_rank: int) -> tuple[str, ...]:
        """Return the last lines that a worker wrote to stderr."""
        return tuple(self._tails.get(local_rank, ()))

    def close(self, *, patience_s: float | None = None) -> None:
        """Read what is there, then stop and leave nothing behind.

        What a child of a worker writes from now on is lost. A console that takes no more (a pager that waits) is waited
        for, as a worker would under torchrun.

        Args:
            patience_s: how long to wait for the console; None waits until it has taken all.

        """
        if not self._is_open:
            return
        if self._thread.is_alive():
            os.write(self._ring, b"!")
            self._thread.join(patience_s)
            if self._thread.is_alive():
                return
        self._is_open = False
        for key in list(self._selector.get_map().values()):
            self._hang_up(key.fd)
        os.close(self._ring)
        self._selector.close()
        for file in self._files:
            if file.opened:
                file.opened.close()

    def _keep(self, local_rank: int) -> Callable[[str], None]:
        return self._tails.setdefault(local_rank, deque(maxlen=TAIL_LINES)).append

    def _pipe(self, source: _Source) -> str:
        """Open a pipe; both ends stay open here, so that it never reports its end while no worker has it open."""
        reader, writer = os.pipe()
        self._writers[reader] = writer
        self._selector.register(reader, selectors.EVENT_READ, source)
        return f"/proc/self/fd/{writer}"

    def _hang_up(self, reader: int) -> None:
        self._selector.unregister(reader)
        os.close(reader)
        if reader in self._writers:
            os.close(self._writers.pop(reader))

    def _loop(self) -> None:
        is_over = behind = False
        while not is_over:
            # Pipes ring; files must be looked at.
            ready = self._selector.select(self._wait_s((0.0 if behind else FOLLOW_S) if self._files else math.inf))
            is_over = any(key.fd == self._bell for key, _ in ready)
            for key, _ in ready:
                if key.fd != self._bell and not is_over:
                    self._read_pipe(key.fd, key.data, CHUNK_BYTES)
            self._copy_begun_lines(time.monotonic())
            behind = max((self._read_file(file, CHUNK_BYTES) for file in self._files), default=0) == CHUNK_BYTES
        self._drain()

    def _wait_s(self, longest_s: float) -> float | None:
        """How long to wait for the pipes: until the first held line is due; None = until one of them rings."""
        keys = self._selector.get_map().values()
        due_s = min((key.data.held_until_s for key in keys if key.data), default=math.inf)
        wait_s = min(longest_s, due_s - time.monotonic())
        return None if wait_s == math.inf else max(wait_s, 0.0)

    def _drain(self) -> None:
        """Read what was written up to now; a child that outlives its worker may write for ever."""
        for key in list(self._selector.get_map().values()):
            left = _readable_bytes(key.fd) if key.fd != self._bell else 0
            while left > 0 and key.fd in self._writers:
                left -= self._read_pipe(key.fd, key.data, min(left, CHUNK_BYTES))
        self._copy_begun_lines(math.inf)
        for file in self._files:
            left = file.path.stat().st_size if file.path.exists() else 0
            while left > 0 and (read := self._read_file(file, CHUNK_BYTES)):
                left -= read
        for source in [*self._files, *(key.data for key in self._selector.get_map().values() if key.data)]:
            if source.unfinished:
                self._take(source, b"\n")

    def _read_pipe(self, reader: int, source: _Source, size: int) -> int:
        data = os.read(reader, size)
        if source.copy_to is not None:
            whole, newline, begun = (source.held + data).rpartition(b"\n")
            if newline or not source.held:
                source.held_until_s = time.monotonic() + HOLD_S if begun else math.inf
            if len(begun) >= CHUNK_BYTES:
                source.held_until_s = 0.0
            source.held = begun
            self._copy(reader, source.copy_to, whole + newline)
        self._take(source, data)
        return len(data)

    def _copy_begun_lines(self, now_s: float) -> None:
        """Copy what has waited long enough for the end of its line."""
        for key in list(self._selector.get_map().values()):
            source = key.data
            if source and source.held and source.held_until_s <= now_s:
                begun, source.held, source.held_until_s = source.held, b"", math.inf
                self._copy(key.fd, source.copy_to, begun)

    def _copy(self, reader: int, console: int, data: bytes) -> None:
        try:
            _write_all(console, data)
        except BrokenPipeError:
            # As under torchrun, a worker learns by its next word that nobody listens (`| head`).
            self._hang_up(reader)
        except OSError as error:
            logger.debug("the console takes no more: %s", error)

    def _read_file(self, file: _File, size: int) -> int:
        try:
            file.opened = file.opened or file.path.open("rb")
            data = file.opened.read(size)
        except OSError:
            return 0
        self._take(file, data)
        return len(data)

    def _take(self, source: _Source, data: bytes) -> None:
        *complete, rest = (source.unfinished + data).split(b"\n")
        source.unfinished = rest[-CHUNK_BYTES:]
        try:
            for line in complete:
                source.hear(line[:MOST_LINE_BYTES].decode(errors="replace"))
        except Exception:
            # Reading goes on whatever happens: a full pipe would stop the worker.
            logger.exception("could not make sense of what a worker printed")


def _readable_bytes(reader: int) -> int:
    size: int = struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, b"\0" * 4))[0]
    return size


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        with contextlib.suppress(BlockingIOError):
            view = view[os.write(descriptor, view) :]
        if view:
            select.select([], [descriptor], [])


if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipette_launch.agent.streams import Streams

CONSOLE = ""
"""torch's own sign for a stream that is not redirected."""


class WatchedLogs(LogsSpecs):
    """Lets the user's settings choose the destinations, then leads what goes to the console through pipes."""

    def __init__(self, inner: LogsSpecs, streams: Streams | None, attempt: int) -> None:
        self._inner = inner
        self._streams = streams
        self._attempt = attempt

    @property
    def root_log_dir(self) -> str:
        """Where the user wants logs."""
        return self._inner.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose where each worker writes.

        The folder of an attempt is named by our own count: torchrun's stands still while plans are tried one after
        the other, and the next attempt would delete the logs of the last.
        """
        counted = {rank: {**env, "TORCHELASTIC_RESTART_COUNT": str(self._attempt)} for rank, env in envs.items()}
        destinations = self._inner.reify(counted)
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = counted[rank].get("TORCHELASTIC_ERROR_FILE", "")
        if self._streams is not None:
            self._watch(self._streams, destinations, _last_rank(envs))
        return destinations

    def _watch(self, streams: Streams, destinations: LogsDest, talker: int | None) -> None:
        if talker is not None:
            path = destinations.stdouts[talker]
            if path in (CONSOLE, os.devnull):
                destinations.stdouts[talker] = streams.lines_pipe(copy_to=1 if path == CONSOLE else None)
            else:
                streams.lines_file(path)
        for rank, path in destinations.stderrs.items():
            if path in (CONSOLE, os.devnull):
                destinations.stderrs[rank] = streams.tail_pipe(rank, copy_to=2 if path == CONSOLE else None)
            else:
                streams.tail_file(rank, path)


def _last_rank(envs: Mapping[int, Mapping[str, str]]) -> int | None:
    """Local rank of the worker that prints Megatron's iteration line: RANK = WORLD_SIZE - 1."""
    for local_rank, env in envs.items():
        if int(env["RANK"]) == int(env["WORLD_SIZE"]) - 1:
            return local_rank
    return None
