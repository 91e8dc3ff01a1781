"""Time on a real device: events, waits with a deadline, and a layer as the warm-up times it."""

import time

import pytest

from pipette_launch.probe.compute.timing import HABITS, time_calls
from pipette_launch.probe.instruments import CudaStopwatch, QueuedCalls, await_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
CYCLES = 20_000_000
"""Some 10 ms of a device's clock."""


def test_events_time_the_device_and_not_the_host() -> None:
    """Three pauses take three times as long as one, though the host asks for them in no time."""
    import torch

    watch = CudaStopwatch()
    one, three = (
        time_calls(
            lambda n=number: [torch.cuda._sleep(CYCLES) for _ in range(n)],  # type: ignore[misc]
            stopwatch=watch,
            habits=HABITS["cuda"],
        ).median_s
        for number in (1, 3)
    )

    assert pytest.approx(3.0, rel=0.1) == three / one
    assert one > 1e-3


def test_settling_waits_for_the_device() -> None:
    """Events and the host's clock agree once the device is waited for."""
    import torch

    watch = CudaStopwatch()
    side = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.mm(side, side)
    watch.settle()
    before, before_s = watch.mark(), time.perf_counter()
    for _ in range(200):
        torch.mm(side, side, out=out)
    after = watch.mark()
    watch.settle()
    wall_s = time.perf_counter() - before_s

    assert pytest.approx(wall_s, rel=0.1) == watch.seconds(before, after)


def test_a_wait_for_the_device_has_a_deadline() -> None:
    """A device that is busy for longer is a TimeoutError, one that is done is not waited for."""
    import torch

    torch.cuda.synchronize()
    await_device(1.0, time.perf_counter)
    torch.cuda._sleep(50 * CYCLES)
    with pytest.raises(TimeoutError, match="for the device"):
        await_device(0.05, time.perf_counter)
    torch.cuda.synchronize()
    await_device(1.0, time.perf_counter)


def test_short_calls_in_a_row_take_no_time_of_the_host() -> None:
    """Pauses of about 10 us, which launches would lengthen, take a thousandth of a pause of 10 ms each."""
    import torch

    queued = QueuedCalls(time.perf_counter)
    long_s, short_s = (
        min(queued.seconds(lambda n=cycles: torch.cuda._sleep(n), 16, timeout_s=5.0) for _ in range(8))  # type: ignore[misc]
        for cycles in (CYCLES, CYCLES // 1000)
    )

    # A kernel begins some microseconds after the one before it.
    assert pytest.approx(long_s / 1000, abs=5e-6) == short_s
