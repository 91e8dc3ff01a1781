"""The machines of a prediction: measured ones, imagined ones of a known type, or nothing but their number."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Literal

from pipette_launch.errors import ClusterError, FactError, FileFormatError, PipetteError, UsageError
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
"""Where the user does not say how many devices a host has."""
MOST_HOSTS, MOST_DEVICES, MOST_RANKS = 1 << 14, 1 << 10, 1 << 18
"""Of one job: links between hosts are a matrix, and one of 16,384 hosts takes 2 GiB."""
ITS_OWN_MODEL = (
    "Layer times are those of the model that the warm-up timed; for layers of another kind or size they are wrong."
)
"""A note for files that do not name the model that was timed."""

Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetMachines:
    """How many hosts of how many devices, and what is known of them."""

    num_hosts: int
    devices_per_host: int
    kind: Kind
    measured: Measurements | None = None
    spec: DeviceSpec | None = None
    fabric: FabricSpec = UNIFORM
    """What lies between imagined hosts."""
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_hosts * self.devices_per_host

    @property
    def device_name(self) -> str:
        """As the driver or the table of devices has it; empty where nothing is known."""
        if self.measured is not None:
            return self.measured.cluster.hosts[0].devices[0].name
        return self.spec.name if self.spec else ""

    @property
    def capability(self) -> int | None:
        """Major number of the devices' compute capability; None where it is not known."""
        if self.measured is not None:
            return capability_of_cluster(self.measured.cluster)
        return self.spec.compute_capability if self.spec else None

    @property
    def capacity_bytes(self) -> int | None:
        """Free memory of the fullest device."""
        if self.measured is not None:
            return self.measured.cluster.memory_bytes
        return self.spec.memory_bytes if self.spec else None

    @property
    def origin(self) -> str:
        """Where the machines' figures come from, in a few words."""
        if self.measured is not None:
            return f"measured at {self.measured.taken_at}"
        return "not measured: from the device's data sheet and usual shares of it" if self.spec else "unknown"

    @property
    def network(self) -> str:
        """What lies between imagined hosts, in a few words; empty where it was measured or there is nothing."""
        return self.fabric.words(self.spec, self.num_hosts) if self.spec is not None and self.num_hosts > 1 else ""

    @property
    def switches_H(self) -> tuple[tuple[int, ...], ...]:
        """Declared groups above each imagined host, outermost first; empty where none are declared."""
        return () if self.spec is None else self.fabric.switches_H(self.num_hosts, self.spec)

    def measurements(self, job: Job, layouts: Sequence[Layout] = ()) -> Measurements | None:
        """Return what a step is priced by: what was measured, else what a device of this type would show.

        Args:
            job: whose model is computed.
            layouts: those that will be priced; none = the user's own.

        Raises:
            ClusterError: layers of another model were measured.

        """
        if self.measured is not None:
            _check_model(job, self.measured)
        if self.measured is not None or self.spec is None:
            return self.measured
        from pipette_launch.cost.compute.device_model import imagined

        return imagined(
            job,
            self.spec,
            num_hosts=self.num_hosts,
            devices_per_host=self.devices_per_host,
            layouts=layouts or (job.own,),
            fabric=self.fabric,
        )


def machines_of(
    *,
    world_size: int | None,
    num_hosts: int | None = None,
    devices_per_host: int | None = None,
    gpu: str | Path | DeviceFile | None = None,
    cluster: Path | Measurements | None = None,
    fabric: str | Path | FabricSpec | None = None,
    device_kind: Kind = "cuda",
) -> TargetMachines:
    """Find out which machines are meant.

    Args:
        world_size: ranks of the job; may be left out where the other sizes or the cluster tell it.
        num_hosts: nodes of the job.
        devices_per_host: ranks on each.
        gpu: a device type: the name of a known one, a file of kind `device`, or its contents.
        cluster: what a warm-up measured, or the file that holds it.
        fabric: what lies between imagined hosts: a file, a built-in name, or the description; None = all are equal.
        device_kind: what the ranks run on where neither `gpu` nor `cluster` says it.

    Raises:
        UsageError: the sizes are missing, contradict each other, both `gpu` and `cluster` are given, or `fabric`
            without `gpu`.
        FactError: no device is known by this name, or several are.
        FileFormatError: the file is no cluster.json, or no fabric of these hosts.
        ClusterError: the measured cluster has another size than the job.

    """
    sizes = {
        "--world-size": (world_size, MOST_RANKS),
        "--nodes": (num_hosts, MOST_HOSTS),
        "--gpus-per-node": (devices_per_host, MOST_DEVICES),
    }
    for flag, (value, most) in sizes.items():
        if value is not None and not isinstance(value, Integral):
            raise UsageError(f"{flag} must be a whole number, got {value!r}")
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be at least 1, got {value}")
        if value is not None and value > most:
            raise UsageError(f"{flag} must be at most {most}, got {reprlib.repr(value)}")
    if gpu is not None and cluster is not None:
        raise UsageError("--gpu and --cluster exclude each other: machines are either imagined or measured")
    if fabric is not None and gpu is None:
        raise UsageError("--fabric describes imagined machines; name their devices with --gpu, or leave it out")
    if cluster is not None:
        return _measured(cluster, world_size, num_hosts, devices_per_host)
    if gpu is None:
        hosts, devices, _ = _sizes(world_size, num_hosts, devices_per_host)
        return TargetMachines(num_hosts=hosts, devices_per_host=devices, kind=device_kind)
    if device_kind == "cpu":
        raise UsageError("--gpu and --device cpu exclude each other")
    device, notes = _device(gpu)
    return _imagined(device, notes, fabric or UNIFORM, world_size, num_hosts, devices_per_host)


