"""A layout that Megatron refuses has a stand-in as near to it as the ranks and the fixed fields allow."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_lines import SMALL, job

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Layout
from pipette_launch.search.layouts.enumerate import cuts

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
EP = "--num-experts 4 --moe-token-dispatcher-type alltoall --expert-model-parallel-size"
CHUNKS, VIRTUAL = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
LAYOUT = "--pipeline-model-parallel-layout"


@pytest.mark.parametrize(
    ("words", "fix", "expected"),
    [
        ("--num-layers 6 {PP} 4", ("pp",), {"pp": 4, "dp": 2, "layers_per_chunk": (1, 2, 2, 1)}),
        ("--num-layers 7 {PP} 4", (), {"pp": 4, "dp": 2, "layers_per_chunk": (2, 2, 2, 1)}),
        ("--num-layers 7 {PP} 2 {TP} 2", ("pp", "tp", "dp"), {"pp": 2, "tp": 2, "dp": 2, "layers_per_chunk": (4, 3)}),
        (
            "--num-layers 9 {PP} 2 {VIRTUAL} 2",
            ("pp", "vpp"),
            {"pp": 2, "dp": 4, "vpp": 2, "layers_per_chunk": (2, 3, 2, 2)},
        ),
        ("--num-layers 9 {PP} 2 {CHUNKS} 2", ("pp",), {"pp": 2, "dp": 4, "layers_per_chunk": (5, 4)}),
        ("{PP} 2 {LAYOUT} Et*3|t*4L", ("pp",), {"pp": 2, "dp": 4}),
        ("{PP} 2 {LAYOUT} Ett|tt|tt|tL", ("vpp",), {"pp": 2, "dp": 4, "vpp": 2}),
        ("{PP} 2 --decoder-first-pipeline-num-layers 9", ("pp",), {"pp": 2, "dp": 4}),
        ("{TP} 3 {PP} 4", ("pp",), {"pp": 4, "dp": 2}),
        ("{TP} 3 {CP} 2", ("cp",), {"cp": 2, "dp": 4}),
        ("{PP} 4 {EP} 4", ("pp",), {"pp": 4, "dp": 2}),
        ("{PP} 4 {EP} 4", ("ep",), {"ep": 4, "dp": 8}),
        ("--num-layers 6 {PP} 4", ("layers",), {"dp": 8}),
    ],
)
def test_a_refused_layout_has_a_stand_in(words: str, fix: tuple[str, ...], expected: dict[str, Any]) -> None:
    """Layers are split anew first, then the experts' degrees go, then all that are not fixed; the job says both."""
    flags = words.format(PP=PP, TP=TP, CP=CP, EP=EP, CHUNKS=CHUNKS, VIRTUAL=VIRTUAL, LAYOUT=LAYOUT)
    asked = job(flags, fix=fix, for_planning=True)
    layout = Layout(**({"etp": expected.get("tp", 1)} | expected))

    assert layout == asked.own
    assert f"{asked.own_refusal}; {layout.words()} stands in for your own layout" in asked.notes


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (f"--num-layers 6 {PP} 4", ("pp", "layers")),
        (f"--num-layers 9 {PP} 2 {CHUNKS} 2", ("pp", "vpp")),
        (f"{TP} 3", ("tp",)),
        (f"{TP} 3", ("dp",)),
        (f"{PP} 4 {EP} 4", ("pp", "ep")),
        ("--recompute-granularity full", ()),
    ],
)
def test_what_no_layout_can_keep_stays_refused(words: str, fix: tuple[str, ...]) -> None:
    """The fixed fields themselves do not suit the ranks or the layers, or the flags contradict each other."""
    with pytest.raises(MegatronError):
        job(words, fix=fix, for_planning=True)


def test_a_job_that_starts_splits_only_its_layers_anew() -> None:
    """Other hosts may suit its sizes, a later release its stages; a prediction has no stand-in at all."""
    layers = f"--num-layers 6 {PP} 4"

    assert (1, 2, 2, 1) == job(layers, fix=("pp",)).own.layers_per_chunk == job(layers).own.layers_per_chunk
    assert "--num-layers 6 does not divide over" in job(layers).own_refusal
    for words, options in ((f"{TP} 3", {}), (f"{PP} 2 {LAYOUT} Et*3|t*4L", {}), (layers, {"for_prediction": True})):
        with pytest.raises(MegatronError):
            job(words, **options)  # type: ignore[arg-type]


def test_a_stand_in_that_megatron_refuses_too_is_no_way_to_start() -> None:
    """The error of a job that starts is that of the user's own layout."""
    with pytest.raises(MegatronError, match="--num-layers 6 does not divide over --pipeline-model-parallel-size 4"):
        job(f"--num-layers 6 {PP} 4 {TP} 2 --ffn-hidden-size 63")


@cache
def legal(num_layers: int) -> frozenset[tuple[int, ...]]:
    """Degrees and virtual stages of every legal layout of a dense job on eight ranks."""
    free = replace(job(f"--num-layers {num_layers}"), pinned=())
    columns = cuts(free, world_size=8, devices_per_host=8, device_kind="cuda").columns
    return frozenset((one.tp, one.pp, one.cp, one.vpp) for one in map(columns.layout, range(len(columns))))


@settings(max_examples=150, deadline=None)
@given(
    num_layers=st.integers(1, 12),
    sizes=st.tuples(*[st.integers(1, 5)] * 4),
    fix=st.sets(st.sampled_from(["tp", "pp", "cp", "vpp"])),
)
def test_fixing_fields_refuses_no_job_that_has_a_legal_layout(
    num_layers: int, sizes: tuple[int, int, int, int], fix: set[str]
) -> None:
    """The job is read and has layouts wherever some legal layout has the fixed fields as the flags have them."""
    tp, pp, cp, vpp = sizes
    flags = f"--num-layers {num_layers} {TP} {tp} {PP} {pp} {CP} {cp} {VIRTUAL} {vpp}"
    fixed = [place for place, name in enumerate(("tp", "pp", "cp", "vpp")) if name in fix]
    wanted = [one for one in legal(num_layers) if all(one[place] == sizes[place] for place in fixed)]
    try:
        asked = job(flags, fix=tuple(fix), for_planning=True)
    except MegatronError:
        assert not wanted
        return
    found = cuts(asked, world_size=8, devices_per_host=8, device_kind="cuda").columns

    assert len(found) or not wanted
    assert all(
        getattr(found, name).tolist() == [size] * len(found)
        for name, size in zip(("tp", "pp", "cp", "vpp"), sizes, strict=True)
        if name in fix
    )


def test_small_lines_are_read_as_they_are() -> None:
    """Where Megatron takes the user's own layout nothing stands in for it."""
    assert "" == job(f"{PP} 2", base=SMALL, for_planning=True).own_refusal


def test_where_0_14_builds_token_prediction_is_said() -> None:
    """Its checks pass any stage, and its models build the depths on the last one."""
    words = f"{PP} 4 {LAYOUT} Et*4|t*4|m|L --mtp-num-layers 1 --position-embedding-type rope"
    note = f"{LAYOUT} Et*4|t*4|m|L: Megatron 0.14 builds multi-token prediction (m) on the last stage all the same"

    assert 0 == job(words, version="0.14.0").own.chunks_after_mtp
    assert note in job(words, version="0.14.0").notes
    assert note not in job(words, version="0.16.1").notes
