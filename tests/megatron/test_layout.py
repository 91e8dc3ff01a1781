"""A layout that Megatron refuses gets a stand-in that keeps the fixed fields and fits the ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron_lines import SMALL, job

from pipette_launch.errors import LayoutError, MegatronError
from pipette_launch.facts import Layout, Recompute
from pipette_launch.facts.co_location import Domains
from pipette_launch.megatron import read_job, write_arguments
from pipette_launch.megatron.flags import releases
from pipette_launch.search.layouts import base_layouts

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
    """Layers are split anew first, then the experts' degrees change, then all degrees; a note reports it."""
    flags = words.format(PP=PP, TP=TP, CP=CP, EP=EP, CHUNKS=CHUNKS, VIRTUAL=VIRTUAL, LAYOUT=LAYOUT)
    asked = job(flags, fix=fix, for_planning=True)
    layout = Layout(**({"etp": expected.get("tp", 1)} | expected))

    assert layout == asked.own
    assert f"{asked.own_refusal}; {layout.words()} replaces your own layout" in asked.notes


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
    """No stand-in exists if the fixed fields do not fit the ranks or layers, or if flags contradict each other."""
    with pytest.raises(MegatronError):
        job(words, fix=fix, for_planning=True)


def test_a_job_that_starts_splits_only_its_layers_anew() -> None:
    """A launched job keeps sizes that other hosts may suit, and named stages; a prediction gets no stand-in."""
    layers = f"--num-layers 6 {PP} 4"

    assert (1, 2, 2, 1) == job(layers, fix=("pp",)).own.layers_per_chunk == job(layers).own.layers_per_chunk
    assert "--num-layers 6 does not divide over" in job(layers).own_refusal
    for words, options in ((f"{TP} 3", {}), (f"{PP} 2 {LAYOUT} Et*3|t*4L", {}), (layers, {"for_prediction": True})):
        with pytest.raises(MegatronError):
            job(words, **options)  # type: ignore[arg-type]


def test_a_stand_in_that_megatron_refuses_too_is_no_way_to_start() -> None:
    """If the stand-in breaks a rule, the error is about the user's own layout."""
    with pytest.raises(MegatronError, match="--num-layers 6 does not divide over --pipeline-model-parallel-size 4"):
        job(f"--num-layers 6 {PP} 4 {TP} 2 --ffn-hidden-size 63")


@cache
def legal(num_layers: int) -> frozenset[tuple[int, ...]]:
    """Yield degrees and virtual stages of every legal layout of a dense job on eight ranks."""
    free = replace(job(f"--num-layers {num_layers}"), pinned=())
    columns = base_layouts(free, world_size=8, domains=Domains(devices_per_host=8), device_kind="cuda").columns
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
    """If a legal layout has the fixed fields of the flags, the job is read and has layouts."""
    tp, pp, cp, vpp = sizes
    flags = f"--num-layers {num_layers} {TP} {tp} {PP} {pp} {CP} {cp} {VIRTUAL} {vpp}"
    fixed = [place for place, name in enumerate(("tp", "pp", "cp", "vpp")) if name in fix]
    wanted = [one for one in legal(num_layers) if all(one[place] == sizes[place] for place in fixed)]
    try:
        asked = job(flags, fix=tuple(fix), for_planning=True)
    except MegatronError:
        assert not wanted
        return
    found = base_layouts(asked, world_size=8, domains=Domains(devices_per_host=8), device_kind="cuda").columns

    assert len(found) or not wanted
    assert all(
        getattr(found, name).tolist() == [size] * len(found)
        for name, size in zip(("tp", "pp", "cp", "vpp"), sizes, strict=True)
        if name in fix
    )


def test_small_lines_are_read_as_they_are() -> None:
    """A layout that Megatron accepts gets no stand-in."""
    assert "" == job(f"{PP} 2", base=SMALL, for_planning=True).own_refusal


