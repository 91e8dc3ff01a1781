"""Plans kept from job to job, each in a folder named by the key of what it depends on."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.errors import FileFormatError, PlanError
from pipette_launch.facts import Measurements, Plan, files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipette_launch.facts import Host, Job

logger = logging.getLogger(__name__)

PLAN = "plan.json"
CLUSTER = "cluster.json"
OUTCOME = "outcome.json"


def key_of(hosts: Sequence[Host], job: Job, versions: dict[str, str], settings: Sequence[float]) -> str:
    """Digest everything that a plan depends on; what changes from minute to minute (free memory) is left out."""
    steady = [
        (host.name, [(device.kind, device.uuid, device.name, device.memory_total_bytes) for device in host.devices])
        for host in sorted(hosts, key=lambda host: host.name)
    ]
    # Notes are prose, and the number of iterations changes no step.
    work = replace(job, notes=(), train_iters=None, log_interval=1)
    return files.digest(steady, work, versions, list(settings))


class Cache:
    """The folder of one key. What cannot be read or written is said once and is never fatal."""

    def __init__(self, root: Path | None, key: str) -> None:
        self.folder = root / key if root else None

    def path(self, name: str) -> Path | None:
        """Where a file of this key lies; None when nothing is kept."""
        return self.folder / name if self.folder else None

    def load(self) -> tuple[Plan | None, str]:
        """Return the plan of this key, or None and the reason when there is a file that cannot be used."""
        path = self.path(PLAN)
        if path is None or not path.exists():
            return None, ""
        try:
            plan = files.read(path, Plan)
        except FileFormatError as error:
            return None, f"the cached plan cannot be used, so the machines are measured anew ({error})"
        return replace(plan, provenance=replace(plan.provenance, source="cached")), ""

    def measurements(self) -> Measurements | None:
        """Return what the plan of this key rests on, if it is still there."""
        path = self.path(CLUSTER)
        if path is None or not path.exists():
            return None
        try:
            return files.read(path, Measurements)
        except FileFormatError as error:
            logger.warning("%s", error)
            return None

    def save(self, name: str, document: files.Document) -> str:
        """Keep a document; returns why it could not be kept, or nothing."""
        path = self.path(name)
        if path is None:
            return ""
        try:
            files.write(path, document)
        except OSError as error:
            return (
                f"{path} cannot be written ({error.strerror or error}): the next start will measure again; "
                f"name a writable folder with --pipette-cache, or switch the cache off with --pipette-cache off"
            )
        return ""


def check_belongs(plan: Plan, hosts: Sequence[Host], source: str) -> None:
    """Raise PlanError unless a plan is for these hosts and devices."""
    here = sorted(host.name for host in hosts)
    if sorted(plan.hosts) != here:
        raise PlanError(
            f"{source}: the plan is for the hosts {', '.join(sorted(plan.hosts))}; this job runs on {', '.join(here)}"
        )
    devices = len(hosts[0].devices)
    if plan.devices_per_host != devices:
        raise PlanError(f"{source}: the plan is for {plan.devices_per_host} devices a host; this job has {devices}")
    kind = hosts[0].devices[0].kind
    if plan.device_kind != kind:
        raise PlanError(f"{source}: the plan is for {plan.device_kind} devices; this job has {kind}")
