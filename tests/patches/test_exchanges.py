"""The exchanges of a training step that Megatron requests are those that the formulas count.

Ranks of each layout are played under a fake process group. The example trainer plays a few layouts. NVIDIA's script,
from a checkout of Megatron-LM in MEGATRON_LM_DIR, plays all layouts. `python -m benchmarks.bench_exchanges` prints the
comparison.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from typing import Any

import pytest
from patches.exchanges import CASES, EXAMPLE, FAST, Case, Program, differences, expected, nvidias, record, recorded

CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "")
Records = dict[tuple[str, int], Any]


def played(cases: list[Case], program: Program, *, timeout_s: float) -> Records:
    """Play the first, the second and the last pipeline rank of each case."""
    ranks = [(case, pp_rank) for case in cases for pp_rank in case.pp_ranks()]
    records = record(ranks, program, timeout_s=timeout_s)
    return {(case.name, pp_rank): found for (case, pp_rank), found in zip(ranks, records, strict=True)}


@pytest.fixture(scope="module")
def of_example() -> Records:
    """Records of the example trainer."""
    return played([case for case in CASES if case.name in FAST], EXAMPLE, timeout_s=300)


@pytest.fixture(scope="module")
def of_nvidia() -> Records:
    """Records of NVIDIA's script."""
    if not CHECKOUT:
        pytest.skip("MEGATRON_LM_DIR names no checkout of Megatron-LM")
    return played(list(CASES), nvidias(CHECKOUT), timeout_s=1500)


def faults(case: Case, records: Records, *, is_nvidias: bool) -> list[str]:
    """Return one line for each kind of exchange of which number or bytes differ."""
    lines = []
    for pp_rank in case.pp_ranks():
        found = records[case.name, pp_rank]
        assert not isinstance(found, str), found
        lines += differences(expected(case.job(), pp_rank, is_nvidias=is_nvidias), recorded(found))
    return lines


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FAST], ids=lambda case: case.name)
def test_the_formulas_count_what_the_example_trainer_exchanges(of_example: Records, case: Case) -> None:
    """Operation, group, number and bytes agree, in each phase of a step."""
    assert faults(case, of_example, is_nvidias=False) == []


@pytest.mark.processes
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_formulas_count_what_nvidias_script_exchanges(of_nvidia: Records, case: Case) -> None:
    """Operation, group, number and bytes agree, in each phase of a step."""
    assert faults(case, of_nvidia, is_nvidias=True) == []


def test_equal_layers_exchange_the_same(of_example: Records) -> None:
    """Each exchange has the layer at work, in the forward and in the backward."""
    layers: dict[str, Counter[tuple[Any, ...]]] = defaultdict(Counter)
    for phase, layer, *exchange, count in of_example["gpt tp2 sp", 0]:
        layers[layer][(phase, *exchange)] += count

    one, *others = (layers[f"layer {number}"] for number in range(1, 5))

    assert one
    assert [one] * 3 == others


def test_activations_have_the_type_of_the_model(of_example: Records) -> None:
    """Messages between stages are in bf16, reductions of gradients in fp32."""
    records = of_example["gpt pp2 dist", 1]
    kinds = {(record[2], record[6]) for record in records if record[2] in ("send", "receive", "reduce_scatter")}

    assert kinds == {("send", "bfloat16"), ("receive", "bfloat16"), ("reduce_scatter", "float32")}


def test_a_difference_is_one_line() -> None:
    """The line names phase, operation, group, and both numbers by bytes."""
    key = ("forward", "all_gather", "tp")

    assert differences({key: Counter({64: 2})}, {key: Counter({64: 1})}) == [
        "forward all_gather tp: ours {64: 2}, Megatron's {64: 1} (bytes: number)"
    ]


def test_there_are_layouts_enough() -> None:
    """At least fifty different layouts, each with a name of its own, and the fast ones among them."""
    assert len({case.words for case in CASES}) == len({case.name for case in CASES}) >= 50
    assert set(FAST) <= {case.name for case in CASES}
