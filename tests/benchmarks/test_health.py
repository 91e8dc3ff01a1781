"""The health benchmark's networks are what they claim to be, and its scores count."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.bench_health import Network, fat_tree, islands, links_score, nics, slots_score, uniform


@pytest.mark.parametrize("network", [uniform, islands, fat_tree, nics])
def test_no_link_is_slower_than_a_detour(network: Network) -> None:
    """Every healthy network obeys the law by which links are judged."""
    for seed in range(20):
        rates = network(4 + seed, np.random.default_rng(seed))
        np.fill_diagonal(rates, 0.0)
        detours = np.minimum(rates[:, :, None], rates[None]).max(axis=1)
        np.fill_diagonal(detours, 0.0)

        assert (rates >= detours).all()


def test_scores_count_what_was_planted() -> None:
    """Without noise nobody healthy is accused, and every slow one is found."""
    well = links_score(uniform, (4, 8), noise=1e-6, slow=1.0, clusters=5, seed=0)
    sick = links_score(uniform, (4, 8), noise=1e-6, slow=0.5, clusters=5, seed=0)
    slots = slots_score("cuda", noise=1e-6, slow=0.8, clusters=5, seed=0)

    assert (0, 0, 0.0) == (well.accused, well.found, well.again)
    assert (0, 5, 1.0) == (sick.accused, sick.found, sick.again)
    assert (0, 5, 1.0) == (slots.accused, slots.found, slots.again)
