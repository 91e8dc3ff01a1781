"""Fields that a plan must not change are pinned with a note; some jobs are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_lines import TEXT, job

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.pins import MEASURED, binds_hosts

SAMPLES = TEXT.replace("--train-iters 10", "--train-samples 1000").split()
OPTIMIZER = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
MICRO = "micro_batch_size"
EXPERTS = "--num-experts 4"


@pytest.mark.parametrize(
    ("words", "pinned"),
    [
        ("--dataloader-type cyclic", ("dp", MICRO)),
        ("--dataloader-type single", ()),
        ("--dataloader-type mosaic", ("dp", MICRO)),
        ("--rampup-batch-size 8 8 100", ("dp", MICRO, "vpp")),
        (
            "--rampup-batch-size 8 8 100 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            ("dp", MICRO, "pp", "vpp"),
        ),
        ("--eod-mask-loss", (MICRO,)),
        ("--eod-mask-loss --calculate-per-token-loss", ()),
        ("--attention-dropout 0.5", ()),
        (f"{EXPERTS} --moe-aux-loss-coeff 0.01", (MICRO,)),
        (EXPERTS, ()),
        (f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01", ()),
        (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", (MICRO,)),
        (
            f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
            ("dp", MICRO),
        ),
        (f"{EXPERTS} --moe-expert-capacity-factor 1.0", ("cp", "ep", "etp", MICRO, "tp")),
        ("--optimizer sgd", OPTIMIZER),
        ("--optimizer muon", ("etp", *OPTIMIZER[:2], "tp", OPTIMIZER[2])),
        ("--use-distributed-optimizer --use-precision-aware-optimizer", OPTIMIZER),
        (
            (
                "--distribute-saved-activations --tensor-model-parallel-size 2 --recompute-granularity full "
                "--recompute-method block --recompute-num-layers 1"
            ),
            ("recompute",),
        ),
        ("--fine-grained-activation-offloading --offload-modules core_attn", ("recompute",)),
        ("--num-experts 4 --moe-layer-recompute", ("recompute",)),
        ("--data-parallel-random-init", ("dp",)),
        ("--ckpt-format torch --disable-gloo-process-groups", ("use_distributed_optimizer",)),
        ("--ckpt-format torch", ()),
        ("--batch-invariant-mode --attention-backend flash", ("cp",)),
    ],
)
def test_learning_stays_the_same(words: str, pinned: tuple[str, ...]) -> None:
    """Each flag that makes the training result depend on the layout pins these fields, with a note."""
    asked = job(words, base=SAMPLES)

    assert pinned == asked.pinned
    assert bool(asked.notes) == bool(pinned)


def test_sharding_stays() -> None:
    """Flags of sharding pin the optimizer's fields; the rest of the layout may change."""
    words = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer"
    asked = job(words, base=SAMPLES, for_prediction=True)

    assert OPTIMIZER == asked.pinned


def test_megatron_turns_the_optimizer_on_itself() -> None:
    """From 0.18 on Megatron-FSDP implies the distributed optimizer; before, the job is refused without it."""
    flags = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"

    assert job(flags, version="0.18.0", for_prediction=True).own.use_distributed_optimizer
    with pytest.raises(MegatronError, match="add --use-distributed-optimizer"):
        job(flags, for_prediction=True)


def test_cpu_pins_context_parallelism() -> None:
    """On CPU cp is pinned, because context parallelism needs Transformer Engine."""
    assert job(device_kind="cpu").pinned == ("cp",)


@pytest.mark.parametrize(
    "words",
    [
        "--local-rank 0",
        "--yaml-cfg job.yaml",
        "--is-hybrid-model",
        "--heterogeneous-layers-config-path layers.json",
        "--use-torch-fsdp2",
        "--perform-rl-step",
        "--skip-train",
        "--fake-process-group",
        "--inprocess-restart",
        "--non-persistent-ckpt-type local",
        "--dataloader-type external",
    ],
)
def test_unplanned_jobs_are_refused(words: str) -> None:
    """The error begins with the user's own words."""
    with pytest.raises(MegatronError) as error:
        job(words)

    assert str(error.value).startswith(f"{words}: ")


@pytest.mark.parametrize(
    "words",
    [
        *("--spec my.module layers", "--experimental-attention-variant dsa"),
        "--hybrid-override-pattern D-D-D-D-",
    ],
)
def test_layers_that_no_formula_knows_are_measured(words: str) -> None:
    """The job's own script builds them; a prediction, or a plan for described machines, refuses them."""
    flag = words.partition(" ")[0]

    found = job(words)

    assert words in found.performance_flags
    assert any(note.startswith(f"{words}: its layers are measured") for note in found.notes)
    with pytest.raises(MegatronError, match=flag):
        job(words, for_prediction=True)


def test_another_model_is_measured(tmp_path: Path) -> None:
    """Context parallelism and the micro-batch size stay, and a plan for described machines is refused."""
    script = tmp_path / "mine.py"
    script.write_text("from megatron.core.models.bert.bert_model import BertModel")

    found = job(script=str(script))

    assert ("bert", ("cp", "micro_batch_size")) == (found.model.foreign, found.pinned)
    assert "--hidden-size 64" in found.performance_flags
    assert any(note.startswith("the layers of this bert model are measured") for note in found.notes)
    with pytest.raises(MegatronError, match="no formula describes the bert model"):
        job(script=str(script), for_planning=True, without_probes=True)


