"""Pipette's neural memory estimator (DATE 2024): eleven features of a configuration to used GPU memory.

Re-derived from predict_model/predict_gpu_mem_a100_real_result_torch.py and from
strategy/merge4/llm_train_strategy_assignment_total_v3.py of yimjinkyu1/date2024_pipette@a2b0683: an MLP
11-64-48-24-12-1 with ReLU on standard-scaled features, Adam at 0.1 with a tenth of it after every 1000 of 5000 epochs,
batches of 32, mean squared error on MiB. Here in numpy, every draw from one seed. Sequence length, vocabulary,
recompute, optimizer, interleaving and the rest are not among the features.
"""

# N = rows, F = the eleven features, I = these and a one for the bias.

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipette_launch.errors import FactError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.text import MIB

Array = NDArray[np.float64]
Single = NDArray[np.float32]
"""Number format of the network, as in the original."""

FEATURES = (
    "world_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "tp",
    "pp",
    "dp",
    "layers_per_stage",
    "micro_batch_size",
    "global_batch_size",
    "batch_per_replica",
)
EPOCHS = 5000

_WIDTHS = (len(FEATURES), 64, 48, 24, 12, 1)
_BATCH = 32
_LEARNING_RATE = 0.1
_NUM_RATES = 5
_STEP_FACTOR = 0.1
# Adam's defaults (Kingma and Ba 2015).
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


@dataclass(frozen=True, kw_only=True)
class PipetteMlp:
    """A trained estimator."""

    mean_F: Array
    scale_F: Array
    weights: tuple[Single, ...]
    """Matrix of each layer, inputs + 1 by outputs; its last row is the bias."""

    def predict(self, features_NF: ArrayLike) -> Array:
        """Predict bytes for rows of features."""
        rows = (_checked_features(features_NF) - self.mean_F) / self.scale_F
        return _forward(self.weights, _with_ones(rows))[-1][:, 0].astype(np.float64) * MIB


def features(job: Job, layout: Layout) -> tuple[float, ...]:
    """List the eleven features of a configuration, in the order of `FEATURES`."""
    model, batch = job.model, job.batch.global_batch_size
    return (
        layout.world_size,
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        layout.tp,
        layout.pp,
        layout.dp,
        model.num_layers / layout.pp,
        layout.micro_batch_size,
        batch,
        batch // layout.dp,
    )


def train(features_NF: ArrayLike, target_bytes_N: ArrayLike, *, seed: int, epochs: int = EPOCHS) -> PipetteMlp:
    """Train the estimator as published; the same seed gives the same estimator.

    Args:
        features_NF: a row of `features` for each sample.
        target_bytes_N: used memory of each sample.
        seed: of the initial weights and of the order of the samples.
        epochs: passes over the samples; after every fifth of them the learning rate falls to a tenth.

    Raises:
        FactError: no rows, rows of another width, values that are not finite, or another number of targets.

    """
    rows = _checked_features(features_NF)
    target = np.asarray(target_bytes_N, dtype=np.float64) / MIB
    if target.shape != rows.shape[:1] or not len(rows) or not np.isfinite(target).all():
        raise FactError(f"training needs one finite target for each of {len(rows)} rows, got shape {target.shape}")
    if epochs < 1:
        raise FactError(f"epochs must be at least 1, got {epochs}")
    mean, deviation = rows.mean(axis=0), rows.std(axis=0)
    scale = np.where(deviation > 0, deviation, 1.0)
    scaled = _with_ones((rows - mean) / scale)
    target_mib = target[:, None].astype(np.float32)
    rng = np.random.default_rng(seed)
    flat = _initial(rng)
    weights = tuple(_layers(flat))
    gradient = np.empty_like(flat)
    slots = tuple(_layers(gradient))
    adam = _Adam(len(flat))
    for epoch in range(epochs):
        rate = _LEARNING_RATE * _STEP_FACTOR ** (epoch * _NUM_RATES // epochs)
        order = rng.permutation(len(rows))
        for start in range(0, len(rows), _BATCH):
            batch = order[start : start + _BATCH]
            _backward(weights, slots, scaled[batch], target_mib[batch])
            adam.step(flat, gradient, rate)
    return PipetteMlp(mean_F=mean, scale_F=scale, weights=weights)


class _Adam:
    """Kingma and Ba 2015, algorithm 1, on one flat vector."""

    def __init__(self, size: int) -> None:
        self._first = np.zeros(size, dtype=np.float32)
        self._second = np.zeros(size, dtype=np.float32)
        self._steps = 0

    def step(self, parameters: Single, gradient: Single, rate: float) -> None:
        """Move the parameters in place."""
        self._steps += 1
        self._first += (1 - _BETA1) * (gradient - self._first)
        self._second += (1 - _BETA2) * (gradient * gradient - self._second)
        first_scale = rate / (1 - _BETA1**self._steps)
        second_scale = 1 / (1 - _BETA2**self._steps)
        parameters -= first_scale * self._first / (np.sqrt(self._second * second_scale) + _EPSILON)


def _initial(rng: np.random.Generator) -> Single:
    """Uniform within 1/sqrt(inputs), weights and biases alike, which is torch's default for a linear layer."""
    parts = []
    for inputs, outputs in itertools.pairwise(_WIDTHS):
        bound = inputs**-0.5
        parts.append(rng.uniform(-bound, bound, size=(inputs + 1) * outputs))
    return np.concatenate(parts).astype(np.float32)


def _layers(flat: Single) -> Iterator[Single]:
    """Views of each layer's matrix on one flat vector; the last row of a matrix is the bias."""
    start = 0
    for inputs, outputs in itertools.pairwise(_WIDTHS):
        end = start + (inputs + 1) * outputs
        yield flat[start:end].reshape(inputs + 1, outputs)
        start = end


def _forward(weights: tuple[Single, ...], inputs_NI: Single) -> list[Single]:
    """Return the input of every layer, with a column of ones for the bias, and the output of the last."""
    values = [inputs_NI]
    for matrix in weights[:-1]:
        hidden = np.ones((len(inputs_NI), matrix.shape[1] + 1), dtype=np.float32)
        np.maximum(values[-1] @ matrix, 0.0, out=hidden[:, :-1])
        values.append(hidden)
    values.append(values[-1] @ weights[-1])
    return values


def _backward(weights: tuple[Single, ...], slots: tuple[Single, ...], inputs_NI: Single, target_N1: Single) -> None:
    """Write the gradient of the mean squared error into `slots`."""
    values = _forward(weights, inputs_NI)
    error = (values[-1] - target_N1) * np.float32(2.0 / len(target_N1))
    for layer in range(len(weights) - 1, -1, -1):
        np.matmul(values[layer].T, error, out=slots[layer])
        if layer:
            error = (error @ weights[layer][:-1].T) * (values[layer][:, :-1] > 0)


def _with_ones(rows_NF: Array) -> Single:
    ones_N1 = np.ones((len(rows_NF), 1))
    return np.concatenate([rows_NF, ones_N1], axis=1).astype(np.float32)


def _checked_features(features_NF: ArrayLike) -> Array:
    rows = np.asarray(features_NF, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != len(FEATURES) or not np.isfinite(rows).all():
        raise FactError(
            f"features must be finite rows of {len(FEATURES)} values ({', '.join(FEATURES)}), got {rows.shape}"
        )
    return rows
