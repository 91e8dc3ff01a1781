"""Tests of degrees, chunks, and the ranks of cells."""

from __future__ import annotations

import itertools

import pytest
from facts_for_tests import expert_groups, groups_of
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.errors import LayoutError
from pipette_launch.facts import Cell, Layout, Recompute
from pipette_launch.facts.layout import FLAG_WORDS, NO_RECOMPUTE, MemoryOptions

SIZES = st.integers(1, 3)


@given(tp=SIZES, cp=SIZES, dp=SIZES, pp=SIZES, swapped=st.booleans())
def test_cells_and_ranks_are_one_to_one(tp: int, cp: int, dp: int, pp: int, swapped: bool) -> None:
    """Each cell has one rank and each rank has one cell, in both of Megatron's orders."""
    layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, use_tp_pp_dp_mapping=swapped)
    cells = [Cell(*cell) for cell in itertools.product(range(pp), range(dp), range(cp), range(tp))]

    assert set(range(layout.world_size)) == {layout.rank_of(cell) for cell in cells}
    assert cells == [layout.cell_of(layout.rank_of(cell)) for cell in cells]


def test_ranks_follow_megatrons_order() -> None:
    """Tensor ranks are neighbours, then data-parallel, then pipeline ranks. The flag swaps the last two."""
    assert ((0, 1), (2, 3), (4, 5), (6, 7)) == groups_of(Layout(tp=2, dp=2, pp=2), "tp")
    assert ((0, 2), (1, 3), (4, 6), (5, 7)) == groups_of(Layout(tp=2, dp=2, pp=2), "dp")
    assert ((0, 4), (1, 5), (2, 6), (3, 7)) == groups_of(Layout(tp=2, dp=2, pp=2), "pp")
    assert ((0, 2), (1, 3), (4, 6), (5, 7)) == groups_of(Layout(tp=2, dp=2, pp=2, use_tp_pp_dp_mapping=True), "pp")
    assert ((0, 1, 2, 3), (4, 5, 6, 7)) == groups_of(Layout(cp=2, dp=2, pp=2), "dp_cp")


def test_experts_overlay_data_parallel_ranks() -> None:
    """EP covers the ranks with one pipeline rank, and has its own tensor parallel size."""
    assert ((0, 1), (2, 3), (4, 5), (6, 7)) == expert_groups(Layout(dp=4, pp=2, ep=2))
    assert ((0, 2), (1, 3), (4, 6), (5, 7)) == expert_groups(Layout(tp=2, dp=4, ep=2, etp=2))


def test_layers_are_dealt_round_robin() -> None:
    """Chunk c is on pipeline rank c % pp. Uneven chunks are summed."""
    assert (4, 4) == Layout(pp=2, vpp=2).stage_layers(8)
    assert (2, 4) == Layout(pp=2, vpp=2, layers_per_chunk=(1, 2, 1, 2)).stage_layers(6)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Layout(tp=0), "tp must be at least 1, got 0"),
        (lambda: Layout(vpp=2), "vpp=2 needs pp > 1"),
        (lambda: Layout(pp=2, layers_per_chunk=(1,)), "1 entries, not pp*vpp=2"),
        (lambda: Layout(dp=3, ep=2), "etp*ep*pp=2 does not divide 3 ranks"),
        (lambda: Layout(dp=2).num_microbatches(3), "3 is not divisible by micro_batch_size*dp = 1*2"),
        (lambda: Layout(pp=2).stage_layers(3), "3 layers do not divide into pp*vpp = 2*1 chunks"),
        (lambda: Recompute(granularity="full"), "full needs a method and a layer count"),
        (lambda: Recompute(granularity="none", method="block", num_layers=1), "the others have neither"),
    ],
)
def test_impossible_layouts_say_why(make: object, expected: str) -> None:
    """The message names the sizes that do not match."""
    with pytest.raises(LayoutError) as caught:
        make()  # type: ignore[operator]

    assert expected in str(caught.value)


def test_words_are_what_people_say() -> None:
    """Degrees are always shown, other options only if they differ from Megatron's default."""
    layout = Layout(tp=2, pp=4, vpp=2, micro_batch_size=2, use_distributed_optimizer=True)

    assert "tp2 pp4 dp1 vpp2 mbs2 dist-opt" == layout.words()


def test_words_have_names() -> None:
    """Other texts choose words by their names, and read no text."""
    layout = Layout(tp=2, ep=2, etp=1, dp=2, sequence_parallel=True, recompute=SELECTIVE)

    assert {
        "tp": "tp2",
        "pp": "pp1",
        "dp": "dp2",
        "ep": "ep2",
        "etp": "etp1",
        "mbs": "mbs1",
        "seq-par": "seq-par",
        "recompute": "recompute-selective",
    } == layout.named_words()


SELECTIVE = Recompute(granularity="selective", modules=("core_attn",))
MORE = Recompute(granularity="selective", modules=("core_attn", "layernorm"))
BLOCKS = [Recompute(granularity="full", method="block", num_layers=layers) for layers in (1, 2)]
WHOLE = Recompute(granularity="full", method="uniform", num_layers=1)


@pytest.mark.parametrize(
    ("one", "others"),
    [
        (NO_RECOMPUTE, [NO_RECOMPUTE, SELECTIVE, MORE, *BLOCKS, WHOLE]),
        (SELECTIVE, [SELECTIVE, MORE, WHOLE]),
        (MORE, [MORE, WHOLE]),
        (BLOCKS[0], [*BLOCKS, WHOLE]),
        (BLOCKS[1], [BLOCKS[1], WHOLE]),
        (WHOLE, [WHOLE]),
    ],
)
def test_which_recompute_runs_no_more_again(one: Recompute, others: list[Recompute]) -> None:
    """No recompute is within everything, fewer modules within more, fewer layers within more, and all within full."""
    every = [NO_RECOMPUTE, SELECTIVE, MORE, *BLOCKS, WHOLE]

    assert others == [other for other in every if one.runs_no_more_than(other)]


def test_reports_name_every_switch_of_the_memory_options() -> None:
    """The names stand in the order of the fields, because rows of options are read by position."""
    assert (*FLAG_WORDS, "recompute") == MemoryOptions._fields
