"""A slot that takes part in the pace test: real work on a real core, a store of files, and no torch.

`python pace_worker.py FOLDER SLOT RUNS`: the order is FOLDER/options.json, what it finds goes to FOLDER/SLOT.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from pipette_launch.facts import files
from pipette_launch.probe.compute.slot_speeds import PaceTest
from pipette_launch.probe.lockstep import Lockstep
from pipette_launch.probe.messages import WarmupOrder

LIMIT_S = 120.0
LOOPS = 20_000


class FolderStore:
    """A store whose keys are files; a waiting rank sleeps in between, like one that waits for a socket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        """Publish a value."""
        path = self._path(key)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(value)
        temporary.replace(path)

    def get(self, key: str) -> bytes:
        """Read an existing value."""
        self.wait([key], timedelta(seconds=LIMIT_S))
        return self._path(key).read_bytes()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several."""
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Count: every call adds a byte, and the last caller gets the full count."""
        with self._path(key).open("ab") as file:
            file.write(b"." * amount)
            file.flush()
            return file.tell()

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Sleep until all keys exist."""
        end_s = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end_s:
                raise RuntimeError(f"nobody set {keys}")
            time.sleep(0.002)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")


def work() -> None:
    """Compute for about a millisecond."""
    for _ in range(LOOPS):
        pass


def main(folder: Path, slot: int, runs: int) -> None:
    """Take part a number of times."""
    options = files.read(folder / "options.json", WarmupOrder)
    found = []
    for run in range(runs):
        store = folder / f"store{run}"
        store.mkdir(exist_ok=True)
        lockstep = Lockstep(store=FolderStore(store), rank=slot, world_size=options.num_slots, timeout_s=LIMIT_S)
        test = PaceTest(options=options, slot=slot)
        test.first(work, lockstep, 0.0)
        # Stands for the timed parts between both tests.
        for _ in range(100):
            work()
        test.again(work, lockstep, 0.0)
        found.append([[pace.turn, pace.seconds] for pace in test.paces])
    (folder / f"{slot}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
