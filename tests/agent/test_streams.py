"""Workers' streams are passed on byte by byte, and read along the way."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std

from pipette_launch.agent.streams import Streams, WatchedLogs

if TYPE_CHECKING:
    from pathlib import Path


def environments(count: int = 2) -> dict[int, dict[str, str]]:
    """What torch tells about its workers."""
    return {rank: {"RANK": str(rank), "WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "r"} for rank in range(count)}


def test_copies_every_byte_and_reads_every_line() -> None:
    """What a worker writes reaches the console unchanged, without a newline at the end or with half a character."""
    lines: list[str] = []
    reader, writer = os.pipe()
    streams = Streams(lines.append)
    pipe = streams.pipe("stdout", copy_to=writer, lines=True)
    streams.start()
    data = b"one\ntwo\r\n\xff" + b"x" * 200_000

    def write() -> None:
        with open(pipe, "wb") as stream:  # noqa: PTH123
            stream.write(data)

    worker = threading.Thread(target=write)
    worker.start()
    copied = b""
    while len(copied) < len(data):
        copied += os.read(reader, 1 << 16)
    worker.join()
    streams.close()

    assert data == copied
    assert ["one", "two\r"] == lines
    os.close(reader)
    os.close(writer)


def test_the_last_rank_is_read_and_all_keep_a_tail(tmp_path: Path) -> None:
    """Stdout of the last rank is led through a pipe, the others' is left alone; stderr of all is."""
    streams = Streams(lambda line: None)

    destinations = WatchedLogs(DefaultLogsSpecs(log_dir=str(tmp_path)), streams, 0).reify(environments())

    assert ("", True) == (destinations.stdouts[0], destinations.stdouts[1].endswith("stdout"))
    assert ["stderr_0", "stderr_1"] == [os.path.basename(path) for path in destinations.stderrs.values()]  # noqa: PTH119
    streams.close()


def test_a_redirected_stream_is_followed_in_its_file(tmp_path: Path) -> None:
    """The user's own redirection stays, and its file is read."""
    lines: list[str] = []
    streams = Streams(lines.append)
    logs = WatchedLogs(DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL), streams, 3)

    destinations = logs.reify(environments())
    streams.start()
    with open(destinations.stdouts[1], "w") as stream:  # noqa: PTH123
        stream.write("iteration 1\n")
    streams.close()

    assert "attempt_3/1/stdout.log" in destinations.stdouts[1]
    assert ["iteration 1"] == lines
