"""The 65B log is listed with sequence 4096; four of its own figures say 8192."""

from dataclasses import replace

import pytest
from published import GPT_65B_LAYOUT, gpt_65b

from benchmarks.estimators.megatron_formula import megatron_formula
from pipette_launch.cost.memory.peak import MemoryParts, peak_memory_bytes
from pipette_launch.facts import Recompute
from pipette_launch.text import MIB

FULL = Recompute(granularity="full", method="uniform", num_layers=1)
# No Apex, no Transformer Engine: nothing is fused into the gradient.
FLAGS = ("--no-gradient-accumulation-fusion",)


def stages(seq_length: int) -> tuple[MemoryParts, ...]:
    """Predict the memory of all eight stages."""
    job = gpt_65b()
    model = replace(job.model, seq_length=seq_length, max_position_embeddings=seq_length)
    layout = replace(GPT_65B_LAYOUT, recompute=FULL)
    return peak_memory_bytes(replace(job, model=model, performance_flags=FLAGS), layout)


def test_states_scores_and_positions_want_8192() -> None:
    """Allocated after a step on stage 0: 38,921.15 MiB. Scores of local attention alone are 2,048 MiB at 8192."""
    assert 38921.15 == pytest.approx(stages(8192)[0].static / MIB, rel=1e-3)
    assert 38921.15 > stages(4096)[0].static / MIB * 1.05


def test_a_middle_stage_holds_two_pipeline_tensors_more() -> None:
    """36,891.15 MiB: the states and the scores, and 128 MiB received and sent."""
    assert 36891.15 == pytest.approx(stages(8192)[1].static / MIB + 2 * 128, rel=1e-3)


def test_the_step_of_the_optimizer_wants_8192_positions() -> None:
    """Peak less allocated: 8,183.16 and 7,675.16 MiB, 4 bytes a parameter; the difference is two embeddings."""
    found = stages(8192)

    assert 8183.16 == pytest.approx(found[0].optimizer_step / MIB, rel=2e-3)
    assert 7675.16 == pytest.approx(found[1].optimizer_step / MIB, rel=2e-3)


def test_megatrons_own_figure_wants_8192() -> None:
    """It printed 86,554 MB of activations."""
    job = gpt_65b()
    longer = replace(job, model=replace(job.model, seq_length=8192))

    assert 86554 == round(megatron_formula(longer, GPT_65B_LAYOUT).activations / MIB)
