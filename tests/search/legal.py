"""All legal layouts of a small job, one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipette_launch.facts.co_location import Domains
from pipette_launch.search.layouts import BaseLayouts, base_layouts

if TYPE_CHECKING:
    from pipette_launch.facts import Job, Layout


def legal_layouts(job: Job, *, world_size: int, devices_per_host: int, device_kind: str) -> tuple[Layout, ...]:
    """The user's own layout first, then every other: all cuts with all their memory options."""
    found = base_layouts(
        job, world_size=world_size, domains=Domains(devices_per_host=devices_per_host), device_kind=device_kind
    )
    return tuple(dict.fromkeys((job.own, *variants(found, *range(len(found))))))


def variants(found: BaseLayouts, *rows: int) -> tuple[Layout, ...]:
    """All legal variants of some cuts, cut by cut."""
    _, columns = found.variants(np.array(rows, dtype=np.int64))
    return tuple(columns.layout(row) for row in range(len(columns)))


def cuts(found: BaseLayouts) -> list[Layout]:
    """The first variant of every cut."""
    return [found.columns.layout(row) for row in range(len(found))]
