"""Hosts, slots, device memory and link matrices in bytes/s and seconds, as measured, never as advertised."""

# H = hosts, D = devices of one host, S = slots (all devices of all hosts, host by host).
# K = placements, W = slots, H = hosts, D = devices of one host. A placement gives the RANK of each slot.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipette_launch.errors import FactError
from pipette_launch.facts.accelerators import DeviceSpec
from pipette_launch.facts.files import ADDED_LATER

Matrix: TypeAlias = NDArray[np.float64]
MatrixLike: TypeAlias = Matrix | Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU, or one process's share of a host's cores and memory."""

    kind: Literal["cuda", "cpu"]
    uuid: str
    """NVML's UUID; on CPU `cpu-<index>`."""
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    """What others leave free, read before the job's own processes started."""

    def __post_init__(self) -> None:
        if not 0 <= self.memory_free_bytes <= self.memory_total_bytes:
            raise FactError(
                f"device {self.uuid}: memory_free_bytes={self.memory_free_bytes} is not between 0 and "
                f"memory_total_bytes={self.memory_total_bytes}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One node of the job and the devices it lends to it, in the order of its local ranks under torchrun."""

    name: str
    address: str
    cores: int
    devices: tuple[Device, ...]
    place: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    """The switches above it, outermost first, as the scheduler names them; empty where it does not."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise FactError(f"host {self.name} has no devices")

    @property
    def shares_cores(self) -> bool:
        """Whether more processes compute on it than it has cores, so that they take turns."""
        return self.devices[0].kind == "cpu" and len(self.devices) > self.cores


@dataclass(frozen=True, kw_only=True, init=False, eq=False)
class Links:
    """Latency and bandwidth between n places; row sends to column. The diagonal is no link and is stored as 0.

    Both are read-only arrays. Two of them are equal if all their numbers are.
    """

    latency_s: Matrix
    bandwidth_bytes_per_s: Matrix

    def __init__(self, *, latency_s: MatrixLike, bandwidth_bytes_per_s: MatrixLike) -> None:
        """Take n x n numbers each, as arrays or as rows; raise FactError where they are not, or describe no link."""
        size = len(latency_s)
        matrices = [_matrix(rows, size) for rows in (latency_s, bandwidth_bytes_per_s)]
        for name, matrix in zip(("latency_s", "bandwidth_bytes_per_s"), matrices, strict=True):
            object.__setattr__(self, name, matrix)
        good = (matrices[0] >= 0) & (matrices[1] > 0)
        np.fill_diagonal(good, val=True)
        if not good.all():
            i, j = (int(index) for index in np.unravel_index(int(good.argmin()), good.shape))
            raise FactError(
                f"links: {i} -> {j} has latency {float(matrices[0][i, j])} s and bandwidth "
                f"{float(matrices[1][i, j])} bytes/s"
            )

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
        """How many places there are."""
        return len(self.latency_s)

    @classmethod
    def uniform(cls, size: int, *, latency_s: float, bandwidth_bytes_per_s: float) -> Links:
        """Give every pair the same link."""
        latency, bandwidth = (np.full((size, size), float(value)) for value in (latency_s, bandwidth_bytes_per_s))
        for matrix in (latency, bandwidth):
            np.fill_diagonal(matrix, 0.0)
        return cls(latency_s=latency, bandwidth_bytes_per_s=bandwidth)

    def seconds_per_byte(self) -> Matrix:
        """1 / bandwidth, with 0 on the diagonal; read-only."""
        return self._seconds_per_byte

    @cached_property
    def extremes(self) -> tuple[tuple[int, int], ...]:
        """Sender and receiver of the slowest link and of the fastest, by bandwidth; empty where there is no link."""
        if self.size < 2:
            return ()
        rates, diagonal = self.bandwidth_bytes_per_s.ravel(), np.eye(self.size, dtype=bool).ravel()
        slowest = int(np.where(diagonal, np.inf, rates).argmin())
        # Of equal ones the first and the last: then they are two links.
        fastest = len(rates) - 1 - int(np.where(diagonal, 0.0, rates)[::-1].argmax())
        return divmod(slowest, self.size), divmod(fastest, self.size)

    @cached_property
    def _seconds_per_byte(self) -> Matrix:
        inverse = np.zeros((self.size, self.size))
        np.divide(1.0, self.bandwidth_bytes_per_s, out=inverse, where=~np.eye(self.size, dtype=bool))
        inverse.flags.writeable = False
        return inverse

    @cached_property
    def _hash(self) -> int:
        # + 0.0 makes one zero of 0.0 and -0.0, which are equal but differ in their bytes.
        return hash(((self.latency_s + 0.0).tobytes(), (self.bandwidth_bytes_per_s + 0.0).tobytes()))


def _matrix(rows: MatrixLike, size: int) -> Matrix:
    """Return size x size numbers as an array that nobody can change."""
    if len(rows) != size or any(len(row) != size for row in rows):
        raise FactError(f"links: both matrices must be {size} x {size}")
    # A copy, so that an array of the caller's stays writable, and cannot be changed behind our back.
    matrix = np.array(rows, dtype=np.float64).reshape(size, size)
    matrix.flags.writeable = False
    return matrix


class HostsOfJob:
    """What follows from the hosts of a job, which lend equally many devices of one kind."""

    __slots__ = ()
    hosts: tuple[Host, ...]

    @property
    def devices_per_host(self) -> int:
        """D: how many devices each host lends."""
        return len(self.hosts[0].devices)

    @property
    def num_slots(self) -> int:
        """S: how many ranks the job has."""
        return len(self.hosts) * self.devices_per_host

    @property
    def device_kind(self) -> Literal["cuda", "cpu"]:
        """What the slots are."""
        return self.hosts[0].devices[0].kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster(HostsOfJob):
    """The allocation: its hosts in torchrun's own order, and what lies between and inside them."""

    hosts: tuple[Host, ...]
    between_hosts: Links
    """H x H, for each device when all devices of a host talk to their counterparts of another at once."""
    within_host: tuple[Links, ...]
    """For each host, D x D between its devices."""
    slot_speed: tuple[float, ...]
    """Compute speed of each slot relative to the median slot, 1.0 = as fast as the median."""
    imagined: DeviceSpec | None = field(default=None, hash=False, metadata=ADDED_LATER)
    """The type of all devices where nothing was measured; None for real hosts."""

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
            raise FactError("within_host needs one matrix for each host, as wide as the host has devices")
        # Hosts that are alike share one object, so that whoever works through the links meets each only once.
        shared: dict[Links, Links] = {}
        object.__setattr__(self, "within_host", tuple(shared.setdefault(links, links) for links in self.within_host))
        if len(self.slot_speed) != self.num_slots or not all(speed > 0 for speed in self.slot_speed):
            raise FactError(f"slot_speed needs {self.num_slots} positive values, got {self.slot_speed}")

    @property
    def memory_bytes(self) -> int:
        """The memory that every slot has at least, less what other processes hold."""
        return min(device.memory_free_bytes for host in self.hosts for device in host.devices)

    @property
    def keeps_residues(self) -> bool:
        """Whether the RANKs of a host must differ modulo its slots: on CUDA (`search.placement.slots.Slots`)."""
        return self.device_kind == "cuda"

    def host_of(self, slot: int) -> int:
        """Index of the host of a slot."""
        return slot // self.devices_per_host

    def slot_name(self, slot: int) -> str:
        """A slot as people write it: `node17:3`."""
        return f"{self.hosts[self.host_of(slot)].name}:{slot % self.devices_per_host}"

    def seconds_per_byte_SS(self) -> NDArray[np.float64]:
        """1 / bandwidth from slot (row) to slot (column); 0 on the diagonal."""
        size = self.devices_per_host
        full = np.repeat(np.repeat(self.between_hosts.seconds_per_byte(), size, axis=0), size, axis=1)
        for host, links in enumerate(self.within_host):
            place = slice(host * size, (host + 1) * size)
            full[place, place] = links.seconds_per_byte()
        return full


Ints = NDArray[np.int64]


def in_device_order(placement_KW: ArrayLike, devices: int, order_D: Sequence[int] | None = None) -> Ints:
    """Rearrange the ranks inside every host of one placement or of several; each host keeps its ranks.

    Args:
        placement_KW: one placement, or one in each row.
        devices: D.
        order_D: devices that the ranks of a host take, lowest rank first; None = in device order.

    """
    ranks = np.asarray(placement_KW, dtype=np.int64)
    sorted_KHD = np.sort(ranks.reshape(*ranks.shape[:-1], -1, devices), axis=-1)
    if order_D is not None:
        sorted_KHD[..., list(order_D)] = sorted_KHD.copy()
    return sorted_KHD.reshape(ranks.shape)


def shared_order(placement: ArrayLike, devices: int) -> tuple[int, ...] | None:
    """Return the devices that the ranks of a host take, lowest rank first; None where two hosts differ."""
    order_HD = np.argsort(np.asarray(placement).reshape(-1, devices), axis=1)
    return tuple(order_HD[0].tolist()) if (order_HD == order_HD[0]).all() else None


def is_in_device_order(placement: ArrayLike, devices: int) -> bool:
    """Return true if the ranks of every host rise with its devices."""
    return shared_order(placement, devices) == tuple(range(devices))
