"""Every way to split the layers is read as Megatron reads it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_lines import SMALL

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.chunks import Split, hybrid_pattern, read_chunks, write_chunks
from pipette_launch.megatron.flags import Arguments

MAMBA = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"


def chunks(words: str, *, pp: int, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """Return virtual stages and chunk sizes of some flags."""
    return read_chunks(Arguments.parse(words.split(), "0.16.1"), pp=pp, num_layers=num_layers)[:2]


@pytest.mark.parametrize(
    ("words", "pp", "num_layers", "expected"),
    [
        ("", 4, 8, (1, ())),
        ("--num-layers-per-virtual-pipeline-stage 2", 2, 8, (2, ())),
        ("--num-layers-per-virtual-pipeline-stage 4", 2, 8, (1, ())),
        ("--num-virtual-stages-per-pipeline-rank 2", 2, 8, (2, ())),
        ("--num-virtual-stages-per-pipeline-rank 1", 1, 8, (1, ())),
        ("--decoder-first-pipeline-num-layers 1", 4, 10, (1, (1, 3, 3, 3))),
        ("--decoder-first-pipeline-num-layers 8", 1, 8, (1, ())),
        ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2", 4, 8, (1, ())),
        ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 6", 2, 8, (1, (2, 6))),
        (
            "--decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2",
            3,
            10,
            (2, (2, 2, 1, 2, 2, 1)),
        ),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", 4, 10, (1, (2, 3, 3, 2))),
        (
            "--account-for-embedding-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2",
            2,
            7,
            (2, (1, 2, 2, 2)),
        ),
        ("--pipeline-model-parallel-layout Et|t|t|tL", 2, 4, (2, ())),
        ("--pipeline-model-parallel-layout E|(tt|)*3,tL", 5, 7, (1, (0, 2, 2, 2, 1))),
        ("--pipeline-model-parallel-layout Et*3|t*5L", 2, 8, (1, (3, 5))),
    ],
)
def test_cuts_are_read(words: str, pp: int, num_layers: int, expected: tuple[int, tuple[int, ...]]) -> None:
    """Examples from Megatron's documents, computed by hand."""
    assert expected == chunks(words, pp=pp, num_layers=num_layers)


@pytest.mark.parametrize(
    ("words", "pp", "num_layers", "message"),
    [
        ("", 3, 8, "does not divide over --pipeline-model-parallel-size 3"),
        ("--num-layers-per-virtual-pipeline-stage 3", 2, 8, "not a multiple of 3"),
        (
            "--num-virtual-stages-per-pipeline-rank 3",
            2,
            8,
            "rank 3: 4 layers of pipeline rank 0 do not divide into 3",
        ),
        ("--num-virtual-stages-per-pipeline-rank 2", 1, 8, "above 1"),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
            2,
            8,
            "exclude each other",
        ),
        (
            "--pipeline-model-parallel-layout Et|tL --decoder-first-pipeline-num-layers 1",
            2,
            2,
            "exclude each other",
        ),
        (
            "--account-for-loss-in-pipeline-split --decoder-first-pipeline-num-layers 1",
            2,
            2,
            "exclude each other",
        ),
        (
            "--decoder-first-pipeline-num-layers 2 --num-layers-per-virtual-pipeline-stage 2",
            2,
            8,
            "use --num-virtual-stages-per-pipeline-rank",
        ),
        ("--decoder-first-pipeline-num-layers 8", 2, 8, "does not divide"),
        ("--decoder-first-pipeline-num-layers 9", 1, 8, "9: a pipeline of one rank has one stage"),
        ("--decoder-last-pipeline-num-layers 3", 1, 8, "3: a pipeline of one rank has one stage"),
        (
            "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 4",
            1,
            8,
            "4: a pipeline of one rank has one stage with all 8 layers; remove it",
        ),
        (
            "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2",
            1,
            8,
            "of one rank has one stage",
        ),
        ("--decoder-first-pipeline-num-layers 4", 1, 8, "4: a pipeline of one rank has one stage"),
        ("--decoder-last-pipeline-num-layers 4", 1, 8, "4: a pipeline of one rank has one stage"),
        ("--pipeline-model-parallel-layout Et|t|tL", 2, 3, "3 stages are not a multiple"),
        (
            "--pipeline-model-parallel-layout Et|tL",
            2,
            3,
            "has 1 E, 2 t, 1 L; needs one E, one t for each of --num-layers 3, one L",
        ),
        ("--pipeline-model-parallel-layout t|EtL", 2, 2, "E at the very front"),
        ("--pipeline-model-parallel-layout Et|mL", 2, 1, "has 1 m, but --mtp-num-layers is 0"),
        ("--pipeline-model-parallel-layout Et|LL", 2, 1, "has 1 E, 1 t, 2 L; needs one E"),
        ("--pipeline-model-parallel-layout EEt|L", 2, 1, "has 2 E, 1 t, 1 L; needs one E"),
        ("--pipeline-model-parallel-layout Et|xL", 2, 1, "'x' names no layer; write only E, t, m and L"),
        ("--pipeline-model-parallel-layout et|l", 2, 1, "'e l' names no layer; write only E, t, m and L"),
    ],
)
def test_contradictions_are_named(words: str, pp: int, num_layers: int, message: str) -> None:
    """Splits that Megatron refuses are refused with flag, value and remedy."""
    with pytest.raises(MegatronError, match=message):
        chunks(words, pp=pp, num_layers=num_layers)


