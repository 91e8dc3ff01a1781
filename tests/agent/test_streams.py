"""Workers' streams are passed on unchanged, in whole lines, and read along the way."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, Std

from pipette_launch.agent.streams import CHUNK_BYTES, MOST_LINE_BYTES, Streams, WatchedLogs


def write(path: str, data: bytes) -> threading.Thread:
    """Write as a worker does, in a thread of its own."""

    def work() -> None:
        with open(path, "wb", buffering=0) as stream:  # noqa: PTH123
            view = memoryview(data)
            while view:
                view = view[stream.write(view) :]

    worker = threading.Thread(target=work)
    worker.start()
    return worker


def test_copies_every_byte_and_reads_every_line() -> None:
    """What a worker writes reaches the console unchanged, without a newline at the end or with half a character."""
    lines: list[str] = []
    reader, writer = os.pipe()
    streams = Streams(lines.append)
    pipe = streams.watch("", console=writer)
    streams.start()
    data = b"one\ntwo\r\n\xff" + b"x" * 3_000_000

    worker = write(pipe, data)
    copied = b""
    while len(copied) < len(data):
        copied += os.read(reader, 1 << 20)
    worker.join()
    streams.close()

    assert data == copied
    # Of a line that never ends a part is read.
    assert ["one", "two\r", "x" * MOST_LINE_BYTES] == lines
    os.close(reader)
    os.close(writer)


def test_lines_of_two_workers_do_not_mix() -> None:
    """Each line reaches the console whole, though two workers' prints write word by word and in turn."""
    console, writer = os.pipe()
    streams = Streams(lambda line: None)
    pipes = [streams.watch("", console=writer, local_rank=rank) for rank in range(2)]
    streams.start()
    workers = [open(pipe, "wb", buffering=0) for pipe in pipes]  # noqa: SIM115, PTH123
    for piece in (b"error", b" of ", b"rank", b"\n"):
        for worker in workers:
            worker.write(piece)
            time.sleep(0.01)
    for worker in workers:
        worker.close()
    streams.close()

    assert b"error of rank\nerror of rank\n" == os.read(console, CHUNK_BYTES)
    os.close(console)
    os.close(writer)


def test_a_line_without_an_end_is_shown_soon() -> None:
    """A prompt and each step of a progress bar show while the worker waits, whatever else it wrote before."""
    console, writer = os.pipe()
    streams = Streams(lambda line: None)
    pipe = streams.watch("", console=writer, local_rank=0)
    streams.start()

    shown = []
    for piece in (b"done\n1 %\r", b"2 %\r", b"sure? "):
        write(pipe, piece).join()
        copied = b""
        while len(copied) < len(piece) and select.select([console], [], [], 10)[0]:
            copied += os.read(console, CHUNK_BYTES)
        shown.append(copied)
    streams.close()

    assert [b"done\n1 %\r", b"2 %\r", b"sure? "] == shown
    os.close(console)
    os.close(writer)


def test_a_slow_console_loses_nothing() -> None:
    """Closing waits until the console has taken the last words, also one that refuses to wait itself."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    streams = Streams(lambda line: None)
    pipe = streams.watch("", console=writer)
    streams.start()
    write(pipe, b"x" * 60_000).join()
    write(pipe, b"y" * 60_000).join()
    copied = []

    def look() -> None:
        time.sleep(0.3)
        while sum(map(len, copied)) < 120_000:
            copied.append(os.read(reader, 10_000))

    user = threading.Thread(target=look)
    user.start()
    streams.close()
    user.join()

    assert b"x" * 60_000 + b"y" * 60_000 == b"".join(copied)
    os.close(reader)
    os.close(writer)


def test_a_console_that_takes_nothing_is_left_when_time_is_short() -> None:
    """With patience to lose, a signal ends the launcher although a pager is waiting."""
    reader, writer = os.pipe()
    os.write(writer, b"x" * CHUNK_BYTES)
    streams = Streams(lambda line: None)
    pipe = streams.watch("", console=writer)
    streams.start()
    write(pipe, b"more").join()
    began_s = time.monotonic()

    streams.close(patience_s=0.2)

    assert 0.1 < time.monotonic() - began_s < 5
    os.read(reader, 2 * CHUNK_BYTES)
    streams.close()
    os.close(reader)
    os.close(writer)


def test_a_closed_console_closes_the_workers_stream() -> None:
    """Behind `| head` a worker gets the error that it would get under torchrun."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = Streams(lambda line: None)
    pipe = streams.watch("", console=writer)
    streams.start()

    def talk() -> None:
        with open(pipe, "wb", buffering=0) as stream:  # noqa: PTH123
            for _ in range(1000):
                stream.write(b"x\n")
                time.sleep(0.01)

    with pytest.raises(BrokenPipeError):
        talk()

    streams.close()
    os.close(writer)


