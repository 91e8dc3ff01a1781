"""A layout written into a command line reads back as that layout, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron_lines import SMALL, job

from pipette_launch.errors import LayoutError, MegatronError
from pipette_launch.facts import Layout, Recompute
from pipette_launch.megatron import read_job, write_arguments
from pipette_launch.megatron.flags import releases

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
    """Legal layouts of the small model on 8 ranks, uneven cuts among them."""
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
    """Every legal layout survives the way through the user's flags, whatever they said before, in every release."""
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
    """On any of the last stages behind which there are no layers; other cuts have it with the head."""
    empty = next((place for place, layers in enumerate(layout.layers_per_chunk[::-1]) if layers), 0)
    placed = replace(layout, chunks_after_mtp=data.draw(st.integers(0, min(empty, layout.pp - 1))))
    flags = f"{NO_BIAS} --mtp-num-layers {depths} --position-embedding-type rope"
    asked = job(flags)
    words = write_arguments([*SMALL, *flags.split()], job=asked, layout=placed)

    assert placed == job(base=words).own


@settings(max_examples=60, deadline=None)
@given(layout=layouts(experts=True))
def test_expert_layouts_read_back(layout: Layout) -> None:
    """So do expert and expert-tensor sizes."""
    argv = [*SMALL, *EXPERTS.split()]
    written = write_arguments(argv, job=job(EXPERTS), layout=layout)

    assert layout == read_job(written, world_size=8, megatron_version="0.16.1", device_kind="cuda").own


@pytest.mark.parametrize("own", OWN)
def test_own_layout_keeps_every_word(own: str) -> None:
    """The user's own configuration is run with the user's own words."""
    argv = (*SMALL, *own.split(), "--mine", "a b", "--log-interval=1")

    assert argv == write_arguments(argv, job=job(own), layout=job(own).own)


def test_global_batch_size_is_pinned() -> None:
    """Left to its default, the batch would change with the plan."""
    argv = tuple(" ".join(SMALL).replace("--global-batch-size 32 ", "").split())
    asked = job(base=argv)

    assert 8 == asked.batch.global_batch_size
    assert (*argv, "--global-batch-size", "8") == write_arguments(argv, job=asked, layout=asked.own)


def test_flags_are_replaced_in_place_and_deleted() -> None:
    """Values change where they stand; flags without an inverse go; what is unknown stays where it was."""
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
    """Padding takes part in the softmax, so that it is kept: 501 tokens are 512 rows, at TP 8 too instead of 1024."""
    argv = [*SMALL, "--vocab-size", "500"]
    written = write_arguments(argv, job=job(base=argv), layout=Layout(tp=8, etp=8))

    assert ("--padded-vocab-size", "512") == written[-2:]


def test_uncertain_vocabulary_is_not_pinned() -> None:
    """A guessed size is never written: too small a one would break the job."""
    words = " ".join(SMALL).replace("--vocab-size 1000 --tokenizer-type NullTokenizer", "").split()
    written = write_arguments(words, job=job(base=words), layout=Layout(tp=8, etp=8))

    assert "--padded-vocab-size" not in written


def test_checkpoint_sizes_are_not_asked_for_again() -> None:
    """The flag that would overwrite the plan's sizes is removed."""
    argv = [*SMALL, "--use-mp-args-from-checkpoint-args"]

    assert tuple(SMALL) == write_arguments(argv, job=job(), layout=job().own)


def test_local_rank_is_refused() -> None:
    """In the command line it would beat the launcher's choice of devices."""
    with pytest.raises(MegatronError, match="--local-rank 0"):
        write_arguments([*SMALL, "--local-rank", "0"], job=job(), layout=job().own)
