"""Counts on the longest path are a subgradient of the makespan."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipette_launch.cost.pipeline.critical_path import critical_counts
from pipette_launch.cost.pipeline.simulate import Engine, engine_of
from pipette_launch.facts import Layout

ENGINES = [
    engine_of(Layout(pp=pp, vpp=vpp), num, rendezvous=rendezvous)
    for pp, vpp, num in ((1, 1, 3), (2, 1, 4), (4, 1, 6), (2, 2, 4))
    for rendezvous in (False, True)
] + [engine_of(Layout(pp=2, vpp=2, microbatch_group_size=size), 6, blocking_ends=True) for size in (2, 3)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(ENGINES), st.integers(0, 1000), st.integers(1, 9))
def test_counts_are_a_subgradient(engine: Engine, seed: int, pipelines: int) -> None:
    """They give each makespan exactly, and no other pipeline's makespan is below what they say of it."""
    stages = engine.schedule.num_stages
    rng = np.random.default_rng(seed)
    durations, hops = rng.random((3 * stages, pipelines)), rng.random((2 * stages - 1, pipelines))
    hops[-1] = 0
    makespan = engine.drain_s_SR(durations, hops).max(axis=0)

    of_durations, of_hops = critical_counts(engine, durations, hops)
    said = of_durations.T @ durations + of_hops.T @ hops

    np.testing.assert_allclose(np.diag(said), makespan, rtol=1e-12)
    assert (said <= makespan * (1 + 1e-12)).all()


def test_counts_by_hand() -> None:
    """Two equal stages, two micro-batches, 1F1B: the path is F F B B on the last stage, and one pass before and after.

    0F0 -> 1F0 1B0 1F1 1B1 -> 0B1, with a hop to the last stage and one back.
    """
    engine = engine_of(Layout(pp=2), 2)
    durations = np.array([[1.0], [1.0], [2.0], [2.0], [1.0], [1.0]])

    of_durations, of_hops = critical_counts(engine, durations, np.array([[0.5], [0.5], [0.0]]))

    assert [0.0, 1.0, 1.0, 2.0, 1.0, 1.0] == of_durations[:, 0].tolist()
    assert [1.0, 1.0, 0.0] == of_hops[:, 0].tolist()
