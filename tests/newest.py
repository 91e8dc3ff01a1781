"""Gaps of the product with the newest megatron-core: tests that must fail there, each for a known reason."""

from collections.abc import Container, Iterable
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

CORE = Version(version("megatron-core"))


def with_gap_since_019(names: Iterable[str], reason: str, *, but: Container[str] = ()) -> list[Any]:
    """Return the parameters of a test. All but the names in `but` must fail with megatron-core 0.19 or later."""
    gap = pytest.mark.xfail(Version("0.19") <= CORE, reason=f"megatron-core 0.19: {reason}", strict=True)
    return [name if name in but else pytest.param(name, marks=gap) for name in names]