def test_several_stacks_of_layers_keep_their_stages() -> None:
    """No formula describes the exchanges of several stacks, so degrees stay, and no stages are planned."""
    words = "--decoder-num-layers 4 --decoder-seq-length 16"

    assert {"tp", "pp", "vpp", "cp", "sequence_parallel"} < set(job(words, script="pretrain_t5.py").pinned)
    with pytest.raises(MegatronError, match=r"^--pipeline-model-parallel-size 2: pipeline stages of several stacks"):
        job(words, "--pipeline-model-parallel-size 2", script="pretrain_t5.py")


def test_a_hybrid_model_is_measured() -> None:
    """The warm-up times its layers by kind, because the job's own script builds them."""
    found = job("--hybrid-override-pattern *M-*M-*M --mamba-num-groups 2 --mamba-num-heads 2")

    assert found.model.hybrid is not None
    assert "*M-*M-*M" == found.model.hybrid.pattern


def test_offloaded_scores_of_uneven_layers_are_refused() -> None:
    """Unfused attention is refused if dense layers and layers with experts offload different modules."""
    words = "--fine-grained-activation-offloading --offload-modules core_attn moe_act"
    mixed = f"{EXPERTS} --moe-layer-freq [0]+[1]*7 {words}"

    assert job(f"{mixed} --attention-backend fused")
    assert job(f"{EXPERTS} {words} --attention-backend unfused")
    with pytest.raises(MegatronError, match="two layers return at once"):
        job(f"{mixed} --attention-backend unfused", for_prediction=True)


def test_what_is_off_or_harmless_is_not_refused() -> None:
    """The local spec is Megatron's own, and flags of placement do not matter for a prediction."""
    assert job("--spec local")
    assert job("--tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel")
    assert job("--moe-token-dispatcher-type flex")


def test_what_megatron_fsdp_shards_is_planned() -> None:
    """The warm-up times whole layers of Megatron-FSDP and runs stages with their shards, so such jobs are planned."""
    assert job("--use-megatron-fsdp --use-distributed-optimizer")


@pytest.mark.parametrize(
    "words",
    [
        "--hybrid-override-pattern M-M-M-*- --mamba-head-dim 8 --spec megatron.core.models mamba_stack_spec",
        "--local-rank 0",
        "--inprocess-restart",
        "--dataloader-type external",
    ],
)
def test_what_only_a_placement_breaks_is_predicted(words: str) -> None:
    """Memory and time of some jobs can be predicted, though they cannot be planned."""
    assert job(words, for_prediction=True)


@pytest.mark.parametrize(
    "words",
    [
        "--skip-train",
        "--img-h 224",
    ],
)
def test_what_is_not_modelled_is_not_predicted(words: str) -> None:
    """A job with parts that are not modelled is not predicted."""
    with pytest.raises(MegatronError):
        job(words, for_prediction=True)


def test_the_old_word_for_recomputed_experts() -> None:
    """The flag makes recompute selective and adds a module to it."""
    experts = "--num-experts 4 --moe-layer-recompute"

    assert job(experts).own.recompute.modules == ("core_attn", "moe")
    assert job(experts, "--recompute-granularity selective --recompute-modules moe").own.recompute.modules == ("moe",)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--local-rank 0", True),
        ("--inprocess-restart", True),
        ("checkpoint.non_persistent_ckpt_type=local", True),
        ("--dataloader-type external", True),
        ("--machine_rank=1", True),
        ("--dataloader-type cyclic --non-persistent-ckpt-type global", False),
    ],
)
def test_flags_that_bind_ranks_to_hosts_are_found(words: str, *, expected: bool) -> None:
    """Any dialect may bind ranks to hosts; other values of the same flag do not bind."""
    assert expected is binds_hosts(words.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--decoder-seq-length 64 --img-h 336 --img-w 336",
            "--decoder-seq-length 64 and --img-h 336: models of several stacks of layers (T5, images) are not modelled",
        ),
        (
            "--decoder-num-layers 4 --decoder-seq-length 64",
            "--decoder-num-layers 4 and --decoder-seq-length 64: models of several stacks of layers (T5, images)",
        ),
        ("--spec my.layers spec", "--spec my.layers spec: layers from a module of your own are not modelled"),
    ],
)
def test_a_job_without_formulas_names_the_next_step(words: str, expected: str) -> None:
    """All flags of one reason stand in one fault, which ends with the commands that measure the job."""
    with pytest.raises(MegatronError) as error:
        job(words, for_prediction=True)

    text = str(error.value)
    assert text.startswith(expected)
    assert text.endswith(f"; {MEASURED}")


def test_an_old_flag_of_full_recompute_is_translated() -> None:
    """Megatron-DeepSpeed's --checkpoint-activations recomputes every layer, unlike --recompute-activations."""
    with pytest.raises(MegatronError, match="--recompute-granularity full --recompute-method uniform --recompute-num-"):
        job("--checkpoint-activations", for_prediction=True)


@pytest.mark.parametrize("given", ["", "--recompute-method uniform"])
def test_full_recompute_names_the_missing_flags(given: str) -> None:
    """The error shows the flags as given, and all that full recompute needs."""
    words = f"--recompute-granularity full {given}".strip()
    with pytest.raises(MegatronError) as error:
        job(words, for_prediction=True)

    needs = "full recompute needs --recompute-method uniform or block, and --recompute-num-layers N"
    assert f"{words.replace('full --', 'full and --')}: {needs}" == str(error.value)
