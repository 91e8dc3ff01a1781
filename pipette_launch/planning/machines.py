"""Machines of a job: measured, imagined from a device type, or only a number of devices."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.errors import ClusterError, FactError, FileFormatError, OptionError, UsageError
from pipette_launch.facts import Job, Layout, Measurements, files
from pipette_launch.facts.accelerators import DeviceSpec
from pipette_launch.facts.fabric import BUILT_IN, UNIFORM, FabricSpec, built_in_fabric
from pipette_launch.facts.known_devices import (
    DeviceFile,
    UnknownDeviceError,
    capability_of_cluster,
    device_named,
    other_meanings,
)
from pipette_launch.facts.measurements import layers_digest
from pipette_launch.text import did_you_mean

DEVICES_PER_HOST = 8
"""Devices of each host, if the machines are unknown."""
MOST_HOSTS, MOST_DEVICES, MOST_RANKS = 1 << 14, 1 << 10, 1 << 18
"""Largest sizes of a job. The matrix of links between hosts takes 2 GiB for 16,384 hosts."""
ITS_OWN_MODEL = (
    "Layer times are those of the model that the warm-up timed; for layers of another kind or size they are wrong."
)
"""Note on measurements whose file does not name the model whose layers were timed."""

Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetMachines:
    """Number of hosts and devices, with measurements or a device type if known."""

    num_hosts: int
    devices_per_host: int
    kind: Kind
    measured: Measurements | None = None
    spec: DeviceSpec | None = None
    fabric: FabricSpec = UNIFORM
    """Network between imagined hosts."""
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_hosts * self.devices_per_host

    @property
    def device_name(self) -> str:
        """Device name, from the driver or from the table of devices; empty if unknown."""
        if self.measured is not None:
            return self.measured.cluster.hosts[0].devices[0].name
        return self.spec.name if self.spec else ""

    @property
    def capability(self) -> int | None:
        """Major number of the devices' compute capability; None if unknown."""
        if self.measured is not None:
            return capability_of_cluster(self.measured.cluster)
        return self.spec.compute_capability if self.spec else None

    @property
    def capacity_bytes(self) -> int | None:
        """Free memory of the fullest device; None if unknown."""
        if self.measured is not None:
            return self.measured.cluster.memory_bytes
        return self.spec.memory_bytes if self.spec else None

    @property
    def origin(self) -> str:
        """Source of the machines' figures, in a few words."""
        if self.measured is not None:
            return f"measured at {self.measured.taken_at}"
        return "not measured: from the device's data sheet and usual shares of it" if self.spec else "unknown"

    @property
    def network(self) -> str:
        """Network between imagined hosts, in a few words; empty for measured hosts and for one host."""
        return self.fabric.words(self.spec, self.num_hosts) if self.spec is not None and self.num_hosts > 1 else ""

    def measurements(self, job: Job, layouts: Sequence[Layout] = ()) -> Measurements | None:
        """Return the measurements that price a step, imagined for a device type; None for unknown machines.

        Empty `layouts` mean the job's own layout. Raises ClusterError if layers of another model were measured.
        """
        if self.measured is not None:
            if self.measured.model_digest and self.measured.model_digest != layers_digest(job.model):
                raise ClusterError(
                    f"the warm-up at {self.measured.taken_at} timed the layers of another model (hidden size, heads, "
                    f"sequence or another field differs); measure this model with pipette probe, or name a device type"
                )
            return self.measured
        if self.spec is None:
            return None
        return imagined(
            job,
            self.spec,
            num_hosts=self.num_hosts,
            devices_per_host=self.devices_per_host,
            layouts=layouts or (job.own,),
            fabric=self.fabric,
        )


def checked_words(arguments: Sequence[str]) -> Sequence[str]:
    """Return the words; raise UsageError for a single string, which Python would split into letters."""
    if isinstance(arguments, str) or not all(isinstance(word, str) for word in arguments):
        raise UsageError("the arguments must be a sequence of words, each a str; shlex.split splits a command line")
    return arguments


def machines_of(
    *,
    world_size: int | None,
    num_hosts: int | None = None,
    devices_per_host: int | None = None,
    gpu: str | Path | DeviceFile | None = None,
    cluster: str | Path | Measurements | None = None,
    fabric: str | Path | FabricSpec | None = None,
    device_kind: Kind = "cuda",
) -> TargetMachines:
    """Find the machines that the options name.

    Args:
        world_size: ranks of the job; None if the other sizes or the cluster determine this number.
        fabric: network between imagined hosts; None for equal links.
        device_kind: kind of the devices, if neither `gpu` nor `cluster` is given.

    Raises:
        PipetteError: sizes are missing or contradict each other or the cluster, options exclude each other, a name is
            unknown or ambiguous, or a file is of another kind.

    """
    # Callers in Python may pass other types than int.
    sizes: dict[str, tuple[Any, int]] = {
        "world_size": (world_size, MOST_RANKS),
        "num_hosts": (num_hosts, MOST_HOSTS),
        "devices_per_host": (devices_per_host, MOST_DEVICES),
    }
    for option, (value, most) in sizes.items():
        if value is not None and not hasattr(value, "__index__"):
            raise OptionError(option, f"must be a whole number, got {value!r}")
        if value is not None and not 1 <= value <= most:
            limit = "at least 1" if value < 1 else f"at most {most}"
            raise OptionError(option, f"must be {limit}, got {reprlib.repr(value)}")
    if gpu is not None and cluster is not None:
        raise OptionError(("gpu", "cluster"), "exclude each other: machines are either imagined or measured")
    if fabric is not None and gpu is None:
        raise OptionError("fabric", "describes imagined machines: name their device type too, or leave it out")
    if cluster is not None:
        return _measured(cluster, world_size, num_hosts, devices_per_host)
    if gpu is None:
        hosts, devices, _ = _sizes(world_size, num_hosts, devices_per_host)
        return TargetMachines(num_hosts=hosts, devices_per_host=devices, kind=device_kind)
    if device_kind == "cpu":
        raise OptionError(("gpu", "device_kind"), "exclude each other: a job on CPU has no GPU type")
    device, notes = _device(gpu)
    return _imagined(device, notes, fabric or UNIFORM, world_size, num_hosts, devices_per_host)


