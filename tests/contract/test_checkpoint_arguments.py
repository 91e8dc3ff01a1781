"""`--use-checkpoint-args` takes what the release's own `load_args_from_checkpoint` takes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pipette_launch.megatron import script_version
from pipette_launch.megatron.checkpoint_files import WHERE_MISSING, always_taken
from pipette_launch.megatron.flags import flag_table, release_of

CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "")
NOT_THE_MODELS = {"ckpt_format", "tokenizer_model", "tokenizer_type"}
"""Of no effect on a model, or taken under a further condition."""


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_DIR names no checkout of Megatron-LM")
def test_the_same_arguments_are_taken() -> None:
    """Each with or without the user's consent, as far as flags of the release store them."""
    text = (Path(CHECKOUT) / "megatron" / "training" / "checkpointing.py").read_text()
    body = text.partition("def load_args_from_checkpoint(")[2].partition("args.use_mp_args_from_checkpoint_args")[0]
    calls = re.findall(r"_set_arg\(\s*['\"](\w+)['\"](?:,\s*force=(True|False))?", body)
    version = script_version(f"{CHECKOUT}/pretrain_gpt.py", {})
    known = {flag.dest for flag in flag_table(version).values()} - NOT_THE_MODELS
    always = set(always_taken(release_of(version)))

    assert len(calls) > 40
    assert {dest for dest, force in calls if force == "True"} & known == always & known
    assert {dest for dest, force in calls if force != "True"} & known == (set(WHERE_MISSING) - always) & known
