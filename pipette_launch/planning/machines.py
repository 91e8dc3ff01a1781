"""Machines of a job: measured, imagined from a device type, or only a number of devices."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipette_launch import megatron
from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.errors import ClusterError, FactError, FileFormatError, OptionError, UsageError
from pipette_launch.facts import Job, Layout, Measurements, devices, files
from pipette_launch.facts.devices import DeviceFile, DeviceSpec
from pipette_launch.facts.fabric import BUILT_IN, UNIFORM, FabricSpec, built_in_fabric
from pipette_launch.facts.measurements import layers_digest
from pipette_launch.megatron import Dialect
from pipette_launch.text import counted, did_you_mean

DEVICES_PER_HOST = 8
"""Devices of each host, if the machines are unknown."""
MOST_HOSTS, MOST_DEVICES, MOST_RANKS = 1 << 14, 1 << 10, 1 << 18
"""Largest numbers of hosts, of a host's devices, and of ranks. The links between 16,384 hosts take 2 GiB."""
ITS_OWN_MODEL = (
    "The layer times belong to the model that the warm-up timed, and are wrong for layers of another kind or size."
)
"""Note on a measurements file that does not name the model whose layers were timed."""

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
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_hosts * self.devices_per_host

    @property
    def device_name(self) -> str:
        """Device name, from the driver or from the table of devices. Empty = unknown."""
        if self.measured is not None:
            return self.measured.cluster.hosts[0].devices[0].name
        return self.spec.name if self.spec else ""

    @property
    def capability(self) -> float | None:
        """CUDA's compute capability of the devices, such as 8.9. None = unknown."""
        if self.measured is not None:
            return self.measured.cluster.compute_capability
        return self.spec.compute_capability if self.spec else None

    @property
    def capacity_bytes(self) -> int | None:
        """Free bytes of the device with the least free memory. None = unknown."""
        if self.measured is not None:
            return self.measured.cluster.memory_bytes
        return self.spec.memory_bytes if self.spec else None

    @property
    def origin(self) -> str:
        """Words on the source of the machines' speeds and sizes, such as the time of the measurement."""
        if self.measured is not None:
            return f"measured at {self.measured.taken_at}"
        return "not measured: from the device's data sheet and usual shares of it" if self.spec else "unknown"

    @property
    def network(self) -> str:
        """Network between imagined hosts, in a few words. The text is empty for measured hosts and for one host."""
        return self.fabric.words(self.spec, self.num_hosts) if self.spec is not None and self.num_hosts > 1 else ""

    def dialect(self, arguments: Sequence[str], *, script: str, bridge_config: str | Path | None) -> Dialect:
        """Return reader and writer of a job's words. `bridge_config` is a configuration that Megatron-Bridge saved."""
        saved = None if bridge_config is None else Path(bridge_config)
        return megatron.dialect_of(checked_words(arguments), script=script, world_size=self.world_size, saved=saved)

    def job(
        self,
        dialect: Dialect,
        *,
        script: str,
        megatron_version: str | None,
        environment: Mapping[str, str],
        **purpose: Any,
    ) -> Job:
        """Read a job for these machines. `purpose` has further keyword arguments for `megatron.read_job`.

        The job's notes begin with the note on an assumed Megatron version.
        """
        version, guess = megatron.version_or_newest(megatron_version, script, environment)
        job = megatron.read_job(
            dialect.flags(version),
            world_size=self.world_size,
            megatron_version=version,
            device_kind=self.kind,
            script=script,
            environment=environment,
            device_name=self.device_name,
            capability=self.capability,
            is_translated=dialect.is_translated,
            **purpose,
        )
        return replace(job, notes=(*guess, *job.notes, *dialect.notes))

    def measurements(self, job: Job, layouts: Sequence[Layout] = ()) -> Measurements | None:
        """Return the measurements that price a step, imagined for a device type. Return None for unknown machines.

        If `layouts` is empty, measurements are imagined for the job's own layout. Raises ClusterError if the measured
        layer times belong to another model.
        """
        measured = self.measured
        if measured is not None:
            if measured.model_digest in ("", layers_digest(job.model)):
                return measured
            raise ClusterError(
                f"the warm-up at {measured.taken_at} timed the layers of another model (hidden size, heads, sequence "
                f"or another field differs); measure this model with pipette probe, or name a device type"
            )
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
    """Return the words. Raise UsageError for a single string, which Python would split into letters."""
    if isinstance(arguments, str) or not all(isinstance(word, str) for word in arguments):
        raise UsageError("the arguments must be a sequence of words, each a str; shlex.split splits a command line")
    return arguments


class _Sizes(NamedTuple):
    """Sizes of a job as a caller gave them. A size is None if the caller did not give it."""

    world_size: int | None
    nodes: int | None
    gpus_per_node: int | None


def machines_of(
    *,
    world_size: int | None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu: str | Path | DeviceFile | None = None,
    cluster: str | Path | Measurements | None = None,
    fabric: str | Path | FabricSpec | None = None,
    device_kind: Kind = "cuda",
) -> TargetMachines:
    """Find the machines that the options name.

    `world_size` may be None if the other sizes or the cluster determine the number of ranks. `fabric` is the network
    between imagined hosts (None = equal links). `device_kind` is used only if neither `gpu` nor `cluster` is given.
    Raises PipetteError if sizes are missing or contradict each other, if options exclude each other, if a name is
    unknown or ambiguous, or if a file is of another kind.
    """
    sizes = _Sizes(world_size, nodes, gpus_per_node)
    _check_sizes(sizes)
    if gpu is not None and cluster is not None:
        raise OptionError(("gpu", "cluster"), "exclude each other: machines are either imagined or measured")
    if fabric is not None and gpu is None:
        raise OptionError("fabric", "describes imagined machines: name their device type too, or leave it out")
    if cluster is not None:
        return _measured(cluster, sizes)
    if gpu is None:
        hosts, devices, _ = _hosts_and_devices(sizes)
        return TargetMachines(num_hosts=hosts, devices_per_host=devices, kind=device_kind)
    if device_kind == "cpu":
        raise OptionError(("gpu", "device_kind"), "exclude each other: a job on CPU has no GPU type")
    return _imagined(_device(gpu), fabric or UNIFORM, sizes)


