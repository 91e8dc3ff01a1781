"""Layers go where they make the slowest stage quickest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from facts_for_tests import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from pipette_launch.errors import LayoutError
from pipette_launch.facts import HybridLayers
from pipette_launch.search.layouts.partition import LayerSeconds, balanced_chunks, by_flops, by_parts, stage_seconds


def live(cut: tuple[int, ...]) -> int:
    """Layers times micro-batches at once, on the stage where that is most: the first holds one for each stage."""
    return max((len(cut) - stage) * layers for stage, layers in enumerate(cut))


TIMES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 3.7])


def cuts(layers: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut layers into chunks, empty ones included."""
    if chunks == 1:
        yield (layers,)
        return
    for size in range(layers + 1):
        yield from ((size, *rest) for rest in cuts(layers - size, chunks - 1))


@st.composite
def parts(draw: st.DrawFn, *, equal: bool) -> LayerSeconds:
    """A small model whose ends may cost more than its layers."""
    size = draw(st.integers(1, 9))
    kinds = draw(st.lists(st.sampled_from([1.0, 1.0, 2.5]), min_size=size, max_size=size))
    return LayerSeconds(layers_s=(1.3,) * size if equal else tuple(kinds), first_s=draw(TIMES), last_s=draw(TIMES))


@settings(max_examples=60, deadline=None)
@given(parts(equal=False), st.integers(1, 4))
def test_plain_stages_are_as_quick_as_trying_everything(seconds: LayerSeconds, pp: int) -> None:
    """No other cut has a quicker slowest stage, and none as quick holds fewer live layers."""
    found = balanced_chunks(seconds, pp=pp, vpp=1)
    slowest_s = max(stage_seconds(seconds, found, pp))
    every = {cut: max(stage_seconds(seconds, cut, pp)) for cut in cuts(len(seconds.layers_s), pp)}

    assert sum(found) == len(seconds.layers_s)
    assert min(every.values()) == pytest.approx(slowest_s)
    assert min(live(cut) for cut in every if every[cut] <= slowest_s * (1 + 1e-9)) == live(found)


@settings(max_examples=40, deadline=None)
@given(parts(equal=True), st.integers(2, 3))
def test_interleaved_stages_of_equal_layers_are_too(seconds: LayerSeconds, pp: int) -> None:
    """Interleaved, with layers of one kind, the slowest rank is as quick as any cut makes it."""
    found = balanced_chunks(seconds, pp=pp, vpp=2)
    best_s = min(max(stage_seconds(seconds, cut, pp)) for cut in cuts(len(seconds.layers_s), 2 * pp))

    assert (2 * pp, len(seconds.layers_s)) == (len(found), sum(found))
    assert max(stage_seconds(seconds, found, pp)) == pytest.approx(best_s)


@settings(max_examples=40, deadline=None)
@given(parts(equal=False), st.integers(2, 3))
def test_interleaved_mixed_layers_come_within_one_layer(seconds: LayerSeconds, pp: int) -> None:
    """With mixed layers the slowest rank is at most one layer above the best of all cuts."""
    found = balanced_chunks(seconds, pp=pp, vpp=2)
    best_s = min(max(stage_seconds(seconds, cut, pp)) for cut in cuts(len(seconds.layers_s), 2 * pp))

    assert (2 * pp, len(seconds.layers_s)) == (len(found), sum(found))
    assert max(stage_seconds(seconds, found, pp)) <= best_s + max(seconds.layers_s) + 1e-9


@pytest.mark.parametrize(
    ("first_s", "last_s", "pp", "vpp", "expected"),
    [
        (0.0, 0.0, 4, 1, (2, 2, 2, 2)),
        (0.0, 1.0, 4, 1, (1, 2, 3, 2)),
        (0.0, 2.0, 2, 1, (5, 3)),
        (1.0, 2.0, 3, 1, (2, 4, 2)),
        (0.0, 5.0, 4, 1, (2, 2, 4, 0)),
        (0.0, 0.0, 3, 1, (2, 3, 3)),
        (0.0, 2.0, 2, 2, (2, 2, 3, 1)),
    ],
)
def test_ends_that_cost_take_layers_away(
    first_s: float, last_s: float, pp: int, vpp: int, expected: tuple[int, ...]
) -> None:
    """Eight layers of one second each, worked by hand."""
    seconds = LayerSeconds(layers_s=(1.0,) * 8, first_s=first_s, last_s=last_s)

    assert expected == balanced_chunks(seconds, pp=pp, vpp=vpp)


def test_unmeasured_parts_are_weighed_by_flops() -> None:
    """The head counts by its width, an embedding for nothing, and each depth of prediction as a layer and a head."""
    plain, deeper = by_flops(tiny_model()), by_flops(tiny_model(mtp_num_layers=2))

    assert (tiny_model().forward_flops_per_token(),) * 4 == plain.layers_s
    assert (0.0, 2.0 * 64 * 256) == (plain.first_s, plain.last_s)
    assert deeper.last_s == 3 * plain.last_s + 2 * plain.layers_s[0]


def test_a_depth_of_prediction_weighs_what_it_was_timed_to() -> None:
    """The last stage has the head and two of them."""
    parts = {"layer": 1.0, "embedding": 0.1, "head": 0.5, "prediction": 1.7}

    assert pytest.approx(0.5 + 2 * 1.7) == by_parts(tiny_model(mtp_num_layers=2), parts).last_s


def test_layers_without_times_are_refused() -> None:
    """A model has layers, and no time is negative."""
    for bad in ({"layers_s": ()}, {"layers_s": (0.0,)}, {"first_s": -1.0}):
        with pytest.raises(LayoutError, match="layers need times"):
            LayerSeconds(**{"layers_s": (1.0,), "first_s": 0.0, "last_s": 0.0} | bad)  # type: ignore[arg-type]


def test_stages_of_hybrid_models_are_cut_by_time() -> None:
    """Seven quick layers balance one slow one."""
    seconds = {"mamba_layer": 1.0, "attention_layer": 7.0, "embedding": 0.0, "head": 0.0}
    model = tiny_model(
        hybrid=HybridLayers(
            pattern="MMMMMMM*", mamba_state_dim=16, mamba_head_dim=8, mamba_num_groups=2, mamba_num_heads=16
        ),
        num_layers=8,
    )

    assert (7, 1) == balanced_chunks(by_parts(model, seconds), pp=2, vpp=1)
    assert by_flops(model).layers_s[0] != by_flops(model).layers_s[-1]