NO_BIAS = "--disable-bias-linear"
"""With biases neither experts are cut, nor MLPs recomputed."""
EXPERTS = f"--num-experts 4 --moe-ffn-hidden-size 64 {NO_BIAS}"
GROUPS_OF_4 = "--microbatch-group-size-per-virtual-pipeline-stage 4"
OWN = (
    "",
    "--tensor-model-parallel-size 2 --sequence-parallel --recompute-activations --use-distributed-optimizer",
    "--pipeline-model-parallel-size=4 --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce",
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 " + GROUPS_OF_4,
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t*3|tt|ttL --use-tp-pp-dp-mapping",
    "--context-parallel-size 2 --recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "--micro-batch-size 2 --micro-batch-size 4",
)
RECOMPUTE = (
    Recompute(granularity="none"),
    Recompute(granularity="selective", modules=("core_attn",)),
    Recompute(granularity="selective", modules=("mlp", "layernorm")),
    Recompute(granularity="full", method="uniform", num_layers=1),
    Recompute(granularity="full", method="block", num_layers=2),
)


@st.composite
def layouts(draw: st.DrawFn, *, num_layers: int = 8, world_size: int = 8, experts: bool = False) -> Layout:
    """Draw legal layouts of the small model on 8 ranks, also with uneven splits."""
    sizes = st.sampled_from((1, 2, 4, 8))
    tp, pp, cp = draw(sizes), draw(sizes), draw(sizes)
    assume(world_size % (tp * pp * cp) == 0)
    dp, vpp = world_size // (tp * pp * cp), draw(st.sampled_from((1, 2))) if pp > 1 else 1
    cut = draw(st.sampled_from(("even", "uneven")))
    chunks: tuple[int, ...] = ()
    if cut == "uneven" and pp * vpp > 1:
        ends = sorted(draw(st.lists(st.integers(0, num_layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
        chunks = tuple(b - a for a, b in zip([0, *ends], [*ends, num_layers], strict=True))
        chunks = () if len(set(chunks)) == 1 else chunks
    assume(chunks or num_layers % (pp * vpp) == 0)
    sharded, early = draw(st.booleans()), draw(st.booleans())
    mapping = draw(st.booleans())
    ep, etp = (draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, tp)))) if experts else (1, tp)
    assume(not mapping or pp == 1 or ep * etp == tp * cp)
    try:
        layout = Layout(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            ep=ep,
            etp=etp,
            vpp=vpp,
            microbatch_group_size=draw(st.sampled_from((0, pp))) if vpp > 1 else 0,
            layers_per_chunk=chunks,
            micro_batch_size=draw(st.sampled_from((1, 2, 4))),
            sequence_parallel=tp > 1 and (experts or draw(st.booleans())),
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=early,
            overlap_param_gather=sharded and early and draw(st.booleans()),
            use_tp_pp_dp_mapping=mapping,
            recompute=draw(st.sampled_from(RECOMPUTE)),
        )
        micro_batches = layout.num_microbatches(32)
    except LayoutError:
        assume(False)
    assume(vpp == 1 or micro_batches % pp == 0)
    return layout


@settings(max_examples=150, deadline=None)
@given(own=st.sampled_from(OWN), layout=layouts(), version=st.sampled_from(releases()))
def test_what_is_written_reads_back(own: str, layout: Layout, version: str) -> None:
    """Every legal layout, written into any flags in any release, is read back unchanged."""
    argv = [*SMALL, NO_BIAS, *own.split()]
    asked = job(NO_BIAS, own, version=f"{version}.0")
    written = write_arguments(argv, job=asked, layout=layout)
    again = read_job(written, world_size=8, megatron_version=f"{version}.0", device_kind="cuda")

    assert layout == again.own
    assert asked.batch == again.batch
    assert asked.model.padded_vocab_size(asked.own.tp) == again.model.padded_vocab_size(layout.tp)


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), depths=st.integers(1, 2), data=st.data())
def test_the_place_of_token_prediction_reads_back(layout: Layout, depths: int, data: st.DataObject) -> None:
    """Multi-token prediction may lie on any stage behind all layers; other splits put it beside the head."""
    empty = next((place for place, layers in enumerate(layout.layers_per_chunk[::-1]) if layers), 0)
    placed = replace(layout, chunks_after_mtp=data.draw(st.integers(0, min(empty, layout.pp - 1))))
    flags = f"{NO_BIAS} --mtp-num-layers {depths} --position-embedding-type rope"
    asked = job(flags)
    words = write_arguments([*SMALL, *flags.split()], job=asked, layout=placed)

    assert placed == job(base=words).own


