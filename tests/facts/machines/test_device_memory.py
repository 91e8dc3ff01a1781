"""What a device holds beside the model, and what stages held."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.errors import FactError
from pipette_launch.facts import Batch, DeviceOverhead, Layout, StageReading
from pipette_launch.facts.machines.device_memory import memory_digest


def test_a_communicator_takes_its_share_of_what_they_added() -> None:
    """Four of them made 600 bytes of a context of 500: 150 each."""
    overhead = DeviceOverhead(alone_bytes=500, together_bytes=1100, num_communicators=4, workspace_bytes=70)

    assert 150 == overhead.communicator_bytes


def test_no_communicator_takes_nothing() -> None:
    """A slot alone has none, and a driver that gave something back does not make one negative."""
    assert (
        0 == DeviceOverhead(alone_bytes=5, together_bytes=5, num_communicators=0, workspace_bytes=0).communicator_bytes
    )
    assert (
        0 == DeviceOverhead(alone_bytes=5, together_bytes=4, num_communicators=1, workspace_bytes=0).communicator_bytes
    )


def reading(**changes: object) -> StageReading:
    """A stage that held nothing."""
    fields = {
        "job_digest": "",
        "layout": Layout(pp=2),
        "pp_rank": 0,
        "slot": 0,
        "allocator_peak_bytes": 0,
        "reserved_peak_bytes": 0,
        "device_peak_bytes": 0,
    }
    return StageReading(**{**fields, **changes})  # type: ignore[arg-type]


def test_nothing_is_negative() -> None:
    """Neither overheads nor readings."""
    with pytest.raises(FactError, match="alone_bytes must be at least 0, got -1"):
        DeviceOverhead(alone_bytes=-1, together_bytes=0, num_communicators=0, workspace_bytes=0)
    with pytest.raises(FactError, match="allocator_peak_bytes must be at least 0, got -1"):
        reading(allocator_peak_bytes=-1)


def test_a_reading_is_of_a_stage_that_exists() -> None:
    """Two pipeline ranks have no third."""
    with pytest.raises(FactError, match="pp_rank=2 is not one of the layout's 2"):
        reading(pp_rank=2)


def test_a_reading_is_of_one_job() -> None:
    """Another batch or model holds other bytes; another layout or other pins of the same job are no other job."""
    job = tiny_job(4)

    assert memory_digest(job) == memory_digest(replace(job, own=Layout(tp=4), pinned=("tp",), train_iters=99))
    assert memory_digest(job) != memory_digest(replace(job, batch=Batch(global_batch_size=4)))
    assert memory_digest(job) != memory_digest(replace(job, model=tiny_model(num_layers=8)))
