"""Pipette's network: its size, its gradients, that it learns, and that a seed fixes everything."""

import numpy as np
import pytest
from facts_for_tests import tiny_job

from benchmarks.estimators import pipette_mlp
from benchmarks.estimators.pipette_mlp import FEATURES, features, train
from pipette_launch.errors import FactError
from pipette_launch.facts import Layout
from pipette_launch.text import GIB


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Configurations whose memory is a plane, 5 to 40 GiB."""
    rng = np.random.default_rng(7)
    drawn = rng.integers(1, 9, size=(count, len(FEATURES))).astype(float)
    return drawn, GIB * (1 + drawn[:, 2] * 3 + drawn[:, 8] * 1.5)


def test_the_features_of_a_configuration() -> None:
    """World, layers, hidden, heads, tp, pp, dp, layers a stage, micro-batch, batch, batch a replica."""
    expected = (4, 4, 64, 4, 1, 2, 2, 2, 2, 8, 4)

    assert expected == features(tiny_job(4), Layout(pp=2, dp=2, micro_batch_size=2))
    assert len(expected) == len(FEATURES)


def test_the_network_has_its_published_size() -> None:
    """11-64-48-24-12-1: 5,377 weights and biases."""
    flat = pipette_mlp._initial(np.random.default_rng(0))

    assert 5377 == len(flat)
    assert [(12, 64), (65, 48), (49, 24), (25, 12), (13, 1)] == [m.shape for m in pipette_mlp._layers(flat)]


def test_gradients_are_those_of_the_loss() -> None:
    """Moved a little along the gradient, the loss changes as the gradient's square says."""
    rng = np.random.default_rng(3)
    flat = pipette_mlp._initial(rng)
    gradient = np.empty_like(flat)
    inputs = pipette_mlp._with_ones(rng.normal(size=(8, 11)))
    target = rng.normal(size=(8, 1)).astype(np.float32)

    def loss(at: np.ndarray) -> float:  # type: ignore[type-arg]
        output = pipette_mlp._forward(tuple(pipette_mlp._layers(at)), inputs)[-1]
        return float(((output - target).astype(np.float64) ** 2).mean())

    pipette_mlp._backward(tuple(pipette_mlp._layers(flat)), tuple(pipette_mlp._layers(gradient)), inputs, target)
    step = np.float32(1e-2) * gradient

    assert (loss(flat + step) - loss(flat - step)) / 2e-2 == pytest.approx(float((gradient**2).sum()), rel=1e-2)


def test_it_learns_a_plane() -> None:
    """A few hundred epochs bring the mean error on its own rows under 5 %, where their mean is off by 35 %."""
    inputs, target = rows(64)
    predicted = train(inputs, target, seed=1, epochs=400).predict(inputs)

    assert np.abs(predicted / target - 1).mean() < 0.05
    assert np.abs(target.mean() / target - 1).mean() > 0.35


def test_a_seed_fixes_everything() -> None:
    """The same seed gives the same digits, another seed others."""
    inputs, target = rows(40)
    first, again, other = (train(inputs, target, seed=seed, epochs=3).predict(inputs) for seed in (1, 1, 2))

    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_a_feature_that_never_varies_does_no_harm() -> None:
    """Its scale is taken as one, so nothing is divided by zero."""
    inputs, target = rows(8)
    inputs[:, 0] = 8

    assert np.isfinite(train(inputs, target, seed=1, epochs=2).predict(inputs)).all()


@pytest.mark.parametrize(
    ("inputs", "target", "words"),
    [
        (np.ones((2, 10)), np.ones(2), "rows of 11 values"),
        (np.full((2, 11), np.nan), np.ones(2), "finite"),
        (np.ones((2, 11)), np.ones(3), "one finite target for each of 2 rows"),
        (np.ones((0, 11)), np.ones(0), "for each of 0 rows"),
        (np.ones((2, 11)), np.array([1.0, np.inf]), "finite target"),
    ],
)
def test_bad_samples_are_refused(inputs: object, target: object, words: str) -> None:
    """Rows of another width, values that are not numbers, no rows, another number of targets."""
    with pytest.raises(FactError, match=words):
        train(inputs, target, seed=1, epochs=1)  # type: ignore[arg-type]


def test_no_epochs_are_refused() -> None:
    """Training needs at least one."""
    with pytest.raises(FactError, match="epochs must be at least 1, got 0"):
        train(*rows(2), seed=1, epochs=0)
