"""Jobs are read with their batch, their length, their pins and their notes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_lines import SMALL, TEXT, job

from pipette_launch.errors import MegatronError, UsageError
from pipette_launch.facts import Batch, Layout, Recompute
from pipette_launch.megatron import global_batch_size, read_job, write_arguments
from pipette_launch.megatron.script import trial_arguments

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


def test_own_layout_is_read() -> None:
    """Degrees, chunks, micro-batch, memory options and mapping are those that torchrun would have run."""
    own = job(
        f"{TP}=2 {PP} 2 --sequence-parallel --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer",
        "--overlap-grad-reduce --overlap-param-gather --recompute-activations --use-tp-pp-dp-mapping",
    ).own

    assert own == Layout(
        tp=2,
        pp=2,
        dp=2,
        etp=2,
        vpp=2,
        sequence_parallel=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_tp_pp_dp_mapping=True,
        recompute=Recompute(granularity="selective", modules=("core_attn",)),
    )


def test_a_plain_job_pins_nothing() -> None:
    """A job with dropout and a fixed batch pins nothing and assumes nothing."""
    asked = job()

    assert ((), ()) == (asked.pinned, asked.notes)
    assert (32, 10, 100, "adam") == (
        asked.batch.global_batch_size,
        asked.train_iters,
        asked.log_interval,
        asked.optimizer,
    )


def test_sequence_parallel_is_off_at_tp_1() -> None:
    """Megatron silently ignores sequence parallelism at TP 1."""
    assert job("--sequence-parallel").own.sequence_parallel is False


def test_samples_become_iterations() -> None:
    """Training by samples ends after the number of whole batches that holds them."""
    words = TEXT.replace("--train-iters 10", "--train-samples 100").split()

    assert job(base=words).train_iters == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{TP} 3", f"{TP} 3 needs a multiple of 3 ranks, but the job has 8"),
        (f"{TP} 16", f"{TP} 16 needs a multiple of 16 ranks"),
        ("--expert-tensor-parallel-size 3 --num-experts 2", "--expert-tensor-parallel-size 3 needs a multiple of 3"),
        (
            f"{TP} 8 --num-attention-heads 4",
            f"{TP} 8 and --num-attention-heads 4: tp does not divide num_attention_heads=4",
        ),
        (
            f"{TP} 4 --group-query-attention --num-query-groups 8 --ffn-hidden-size 30",
            f"{TP} 4 and --ffn-hidden-size 30: tp does not divide ffn_hidden_size=30",
        ),
        ("--context-parallel-size 8 --seq-length 24", "--seq-length must be a multiple of 16"),
        (
            "--expert-model-parallel-size 2",
            "--expert-model-parallel-size 2: expert parallelism needs experts; remove it, or add --num-experts",
        ),
        ("--num-experts 3 --expert-model-parallel-size 2", "--num-experts 3: ep does not divide num_experts=3"),
        (f"--num-experts 4 --disable-bias-linear {TP} 2", "add --sequence-parallel"),
        (
            f"--num-experts 4 {PP} 2 --use-tp-pp-dp-mapping --expert-model-parallel-size 2",
            "etp*ep = 2, tp*cp = 1; remove the flag",
        ),
        ("--global-batch-size 12", "it must be a multiple of 8"),
        (
            "--overlap-param-gather",
            "--overlap-param-gather: overlap_param_gather needs the distributed optimizer",
        ),
        (
            f"{PP} 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 6",
            "3 micro-batches do not fill groups of 4",
        ),
        (
            f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
            "a pipeline of more than 2 ranks",
        ),
        ("--train-samples 5", "--train-iters 10 and --train-samples 5 exclude each other"),
        ("--rampup-batch-size 8 8 100", "works only with --train-samples"),
        ("--recompute-granularity full", "needs --recompute-method uniform or block"),
        ("--recompute-activations --recompute-num-layers 1", "selective recompute takes neither"),
    ],
)
def test_contradictions_are_named(words: str, message: str) -> None:
    """Jobs that Megatron would refuse are refused with flag, value and remedy."""
    with pytest.raises(MegatronError) as error:
        job(words)

    assert message in str(error.value)


def test_a_ramp_up_has_no_effect_from_0_18_on() -> None:
    """From 0.18 on the ramp-up flag has no effect, so it excludes nothing."""
    words = "--rampup-batch-size 3 5 100"

    assert job(words, version="0.18.0").pinned == ()
    with pytest.raises(MegatronError, match="only with --train-samples"):
        job(words, version="0.17.1")


STEPS = ("--step-batch-size-schedule", "2K:8, 0:4")


def test_a_batch_size_schedule_ends_with_the_largest_threshold() -> None:
    """Plans are for the last batch size, keep the flag, and divide earlier sizes; a trial runs the last size."""
    bare = " ".join(SMALL).replace("--global-batch-size 32", "").split()
    read = read_job([*bare, *STEPS], world_size=4, megatron_version="0.19.0", device_kind="cuda", for_planning=True)

    assert (read.batch, read.pinned) == (Batch(global_batch_size=8, earlier_sizes=(4,)), ())
    written = write_arguments([*bare, *STEPS], job=read, layout=replace(read.own, dp=2, tp=2))
    assert (global_batch_size(written), "--global-batch-size" in written) == (8, False)
    assert "--global-batch-size 8" in " ".join(trial_arguments(written, "0.19.0").words)
    for wrong in ("0:4 8", "0:4 1.2.3B:8", "1K:4", "0:4 0:8", "0:4 infT:8"):
        with pytest.raises(MegatronError, match="not a list such as 0:384 200B:768"):
            read_job([*bare, STEPS[0], wrong], world_size=4, megatron_version="0.19.0", device_kind="cuda")


def test_query_groups_are_replicated() -> None:
    """More tensor ranks than groups are legal."""
    assert job(f"{TP} 4 --group-query-attention --num-query-groups 2").own.tp == 4


def test_length_of_the_job_must_be_said() -> None:
    """A job without iterations and samples is refused, as Megatron would fail later."""
    with pytest.raises(MegatronError, match=r"lacks --train-iters \(or --train-samples\); add what is missing"):
        job(base=TEXT.replace("--train-iters 10", "").split())


@pytest.mark.parametrize("purpose", ["for_prediction", "for_planning"])
@pytest.mark.parametrize(
    ("more", "missing", "needless"),
    [
        ("", "--train-iters 10", "--train-iters (or --train-samples)"),
        ("--position-embedding-type rope", "--max-position-embeddings 32", "--max-position-embeddings"),
        ("--use-rotary-position-embeddings", "--max-position-embeddings 32", "--max-position-embeddings"),
        ("--position-embedding-type none", "--max-position-embeddings 32", "--max-position-embeddings"),
        ("--lr-decay-style cosine", "--no-such-flag", ""),
    ],
)
def test_flags_that_change_nothing_are_not_demanded(purpose: str, more: str, missing: str, needless: str) -> None:
    """Commands that start nothing add a note on flags that Megatron itself needs; the job is otherwise the same."""
    whole = job(more, **{purpose: True})  # type: ignore[arg-type]
    part = job(more, base=TEXT.replace(missing, "").split(), **{purpose: True})  # type: ignore[arg-type]

    assert job("--train-samples 640", base=TEXT.replace("--train-iters 10", "").split(), for_planning=True).notes == ()
    note = f"Megatron itself needs {needless} to train; nothing here depends on it"
    assert (note in part.notes) == bool(needless)
    assert (whole.own, whole.pinned, whole.model.seq_length) == (part.own, part.pinned, part.model.seq_length)


def test_learned_positions_must_be_counted() -> None:
    """The table of learned positions is part of the model, so predictions and plans need its length."""
    for purpose in ("for_prediction", "for_planning"):
        with pytest.raises(MegatronError, match="lacks --max-position-embeddings; add"):
            job(base=TEXT.replace("--max-position-embeddings 32", "").split(), **{purpose: True})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--context-parallel-size 2", "a GPU; use --context-parallel-size 1"),
        (
            "--recompute-granularity selective --recompute-modules layernorm moe",
            "--recompute-modules layernorm moe: recompute of layernorm, moe_act and mla_up_proj needs",
        ),
    ],
)
def test_cpu_lacks_transformer_engine(words: str, message: str) -> None:
    """Options that need Transformer Engine are refused on CPU and accepted on a GPU."""
    assert job(words).own
    with pytest.raises(MegatronError, match=message):
        job(words, device_kind="cpu")


def test_newer_releases_are_read_with_a_note() -> None:
    """The newest known flags are used, and a note says so."""
    assert job(version="0.25.0").notes == (
        "Megatron 0.25.0 is newer than 0.20, the newest release whose flags are known",
    )


def test_fix_pins_fields() -> None:
    """`--pipette-fix` accepts short names and field names, and adds a note."""
    asked = job(fix=("tp", "mbs", "dist-opt", "overlap", "layers_per_chunk"))

    assert asked.pinned == (
        "layers_per_chunk",
        "micro_batch_size",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "tp",
        "use_distributed_optimizer",
    )
    assert asked.notes == (f"The plan keeps these parts of your layout, as you asked: {', '.join(asked.pinned)}.",)


def test_unknown_fix_is_answered_with_the_nearest() -> None:
    """The error suggests the most similar name."""
    with pytest.raises(UsageError, match="did you mean micro_batch_size"):
        job(fix=("micro_batch_siz",))
    with pytest.raises(UsageError, match="known are"):
        job(fix=("zzz",))


def test_performance_flags_are_kept() -> None:
    """The last value of each performance flag is kept, sorted."""
    words = "--fp8-format=hybrid --fp8-format e4m3 --no-rope-fusion --cp-comm-type p2p a2a --no-bias-swiglu-fusion"

    assert ("--cp-comm-type p2p a2a", "--fp8-format e4m3", "--no-bias-swiglu-fusion", "--no-rope-fusion") == job(
        f"{words} --lr 1"
    ).performance_flags


def test_unknown_flags_do_not_matter() -> None:
    """A script's own flags do not change the job."""
    assert job("--mine 3 --tp 2") == job(base=SMALL)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--tensor-model-parallel-szie 2", "--tensor-model-parallel-szie (did you mean --tensor-model-parallel-size?)"),
        ("--micro_batch_size 4 --mine", "--micro_batch_size (did you mean --micro-batch-size?), --mine"),
        # Flags of Megatron's multimodal scripts, of its tool for distillation, and of a later release.
        ("--freeze-LM --packing-seq-length 8 --export-kd-cfg x", "--freeze-LM, --packing-seq-length, --export-kd-cfg"),
        ("--activation-offload-fraction 0.5", "--activation-offload-fraction (in 0.19 to 0.20)"),
        ("--mine 1 --mine=2 -- --num-layres", "--mine, --num-layres (did you mean --num-layers?)"),
    ],
)
def test_where_nothing_starts_unknown_flags_are_named(words: str, shown: str) -> None:
    """A note lists the unknown flags with the probable right ones; a launched script would refuse them itself."""
    note = (
        f"not flags of Megatron 0.16.1, so without effect here: {shown}; "
        "the script stops at these flags unless the script defines them"
    )

    assert (note,) == job(words, for_planning=True).notes == job(words, for_prediction=True).notes
    assert () == job(words).notes


