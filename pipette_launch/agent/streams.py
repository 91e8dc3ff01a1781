"""What the workers print, passed on untouched and read along the way, so that the launcher sees the first iteration."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CONSOLE = ""
"""torch's own sign for a stream that is not redirected."""
CHUNK_BYTES = 1 << 16
FOLLOW_S = 0.2
TAIL_LINES = 60


class Streams:
    """Reads the workers' streams in a thread of its own, one line at a time.

    A stream that would go to the console goes through a named pipe and is copied to the console byte by byte: nothing
    is prefixed, kept or put off. A stream that the user had redirected to a file is followed in that file.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._folder = Path(tempfile.mkdtemp(prefix="pipette_streams_"))
        self._selector = selectors.DefaultSelector()
        self._followed: dict[Path, int] = {}
        self._partial: dict[object, bytes] = {}
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="pipette-streams", daemon=True)

    def pipe(self, name: str, *, copy_to: int | None, lines: bool) -> str:
        """Make a pipe for a worker's stream.

        Args:
            name: unique name of the stream.
            copy_to: file descriptor that gets every byte; None copies to none.
            lines: whether `on_line` sees the lines; a tail is kept of the others.

        """
        path = self._folder / name
        os.mkfifo(path)
        # Read and write: the pipe then never reports its end while no worker has it open.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._selector.register(descriptor, selectors.EVENT_READ, (copy_to, lines))
        return str(path)

    def follow(self, path: str) -> None:
        """Read along in a file that a worker's stdout was redirected to."""
        self._followed[Path(path)] = 0

    def start(self) -> None:
        """Begin to read; call it before the workers start."""
        self._thread.start()

    def tail(self) -> str:
        """Return the last lines of the streams that `on_line` does not see (stderr)."""
        return "\n".join(self._tail)

    def close(self) -> None:
        """Read what is left, then stop and leave nothing behind."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join(timeout=5)
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fd)
            os.close(key.fd)
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._read(FOLLOW_S)
        while self._read(0.0):
            pass

    def _read(self, timeout_s: float) -> bool:
        """Read once from whatever is ready; False when nothing was."""
        ready = self._selector.select(timeout_s) if self._selector.get_map() else []
        if not ready and timeout_s:
            self._stop.wait(timeout_s if not self._selector.get_map() else 0)
        for key, _ in ready:
            copy_to, lines = key.data
            with contextlib.suppress(BlockingIOError):
                self._take(key.fd, os.read(key.fd, CHUNK_BYTES), copy_to, lines=lines)
        grown = [path for path in self._followed if self._read_file(path)]
        return bool(grown or ready)

    def _read_file(self, path: Path) -> bool:
        try:
            with path.open("rb") as stream:
                stream.seek(self._followed[path])
                data = stream.read(CHUNK_BYTES)
        except OSError:
            return False
        self._followed[path] += len(data)
        self._take(path, data, None, lines=True)
        return bool(data)

    def _take(self, source: object, data: bytes, copy_to: int | None, *, lines: bool) -> None:
        if copy_to is not None:
            _write_all(copy_to, data)
        *complete, rest = (self._partial.get(source, b"") + data).split(b"\n")
        self._partial[source] = rest[-CHUNK_BYTES:]
        for line in complete:
            text = line.decode(errors="replace")
            if lines:
                self._on_line(text)
            else:
                self._tail.append(text)


class WatchedLogs(LogsSpecs):
    """The user's own log settings, with the streams that the launcher reads led through `Streams`."""

    def __init__(self, inner: LogsSpecs, streams: Streams, attempt: int) -> None:
        self._inner = inner
        self._streams = streams
        self._attempt = attempt

    @property
    def root_log_dir(self) -> str:
        """Where the user wants logs."""
        return self._inner.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Let the user's settings choose the destinations, then lead what goes to the console through pipes.

        The folder of an attempt is named by our own count: torchrun's stands still while plans are tried one after
        the other, and the next attempt would delete the logs of the last.
        """
        counted = {rank: {**env, "TORCHELASTIC_RESTART_COUNT": str(self._attempt)} for rank, env in envs.items()}
        destinations = self._inner.reify(counted)
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = counted[rank].get("TORCHELASTIC_ERROR_FILE", "")
        talker = _last_rank(envs)
        if talker is not None:
            self._watch_stdout(destinations, talker)
        for rank, path in destinations.stderrs.items():
            if path == CONSOLE:
                destinations.stderrs[rank] = self._streams.pipe(f"stderr_{rank}", copy_to=2, lines=False)
        return destinations

    def _watch_stdout(self, destinations: LogsDest, rank: int) -> None:
        path = destinations.stdouts[rank]
        if path == CONSOLE:
            destinations.stdouts[rank] = self._streams.pipe("stdout", copy_to=1, lines=True)
        elif path == os.devnull:
            destinations.stdouts[rank] = self._streams.pipe("stdout", copy_to=None, lines=True)
        else:
            self._streams.follow(path)


def _last_rank(envs: Mapping[int, Mapping[str, str]]) -> int | None:
    """Local rank of the worker that prints Megatron's iteration line: RANK = WORLD_SIZE - 1."""
    for local_rank, env in envs.items():
        if int(env["RANK"]) == int(env["WORLD_SIZE"]) - 1:
            return local_rank
    return None


def _write_all(descriptor: int, data: bytes) -> None:
    """Write to the console; a closed console loses the text, as it does under torchrun, and never stops the job."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(descriptor, view) :]
