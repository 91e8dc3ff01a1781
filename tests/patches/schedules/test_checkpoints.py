"""A checkpoint holds the layers of the model, so training can go on under any other schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from patches.torchrun import answers

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes]
FOLDED = {"vpp": 2, "layers": 8, "named_weights": True}


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["", "v-half", "v-zb", ""], {**FOLDED, "tied": True}),
        (["v-min", "v-half", ""], {**FOLDED, "distributed_optimizer": True}),
    ],
    ids=["tied", "distributed optimizer"],
)
def test_training_goes_on_under_another_schedule(tmp_path: Path, names: list[str], options: dict[str, Any]) -> None:
    """Each step starts from the last checkpoint; losses are the same as under Megatron's own without checkpoints."""
    words = (tmp_path, json.dumps(names), json.dumps(options))
    (found,) = answers("checkpoint_worker.py", *words, size=4, timeout_s=180, num_lines=1)

    assert len(names) == len(found["parts"])
    assert len(set(found["whole"])) == len(names)
    assert found["whole"] == pytest.approx(found["parts"], rel=1e-6)