def _device(source: str | Path | DeviceFile) -> tuple[DeviceSpec, tuple[str, ...]]:
    """Find a device by its name, else read the file that describes it; the second is a name's other meanings."""
    if isinstance(source, DeviceFile):
        return source.spec(), ()
    if not isinstance(source, (str, Path)):
        raise UsageError(f"--gpu must be a name, a path or a DeviceFile, got {source!r}")
    name = str(source)
    if isinstance(source, Path) or Path(name).suffix == ".json" or os.sep in name:
        return files.read(Path(name), DeviceFile).spec(), ()
    with _naming("--gpu:"):
        try:
            note = other_meanings(name)
            return device_named(name), (f"--gpu {note}",) if note else ()
        except UnknownDeviceError as error:
            # Not Path.exists, which raises for a name that no file can have.
            if os.path.lexists(name):
                return files.read(Path(name), DeviceFile).spec(), ()
            advice = "pipette devices lists those that are known, and --gpu FILE reads any other from a file"
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
    """Find a fabric by its built-in name, else read its file."""
    named = built_in_fabric(str(source))
    if named is not None:
        return named
    # Not Path.exists, which raises for a name that no file can have.
    if Path(source).suffix or os.path.lexists(source):
        return files.read(Path(source), FabricSpec)
    hint = did_you_mean(str(source), BUILT_IN, otherwise=f"built in are {', '.join(BUILT_IN)}")
    raise UsageError(f"--fabric {source}: neither a file nor a known name; {hint}")


@contextmanager
def _naming(flag: str) -> Iterator[None]:
    """Put the flag before what is said of its value."""
    try:
        yield
    except PipetteError as error:
        error.args = (f"{flag} {error}",)
        raise


def _measured(
    source: Path | Measurements, world_size: int | None, num_hosts: int | None, devices_per_host: int | None
) -> TargetMachines:
    with _naming("--cluster"):
        measured = source if isinstance(source, Measurements) else files.read(source, Measurements)
    name = "the measured cluster" if isinstance(source, Measurements) else str(source)
    found = measured.cluster
    for flag, said, there in (
        ("--world-size", world_size, found.num_slots),
        ("--nodes", num_hosts, len(found.hosts)),
        ("--gpus-per-node", devices_per_host, found.devices_per_host),
    ):
        if said is not None and said != there:
            raise ClusterError(
                f"{name} has {len(found.hosts)} hosts x {found.devices_per_host} devices = {found.num_slots} ranks, "
                f"but {flag} says {said}; leave the sizes out, or name a device type with --gpu to imagine others"
            )
    return TargetMachines(
        num_hosts=len(found.hosts),
        devices_per_host=found.devices_per_host,
        kind=found.device_kind,
        measured=measured,
        notes=() if measured.model_digest else (ITS_OWN_MODEL,),
    )


def _check_model(job: Job, measured: Measurements) -> None:
    """Raise ClusterError if layers of another kind or size were timed."""
    if measured.model_digest and measured.model_digest != layers_digest(job.model):
        raise ClusterError(
            f"the warm-up at {measured.taken_at} timed the layers of another model (hidden size, heads, sequence or "
            f"another field differs); measure this one with pipette probe, or imagine machines with --gpu"
        )


def _assumed_host(devices: int) -> str:
    return f"Hosts of {devices} devices each are assumed; --gpus-per-node says it otherwise."


def _sizes(
    world_size: int | None, num_hosts: int | None, devices_per_host: int | None, *, usual: int = DEVICES_PER_HOST
) -> tuple[int, int, tuple[str, ...]]:
    """Complete hosts and devices of each; the third is what had to be assumed."""
    if world_size is None:
        if num_hosts is None or devices_per_host is None:
            raise UsageError(
                "on how many ranks does it run? Say --world-size N, or --nodes N and --gpus-per-node N, as in the "
                "job's own script"
            )
        return num_hosts, devices_per_host, ()
    if num_hosts is None and devices_per_host is None:
        devices_per_host = max(size for size in range(1, usual + 1) if world_size % size == 0)
        notes = (_assumed_host(devices_per_host),) if world_size > devices_per_host else ()
        return world_size // devices_per_host, devices_per_host, notes
    hosts = num_hosts or world_size // (devices_per_host or 1)
    devices = devices_per_host or world_size // hosts
    if hosts < 1 or hosts * devices != world_size:
        said = [f"--nodes {num_hosts}"] if num_hosts else []
        said += [f"--gpus-per-node {devices_per_host}"] if devices_per_host else []
        product = f"{'a multiple of ' if len(said) == 1 else ''}{' times '.join(said)}"
        raise UsageError(f"--world-size {world_size} is not {product}; correct one of them")
    return hosts, devices, ()