def test_a_child_that_goes_on_writing_does_not_hold_up_the_end() -> None:
    """What was written until the end is read; a process that never stops writing is not waited for."""
    lines: list[str] = []
    streams = Streams(lines.append)
    pipe = streams.watch(os.devnull, console=1)
    stop = threading.Event()

    def chatter() -> None:
        with open(pipe, "wb", buffering=0) as stream:  # noqa: PTH123
            try:
                while not stop.is_set():
                    stream.write(b"x\n" * 1000)
            except BrokenPipeError:
                return

    streams.start()
    child = threading.Thread(target=chatter)
    child.start()
    time.sleep(0.1)
    closing = threading.Thread(target=streams.close)
    closing.start()
    closing.join(timeout=20)
    stop.set()
    child.join()

    assert not closing.is_alive()
    assert {"x"} == set(lines)


def test_a_line_that_nobody_understands_stops_nothing() -> None:
    """An error in the reader is logged; the streams flow on."""
    lines: list[str] = []

    def hear(line: str) -> None:
        if line == "bad":
            raise ValueError(line)
        lines.append(line)

    streams = Streams(hear)
    pipe = streams.watch(os.devnull, console=1)
    streams.start()
    write(pipe, b"bad\n").join()
    time.sleep(0.1)
    write(pipe, b"good\n").join()
    streams.close()

    assert ["good"] == lines


def test_tails_are_kept_for_each_worker() -> None:
    """The last lines of one worker's stderr are not crowded out by another's; an unfinished line is one of them."""
    streams = Streams(lambda line: None)
    streams.start()
    write(streams.watch(os.devnull, console=2, local_rank=0), b"first\nlast").join()
    write(streams.watch(os.devnull, console=2, local_rank=1), b"noise\n" * 1000).join()
    streams.close()

    assert ("first", "last") == streams.tail(0)
    assert ("noise",) * 60 == streams.tail(1)
    assert () == streams.tail(2)


def test_a_redirected_stream_reaches_its_file_and_is_read(tmp_path: Path) -> None:
    """The user's file gets every byte, and a file of an earlier attempt is overwritten; its lines are read too."""
    lines: list[str] = []
    (tmp_path / "out").write_text("old" * 1_000_000)
    streams = Streams(lines.append)
    out = streams.watch(str(tmp_path / "out"), console=1)
    err = streams.watch(str(tmp_path / "err"), console=2, local_rank=0)
    streams.start()
    write(out, b"iteration 1\n" * 50_000).join()
    write(err, b"why").join()
    streams.close()

    assert ["iteration 1"] * 50_000 == lines
    assert "iteration 1\n" * 50_000 == (tmp_path / "out").read_text()
    assert ("why",) == streams.tail(0)
    assert "why" == (tmp_path / "err").read_text()


