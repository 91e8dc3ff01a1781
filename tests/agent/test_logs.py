"""Where workers write: the user's settings, with pipes in place of the console."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, Std

from pipette_launch.agent.logs import WatchedLogs
from pipette_launch.agent.streams import Streams


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
        ({"redirects": Std.ALL}, ["stdout.log", "stdout.log", "stderr.log", "stderr.log"]),
        ({"redirects": Std.ERR, "tee": {0: Std.ERR}}, ["console", "pipe", "stderr.log", "stderr.log"]),
        ({"tee": Std.OUT}, ["stdout.log", "stdout.log", "pipe", "pipe"]),
        ({"local_ranks_filter": {0}}, ["console", "pipe", "pipe", "pipe"]),
        ({"local_ranks_filter": {1}}, ["null", "pipe", "pipe", "pipe"]),
    ],
)
def test_pipes_stand_for_the_console_only(
    tmp_path: Path, streams: Streams, settings: dict[str, Std], expected: list[str]
) -> None:
    """The last rank's stdout and every stderr are read; a redirected stream stays where the user wants it."""
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
