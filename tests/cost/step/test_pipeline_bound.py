"""Paths through a pipeline in closed form: never longer than the simulation, and as long where stages are alike."""

from __future__ import annotations

import random

import numpy as np
import pytest
from event_loop import one_forward_one_backward_s
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.pipeline.engine import engine_of
from pipette_launch.cost.step.pipeline_bound import Drains, Pipelines, drains
from pipette_launch.facts import Layout

Passes = tuple[list[float], list[float]]
"""Forward and backward of each stage in model order."""


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Layout, int]:
    """A pipeline, interleaved or not, and a number of micro-batches that it can run."""
    pp = draw(st.integers(1, 6))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    if vpp == 1:
        return Layout(pp=pp), draw(st.integers(1, 20))
    group = pp + draw(st.integers(0, 3))
    rest = draw(st.sampled_from([0, *range(pp, group)]))
    return Layout(pp=pp, vpp=vpp, microbatch_group_size=group), group * draw(st.integers(1, 3)) + rest


def bounds(layout: Layout, microbatches: int, passes: Passes, hop_s: float, *, slow: Passes | None = None) -> Drains:
    """One pipeline's bounds."""

    def pipeline(times: Passes) -> Pipelines:
        forward, backward = (np.array(each).reshape(1, layout.vpp, layout.pp) for each in times)
        return Pipelines(
            forward_s_UVP=forward,
            backward_s_UVP=backward,
            hop_s_U=np.array([hop_s]),
            microbatches_U=np.array([microbatches]),
            group_size_U=np.array([layout.microbatch_group_size or layout.pp]),
        )

    return drains(pipeline(passes), slow=pipeline(slow) if slow else None)


def simulated(
    layout: Layout, microbatches: int, passes: Passes, hop_s: float, more_s: list[float] | None = None
) -> list[float]:
    """When each stage's last backward ends; `more_s` is what the first forwards take longer."""
    forward, backward = np.array(passes[0]), np.array(passes[1])
    first = forward + np.array(more_s or [0.0])
    hops = [hop_s] * (2 * (layout.num_chunks - 1)) + [0.0]
    durations = np.concatenate([forward, backward, first])[:, None]
    drained = engine_of(layout, microbatches).drain_s_SR(durations, np.array(hops)[:, None])
    return [float(each) for each in drained[:, 0]]


@given(shapes(), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.1, 1.0, 5.0]))
def test_no_path_is_longer_than_the_simulation(shape: tuple[Layout, int], rng: random.Random, hop_s: float) -> None:
    """Whatever the stages take, on every rank, for its first chunk and its last, with longer first forwards too."""
    layout, microbatches = shape
    stages = layout.num_chunks
    passes = ([rng.random() for _ in range(stages)], [2 * rng.random() for _ in range(stages)])
    more_s = [rng.random() for _ in range(stages)]

    found = bounds(layout, microbatches, passes, hop_s)

    ends = np.array(simulated(layout, microbatches, passes, hop_s)) * (1 + 1e-12)
    longer = np.array(simulated(layout, microbatches, passes, hop_s, more_s)) * (1 + 1e-12)
    assert (found.any_UP[0] <= ends[: layout.pp]).all()
    assert (found.early_UP[0] <= ends[-layout.pp :]).all()
    assert (found.first_UP[0] + sum(more_s) <= longer[: layout.pp]).all()


@given(shapes(), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.1, 1.0]), st.floats(1.0, 2.0))
def test_one_slow_rank_costs_at_least_so_much(
    shape: tuple[Layout, int], rng: random.Random, hop_s: float, slowness: float
) -> None:
    """Whichever rank it is."""
    layout, microbatches = shape
    stages = layout.num_chunks
    passes = ([rng.random() for _ in range(stages)], [2 * rng.random() for _ in range(stages)])
    slow = ([each * slowness for each in passes[0]], [each * slowness for each in passes[1]])

    found = bounds(layout, microbatches, passes, hop_s, slow=slow)

    for rank in range(layout.pp):
        mixed = tuple(
            [late if stage % layout.pp == rank else each for stage, (each, late) in enumerate(zip(*times, strict=True))]
            for times in zip(passes, slow, strict=True)
        )
        assert found.any_UP[0, 0] <= simulated(layout, microbatches, mixed, hop_s)[0] * (1 + 1e-12)


@given(st.integers(1, 12), st.integers(1, 40), st.floats(0.0, 5.0))
def test_equal_stages_are_exact(pp: int, microbatches: int, hop_s: float) -> None:
    """Without chunks the bound is the exact form of 1F1B."""
    passes = ([1.0] * pp, [2.0] * pp)
    expected = one_forward_one_backward_s(
        stages=pp, microbatches=microbatches, forward_s=1.0, backward_s=2.0, hop_s=hop_s
    )

    assert bounds(Layout(pp=pp), microbatches, passes, hop_s).any_UP[0, 0] == pytest.approx(expected)


@pytest.mark.parametrize("hop_s", [0.0, 0.5])
@pytest.mark.parametrize("group", [4, 6])
def test_equal_chunks_are_exact(hop_s: float, group: int) -> None:
    """Interleaved, as long as the chunks in between hide the hops."""
    layout = Layout(pp=4, vpp=3, microbatch_group_size=group)
    passes = ([1.0] * 12, [2.0] * 12)

    assert bounds(layout, 12, passes, hop_s).any_UP[0, 0] == pytest.approx(simulated(layout, 12, passes, hop_s)[0])


@given(st.integers(2, 8), st.integers(8, 40), st.floats(0.0, 1.0), st.floats(0.0, 2.0))
def test_a_heavy_head_is_met(pp: int, microbatches: int, hop_s: float, head_s: float) -> None:
    """One last stage that takes longer: within a hundredth."""
    passes = ([1.0] * (pp - 1) + [1.0 + head_s], [2.0] * (pp - 1) + [2.0 + 2 * head_s])
    layout = Layout(pp=pp)

    found = bounds(layout, microbatches, passes, hop_s).any_UP[0, 0]

    assert found >= 0.99 * simulated(layout, microbatches, passes, hop_s)[0]
