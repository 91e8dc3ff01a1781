"""Rivals' picks become command lines that Megatron reads back as exactly these picks."""

from __future__ import annotations

import itertools

from facts_for_tests import tiny_cluster, tiny_measurements

from benchmarks.netlab.suite.cases import MODELS, training
from benchmarks.netlab.suite.contenders import OWN, RIVALS, Case, rivals
from pipette_launch import megatron


def test_every_rivals_pick_is_read_back_from_its_words() -> None:
    """Layouts survive the writing, the user's own words stay word for word, and nobody is lost."""
    ticks = itertools.count()
    for model in MODELS:
        words = training(model, iterations=8)
        case = Case.of(words, tiny_measurements(tiny_cluster(4, 1)))
        found, refused = rivals(case, lambda: next(ticks) * 0.01)

        assert sorted((OWN, *RIVALS)) == sorted([name for one in found for name in one.names] + list(refused))
        assert words == found[0].words
        assert (0, 1, 2, 3) == found[0].placement
        for one in found:
            read = megatron.read_job(
                one.words[1:], world_size=4, megatron_version=case.job.megatron_version, device_kind="cpu"
            )
            assert one.layout == read.own
            assert one.predicted_s is None or one.predicted_s > 0