@pytest.mark.parametrize(
    ("vpp", "cut", "expected"),
    [
        (1, (), ""),
        (2, (), "--num-layers-per-virtual-pipeline-stage 2"),
        (1, (1, 7), "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 7"),
        (1, (0, 8), "--pipeline-model-parallel-layout E|t*8L"),
        (2, (1, 3, 2, 2), "--pipeline-model-parallel-layout Et|t*3|tt|ttL"),
    ],
)
def test_cuts_are_written(vpp: int, cut: tuple[int, ...], expected: str) -> None:
    """The simplest flags for the split are written, and the flags of an earlier split are removed."""
    before = Arguments.parse([*SMALL, "--account-for-loss-in-pipeline-split"], "0.16.1")
    after = write_chunks(before, Split(vpp, cut), pp=2, num_layers=8)

    assert " ".join([*SMALL, *expected.split()]) == " ".join(after.words)


@pytest.mark.parametrize(
    ("words", "version", "pp", "expected"),
    [
        ("--hybrid-layer-pattern M-M*M-M-", "0.17.1", 4, (1, ())),
        ("--hybrid-override-pattern M-M*M-M-", "0.16.1", 4, (1, ())),
        ("--hybrid-layer-pattern M-M|*M-M-", "0.17.1", 2, (1, (3, 5))),
        ("--hybrid-layer-pattern M-|M*|M-|M-/*E/*E", "0.17.1", 2, (2, ())),
        ("--hybrid-override-pattern M-M|*M-M-", "0.17.1", 2, (1, (3, 5))),
        ("--hybrid-layer-pattern M-M*M-M- --decoder-first-pipeline-num-layers 2", "0.17.1", 3, (1, (2, 3, 3))),
    ],
)
def test_hybrid_models_name_their_stages(
    words: str, version: str, pp: int, expected: tuple[int, tuple[int, ...]]
) -> None:
    """From 0.17 on | in the pattern separates stages; without it stages are equal, except for ends that flags state."""
    assert Split(*expected) == read_chunks(Arguments.parse(words.split(), version), pp=pp, num_layers=8)


