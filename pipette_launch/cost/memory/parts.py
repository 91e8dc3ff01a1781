"""Bytes at the peak of pipeline ranks, by kind, and how the kinds add up to the peak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Bytes = TypeVar("Bytes", int, NDArray[np.int64])


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakParts(Generic[Bytes]):
    """Bytes by kind at the peak: numbers for one pipeline rank, or columns for many."""

    weights: Bytes
    """With their copies in FP8."""
    gradients: Bytes
    optimizer: Bytes
    shared_buffer: Bytes
    """Megatron's global buffer, which Megatron keeps once it was used."""
    dummy_gradients: Bytes
    """Stand-ins for gradients that are added to the buffer as they are computed; they are never freed."""
    activations: Bytes
    """Kept by the layers of all live micro-batches."""
    embedding: Bytes
    """Inputs of the model for all live micro-batches, on the first rank."""
    recompute: Bytes
    """Activations of one recomputed layer while its backward runs."""
    backward: Bytes
    """Largest extra need of the backward pass of a layer, with offloading, or with a forward between backwards."""
    mask: Bytes
    """The data loader's attention mask, while a forward pass runs."""
    loading: Bytes
    """The whole mask while it is loaded, less the bytes that the forward pass after it will keep."""
    head: Bytes
    """Final norm, logits and loss of one micro-batch, and what offloading leaves of the last layer until then."""
    deferred: Bytes
    """Inputs and gradients kept for the deferred weight gradients of the head."""
    buffers: Bytes
    """The pipeline's tensors in flight."""
    optimizer_step: Bytes
    """Temporaries of the optimizer step, which runs when no activation is kept any more."""
    whole: Bytes
    """Under FSDP: weights and gradients of the layers at work, beside the shards."""

    @property
    def static(self) -> Bytes:
        """Bytes held all the time."""
        return self.weights + self.gradients + self.optimizer + self._lasting

    @property
    def total(self) -> Bytes:
        """The peak: static, and the larger of forward-backward and optimizer step."""
        larger = max if isinstance(self.weights, int) else np.maximum
        return self.static + larger(self._kept + reduce(larger, self._instants), self.optimizer_step)

    @property
    def _lasting(self) -> Bytes:
        return self.shared_buffer + self.dummy_gradients

    @property
    def _kept(self) -> Bytes:
        return self.activations + self.embedding + self.deferred + self.buffers + self.whole

    @property
    def _instants(self) -> tuple[Bytes, Bytes, Bytes]:
        """The end of a forward pass, where the loss is computed, a layer's backward, and loading: never at once."""
        return self.mask + self.head, self.recompute + self.backward, self.loading


class MemoryParts(PeakParts[int]):
    """Bytes on one pipeline rank at its peak, by kind."""

    __slots__ = ()

    def by_kind(self) -> dict[str, int]:
        """Split the peak as users read it; the values add up to `total`.

        At the peak one of four things happens: the loss with its logits, the backward of a layer, the loading of a
        mask, or the step of the optimizer, whose temporaries count as buffers.
        """
        kinds = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        at_loss, at_backward, at_loading = self._instants
        if self._kept + max(self._instants) < self.optimizer_step:
            return {**kinds, "activations": 0, "logits": 0, "buffers": self._lasting + self.optimizer_step}
        is_loss = at_loss >= max(at_backward, at_loading)
        return {
            **kinds,
            "activations": self.activations + self.embedding + (self.mask if is_loss else max(at_backward, at_loading)),
            "logits": self.deferred + (self.head if is_loss else 0),
            "buffers": self._lasting + self.buffers + self.whole,
        }
