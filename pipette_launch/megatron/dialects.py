"""Dialects: the words by which a job's script takes its settings. Megatron's flags are the first dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipette_launch.facts import Job, Layout
from pipette_launch.megatron import bridge
from pipette_launch.megatron.layout import write_arguments


class Dialect(Protocol):
    """Reader and writer of a script's words."""

    @property
    def words(self) -> tuple[str, ...]:
        """The user's words after the script's name."""

    def flags(self, version: str) -> tuple[str, ...]:
        """Return Megatron's flags of a release that describe the same job."""

    def written(self, job: Job, layout: Layout) -> tuple[str, ...]:
        """Return the words with which the script runs exactly the given layout."""


@dataclass(frozen=True, slots=True)
class Flags:
    """Megatron's own flags."""

    words: tuple[str, ...]

    def flags(self, version: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the words themselves."""
        return self.words

    def written(self, job: Job, layout: Layout) -> tuple[str, ...]:
        """Return the words with the flags of a layout."""
        return write_arguments(self.words, job=job, layout=layout)


def dialect_of(words: Sequence[str], *, script: str, world_size: int, saved: Path | None = None) -> Dialect:
    """Return the dialect of a job's words.

    `saved` is a configuration that Megatron-Bridge saved. Without this file, a script of Megatron-Bridge runs up to its
    training as one of `world_size` ranks. Raise PipetteError if the configuration cannot be read.
    """
    if saved is not None:
        return bridge.saved(saved, words)
    if bridge.is_bridge(words, script):
        return bridge.from_script(script, words, world_size=world_size)
    return Flags(tuple(words))
