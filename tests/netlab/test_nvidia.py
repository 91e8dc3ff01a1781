"""NVIDIA's script in the suite: which layouts stand beside the pick, and where they are put."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.netlab.suite import nvidia
from benchmarks.netlab.suite.cases import NUM_HOSTS, megatron_lm, nvidia_training
from benchmarks.netlab.suite.contenders import Contender
from benchmarks.netlab.suite.nvidia import FIXED, best_placed
from benchmarks.netlab.suite.parts import Setting
from benchmarks.netlab.system import LabError
from benchmarks.rivals.pick import Placement
from pipette_launch import megatron
from pipette_launch.facts import Layout


class Priced:
    """Predicts the least where the first host has the last rank, and nothing for pipelines."""

    def contender(self, name: str, layout: Layout, placement: Placement) -> Contender:
        """Make one that nobody runs."""
        seconds = 9.0 - placement[0] if layout.pp == 1 else None
        return Contender(names=(name,), layout=layout, placement=placement, words=(), predicted_s=seconds)


def test_at_least_eight_fixed_layouts_that_the_job_allows_stand_beside_the_pick() -> None:
    """The first is what the user's words ask for, and all train the global batch on all hosts."""
    words = nvidia_training(Path("checkout"), iterations=4)
    job = megatron.read_job(words[1:], world_size=NUM_HOSTS, megatron_version="0.16.1", device_kind="cpu")

    assert Path("checkout/pretrain_gpt.py") == Path(words[0])
    assert job.own == FIXED[0]
    assert 8 <= len(set(FIXED[1:])) == len(FIXED) - 1
    assert {NUM_HOSTS} == {layout.world_size for layout in FIXED}
    for layout in FIXED:
        assert layout.num_microbatches(job.batch.global_batch_size)
        assert layout.chunk_layers(job.model.num_layers)


def test_a_fixed_layout_is_put_where_it_is_predicted_to_be_quickest() -> None:
    """On torchrun's order of hosts where it cannot be priced."""
    assert NUM_HOSTS - 1 == best_placed(Priced(), Layout(dp=NUM_HOSTS)).placement[0]
    assert (0, 1, 2, 3) == best_placed(Priced(), Layout(pp=NUM_HOSTS)).placement


def test_without_a_checkout_the_part_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that names one."""
    monkeypatch.delenv("MEGATRON_LM_DIR", raising=False)

    assert megatron_lm() is None
    with pytest.raises(LabError, match="MEGATRON_LM_DIR"):
        nvidia.run(Setting(), lambda _: None)