@pytest.mark.parametrize(
    ("words", "version", "message"),
    [
        (
            "--hybrid-layer-pattern M-M|*M-|M-",
            "0.17.1",
            "--hybrid-layer-pattern M-M|*M-|M-: 3 stages of the pattern are not a multiple",
        ),
        ("--hybrid-override-pattern M-M|*M-M-", "0.16.1", "stages (|) can be named from 0.17 on"),
        (
            "--hybrid-override-pattern M-M*M-M- --num-layers-per-virtual-pipeline-stage 2",
            "0.16.1",
            "the pattern of a hybrid model says where stages begin",
        ),
        ("--hybrid-layer-pattern M-M*M-M- --hybrid-override-pattern M-M*M-M-", "0.17.1", "exclude each other"),
        ("--hybrid-layer-pattern |/*E", "0.17.1", "needs layers"),
        ("--hybrid-layer-pattern M-M*M-M-/*E/*-", "0.17.1", "the same layers in each depth"),
        ("--hybrid-layer-pattern *E+E", "0.19.0", "refuses attention"),
        ("--is-hybrid-model", "0.16.1", "needs --hybrid-override-pattern"),
        (
            f"{MAMBA} --num-layers 8 --hybrid-attention-ratio 0.6 --hybrid-mlp-ratio 0.5",
            "0.16.1",
            "--hybrid-mlp-ratio 0.5: shares of layers must be at least 0, and together at most 1",
        ),
    ],
)
def test_what_a_hybrid_model_cannot_say(words: str, version: str, message: str) -> None:
    """The error names the flag that a hybrid model does not allow."""
    with pytest.raises(MegatronError, match=re.escape(message)):
        read_chunks(Arguments.parse(words.split(), version), pp=2, num_layers=8)


def test_cuts_of_hybrid_models_are_written_into_their_pattern() -> None:
    """From 0.17 on the pattern, under either name, gets the stages and keeps its prediction depths."""
    given = Arguments.parse(["--hybrid-layer-pattern", "M-|M*|M-|M-/*E/*E"], "0.17.1")
    old = Arguments.parse(["--hybrid-override-pattern", "M-M*M-M-"], "0.16.1")

    assert "M-M|*M-M-/*E/*E" == write_chunks(given, Split(1, (3, 5)), pp=2, num_layers=8).words[-1]
    assert "M-M*|M-M-/*E/*E" == write_chunks(given, Split(), pp=2, num_layers=8).words[-1]
    assert "M-M*M-M-/*E/*E" == write_chunks(given, Split(), pp=1, num_layers=8).words[-1]
    assert "M-M*M-M-" == write_chunks(old, Split(), pp=2, num_layers=8).words[-1]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (Split(2, (1, 3, 3, 1)), "Et|t*3|t*3|tmmL"),
        (Split(2, (2, 3, 3, 0), 1), "Ett|t*3|t*3mm|L"),
        (Split(1, (8, 0), 1), "Et*8mm|L"),
    ],
)
def test_uneven_cuts_place_the_depths_of_prediction(split: Split, expected: str) -> None:
    """Megatron needs each prediction depth in the layout; the written layout is read back unchanged."""
    before = Arguments.parse([*SMALL, "--mtp-num-layers", "2"], "0.16.1")
    after = write_chunks(before, split, pp=2, num_layers=8)

    assert expected == after.get("pipeline_model_parallel_layout")
    assert split == read_chunks(after, pp=2, num_layers=8)


@pytest.mark.parametrize(
    ("layout", "pp", "expected"),
    [
        ("Et*3|(tt|)*29,m|L", 16, Split(2, (3, *(2,) * 29, 0, 0), 1)),
        ("E|(t*2|)*14t*2mL", 16, Split(1, (0, *(2,) * 15), 0)),
        ("Ett|tt|m|L", 4, Split(1, (2, 2, 0, 0), 1)),
        ("Ett|ttm||L", 4, Split(1, (2, 2, 0, 0), 2)),
        ("Et*4m|L", 2, Split(1, (4, 0), 1)),
    ],
)
def test_multi_token_prediction_stands_where_the_layout_has_it(layout: str, pp: int, expected: Split) -> None:
    """Multi-token prediction may lie before stages that hold only the head."""
    words = ["--pipeline-model-parallel-layout", layout, "--mtp-num-layers", "1"]
    found = read_chunks(Arguments.parse(words, "0.16.0"), pp=pp, num_layers=sum(expected.layers_per_chunk))

    assert expected == found


