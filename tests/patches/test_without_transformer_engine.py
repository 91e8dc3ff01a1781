"""megatron-core imports every name of Transformer Engine from the stand-ins."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import warnings
warnings.simplefilter("ignore")
from pipette_patches import without_transformer_engine
without_transformer_engine.install()
import megatron.core.extensions.transformer_engine as wrapped
import megatron.core.models.gpt.gpt_layer_specs as layers
import megatron.core.optimizer
from megatron.core.utils import is_te_min_version
assert wrapped.HAVE_TE and layers.HAVE_TE and is_te_min_version("2.0")
assert issubclass(wrapped.TELinear, wrapped.te.pytorch.Linear)
"""


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is there")
def test_megatron_finds_transformer_engine() -> None:
    """Each class that megatron-core wraps is a class, and its version checks pass."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "patches")))
    subprocess.run([sys.executable, "-c", CODE], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=200)
