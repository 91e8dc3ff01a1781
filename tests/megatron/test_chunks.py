"""Every way to cut the layers is read as Megatron reads it."""

from __future__ import annotations

import re

import pytest
from megatron_lines import SMALL

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.chunks import Split, read_chunks, write_chunks
from pipette_launch.megatron.flags import Arguments


def chunks(words: str, *, pp: int, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """Virtual stages and chunk sizes of some flags."""
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
    """Megatron's examples, worked by hand."""
    assert expected == chunks(words, pp=pp, num_layers=num_layers)


@pytest.mark.parametrize(
    ("words", "pp", "num_layers", "message"),
    [
        ("", 3, 8, "does not divide over --pipeline-model-parallel-size 3"),
        ("--num-layers-per-virtual-pipeline-stage 3", 2, 8, "not a multiple of 3"),
        ("--num-virtual-stages-per-pipeline-rank 3", 2, 8, "do not divide into 3 virtual stages"),
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
        ("--decoder-first-pipeline-num-layers 9", 1, 8, "does not divide"),
        ("--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 4", 1, 8, "does not divide"),
        ("--decoder-first-pipeline-num-layers 4", 1, 8, "does not divide"),
        ("--decoder-last-pipeline-num-layers 4", 1, 8, "does not divide"),
        ("--pipeline-model-parallel-layout Et|t|tL", 2, 3, "3 stages are no multiple"),
        ("--pipeline-model-parallel-layout Et|tL", 2, 3, "names 2 layers"),
        ("--pipeline-model-parallel-layout t|EtL", 2, 2, "E at the very front"),
        ("--pipeline-model-parallel-layout Et|mL", 2, 1, "needs m for each of --mtp-num-layers 0"),
        ("--pipeline-model-parallel-layout Et|xL", 2, 1, "'x' is no layer"),
    ],
)
def test_contradictions_are_named(words: str, pp: int, num_layers: int, message: str) -> None:
    """What Megatron refuses is refused with flag, value and remedy."""
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
    """The plainest flags that say it, and nothing of what said another cut before."""
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
    """By | from 0.17 on; without it they are equal, but for the ends that other flags name."""
    assert Split(*expected) == read_chunks(Arguments.parse(words.split(), version), pp=pp, num_layers=8)


@pytest.mark.parametrize(
    ("words", "version", "message"),
    [
        ("--hybrid-layer-pattern M-M|*M-|M-", "0.17.1", "3 stages of the pattern are no multiple"),
        ("--hybrid-override-pattern M-M|*M-M-", "0.16.1", "stages (|) can be named from 0.17 on"),
        (
            "--hybrid-override-pattern M-M*M-M- --num-layers-per-virtual-pipeline-stage 2",
            "0.16.1",
            "the pattern of a hybrid model says where stages begin",
        ),
        ("--hybrid-layer-pattern M-M*M-M- --hybrid-override-pattern M-M*M-M-", "0.17.1", "exclude each other"),
        ("--hybrid-layer-pattern |/*E", "0.17.1", "needs layers"),
        ("--hybrid-layer-pattern M-M*M-M-/*E/*-", "0.17.1", "the same ones for each depth"),
        ("--is-hybrid-model", "0.16.1", "needs --hybrid-override-pattern"),
    ],
)
def test_what_a_hybrid_model_cannot_say(words: str, version: str, message: str) -> None:
    """The error names the flag."""
    with pytest.raises(MegatronError, match=re.escape(message)):
        read_chunks(Arguments.parse(words.split(), version), pp=2, num_layers=8)


def test_cuts_of_hybrid_models_are_written_into_their_pattern() -> None:
    """By either name, with the depths of prediction; one stage has no marks, nor has any before 0.17."""
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
    """Megatron wants each depth named in a layout; what was written is read as it was."""
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
    """Megatron's documents, and stages with the head alone, from 0.16 on."""
    words = ["--pipeline-model-parallel-layout", layout, "--mtp-num-layers", "1"]
    found = read_chunks(Arguments.parse(words, "0.16.0"), pp=pp, num_layers=sum(expected.layers_per_chunk))

    assert expected == found


@pytest.mark.parametrize(
    ("layout", "version", "message"),
    [
        ("Ett|tt|m|L", "0.15.3", "before 0.16 .* must stand in the last stage"),
        ("Ett|m|tt|L", "0.16.1", "must stand behind all layers"),
        ("Ett|tt|mm|L", "0.16.1", "needs m for each of --mtp-num-layers 1"),
        ("Ett|tt|m||||L|", "0.16.1", "must stand in one of the last 4 stages"),
    ],
)
def test_multi_token_prediction_that_megatron_refuses(layout: str, version: str, message: str) -> None:
    """The error names the layout and the rule."""
    words = ["--pipeline-model-parallel-layout", layout, "--mtp-num-layers", "1"]
    with pytest.raises(MegatronError, match=message):
        read_chunks(Arguments.parse(words, version), pp=4, num_layers=4)


def test_ranks_between_full_ends_may_be_empty_before_0_16() -> None:
    """Four layers on the ends leave none for the two between them, which 0.16 refuses."""
    words = ["--decoder-first-pipeline-num-layers", "2", "--decoder-last-pipeline-num-layers", "2"]

    assert Split(1, (2, 0, 0, 2)) == read_chunks(Arguments.parse(words, "0.15.0"), pp=4, num_layers=4)
    with pytest.raises(MegatronError, match="does not divide"):
        read_chunks(Arguments.parse(words, "0.16.0"), pp=4, num_layers=4)