@pytest.mark.parametrize(
    ("layout", "version", "message"),
    [
        ("Ett|m|tt|L", "0.16.1", "must stand behind all layers"),
        ("Ett|tt|mm|L", "0.16.1", "has 2 m, but --mtp-num-layers is 1"),
        ("Ett|tt|m||||L|", "0.16.1", "must stand in one of the last 4 stages"),
    ],
)
def test_multi_token_prediction_that_megatron_refuses(layout: str, version: str, message: str) -> None:
    """The error names the layout and the rule."""
    words = ["--pipeline-model-parallel-layout", layout, "--mtp-num-layers", "1"]
    with pytest.raises(MegatronError, match=message):
        read_chunks(Arguments.parse(words, version), pp=4, num_layers=4)


def test_ranks_between_full_ends_need_layers() -> None:
    """Four layers on the two ends leave none for the middle ranks."""
    words = ["--decoder-first-pipeline-num-layers", "2", "--decoder-last-pipeline-num-layers", "2"]

    with pytest.raises(MegatronError, match="does not divide"):
        read_chunks(Arguments.parse(words, "0.16.0"), pp=4, num_layers=4)


@given(
    num_layers=st.integers(1, 200),
    shares=st.tuples(st.integers(0, 100), st.integers(0, 100)).filter(lambda shares: sum(shares) <= 100),
)
def test_shares_of_layers_give_megatrons_pattern(num_layers: int, shares: tuple[int, int]) -> None:
    """Before 0.17 shares of the kinds define a hybrid model, in the order of Megatron's own function."""
    allocation = pytest.importorskip("megatron.core.ssm.mamba_hybrid_layer_allocation")
    if not hasattr(allocation, "allocate_layers"):
        pytest.skip("this megatron-core has no allocate_layers")
    attention, mlp = (share / 100 for share in shares)
    words = f"{MAMBA} --num-layers {num_layers} --hybrid-attention-ratio {attention} --hybrid-mlp-ratio {mlp}"

    pattern = hybrid_pattern(Arguments.parse(words.split(), "0.16.1"))

    assert pattern is not None
    assert "".join(allocation.allocate_layers(num_layers, attention, mlp)) == pattern.layers


@pytest.mark.parametrize(
    ("words", "version", "layers"),
    [
        (f"{MAMBA} --num-layers 4", "0.16.1", "MMMM"),
        (f"{MAMBA} --num-layers 6 --is-hybrid-model --hybrid-mlp-ratio 0.5", "0.16.1", "M-M-M-"),
        (f"{MAMBA} --num-layers 4 --hybrid-override-pattern M*M-", "0.16.1", "M*M-"),
    ],
)
def test_layers_of_a_hybrid_model_without_a_pattern(words: str, version: str, layers: str) -> None:
    """Without shares all layers are Mamba layers; a pattern overrides shares."""
    pattern = hybrid_pattern(Arguments.parse(words.split(), version))

    assert pattern is not None
    assert layers == pattern.layers


@pytest.mark.parametrize(
    ("words", "version"),
    [
        (MAMBA, "0.16.1"),
        (f"{MAMBA} --num-layers 4", "0.17.1"),
        ("--num-layers 4 --hybrid-mlp-ratio 0.5", "0.16.1"),
    ],
)
def test_other_models_have_no_pattern(words: str, version: str) -> None:
    """No number of layers, a release from 0.17 on, or other layers give no pattern."""
    assert None is hybrid_pattern(Arguments.parse(words.split(), version))