def test_a_plan_needs_no_layout_of_the_users_own() -> None:
    """Sizes that do not fit the ranks are replaced with a note, unless other fields depend on them."""
    sizes = f"{TP} 3 {PP} 5"
    asked = job(f"{sizes} --use-distributed-optimizer --micro-batch-size 2", for_planning=True)

    assert asked.own == Layout(dp=8, micro_batch_size=2, use_distributed_optimizer=True)
    assert asked.notes[-1].startswith(f"{TP} 3 with {PP} 5 needs a multiple of 15 ranks, but the job has 8;")
    assert asked.notes[-1].endswith("; tp1 pp1 dp8 mbs2 dist-opt replaces your own layout")
    assert job(sizes, fix=("mbs",), for_planning=True).pinned == ("micro_batch_size",)
    assert job(sizes, device_kind="cpu", for_planning=True).pinned == ("cp",)
    for wrong in ({"fix": ("tp",)}, {"base": TEXT.replace("--global-batch-size 32", "").split()}):
        with pytest.raises(MegatronError, match="needs a multiple of 15 ranks"):
            job(sizes, for_planning=True, **wrong)  # type: ignore[arg-type]


BATCHLESS = TEXT.replace("--global-batch-size 32 ", "").split()


@pytest.mark.parametrize("schedule", ["0:8,1K:48", "0:8,1.5k:48", "0:48"])
def test_a_schedule_of_batch_sizes_means_its_last(schedule: str) -> None:
    """The last batch size counts, because Megatron trains longest with it."""
    asked = job(f"--step-batch-size-schedule {schedule}", base=BATCHLESS, version="0.20", for_prediction=True)

    assert 48 == asked.batch.global_batch_size
    assert any(note.endswith("figures are for a step of the last batch size") for note in asked.notes)


@pytest.mark.parametrize("schedule", ["8", "0:8,x:16", "0:0", "0:8,1K"])
def test_a_schedule_that_is_none_is_named(schedule: str) -> None:
    """Each entry of a schedule must be a threshold and a batch size."""
    with pytest.raises(MegatronError, match="not a list such as 0:384 200B:768"):
        job(f"--step-batch-size-schedule {schedule}", base=BATCHLESS, version="0.20", for_prediction=True)


def test_a_script_that_trains_nothing_is_noted() -> None:
    """Figures of a converter or a generator are those of a training step; missing flags are no surprise there."""
    note = "tools/generate.py seems to train nothing; the figures are those of a training step with these flags"

    assert note in job(for_prediction=True, script="tools/generate.py").notes
    with pytest.raises(MegatronError, match=r"--micro-batch-size; tools/generate.py seems to train nothing$"):
        job(base=["--mine"], for_prediction=True, script="tools/generate.py")
