"""Output of the workers: copied unchanged to its destination, and read for iteration lines and the last lines."""

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
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, LogsSpecs

CHUNK_BYTES = 1 << 16
HOLD_S = 0.15
"""Seconds until a line without a newline, such as a prompt or a progress bar, is copied."""
TAIL_LINES = 60
MOST_LINE_BYTES = 8192
"""Largest number of bytes of a line that the launcher parses; the console gets the whole line."""

CONSOLE = ""
"""Torch's name for the destination of a stream that is not redirected."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class _Source:
    """A stream of one worker, and the function that receives the lines of this stream."""

    hear: Callable[[str], object]
    copy_to: int | None = None
    """Descriptor of the console or file that gets every byte; None for the null device."""
    unfinished: bytes = b""
    held: bytes = b""
    """First bytes of an incomplete line, which are not copied yet."""
    held_until_s: float = math.inf
    has_failed: bool = False
    """True if bytes could not be copied, which the log reports once."""


class Streams:
    """Reads the workers' streams in a thread, line by line.

    Each stream passes through a pipe, and is copied to the console or the user's file unchanged, in whole lines, so
    that lines of two workers do not mix. A line without a newline is copied after `HOLD_S`.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()
        self._writers: dict[int, int] = {}
        self._files: list[int] = []
        """Descriptors of the files to which streams are copied."""
        self._tails: dict[int, deque[str]] = {}
        self._wakes, self._waker = os.pipe()
        self._selector.register(self._wakes, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._loop, name="pipette-streams", daemon=True)
        self._is_open = True

    def watch(self, path: str, *, console: int, local_rank: int | None = None) -> str:
        """Watch a stream, and return the path to which the worker must write.

        `path` is torch's destination of the stream: a file, the null device, or empty for the console, whose file
        descriptor is `console`. With a `local_rank` the last lines of this worker are kept; None sends all lines to
        `on_line`.
        """
        hear: Callable[[str], object] = self._on_line
        if local_rank is not None:
            hear = self._tails.setdefault(local_rank, deque(maxlen=TAIL_LINES)).append
        copy_to = None if path == os.devnull else console
        if path not in (CONSOLE, os.devnull):
            copy_to = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            self._files.append(copy_to)
        # This process keeps both ends of the pipe open, so that the pipe does not end before a worker opens it.
        reader, writer = os.pipe()
        self._writers[reader] = writer
        self._selector.register(reader, selectors.EVENT_READ, _Source(hear=hear, copy_to=copy_to))
        return f"/proc/self/fd/{writer}"

    def start(self) -> None:
        """Start the reading thread; call this method before the workers start."""
        self._thread.start()

    def tail(self, local_rank: int) -> tuple[str, ...]:
        """Return the last lines of a worker's stderr."""
        return tuple(self._tails.get(local_rank, ()))

    def close(self, *, patience_s: float | None = None) -> None:
        """Read the bytes written so far, then close all pipes; later output of a worker's child is lost.

        A console that accepts no bytes, such as a waiting pager, delays the call by at most `patience_s`.
        """
        if not self._is_open:
            return
        if self._thread.is_alive():
            os.write(self._waker, b"!")
            self._thread.join(patience_s)
            if self._thread.is_alive():
                return
        self._is_open = False
        for key in list(self._selector.get_map().values()):
            self._hang_up(key.fd)
        os.close(self._waker)
        self._selector.close()
        for file in self._files:
            os.close(file)

    def _hang_up(self, reader: int) -> None:
        self._selector.unregister(reader)
        os.close(reader)
        if reader in self._writers:
            os.close(self._writers.pop(reader))

    def _loop(self) -> None:
        is_over = False
        while not is_over:
            # Output in a pipe ends this wait at once. The time limit serves old incomplete lines.
            due_s = min((source.held_until_s for _, source in self._sources()), default=math.inf) - time.monotonic()
            ready = self._selector.select(None if due_s == math.inf else max(due_s, 0.0))
            is_over = any(key.fd == self._wakes for key, _ in ready)
            for key, _ in ready:
                if key.fd != self._wakes and not is_over:
                    self._read(key.fd, key.data, CHUNK_BYTES)
            self._copy_begun_lines(time.monotonic())
        self._drain()

    def _sources(self) -> list[tuple[int, _Source]]:
        """Return the reading ends of all open pipes, each with its stream."""
        return [(key.fd, key.data) for key in self._selector.get_map().values() if key.data]

    def _drain(self) -> None:
        """Read only the bytes written so far, because a child that outlives its worker may write for ever."""
        for reader, source in self._sources():
            (left,) = struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, b"\0" * 4))
            while left > 0 and reader in self._writers:
                left -= self._read(reader, source, min(left, CHUNK_BYTES))
        self._copy_begun_lines(math.inf)
        for _, source in self._sources():
            if source.unfinished:
                self._take(source, b"\n")

    def _read(self, reader: int, source: _Source, size: int) -> int:
        data = os.read(reader, size)
        if source.copy_to is not None:
            whole, newline, begun = (source.held + data).rpartition(b"\n")
            if newline or not source.held:
                source.held_until_s = time.monotonic() + HOLD_S if begun else math.inf
            if len(begun) >= CHUNK_BYTES:
                source.held_until_s = 0.0
            source.held = begun
            self._copy(reader, source, whole + newline)
        self._take(source, data)
        return len(data)

    def _copy_begun_lines(self, now_s: float) -> None:
        for reader, source in self._sources():
            if source.held and source.held_until_s <= now_s:
                begun, source.held, source.held_until_s = source.held, b"", math.inf
                self._copy(reader, source, begun)

    def _copy(self, reader: int, source: _Source, data: bytes) -> None:
        assert source.copy_to is not None
        view = memoryview(data)
        try:
            while view:
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(source.copy_to, view) :]
                if view:
                    select.select([], [source.copy_to], [])
        except BrokenPipeError:
            # If the console's reader is gone (`| head`), close the pipe: the next write fails as under torchrun.
            self._hang_up(reader)
        except OSError as error:
            if not source.has_failed:
                logger.warning("output of a worker is lost: %s", error)
            source.has_failed = True

    def _take(self, source: _Source, data: bytes) -> None:
        *complete, rest = (source.unfinished + data).split(b"\n")
        source.unfinished = rest[-CHUNK_BYTES:]
        try:
            for line in complete:
                source.hear(line[:MOST_LINE_BYTES].decode(errors="replace"))
        except Exception:
            # Go on reading, because a full pipe would stop the worker.
            logger.exception("could not read a line of a worker")