def test_a_full_disk_does_not_stop_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    """The lines of a file that takes no more are still read, and the log names the cause once."""
    lines: list[str] = []
    streams = Streams(lines.append)
    out = streams.watch("/dev/full", console=1)
    streams.start()
    write(out, b"iteration 1\n" * 50_000).join()
    streams.close()

    assert ["iteration 1"] * 50_000 == lines
    assert ["output of a worker is lost: [Errno 28] No space left on device"] == [
        record.getMessage() for record in caplog.records
    ]


def test_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """Hundreds of attempts cost the launcher nothing."""
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    streams = Streams(lambda line: None)
    for rank, path in enumerate(("", os.devnull, str(tmp_path / "err"))):
        streams.watch(path, console=2, local_rank=rank)
    streams.start()
    streams.close()
    streams.close()

    assert before == sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def streams() -> Streams:
    """Streams that nobody listens to."""
    return Streams(lambda line: None)


def environments(count: int = 2) -> dict[int, dict[str, str]]:
    """What torch tells about its workers."""
    return {rank: {"RANK": str(rank), "WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "r"} for rank in range(count)}


def kinds(destinations: LogsDest) -> list[str]:
    """What kind of thing each stdout and stderr is."""
    paths = [*destinations.stdouts.values(), *destinations.stderrs.values()]
    return ["pipe" if "/fd/" in path else Path(path).name or "console" for path in paths]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["console", "pipe", "pipe", "pipe"]),
        ({"redirects": Std.ALL}, ["stdout.log", "pipe", "pipe", "pipe"]),
        ({"redirects": Std.ERR, "tee": {0: Std.ERR}}, ["console", "pipe", "pipe", "pipe"]),
        ({"tee": Std.OUT}, ["stdout.log", "pipe", "pipe", "pipe"]),
        ({"local_ranks_filter": {0}}, ["console", "pipe", "pipe", "pipe"]),
        ({"local_ranks_filter": {1}}, ["null", "pipe", "pipe", "pipe"]),
    ],
)
def test_every_stream_that_is_read_passes_through_a_pipe(
    tmp_path: Path, streams: Streams, settings: dict[str, Std], expected: list[str]
) -> None:
    """The last rank's stdout and every stderr are read; all other streams stay where the user wants them."""
    inner = DefaultLogsSpecs(log_dir=str(tmp_path), **settings)  # type: ignore[arg-type]

    destinations = WatchedLogs(inner, streams, 0).reify(environments())

    assert expected == kinds(destinations)
    streams.close()


def test_folders_are_named_by_our_own_count(tmp_path: Path, streams: Streams) -> None:
    """The next attempt leaves the logs and error files of the last one where they are."""
    inner = DefaultLogsSpecs(log_dir=str(tmp_path))

    for attempt in (0, 1):
        envs = environments()
        WatchedLogs(inner, streams, attempt).reify(envs)
        (path,) = tmp_path.glob(f"r_*/attempt_{attempt}")
        assert str(path / "1" / "error.json") == envs[1]["TORCHELASTIC_ERROR_FILE"]
        assert "TORCHELASTIC_RESTART_COUNT" not in envs[1]

    assert 2 == len(list(tmp_path.glob("r_*/attempt_*")))
    streams.close()


def test_without_streams_nothing_is_led_elsewhere(tmp_path: Path) -> None:
    """Torch opens the streams of a function as files that it can seek in; no pipe is given to it."""
    destinations = WatchedLogs(DefaultLogsSpecs(log_dir=str(tmp_path)), None, 0).reify(environments())

    assert ["console"] * 4 == kinds(destinations)


def test_no_log_folder_at_all(streams: Streams) -> None:
    """`--log-dir /dev/null` keeps no file; what the console shows is read all the same."""
    envs = environments()

    destinations = WatchedLogs(DefaultLogsSpecs(log_dir=os.devnull), streams, 0).reify(envs)

    assert ["console", "pipe", "pipe", "pipe"] == kinds(destinations)
    assert "" == envs[0]["TORCHELASTIC_ERROR_FILE"]
    streams.close()
