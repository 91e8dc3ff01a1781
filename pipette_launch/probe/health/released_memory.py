"""Whether the devices' memory is free again after the warm-up's workers have ended. Imports no torch.

The training needs all of it. A driver frees the memory of a process some time after the process has died, and a child
that a worker left behind may hold memory for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from pipette_launch.errors import ClusterError
from pipette_launch.facts import Host
from pipette_launch.probe.health import inventory
from pipette_launch.probe.health.condition import conditions
from pipette_launch.probe.health.verdicts import BUSY_TOLERANCE_BYTES as TOLERANCE_BYTES
from pipette_launch.text import bytes_text

DEADLINE_S = 50.0
POLL_S = 0.5


def holders_of(host: Host) -> Iterator[str]:
    """Name the processes that hold memory of a host's devices, a sentence each; raises ClusterError without NVML."""
    for condition in conditions(host):
        for one in condition.holders:
            size = "memory" if one.used_bytes is None else bytes_text(one.used_bytes)
            yield f"{host.name}: process {one.pid} ({one.name}) holds {size} of {condition.uuid}"


def await_memory(
    host: Host,
    *,
    deadline_s: float = DEADLINE_S,
    used_bytes: Callable[[str], int] = inventory.device_used_bytes,
    holders: Callable[[Host], Iterable[str]] = holders_of,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[str, ...]:
    """Wait until no GPU of a host holds noticeably more than before the warm-up; ends at once where it is so already.

    Args:
        host: this machine as it was before the warm-up; what its devices held then does not count.
        deadline_s: the longest wait, in seconds.
        used_bytes: returns the memory in use on the GPU of a UUID.
        holders: names the processes that hold memory of a host's devices, a sentence each.
        clock: returns seconds.
        sleep: waits so many seconds.

    Returns:
        For each device that stayed full, how much is missing; then who holds it. Empty when all is well, and on CPU:
        the kernel takes a process's memory back before anyone can see that it has ended.

    """
    ends_s = clock() + deadline_s
    full = [device for device in host.devices if device.kind == "cuda"]
    try:
        while True:
            # Beyond what a device held before the warm-up.
            excess = {
                device: used_bytes(device.uuid) - (device.memory_total_bytes - device.memory_free_bytes)
                for device in full
            }
            full = [device for device in full if excess[device] > TOLERANCE_BYTES]
            if not full:
                return ()
            if clock() >= ends_s:
                break
            sleep(POLL_S)
        named = [sentence for sentence in holders(host) if any(device.uuid in sentence for device in full)]
    except ClusterError as error:
        # A driver that no longer answers: the training will say more about it.
        return (str(error),)
    stayed_full = (
        f"{host.name}: {device.name} {device.uuid} still holds {bytes_text(excess[device])} more than before the "
        f"warm-up, {deadline_s:.0f} s after it"
        for device in full
    )
    return (*stayed_full, *named)
