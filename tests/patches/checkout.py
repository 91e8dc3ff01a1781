"""A checkout of Megatron-LM, in which replaced attributes are looked for."""

import os
from pathlib import Path

import pytest

from pipette_patches.replacements import Replacement, _version_in


def megatron_lm(replacement: Replacement) -> Path:
    """Return the folder; skips the test without a checkout, or if its release is not one of the replacement's."""
    if "MEGATRON_LM_DIR" not in os.environ:
        pytest.skip("MEGATRON_LM_DIR does not name a checkout of Megatron-LM")
    root = Path(os.environ["MEGATRON_LM_DIR"])
    if not replacement.fits(_version_in(root / "megatron" / "core" / "package_info.py")):
        pytest.skip(f"only in Megatron-LM {replacement.versions}")
    return root
