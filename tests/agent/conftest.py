"""What every test of the agents' stores leaves behind it: no thread that calls them."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator

import pytest

from pipette_launch.agent.signals import STORE_THREAD

# torch's store asks the name service for each client. A name service that limits requests would stop these tests.
ctypes.CDLL(None)["__nss_configure_lookup"](b"hosts", b"files")

MOST_S = 5.0
"""A call to a process that is stopped takes minutes."""


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Wait for the calls that a test left: one that returned while Python ends would abort the whole run."""
    before = set(threading.enumerate())
    yield
    # With the agents their stores go, and with these whoever watches them.
    gc.collect()
    ends_s = time.monotonic() + MOST_S
    # Not join(), which a thread that is about to start refuses.
    while any(thread.name.startswith(STORE_THREAD) for thread in set(threading.enumerate()) - before):
        if time.monotonic() > ends_s:
            break
        time.sleep(0.01)
