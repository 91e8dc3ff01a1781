"""A folded pipeline has both ends of the model on its first rank, and every other rank is one of the middle."""

from __future__ import annotations

from dataclasses import replace

from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.cost.memory.folded import folded_peaks
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Batch, Layout

LAYOUT = Layout(pp=4, vpp=2)
MODEL = tiny_model(num_layers=8, untie_embeddings_and_output_weights=True)
JOB = replace(tiny_job(4, own=LAYOUT, batch=Batch(global_batch_size=8)), model=MODEL)


def test_the_first_rank_holds_both_ends_and_nothing_is_lost() -> None:
    """Weights of all ranks add up to those of Megatron's placement; the first has what first and last had of ends."""
    folded = folded_peaks(JOB, LAYOUT, [100, 90, 80, 70])
    stock = peak_memory_bytes(JOB, LAYOUT)
    counts = [each.dense for each in stage_parameters(MODEL, LAYOUT)]

    for kind in ("weights", "gradients", "optimizer"):
        assert sum(getattr(each, kind) for each in folded) == sum(getattr(each, kind) for each in stock)
    assert folded[0].weights == 4 * (counts[0] + counts[3] - counts[1])
    assert [100, 90, 80, 70] == [each.activations for each in folded]
    assert folded[0].head == stock[-1].head
    assert folded[0].embedding == stock[0].embedding
    assert {0} == {each.head for each in folded[1:]}
