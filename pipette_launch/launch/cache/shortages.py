"""Which plan of a job ran out of memory, kept for later plans of such a job, whatever hosts they are for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pipette_launch.errors import FileFormatError
from pipette_launch.facts import files
from pipette_launch.facts.measurements import memory_digest
from pipette_launch.facts.plan import Shortage
from pipette_launch.launch.cache.folder import inside, read_kept
from pipette_launch.launch.cache.plans import machines_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipette_launch.facts import Host, Job

logger = logging.getLogger(__name__)

FOLDER = "shortages"
SHORTAGE = "shortage.json"


class ShortageFile:
    """The file of one kind of machine, what is trained, and versions. One that cannot be used is said once."""

    def __init__(self, root: Path | None, host: Host, job: Job, versions: Mapping[str, str]) -> None:
        key = files.digest(machines_of(host), memory_digest(job), job.megatron_version, dict(versions))
        self._root, self._names = root, (FOLDER, key, SHORTAGE)
        self.path = root.joinpath(*self._names) if root else None
        """None when nothing is kept."""

    def load(self) -> Shortage | None:
        """Return what is known; None where nothing is."""
        return read_kept(Shortage, self._root, *self._names)

    def keep(self, shortage: Shortage) -> None:
        """Put a shortage in the place of what was there."""
        if self._root is None:
            return
        try:
            files.write(inside(self._root, *self._names), shortage)
        except (OSError, FileFormatError) as error:
            logger.warning("that %s cannot be kept for later jobs: %s", shortage.sentence, error)