@settings(max_examples=60, deadline=None)
@given(layout=layouts(experts=True))
def test_expert_layouts_read_back(layout: Layout) -> None:
    """Expert and expert-tensor sizes are read back unchanged."""
    argv = [*SMALL, *EXPERTS.split()]
    written = write_arguments(argv, job=job(EXPERTS), layout=layout)

    assert layout == read_job(written, world_size=8, megatron_version="0.16.1", device_kind="cuda").own


@pytest.mark.parametrize("own", OWN)
def test_own_layout_keeps_every_word(own: str) -> None:
    """The user's own layout is written with the user's own words."""
    argv = (*SMALL, *own.split(), "--mine", "a b", "--log-interval=1")

    assert argv == write_arguments(argv, job=job(own), layout=job(own).own)


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1", "0.20.0"])
def test_dist_muon_shards_without_the_flag(version: str) -> None:
    """Megatron before 0.18 refuses the flag of the distributed optimizer beside it, so no plan writes the flag."""
    read = job("--optimizer dist_muon --untie-embeddings-and-output-weights", version=version, for_prediction=True)

    assert read.own.use_distributed_optimizer
    written = write_arguments([*SMALL, "--optimizer", "dist_muon"], job=read, layout=read.own)
    assert "--use-distributed-optimizer" not in written


def test_global_batch_size_is_pinned() -> None:
    """Without the flag the batch would change with the plan, so the plan writes it."""
    argv = tuple(" ".join(SMALL).replace("--global-batch-size 32 ", "").split())
    asked = job(base=argv)

    assert 8 == asked.batch.global_batch_size
    assert (*argv, "--global-batch-size", "8") == write_arguments(argv, job=asked, layout=asked.own)


def test_flags_are_replaced_in_place_and_deleted() -> None:
    """Values change in place, removed flags disappear, and unknown words stay where they were."""
    flags = "--tensor-model-parallel-size=4 --sequence-parallel --mine 3 --use-distributed-optimizer"
    argv, asked = flags.split(), job(flags)
    written = write_arguments(
        [*argv, *SMALL],
        job=asked,
        layout=replace(asked.own, tp=1, etp=1, dp=8, sequence_parallel=False, use_distributed_optimizer=False),
    )

    assert ("--tensor-model-parallel-size", "1", "--sequence-parallel", "--mine", "3") == written[:5]
    assert "--use-distributed-optimizer" not in written


def test_padded_vocabulary_does_not_follow_tp() -> None:
    """The softmax includes the padding, so 501 tokens keep 512 rows at TP 8 instead of 1024."""
    argv = [*SMALL, "--vocab-size", "500"]
    written = write_arguments(argv, job=job(base=argv), layout=Layout(tp=8, etp=8))

    assert ("--padded-vocab-size", "512") == written[-2:]


def test_uncertain_vocabulary_is_not_pinned() -> None:
    """A guessed vocabulary size is never written: if it were too small, the job would fail."""
    words = " ".join(SMALL).replace("--vocab-size 1000 --tokenizer-type NullTokenizer", "").split()
    written = write_arguments(words, job=job(base=words), layout=Layout(tp=8, etp=8))

    assert "--padded-vocab-size" not in written


def test_checkpoint_sizes_are_not_asked_for_again() -> None:
    """The flag that would overwrite the plan's sizes is removed."""
    argv = [*SMALL, "--use-mp-args-from-checkpoint-args"]

    assert tuple(SMALL) == write_arguments(argv, job=job(), layout=job().own)


def test_local_rank_is_refused() -> None:
    """The flag would override the launcher's choice of devices, so it is refused."""
    with pytest.raises(MegatronError, match="--local-rank 0"):
        write_arguments([*SMALL, "--local-rank", "0"], job=job(), layout=job().own)
