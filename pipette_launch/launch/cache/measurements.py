"""What was measured on a set of hosts, kept for the next job on them, whatever its model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.errors import FileFormatError
from pipette_launch.facts import Measurements, files
from pipette_launch.launch.cache.folder import inside, read_kept
from pipette_launch.launch.cache.plans import CLUSTER, steady, steering

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipette_launch.facts import Host

logger = logging.getLogger(__name__)

FOLDER = "clusters"


class MachineMeasurements:
    """The file of one set of hosts, versions and variables. What cannot be read or written costs time, not the job."""

    def __init__(
        self, root: Path | None, hosts: Sequence[Host], versions: Mapping[str, str], *, environ: Mapping[str, str]
    ) -> None:
        key = files.digest(steady(hosts), dict(versions), steering(environ))
        self._root, self._names = root, (FOLDER, key, CLUSTER)
        self.path = root.joinpath(*self._names) if root else None
        """None when nothing is kept."""

    def load(self) -> Measurements | None:
        """Return what was measured last on these hosts, in whatever order it names them."""
        return read_kept(Measurements, self._root, *self._names)

    def kept(self, measurements: Measurements) -> Measurements:
        """Put what was measured in the place of what was there; returns it with what of that still holds."""
        # A start from the cache keeps nothing, and does without this import.
        from pipette_launch.cost.compute.carried_over import with_cached_times

        if self._root is None:
            return measurements
        whole = with_cached_times(measurements, self.load())
        try:
            files.write(inside(self._root, *self._names), whole)
        except (OSError, FileFormatError) as error:
            logger.warning("links cannot be kept (%s): the next job will measure all of them", error)
        return whole
