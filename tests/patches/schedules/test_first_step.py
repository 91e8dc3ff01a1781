"""The comparison of two first steps, and the replay of their data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipette_patches.schedules.patch import Figures, Replay

STEP = Figures(losses=(2.5, 3.5), norms=(0.7,))


def test_data_is_given_again_and_goes_on_behind() -> None:
    """The second run reads the same items as the first, and then new ones."""
    data = Replay(iter(range(5)))
    first = [next(data), next(data)]
    data.rewind()

    assert (first, [next(data) for _ in range(4)]) == ([0, 1], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"norms": (0.7 * 1.0001,)}, ""),
        ({"losses": (2.5,)}, "1 losses for 2"),
        ({"losses": (2.5, 3.6)}, "a loss of 3.6 for 3.5"),
        ({"norms": (0.71,)}, "a norm of gradients of 0.71 for 0.7"),
        ({"norms": (float("nan"),)}, "a norm of gradients of nan for 0.7"),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, tuple[float, ...]], words: str) -> None:
    """A tenth of a per mille is what kernels that add up in any order may change; nothing more."""
    assert words == replace(STEP, **changes).difference(STEP)


def test_steps_that_are_no_numbers_under_both_are_the_same() -> None:
    """A loss that overflows does so under Megatron's own schedule too."""
    overflown = replace(STEP, losses=(float("nan"), 3.5))

    assert overflown.difference(overflown) == ""