def _device(source: str | Path | DeviceFile) -> tuple[DeviceSpec, tuple[str, ...]]:
    """Return a device, and a note if the device's name has several meanings."""
    if isinstance(source, DeviceFile):
        return source.spec(), ()
    if not isinstance(source, (str, Path)):
        raise OptionError("gpu", f"must be a name, a path or a DeviceFile, got {source!r}")
    name = str(source)
    if isinstance(source, Path) or Path(name).suffix == ".json" or os.sep in name:
        return files.read(Path(name), DeviceFile).spec(), ()
    try:
        return device_named(name), tuple(filter(None, (other_meanings(name),)))
    except UnknownDeviceError as error:
        # Path.exists would raise for a name that no file can have.
        if os.path.lexists(name):
            return files.read(Path(name), DeviceFile).spec(), ()
        advice = "pipette devices lists all known names; a file can describe another device"
        raise FactError(f"{error}{' ' if str(error).endswith('?') else '; '}{advice}") from error


def _imagined(
    spec: DeviceSpec,
    notes: tuple[str, ...],
    source: str | Path | FabricSpec,
    world_size: int | None,
    num_hosts: int | None,
    devices_per_host: int | None,
) -> TargetMachines:
    fabric = source if isinstance(source, FabricSpec) else _fabric(source)
    if world_size is None and fabric.hosts:
        num_hosts = num_hosts or len(fabric.hosts)
    if world_size is None and num_hosts is not None and devices_per_host is None:
        devices_per_host = spec.devices_per_host
        notes = (*notes, _assumed_host(devices_per_host))
    hosts, devices, more = _sizes(world_size, num_hosts, devices_per_host, usual=spec.devices_per_host)
    if hosts > MOST_HOSTS or hosts * devices > MOST_RANKS:
        raise UsageError(f"{hosts} hosts x {devices} devices are more than {MOST_HOSTS} hosts or {MOST_RANKS} ranks")
    try:
        fabric.links(hosts, spec)
        fabric.slot_speed(hosts, devices)
    except FactError as error:
        name = "the fabric" if isinstance(source, FabricSpec) else str(source)
        raise FileFormatError(f"{name}: {error}") from error
    return TargetMachines(
        num_hosts=hosts, devices_per_host=devices, kind="cuda", spec=spec, fabric=fabric, notes=(*notes, *more)
    )


def _fabric(source: str | Path) -> FabricSpec:
    named = built_in_fabric(str(source))
    if named is not None:
        return named
    # Path.exists would raise for a name that no file can have.
    if Path(source).suffix or os.path.lexists(source):
        return files.read(Path(source), FabricSpec)
    hint = did_you_mean(str(source), BUILT_IN, otherwise=f"known names are {', '.join(BUILT_IN)}")
    raise OptionError("fabric", f"{source} is neither a file nor a known name; {hint}")


def _measured(
    source: str | Path | Measurements, world_size: int | None, num_hosts: int | None, devices_per_host: int | None
) -> TargetMachines:
    measured = source if isinstance(source, Measurements) else files.read(Path(source), Measurements)
    name = "the measured cluster" if isinstance(source, Measurements) else str(source)
    found = measured.cluster
    for what, given, there in (
        ("ranks", world_size, found.num_slots),
        ("hosts", num_hosts, len(found.hosts)),
        ("devices per host", devices_per_host, found.devices_per_host),
    ):
        if given is not None and given != there:
            raise ClusterError(
                f"{name} has {len(found.hosts)} hosts x {found.devices_per_host} devices = {found.num_slots} ranks, "
                f"but the job has {given} {what}; leave the sizes out, or name a device type to imagine other machines"
            )
    return TargetMachines(
        num_hosts=len(found.hosts),
        devices_per_host=found.devices_per_host,
        kind=found.device_kind,
        measured=measured,
        notes=() if measured.model_digest else (ITS_OWN_MODEL,),
    )


def _assumed_host(devices: int) -> str:
    return f"{devices} devices per host are assumed."


def _sizes(
    world_size: int | None, num_hosts: int | None, devices_per_host: int | None, *, usual: int = DEVICES_PER_HOST
) -> tuple[int, int, tuple[str, ...]]:
    """Return hosts, devices of each host, and a note if the number of devices was assumed."""
    if world_size is None:
        if num_hosts is None or devices_per_host is None:
            raise OptionError("world_size", "is missing: give it, or the number of hosts and of devices on each host")
        return num_hosts, devices_per_host, ()
    if num_hosts is None and devices_per_host is None:
        devices_per_host = max(size for size in range(1, usual + 1) if world_size % size == 0)
        notes = (_assumed_host(devices_per_host),) if world_size > devices_per_host else ()
        return world_size // devices_per_host, devices_per_host, notes
    hosts = num_hosts or world_size // (devices_per_host or 1)
    devices = devices_per_host or world_size // hosts
    if hosts < 1 or hosts * devices != world_size:
        sizes = ((num_hosts, "hosts"), (devices_per_host, "devices per host"))
        given = " and ".join(f"{number} {what}" for number, what in sizes if number)
        raise OptionError("world_size", f"{world_size} does not agree with {given}; correct one of them")
    return hosts, devices, ()
