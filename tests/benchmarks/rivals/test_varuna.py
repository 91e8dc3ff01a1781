"""Varuna's estimate of memory and its rule for the micro-batch."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import llama_7b

from benchmarks.rivals import varuna
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.errors import PlanError
from pipette_launch.facts import Batch, Layout
from pipette_launch.text import GIB


def test_memory_is_states_and_one_micro_batch() -> None:
    """Last stage of 7B: 18 bytes a parameter, and activations once, not as often as there are live micro-batches."""
    job, layout = llama_7b(), Layout(pp=4, dp=2)
    # Flash attention keeps more from the second sample on.
    job = replace(job, model=replace(job.model, attention_backend="fused"))
    states = 18 * (8 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 32000 * 4096 + 4096)
    one, two = (varuna.memory_bytes(job, replace(layout, micro_batch_size=size)) for size in (1, 2))

    assert one - states == two - one
    assert one < max(stage.total for stage in peak_memory_bytes(job, layout))


@given(st.integers(24, 60))
def test_the_micro_batch_is_the_largest_that_fits(gibibytes: int) -> None:
    """It fits, and one more sample would not, or there is no more."""
    job, layout = replace(llama_7b(), batch=Batch(global_batch_size=64)), Layout(pp=8, dp=2)
    size = varuna.largest_micro_batch(job, layout, gibibytes * GIB)

    assert varuna.memory_bytes(job, replace(layout, micro_batch_size=size)) <= gibibytes * GIB
    assert size == 32 or varuna.memory_bytes(job, replace(layout, micro_batch_size=size + 1)) > gibibytes * GIB


def test_what_does_not_fit_is_refused() -> None:
    """7B on two stages of 24 GiB: Varuna has nothing but more stages to offer."""
    with pytest.raises(PlanError, match=r"Varuna cannot fit tp1 pp2 dp4.*take more stages"):
        varuna.largest_micro_batch(llama_7b(), Layout(pp=2, dp=4), 24 * GIB)