class WatchedLogs(LogsSpecs):
    """Log settings that keep the user's destinations, and send the streams that are read through pipes."""

    def __init__(self, inner: LogsSpecs, streams: Streams | None, attempt: int) -> None:
        self._inner = inner
        self._streams = streams
        self._attempt = attempt

    @property
    def root_log_dir(self) -> str:
        """Folder that the user chose for the workers' logs."""
        return self._inner.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the destination of each worker's streams, in a folder with Pipette's own attempt number.

        torchrun's number does not change between plans, so the next attempt would delete the logs of the last attempt.
        """
        counted = {rank: {**env, "TORCHELASTIC_RESTART_COUNT": str(self._attempt)} for rank, env in envs.items()}
        destinations = self._inner.reify(counted)
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = counted[rank].get("TORCHELASTIC_ERROR_FILE", "")
        if self._streams is not None:
            for rank, env in envs.items():
                # Megatron prints its iteration lines on the last rank.
                if int(env["RANK"]) == int(env["WORLD_SIZE"]) - 1:
                    destinations.stdouts[rank] = self._streams.watch(destinations.stdouts[rank], console=1)
            for rank, path in destinations.stderrs.items():
                destinations.stderrs[rank] = self._streams.watch(path, console=2, local_rank=rank)
        return destinations


class QuietLogs(DefaultLogsSpecs):
    """Log settings that keep error files in a private folder, and discard the workers' output."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the files or pipes to which each worker writes."""
        destinations = super().reify(envs)
        for streams in (destinations.stdouts, destinations.stderrs):
            streams.update(dict.fromkeys(streams, os.devnull))
        return destinations
