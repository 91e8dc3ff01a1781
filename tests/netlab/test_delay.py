"""Frames stay on a way for as long as it is long."""

from __future__ import annotations

import os
from collections import deque
from math import inf

from benchmarks.netlab.delay import Way


def test_frames_leave_in_order_and_not_before_their_time() -> None:
    """What has arrived is written, the rest stays, and the next arrival is told."""
    out, into = os.pipe()
    way = Way(source=-1, target=into, latency_s=1.0, frames=deque([(1.0, b"a"), (2.0, b"b"), (5.0, b"c")]))
    try:
        next_s = way.deliver(2.5)
        written = os.read(out, 10)
        last_s = way.deliver(5.0)
    finally:
        os.close(out)
        os.close(into)

    assert (5.0, b"ab") == (next_s, written)
    assert inf == last_s


def test_frames_for_an_end_that_is_down_are_lost() -> None:
    """As on a real wire: the sender is not told, and later frames are not held up."""
    way = Way(source=-1, target=-1, latency_s=1.0, frames=deque([(1.0, b"a")]))

    assert inf == way.deliver(2.0)
