"""Tests of what is timed on a group."""

from dataclasses import replace
from pathlib import Path

from facts_for_tests import tiny_job, tiny_model
from probe.workers import tiny_options

from pipette_launch.probe.collectives import kinds, padded_sizes


def test_sizes_divide_among_the_members(tmp_path: Path) -> None:
    """Each member's share is a whole number of four-byte elements; sizes that become equal are one."""
    options = tiny_options(tmp_path, hosts=1, devices=3, message_sizes_bytes=(1, 8, 100))

    assert (12, 108) == padded_sizes(options, 3)


def test_only_experts_exchange_all_to_all(tmp_path: Path) -> None:
    """A dense model never needs it."""
    options = tiny_options(tmp_path, hosts=1, devices=2)
    moe = replace(tiny_job(2), model=tiny_model(num_experts=4, moe_layer_freq=(1, 1, 1, 1)))

    assert ("all_reduce", "all_gather", "reduce_scatter") == kinds(options)
    assert ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") == kinds(replace(options, job=moe))
