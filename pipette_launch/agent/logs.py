"""The user's own log settings, with the streams that the launcher reads led through `Streams`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

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
