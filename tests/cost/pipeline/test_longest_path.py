"""The loops in C give the digits of those in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from c_for_tests import in_c
from cost.pipeline.test_steady_state import orders
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipette_launch.cost.pipeline import engine
from pipette_launch.cost.pipeline.engine import Engine, critical_counts
from pipette_launch.cost.pipeline.order import Order


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(orders(), st.integers(0, 10**6), st.integers(1, 6), st.booleans())
def test_ends_and_counts_are_those_of_numpy(
    monkeypatch: pytest.MonkeyPatch, order: Order, seed: int, pipelines: int, are_whole: bool
) -> None:
    """To the last digit, for schedules of every kind; whole numbers make ties, which both settle alike."""
    rng = np.random.default_rng(seed)
    durations_R = rng.uniform(0.5, 2.0, (3 * order.num_stages, pipelines))
    hops_R = rng.uniform(0.0, 0.5, (2 * order.num_stages - 1, pipelines))
    if are_whole:
        durations_R, hops_R = durations_R.round(), hops_R.round()
    hops_R[-1] = 0.0
    found = []
    for module in (None, in_c("cost.pipeline._longest_path")):
        monkeypatch.setattr(engine, "_IN_C", module)
        made = Engine(order)
        found.append(
            (
                made.ends_AR(durations_R, hops_R),
                made.drain_s_SR(durations_R, hops_R),
                *critical_counts(made, durations_R, hops_R),
            )
        )

    for in_numpy, in_c_code in zip(*found, strict=True):
        assert in_numpy.tolist() == in_c_code.tolist()
