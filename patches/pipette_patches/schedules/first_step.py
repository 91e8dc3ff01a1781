"""The first step of a schedule is run under Megatron's own too, on the same data: both must give the same."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

TOLERANCE = 1e-3
"""Kernels that add up in any order change a norm by a tenth of this; one product that is missing changes it by more."""


class Replay:
    """A data iterator that can give the same items again."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._given: list[Any] = []
        self._at = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._at == len(self._given):
            self._given.append(next(self._source))
        self._at += 1
        return self._given[self._at - 1]

    def rewind(self) -> None:
        """Begin again at the first item."""
        self._at = 0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a step gave on one rank."""

    losses: tuple[float, ...]
    """Everything that the script's losses reported; on ranks of the last stage alone."""
    norms: tuple[float, ...]
    """Of each buffer of gradients."""

    @classmethod
    def of(cls, results: list[Any], chunks: list[Any]) -> Figures:
        """Read the results of a step, and the gradients that it left."""
        reports = [each for result in results if isinstance(result, dict) for each in result.values()]
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return cls(
            losses=tuple(float(torch.as_tensor(each).float().sum()) for each in reports),
            norms=tuple(float(torch.linalg.vector_norm(each.grad_data, dtype=torch.float32)) for each in buffers),
        )

    def difference(self, expected: Figures) -> str:
        """Say what differs from what was expected; empty where nothing does."""
        for what in ("losses", "norms"):
            ours, theirs = getattr(self, what), getattr(expected, what)
            if len(ours) != len(theirs):
                return f"{len(ours)} {what} for {len(theirs)}"
            for one, other in zip(ours, theirs, strict=True):
                is_same = math.isclose(one, other, rel_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))
                if not is_same:
                    return f"{'a loss' if what == 'losses' else 'a norm of gradients'} of {one:g} for {other:g}"
        return ""


def compared(
    chunks: list[Any],
    data: list[Any],
    ours: Callable[[list[Any]], list[Any]],
    megatrons: Callable[[list[Any]], list[Any]],
) -> tuple[list[Any], str]:
    """Run a step twice from the same state.

    Args:
        chunks: of the model, in Megatron's `DistributedDataParallel`.
        data: an iterator for each chunk, or None on ranks that get their data from others.
        ours: runs the step under our schedule, given the data.
        megatrons: runs it under Megatron's own.

    Returns:
        Results of our schedule, whose gradients are left; where any rank has other figures, those of Megatron's own,
        run once more, and what differs.

    """
    from megatron.core.tensor_parallel.random import _get_all_rng_states, _set_all_rng_states

    replays = [None if each is None else Replay(each) for each in data]
    states = _get_all_rng_states()

    def again(run: Callable[[list[Any]], list[Any]]) -> list[Any]:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        for each in replays:
            if each is not None:
                each.rewind()
        _set_all_rng_states(*states)
        return run(replays)

    expected = Figures.of(megatrons(replays), chunks)
    results = again(ours)
    mine = Figures.of(results, chunks).difference(expected)
    everyones: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    found = next((f"RANK {rank} has {fault}" for rank, fault in enumerate(everyones) if fault), "")
    return (again(megatrons), found) if found else (results, "")


def say(words: str) -> None:
    """Print a line on RANK 0."""
    if dist.get_rank() == 0:
        sys.stderr.write(f"pipette_patches.schedules: {words}\n")
        sys.stderr.flush()
