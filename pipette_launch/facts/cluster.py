"""Hosts, devices and links of a job, and the order of ranks on the devices of a host."""

# Array axes: H = hosts, D = devices of one host, S or W = slots (all devices of all hosts, host by host), K =
# placements. A placement gives the RANK of each slot.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipette_launch.errors import FactError
from pipette_launch.facts.devices import DeviceSpec, known_device

Matrix: TypeAlias = NDArray[np.float64]
MatrixLike: TypeAlias = Matrix | Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU, or one process's share of a host's cores and memory."""

    kind: Literal["cuda", "cpu"]
    uuid: str
    """UUID of the device as NVML reports it. On CPU `cpu-<index>`."""
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    """Free memory before the job's own processes started."""
    compute_capability: float | None = None
    """CUDA's compute capability, such as 8.9, as NVML reports it. None = unknown."""

    def __post_init__(self) -> None:
        free, total = self.memory_free_bytes, self.memory_total_bytes
        if not 0 <= free <= total:
            found = f"memory_free_bytes={free} is not between 0 and memory_total_bytes={total}"
            raise FactError(f"device {self.uuid}: {found}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One node of the job, and the node's devices that the job uses, in the order of torchrun's local ranks."""

    name: str
    address: str
    cores: int
    devices: tuple[Device, ...]
    place: tuple[str, ...] = ()
    """Names that the scheduler gives the switches above the host, outermost switch first. Empty = unknown."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise FactError(f"host {self.name} has no devices")

    @property
    def shares_cores(self) -> bool:
        """True if more processes compute on the host than the host has cores."""
        return self.devices[0].kind == "cpu" and len(self.devices) > self.cores


@dataclass(frozen=True, kw_only=True, init=False, eq=False)
class Links:
    """Latency and bandwidth between n hosts or devices, as read-only n x n matrices (row = sender, column = receiver).

    Both matrices have 0 on the diagonal.
    """

    latency_s: Matrix
    bandwidth_bytes_per_s: Matrix

    def __init__(self, *, latency_s: MatrixLike, bandwidth_bytes_per_s: MatrixLike) -> None:
        """Copy both matrices.

        Raise FactError if a matrix is not n x n, a latency is negative, or a bandwidth is not above 0.
        """
        size = len(latency_s)
        matrices = [_matrix(rows, size) for rows in (latency_s, bandwidth_bytes_per_s)]
        for name, matrix in zip(("latency_s", "bandwidth_bytes_per_s"), matrices, strict=True):
            object.__setattr__(self, name, matrix)
        latency, bandwidth = matrices
        good = (latency >= 0) & (bandwidth > 0)
        np.fill_diagonal(good, val=True)
        if not good.all():
            i, j = (int(index) for index in np.argwhere(~good)[0])
            figures = f"latency {float(latency[i, j])} s and bandwidth {float(bandwidth[i, j])} bytes/s"
            raise FactError(f"links: {i} -> {j} has {figures}")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Links):
            return NotImplemented
        return np.array_equal(self.latency_s, other.latency_s) and np.array_equal(
            self.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s
        )

    def __hash__(self) -> int:
        return self._hash

    @property
    def size(self) -> int:
        """Number of hosts or devices that the links connect."""
        return len(self.latency_s)

    @classmethod
    def uniform(cls, size: int, *, latency_s: float, bandwidth_bytes_per_s: float) -> Links:
        """Return equal links between all hosts or devices."""
        diagonal = np.eye(size, dtype=bool)
        latency, bandwidth = (np.where(diagonal, 0.0, value) for value in (latency_s, bandwidth_bytes_per_s))
        return cls(latency_s=latency, bandwidth_bytes_per_s=bandwidth)

    @cached_property
    def seconds_per_byte(self) -> Matrix:
        """1 / bandwidth with 0 on the diagonal, as a read-only matrix."""
        inverse = np.zeros((self.size, self.size))
        np.divide(1.0, self.bandwidth_bytes_per_s, out=inverse, where=~np.eye(self.size, dtype=bool))
        inverse.flags.writeable = False
        return inverse

    @cached_property
    def extremes(self) -> tuple[tuple[int, int], ...]:
        """The links with least and greatest bandwidth, as (sender, receiver); empty for a single host or device."""
        if self.size < 2:
            return ()
        rates, diagonal = self.bandwidth_bytes_per_s.ravel(), np.eye(self.size, dtype=bool).ravel()
        slowest = int(np.where(diagonal, np.inf, rates).argmin())
        # If all bandwidths are equal, return the first and the last link, so that the result has two different links.
        fastest = len(rates) - 1 - int(np.where(diagonal, 0.0, rates)[::-1].argmax())
        return divmod(slowest, self.size), divmod(fastest, self.size)

    @cached_property
    def _hash(self) -> int:
        # + 0.0 turns -0.0 into 0.0, because equal links must have equal bytes.
        return hash(((self.latency_s + 0.0).tobytes(), (self.bandwidth_bytes_per_s + 0.0).tobytes()))


def _matrix(rows: MatrixLike, size: int) -> Matrix:
    if len(rows) != size or any(len(row) != size for row in rows):
        raise FactError(f"links: both matrices must be {size} x {size}")
    matrix = np.array(rows, dtype=np.float64).reshape(size, size)
    matrix.flags.writeable = False
    return matrix


class HostsOfJob:
    """Counts and device kind of a job's hosts. All hosts have the same number of devices of one kind."""

    __slots__ = ()
    hosts: tuple[Host, ...]

    @property
    def devices_per_host(self) -> int:
        """Number of devices of each host."""
        return len(self.hosts[0].devices)

    @property
    def num_slots(self) -> int:
        """Number of slots S, which is also the number of ranks."""
        return len(self.hosts) * self.devices_per_host

    @property
    def device_kind(self) -> Literal["cuda", "cpu"]:
        """Kind of all devices of the job."""
        return self.hosts[0].devices[0].kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster(HostsOfJob):
    """The machines of a job: hosts in torchrun's order, the links between hosts, and the links inside hosts."""

    hosts: tuple[Host, ...]
    between_hosts: Links
    """Links between the H hosts, for one device while all devices of both hosts exchange messages."""
    within_host: tuple[Links, ...]
    """Links between the D devices of a host, one entry for each host."""
    slot_speed: tuple[float, ...]
    """Compute speed of each slot relative to the median slot."""
    imagined: DeviceSpec | None = field(default=None, hash=False)
    """Type of all devices if the user only described the machines. The type is `None` if the hosts are real."""

    def __post_init__(self) -> None:
        sizes = {len(host.devices) for host in self.hosts}
        if len(sizes) != 1:
            counts = ", ".join(f"{host.name}: {len(host.devices)}" for host in self.hosts)
            raise FactError(f"hosts must have equally many devices, got {counts or 'no hosts'}")
        if len({host.name for host in self.hosts}) != len(self.hosts):
            raise FactError(f"host names must differ, got {', '.join(host.name for host in self.hosts)}")
        if self.between_hosts.size != len(self.hosts):
            raise FactError(f"between_hosts is {self.between_hosts.size} wide for {len(self.hosts)} hosts")
        if [links.size for links in self.within_host] != [self.devices_per_host] * len(self.hosts):
            raise FactError("within_host needs one matrix for each host, with one row for each device")
        # Hosts with equal inner links share one Links object, so that its cached results are computed only once.
        shared: dict[Links, Links] = {}
        object.__setattr__(self, "within_host", tuple(shared.setdefault(links, links) for links in self.within_host))
        if len(self.slot_speed) != self.num_slots or not all(speed > 0 for speed in self.slot_speed):
            raise FactError(f"slot_speed needs {self.num_slots} positive values, got {self.slot_speed}")

    @property
    def memory_bytes(self) -> int:
        """Free memory of the device that has the least free memory."""
        return min(device.memory_free_bytes for host in self.hosts for device in host.devices)

    @property
    def spec(self) -> DeviceSpec | None:
        """Type of the devices: described by the user, or found by the driver's name. None = unknown."""
        return self.imagined or known_device(self.hosts[0].devices[0].name)

    @property
    def compute_capability(self) -> float | None:
        """CUDA's compute capability of the devices: as NVML reports it, or of `spec`. None = unknown."""
        if self.imagined is None and (reported := self.hosts[0].devices[0].compute_capability):
            return reported
        return self.spec.compute_capability if self.spec else None

    @property
    def keeps_residues(self) -> bool:
        """True on CUDA, where the RANKs of one host must differ modulo the devices of a host (`search.slots`)."""
        return self.device_kind == "cuda"

    def host_of(self, slot: int) -> int:
        """Return the index of the host of a slot."""
        return slot // self.devices_per_host

    def slot_name(self, slot: int) -> str:
        """Return the name of a slot, which has host and local device: `node17:3`."""
        return f"{self.hosts[self.host_of(slot)].name}:{slot % self.devices_per_host}"


def in_device_order(placement_KW: ArrayLike, devices: int) -> NDArray[np.int64]:
    """Sort the ranks of each host, so that a higher device has a higher rank.

    `placement_KW` is one placement, or an array with one placement in each row.
    """
    ranks = np.asarray(placement_KW, dtype=np.int64)
    return np.sort(ranks.reshape(*ranks.shape[:-1], -1, devices), axis=-1).reshape(ranks.shape)
