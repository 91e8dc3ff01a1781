"""Gaps of the product with the newest megatron-core; tests fail there for a known reason."""

from importlib.metadata import version

import pytest
from packaging.version import Version

CORE = Version(version("megatron-core"))


def gap_since_019(reason: str) -> pytest.MarkDecorator:
    """Expect failures with megatron-core 0.19 or later; some cases of a test may pass there."""
    return pytest.mark.xfail(Version("0.19") <= CORE, reason=f"megatron-core 0.19: {reason}", strict=False)
