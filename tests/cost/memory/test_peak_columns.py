"""Peaks of many layouts at once are those of each layout alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import tiny_job, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.memory.peak import peak_memory_bytes, peak_memory_columns
from pipette_launch.errors import LayoutError
from pipette_launch.facts import Batch, Job, Layout, Recompute
from pipette_launch.facts.layout import LayoutColumns, codes_of

RECOMPUTES = (
    Recompute(granularity="none"),
    Recompute(granularity="selective", modules=("mlp", "moe_act")),
    Recompute(granularity="selective"),
    Recompute(granularity="full", method="uniform", num_layers=1),
    Recompute(granularity="full", method="uniform", num_layers=3),
    Recompute(granularity="full", method="block", num_layers=1),
)
MODELS: tuple[dict[str, object], ...] = (
    {"hidden_dropout": 0.1, "attention_dropout": 0.1, "attention_backend": "unfused"},
    {"transformer_impl": "local", "untie_embeddings_and_output_weights": True},
    {"mtp_num_layers": 1, "gated_linear_unit": True, "num_query_groups": 2, "attention_backend": "flash"},
    {"num_experts": 4, "moe_layer_freq": (0, 1, 1, 1, 0, 1, 1, 1), "moe_ffn_hidden_size": 128},
    {"num_experts": 4, "moe_layer_freq": (1,) * 8, "moe_ffn_hidden_size": 128, "add_bias_linear": False},
)
FLAGS = (
    (),
    ("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit 2", "--fp8-format hybrid"),
    ("--fp32-residual-connection", "--num-distributed-optimizer-instances 2", "--no-gradient-accumulation-fusion"),
)
CUTS = {2: (3, 5), 4: (1, 3, 2, 2), 8: (0, 1, 1, 2, 1, 1, 2, 0)}


def long_job(model: dict[str, object], flags: tuple[str, ...] = ()) -> Job:
    """A bf16 job of eight layers and 48 samples."""
    base = {"params_dtype": "bf16", "transformer_impl": "transformer_engine", "num_layers": 8, "vocab_size": 250}
    this = tiny_job(model=tiny_model(**(base | model)), performance_flags=flags)
    return replace(this, batch=Batch(global_batch_size=48))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout of eight layers and 48 samples."""
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (2, 4), (4, 2)]))
    tp = draw(st.sampled_from([1, 2, 4]))
    dp = draw(st.sampled_from([1, 2, 4] if pp <= 4 else [1, 2]))
    uneven = pp * vpp in CUTS and draw(st.booleans())
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=draw(st.sampled_from([1, 2])),
        ep=draw(st.sampled_from([1, 2] if dp % 2 == 0 else [1])),
        etp=draw(st.sampled_from([1, tp])),
        vpp=vpp,
        layers_per_chunk=CUTS[pp * vpp] if uneven else (),
        chunks_after_mtp=draw(st.integers(0, pp - 1)),
        micro_batch_size=draw(st.sampled_from([1, 3])),
        sequence_parallel=draw(st.booleans()),
        use_distributed_optimizer=draw(st.booleans()),
        recompute=draw(st.sampled_from(RECOMPUTES)),
    )


@given(st.sampled_from(MODELS), st.sampled_from(FLAGS), st.lists(layouts(), min_size=1, max_size=12))
def test_columns_equal_single_layouts(model: dict[str, object], flags: tuple[str, ...], rows: list[Layout]) -> None:
    """Every part on every stage is the same alone and among other layouts."""
    this = long_job(model, flags)

    columns = peak_memory_columns(this, LayoutColumns.of(rows))

    expected = [peak_memory_bytes(this, layout) for layout in rows]
    assert expected == [columns.of(row) for row in range(len(rows))]
    assert [part.total for parts in expected for part in parts] == columns.parts_S.total.tolist()
    assert tuple(tuple(part.total for part in parts) for parts in expected) == columns.totals()


def test_stages_are_numbered() -> None:
    """Two layouts of one and of three stages."""
    columns = peak_memory_columns(long_job({"num_layers": 9}), LayoutColumns.of([Layout(), Layout(pp=3)]))

    assert columns.starts_N.tolist() == [0, 1]
    assert [1, 3] == [len(columns.of(row)) for row in range(2)]


def test_no_layouts() -> None:
    """Nothing in, nothing out."""
    columns = peak_memory_columns(long_job({}), LayoutColumns.of([]))

    assert columns.parts_S.total.tolist() == []
    assert columns.totals() == ()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Layout(dp=5), "48 is not divisible by micro_batch_size\\*dp = 1\\*5"),
        (Layout(pp=3), "8 layers do not divide into pp\\*vpp = 3\\*1"),
        (Layout(pp=2, layers_per_chunk=(1, 2)), "sums to 3, not to 8"),
    ],
)
def test_an_impossible_row(bad: Layout, message: str) -> None:
    """The error is the same as for the layout alone."""
    with pytest.raises(LayoutError, match=message):
        peak_memory_columns(long_job({}), LayoutColumns.of([Layout(), bad]))


@given(st.lists(layouts(), min_size=1, max_size=5))
def test_columns_give_their_layouts_back(rows: list[Layout]) -> None:
    """Row by row, and any choice of rows."""
    columns = LayoutColumns.of(rows)

    assert rows == [columns.layout(row) for row in range(len(columns))]
    assert columns.take(np.array([len(rows) - 1])).layout(0) == rows[-1]


def test_bad_columns() -> None:
    """Columns of other lengths or types, and indices that point nowhere, are refused with the column's name."""
    good = LayoutColumns.of([Layout()])

    with pytest.raises(LayoutError, match="column dp"):
        replace(good, dp=np.array([1, 2]))
    with pytest.raises(LayoutError, match="column vpp is float64"):
        replace(good, vpp=np.array([1.0]))
    with pytest.raises(LayoutError, match="column recompute has indices 1 to 1 into 1 entries"):
        replace(good, recompute=np.array([1]))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 40), st.integers(0, 1 << 40)), min_size=1, max_size=9))
def test_codes_tell_rows_apart(rows: list[tuple[int, int, int]]) -> None:
    """Equal rows have equal codes, different ones different codes, however wide the columns are."""
    codes = codes_of([np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]).tolist()

    assert [[one == other for other in rows] for one in rows] == [[one == other for other in codes] for one in codes]
