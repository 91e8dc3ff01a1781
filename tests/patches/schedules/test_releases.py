"""The patch supports the releases for which the search chooses schedules."""

import pytest

from pipette_launch.facts.known_schedules import RELEASES
from pipette_patches.schedules.patch import PATCH

VERSIONS = ("0.13.1", "0.14.0", "0.16.1", "0.19.2", "0.20.0", "0.20.0+d98e8a6", "0.21.0.dev1", "0.21.0rc0", "0.21.0")


@pytest.mark.parametrize("version", VERSIONS)
def test_patch_and_search_agree_on_releases(version: str) -> None:
    """Pre-releases count as their release."""
    release = tuple(int(part) for part in version.split(".")[:2])

    assert (RELEASES[0] <= release < RELEASES[1]) == PATCH.supports.contains(version, prereleases=True)


def test_megatrons_main_is_supported() -> None:
    """Its release was 0.20.0 in August 2026."""
    assert PATCH.supports.contains("0.20.0")
