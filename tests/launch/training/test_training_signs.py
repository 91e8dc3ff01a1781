"""Signs of training where no iteration was shown."""

from __future__ import annotations

from typing import Any

import pytest

from pipette_launch.launch.training.training_signs import SETTLED_S, has_trained

DEAD_AT_ONCE: dict[str, Any] = {
    "lived_s": 5.0,
    "step_time_s": 1.0,
    "exit_codes": {1},
    "saved_before": "10",
    "saved_now": "10",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"saved_before": "", "saved_now": ""}, False),
        ({"saved_now": "20"}, True),
        ({"saved_before": "", "saved_now": "20"}, True),
        ({"exit_codes": {16}}, True),
        ({"exit_codes": {-15, 17}}, True),
        ({"exit_codes": {-9}}, False),
        ({"lived_s": SETTLED_S}, True),
        ({"lived_s": SETTLED_S, "step_time_s": 60.0}, False),
        ({"lived_s": 1200.0, "step_time_s": 60.0}, True),
    ],
)
def test_a_checkpoint_a_code_or_a_long_life_is_a_sign(changes: dict[str, Any], expected: bool) -> None:
    """A new checkpoint, Megatron's own call for a restart, or a life of many steps; nothing else is."""
    assert expected == has_trained(**{**DEAD_AT_ONCE, **changes})
