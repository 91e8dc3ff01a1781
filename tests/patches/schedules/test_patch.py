"""The patch `schedules`: supported releases, the comparison of a first step, and the watchdog."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipette_launch.facts.schedule import RELEASES
from pipette_patches.schedules.patch import PATCH, Figures, Watchdog

VERSIONS = ("0.15.3", "0.16.1", "0.19.2", "0.20.0", "0.20.0+d98e8a6", "0.21.0.dev1", "0.21.0rc0", "0.21.0")


@pytest.mark.parametrize("version", VERSIONS)
def test_patch_and_search_agree_on_releases(version: str) -> None:
    """Pre-releases count as their release."""
    release = tuple(int(part) for part in version.split(".")[:2])

    assert (RELEASES[0] <= release < RELEASES[1]) == PATCH.supports.contains(version, prereleases=True)


def test_megatrons_main_is_supported() -> None:
    """Its release was 0.20.0 in August 2026."""
    assert PATCH.supports.contains("0.20.0")


STEP = Figures(losses=(2.5, 3.5), norms=(0.7,))


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


def test_what_takes_too_long_is_said_once() -> None:
    """Neither before the patience is over, nor again for the same pass, nor outside a pipeline."""
    now = [0.0]
    watchdog = Watchdog(2, patience_s=10.0, clock=lambda: now[0])
    watchdog.begin("5I1")
    now[0] = 9.0
    early = watchdog.complaint()
    now[0] = 11.0

    assert ["", "pipeline rank 2 has been at 5I1 for 11 s", ""] == [early, watchdog.complaint(), watchdog.complaint()]

    watchdog.begin("5W1")
    now[0] = 20.0
    assert watchdog.complaint() == ""
    watchdog.begin("")
    now[0] = 99.0
    assert watchdog.complaint() == ""