def _check_sizes(sizes: _Sizes) -> None:
    # Callers of the Python API may pass other types than int.
    values: Sequence[Any] = sizes
    for option, value, most in zip(_Sizes._fields, values, (MOST_RANKS, MOST_HOSTS, MOST_DEVICES), strict=True):
        if value is not None and not hasattr(value, "__index__"):
            raise OptionError(option, f"must be a whole number, got {value!r}")
        if value is not None and not 1 <= value <= most:
            limit = "at least 1" if value < 1 else f"at most {most}"
            raise OptionError(option, f"must be {limit}, got {reprlib.repr(value)}")


def _device(source: str | Path | DeviceFile) -> DeviceSpec:
    if isinstance(source, DeviceFile):
        return source.spec()
    if not isinstance(source, (str, Path)):
        raise OptionError("gpu", f"must be a name, a path or a DeviceFile, got {source!r}")
    name = str(source)
    if isinstance(source, Path) or Path(name).suffix == ".json" or os.sep in name:
        return files.read(Path(name), DeviceFile).spec()
    try:
        return devices.device_named(name)
    except devices.UnknownDeviceError as error:
        # Use `lexists`, because `Path.exists` raises for a name that no file can have, such as a too long name.
        if os.path.lexists(name):
            return files.read(Path(name), DeviceFile).spec()
        advice = "pipette devices lists all known names; a file can describe another device"
        raise FactError(f"{error}{' ' if str(error).endswith('?') else '; '}{advice}") from error


def _imagined(spec: DeviceSpec, source: str | Path | FabricSpec, sizes: _Sizes) -> TargetMachines:
    notes: tuple[str, ...] = ()
    fabric = source if isinstance(source, FabricSpec) else _fabric(source)
    if sizes.world_size is None:
        num_hosts = sizes.nodes or len(fabric.hosts) or None
        if num_hosts is not None and sizes.gpus_per_node is None:
            notes = (_assumed_host(spec.devices_per_host),)
            sizes = sizes._replace(gpus_per_node=spec.devices_per_host)
        sizes = sizes._replace(nodes=num_hosts)
    hosts, devices, more = _hosts_and_devices(sizes, usual=spec.devices_per_host)
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
    # Use `lexists`, because `Path.exists` raises for a name that no file can have, such as a too long name.
    if Path(source).suffix or os.path.lexists(source):
        return files.read(Path(source), FabricSpec)
    hint = did_you_mean(str(source), BUILT_IN, otherwise=f"known names are {', '.join(BUILT_IN)}")
    raise OptionError("fabric", f"{source} is neither a file nor a known name; {hint}")


def _measured(source: str | Path | Measurements, sizes: _Sizes) -> TargetMachines:
    measured = source if isinstance(source, Measurements) else files.read(Path(source), Measurements)
    name = "the measured cluster" if isinstance(source, Measurements) else str(source)
    found = measured.cluster
    ranks, hosts, devices = there = (found.num_slots, len(found.hosts), found.devices_per_host)
    for what, given, measured_size in zip(("rank", "host", "device"), sizes, there, strict=True):
        if given is not None and given != measured_size:
            raise ClusterError(
                f"{name} has {counted(hosts, 'host')} x {counted(devices, 'device')} = {counted(ranks, 'rank')}, "
                f"but the job has {counted(given, what)}{' per host' if what == 'device' else ''}; "
                f"leave the sizes out, or name a device type to imagine other machines"
            )
    return TargetMachines(
        num_hosts=hosts,
        devices_per_host=devices,
        kind=found.device_kind,
        measured=measured,
        notes=() if measured.model_digest else (ITS_OWN_MODEL,),
    )


def _assumed_host(devices: int) -> str:
    return f"Assumed: {counted(devices, 'device')} per host."


def _hosts_and_devices(sizes: _Sizes, *, usual: int = DEVICES_PER_HOST) -> tuple[int, int, tuple[str, ...]]:
    """Return hosts, devices of each host, and a note if the number of devices was assumed."""
    ranks, num_hosts, devices_per_host = sizes
    if ranks is None:
        if num_hosts is None or devices_per_host is None:
            raise OptionError(
                "world_size", "is missing: give this number, or the number of hosts and of devices on each host"
            )
        return num_hosts, devices_per_host, ()
    if num_hosts is None and devices_per_host is None:
        devices = max(size for size in range(1, usual + 1) if ranks % size == 0)
        return ranks // devices, devices, (_assumed_host(devices),) if ranks > devices else ()
    hosts = num_hosts or ranks // (devices_per_host or 1)
    devices = devices_per_host or ranks // hosts
    if hosts < 1 or hosts * devices != ranks:
        pairs = ((num_hosts, "hosts"), (devices_per_host, "devices per host"))
        given = " and ".join(f"{number} {what}" for number, what in pairs if number)
        raise OptionError("world_size", f"{ranks} does not agree with {given}; correct one of them")
    return hosts, devices, ()
