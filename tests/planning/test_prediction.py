"""A command line and machines become a prediction with notes on every assumption."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_lines import SMALL
from search.worlds import on_gpus

from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.errors import ClusterError, MegatronError, PipetteError, UsageError
from pipette_launch.facts import Measurements, files
from pipette_launch.facts.measurements import layers_digest
from pipette_launch.facts.prediction import PARTS, Prediction
from pipette_launch.megatron import read_job
from pipette_launch.planning.machines import ITS_OWN_MODEL
from pipette_launch.planning.predict import predict
from pipette_launch.report.prediction import prediction_screen
from pipette_launch.search.candidates import SearchInputs
from pipette_launch.text import GIB, bytes_text

PIPELINE = (*SMALL, "--pipeline-model-parallel-size", "4")
MISTRAL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --vocab-size 32000 --tokenizer-type NullTokenizer --micro-batch-size 1 "
    "--global-batch-size 128 --lr 1e-4 --train-iters 100 --bf16 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights"
).split()
DEEPSEEK = (
    "--num-layers 14 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
    "--kv-channels 128 --num-experts 256 --moe-layer-freq ([0]*3+[1]*11) --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-score-function sigmoid "
    "--moe-router-pre-softmax --moe-grouped-gemm --moe-token-dispatcher-type flex --moe-enable-deepep "
    "--moe-router-dtype fp32 --moe-permute-fusion --mtp-num-layers 1 --seq-length 4096 "
    "--max-position-embeddings 4096 --vocab-size 129280 --tokenizer-type NullTokenizer --micro-batch-size 1 "
    "--global-batch-size 256 --train-iters 10 --lr 1e-4 --bf16 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --qk-layernorm --use-distributed-optimizer "
    "--pipeline-model-parallel-size 4 --expert-model-parallel-size 16 "
    "--pipeline-model-parallel-layout Ett|(tt|)*6mL --no-create-attention-mask-in-dataloader "
    "--transformer-impl transformer_engine --use-precision-aware-optimizer --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16 --fp8-format e4m3 --fp8-recipe blockwise"
).split()
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ROOT = Path(__file__).parent.parent.parent


def measured(memory_bytes: int = 8 << 30) -> Measurements:
    """Return measurements of eight CPUs on two hosts."""
    return tiny_measurements(tiny_cluster(2, 4, memory_bytes=memory_bytes))


def test_a_prediction_is_the_memory_model_and_the_predictor() -> None:
    """On a measured cluster it equals the planner's figures for the user's own configuration."""
    found = predict(PIPELINE, cluster=measured(), megatron_version="0.16.1")
    job = read_job(PIPELINE, world_size=8, megatron_version="0.16.1", device_kind="cpu")

    assert [parts.total for parts in peak_memory_bytes(job, job.own)] == [stage.peak_bytes for stage in found.stages]
    assert Predictor(job, measured()).step_time(job.own, range(8)).total_s == found.step_time_s
    assert found.step_time_s == pytest.approx(sum(found.breakdown_s.values()))
    assert ("fits", True) == (found.verdict, found.fits)


def test_the_rate_is_megatrons() -> None:
    """The step, the model's FLOPs and the data sheet's peak make tokens, FLOPs and MFU; a CPU has no MFU."""
    found = predict((*PIPELINE, "--bf16"), world_size=8, gpu="H100", megatron_version="0.16.1")
    job = read_job(PIPELINE, world_size=8, megatron_version="0.16.1", device_kind="cuda")
    rate, slow = found.rate, predict(PIPELINE, cluster=measured(), megatron_version="0.16.1").rate

    assert found.step_time_s
    assert rate
    assert slow
    assert rate.tokens_per_s == found.tokens_per_step / found.step_time_s
    assert rate.flops_per_s == job.model.step_flops(32, tp=1) / found.step_time_s / 8
    assert rate.mfu == rate.flops_per_s / 989e12
    assert slow.mfu is None


def test_the_mfu_of_fp8_is_a_share_of_the_fp8_peak() -> None:
    """Mistral 7B in FP8 on H20 exceeds the 16-bit peak of 148 TFLOP/s, so the MFU has the FP8 peak and names it."""
    words = [*MISTRAL, *"--seq-length 8192 --max-position-embeddings 8192 --fp8-format hybrid".split()]
    found = predict(words, gpu="H20", nodes=1, megatron_version="0.16.1")
    screen = " ".join(prediction_screen(found).split())

    assert found.rate is not None
    assert found.rate.mfu is not None
    assert found.rate.flops_per_s > 148e12
    assert found.rate.mfu == found.rate.flops_per_s / 296e12
    assert f"MFU {found.rate.mfu:.1%} of the FP8 peak" in screen


@pytest.mark.parametrize("devices", [1, 8])
def test_nothing_is_called_measured_on_imagined_machines(devices: int) -> None:
    """A single slot has no links, and one note says that nothing was measured."""
    found = predict(SMALL, gpu="H100", nodes=1, gpus_per_node=devices, megatron_version="0.16.1")

    claims = [note.partition("measured")[0] for note in found.notes if "measured" in note]
    assert ["Nothing was "] == claims


@pytest.mark.parametrize(
    ("seq_length", "stage", "expected"),
    [
        (128, None, "Stages 2, 3 have their memory peak"),
        (128, 3, "Stage 3 has its memory peak"),
        (32, None, "Every stage shown has its memory peak"),
    ],
)
def test_stages_are_counted_in_the_note_on_the_optimizers_step(
    seq_length: int, stage: int | None, expected: str
) -> None:
    """One stage has its peak, and several stages have theirs."""
    words = f"--hidden-size 512 --transformer-impl local --seq-length {seq_length} --max-position-embeddings 128"
    found = predict([*PIPELINE, *words.split()], world_size=8, stage=stage, megatron_version="0.16.1")

    assert [True] == [note.startswith(expected) for note in found.notes if "memory peak in" in note]


def test_it_survives_the_file() -> None:
    """Writing and reading the document changes nothing."""
    found = predict(PIPELINE, world_size=8, gpu="H100", megatron_version="0.16.1")

    assert found == files.loads(Prediction, files.dumps(found), "test")
    assert PARTS == tuple(found.stages[0].parts_bytes)


@pytest.mark.parametrize(
    ("part", "verdict", "fits"), [(1.0, "tight", False), (1.2, "fits", True), (0.9, "too large", False)]
)
def test_the_verdict_depends_on_the_margin(part: float, verdict: str, fits: bool) -> None:
    """With a margin of 8 %, the peak's own size is tight, a fifth more fits, and less does not."""
    peak = predict(PIPELINE, cluster=measured(), megatron_version="0.16.1").fullest.peak_bytes
    found = predict(PIPELINE, cluster=measured(int(part * peak)), megatron_version="0.16.1")

    assert (verdict, fits) == (found.verdict, found.fits)


@settings(max_examples=40, deadline=None)
@given(st.integers(70_000_000, 95_000_000), st.integers(1, 15_000_000), st.sampled_from((0.0, 0.01, 0.1)))
def test_the_planner_and_the_prediction_follow_one_rule(memory: int, overhead: int, margin: float) -> None:
    """On measured GPUs a configuration fits exactly if the planner would let it in."""
    cluster = replace(measured(memory), cluster=on_gpus(measured(memory).cluster), overhead_bytes=overhead)
    local = [*PIPELINE, "--transformer-impl", "local"]
    found = predict(local, cluster=cluster, memory_margin=margin, megatron_version="0.16.1")
    job = read_job(local, world_size=8, megatron_version="0.16.1", device_kind="cuda", device_name="test cpu")
    limit = SearchInputs.of(job, cluster, memory_margin=margin).limit_bytes(job.own)
    needed = max(parts.total for parts in peak_memory_bytes(job, job.own))

    assert (needed <= limit) == found.fits


def test_of_unknown_machines_only_memory_is_told() -> None:
    """There is no verdict and no time, and a note says what would help."""
    found = predict(PIPELINE, world_size=8, megatron_version="0.16.1")

    assert ("unknown", None, None, None) == (found.verdict, found.fits, found.step_time_s, found.capacity_bytes)
    assert any(note.startswith("No step time: the machines are unknown") for note in found.notes)


def test_the_gpu_and_the_environment_decide_the_attention() -> None:
    """By default TransformerEngine keeps scores before Ampere; an environment that contradicts the flag is refused."""
    words = [*SMALL, *"--transformer-impl transformer_engine --fp16 --seq-length 2048".split()]
    words += ["--max-position-embeddings", "2048"]
    volta, ampere = (
        predict(words, world_size=8, gpu=name, megatron_version="0.16.1") for name in ("V100-SXM2-32GB", "A100-80GB")
    )

    assert volta.stages[0].parts_bytes["activations"] > ampere.stages[0].parts_bytes["activations"]
    with pytest.raises(MegatronError, match="NVTE_FLASH_ATTN=0 in the environment contradicts"):
        predict(words, world_size=8, megatron_version="0.16.1", environment={"NVTE_FLASH_ATTN": "0"})


def test_a_rank_has_a_stage() -> None:
    """With pp outermost rank 5 of 8 runs stage 2 of 4; the verdict is then on that stage alone."""
    by_rank = predict(PIPELINE, world_size=8, rank=5, megatron_version="0.16.1")
    by_stage = predict(PIPELINE, world_size=8, stage=2, megatron_version="0.16.1")

    assert [2] == [stage.pp_rank for stage in by_rank.stages]
    assert by_rank.stages == by_stage.stages
    assert "Rank 5 is pp 2, dp 1, cp 0, tp 0." in by_rank.notes


def test_what_was_not_measured_has_no_time() -> None:
    """An unmeasured micro-batch has memory but no time."""
    nothing = replace(measured(), compute=())
    found = predict(PIPELINE, cluster=nothing, megatron_version="0.16.1")

    assert (None, "fits") == (found.step_time_s, found.verdict)
    assert any(note.startswith("No step time: tp1 pp4 dp2 mbs1 was not measured") for note in found.notes)


def test_a_device_without_a_peak_has_no_time() -> None:
    """A V100 has no bf16 peak: there is memory but no time."""
    found = predict([*PIPELINE, "--bf16"], world_size=8, gpu="V100-SXM2-32GB", megatron_version="0.16.1")

    assert found.step_time_s is None
    assert any("V100-SXM2-32GB has no known peak for bf16" in note for note in found.notes)


def test_every_overhead_is_a_note() -> None:
    """On an imagined GPU, each default overhead is a note."""
    notes = " ".join(predict(PIPELINE, world_size=8, gpu="H100", megatron_version="0.16.1").notes)

    for word in ("Workspaces", "Context", "Communicators", "allocator's reserve"):
        assert word in notes


def test_without_megatron_the_newest_flags_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Megatron, a note names the assumed release."""
    monkeypatch.setattr("importlib.metadata.version", _not_installed)
    monkeypatch.chdir(tmp_path)
    found = predict(PIPELINE, world_size=8)

    assert any(note.startswith("No Megatron is here: flags and defaults of 0.") for note in found.notes)


def _not_installed(name: str) -> str:
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("more", "said", "error", "message"),
    [
        ("--tensor-model-parallel-size 3", {}, MegatronError, "--tensor-model-parallel-size 3"),
        ("--tensor-model-parallel-size 16", {}, MegatronError, "the job has 8"),
        ("--global-batch-size 7", {}, MegatronError, "must be a multiple of"),
        ("--num-layers -4", {}, MegatronError, "--num-layers -4"),
        ("--hidden-size 0", {}, MegatronError, "--hidden-size 0"),
        ("--attention-backend quantum", {}, MegatronError, "--attention-backend quantum: unknown value 'quantum'"),
        ("", {"rank": 8}, UsageError, "rank must be between 0 and 7, got 8"),
        ("", {"stage": 4}, UsageError, "stage must be between 0 and 3 for pp 4, got 4"),
        ("", {"memory_margin": 1.0}, UsageError, "memory_margin must be at least 0 and below 1"),
        ("", {"megatron_version": "0.9"}, MegatronError, "older than core_v0.16"),
    ],
)
def test_bad_input_is_one_clear_sentence(
    more: str, said: dict[str, object], error: type[PipetteError], message: str
) -> None:
    """The message names the flag, the value and a legal value."""
    with pytest.raises(error) as caught:
        predict([*PIPELINE, *more.split()], **{"world_size": 8, "megatron_version": "0.16.1", **said})  # type: ignore[arg-type]

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_torch_is_needed() -> None:
    """Neither the API nor the command imports torch or megatron-core; a laptop has neither."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['megatron'] = None\n"
        "import pipette_launch\n"
        f"found = pipette_launch.predict({list(PIPELINE)!r}, world_size=8, gpu='H100', megatron_version='0.16.1')\n"
        "assert found.step_time_s\n"
        "from pipette_launch.cli.pipette import main\n"
        f"main(['predict', '--world-size', '8', '--gpu', 'H100', 'pretrain_gpt.py', *{list(PIPELINE)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)

    assert (0, "") == (done.returncode, done.stderr)
    assert "It fits" in done.stdout


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"arguments": " ".join(PIPELINE)}, "shlex.split"),
        ({"arguments": [*PIPELINE, "--seed", 5]}, "each a str"),
        ({"world_size": "8"}, "^world_size must be a whole number, got '8'"),
        ({"world_size": 8.0}, "^world_size must be a whole number, got 8.0"),
    ],
)
def test_values_of_another_type_are_refused_in_words(wrong: dict[str, Any], message: str) -> None:
    """A whole line in one string, a number as a word, and non-integer sizes are refused."""
    given_ = {"arguments": PIPELINE, "world_size": 8, "megatron_version": "0.16.1"} | wrong

    with pytest.raises(UsageError, match=message):
        predict(**given_)


def test_a_measured_cluster_says_whose_layers_it_timed() -> None:
    """A file without a model gets a note on its layer times; imagined times need no note."""
    told, imagined = (
        predict(PIPELINE, cluster=measured(), megatron_version="0.16.1"),
        predict(PIPELINE, world_size=8, gpu="H100", megatron_version="0.16.1"),
    )

    assert ITS_OWN_MODEL in told.notes
    assert ITS_OWN_MODEL not in imagined.notes


def test_layers_of_another_model_are_refused() -> None:
    """A file for another kind of layer is refused; the number of layers may differ."""
    job = read_job(PIPELINE, world_size=8, megatron_version="0.16.1", device_kind="cpu", for_prediction=True)
    mine = replace(measured(), model_digest=layers_digest(replace(job.model, num_layers=2 * job.model.num_layers)))

    assert ITS_OWN_MODEL not in predict(PIPELINE, cluster=mine, megatron_version="0.16.1").notes
    with pytest.raises(ClusterError, match="timed the layers of another model"):
        predict(PIPELINE, cluster=replace(mine, model_digest="another"), megatron_version="0.16.1")


def test_fp8_shortens_the_products_of_layers() -> None:
    """FP8 is less than twice as fast, because of casts; a note names share and peak."""
    line = (*PIPELINE, "--bf16", "--transformer-impl", "transformer_engine")
    plain, eight = (
        predict(words, world_size=8, gpu="H100", megatron_version="0.16.1")
        for words in (line, (*line, "--fp8-format", "hybrid"))
    )

    narrow = "Matrix products of transformer layers reach 68% of 1979 TFLOP/s (fp8), and casts move 4 bytes an element."
    assert narrow not in plain.notes
    assert narrow in eight.notes
    assert 0.5 < eight.breakdown_s["compute"] / plain.breakdown_s["compute"] < 1.2


@pytest.mark.parametrize(
    ("words", "begins", "ends"),
    [
        ("--use-sharp", "--use-sharp is not in the predicted step time", "the step may be too long."),
        ("--use-nccl-ub", "--use-nccl-ub is not in the predicted step time", "the step may be too long."),
        (
            "--nccl-communicator-config-path nccl.yaml",
            "--nccl-communicator-config-path nccl.yaml is not in the predicted step time",
            "the step may be too long or too short.",
        ),
    ],
)
def test_settings_of_nccl_that_were_not_measured_have_a_note(words: str, begins: str, ends: str) -> None:
    """Collectives are measured with NCCL's defaults, and a note names the job's own settings."""
    plain, with_flag = (
        predict((*PIPELINE, *more), world_size=8, gpu="H100", megatron_version="0.16.1") for more in ((), words.split())
    )
    (note,) = set(with_flag.notes) - set(plain.notes)

    assert note.startswith(begins)
    assert note.endswith(ends)
    assert "NCCL's default settings" in note


def test_frozen_layers_run_forwards_alone() -> None:
    """A step has no backward, reduction or optimizer, and a rank keeps neither gradients nor other layers' tensors."""
    line = (*PIPELINE, "--use-distributed-optimizer", "--global-batch-size", "64")
    plain, frozen = (
        predict((*line, *flags), world_size=8, gpu="H100", megatron_version="0.19.0")
        for flags in ((), ("--freeze-all-layers",))
    )

    assert not frozen.layout.use_distributed_optimizer
    assert any("pipeline ranks behind the first also run backwards" in note for note in frozen.notes)
    for stage in frozen.stages:
        assert stage.parts_bytes["gradients"] == stage.parts_bytes["optimizer"] == 0
    assert frozen.stages[0].model_peak_bytes < plain.stages[0].model_peak_bytes / 2
    assert frozen.step_time_s is not None
    assert plain.step_time_s is not None
    assert 0 < frozen.step_time_s < 0.5 * plain.step_time_s
    assert frozen.breakdown_s["optimizer"] == frozen.breakdown_s["embedding_gradients"] == 0
    with pytest.raises(MegatronError, match="--freeze-all-layers: only forwards run"):
        read_job(
            (*line, "--freeze-all-layers"),
            world_size=8,
            megatron_version="0.19.0",
            device_kind="cuda",
            for_planning=True,
            without_probes=True,
        )


QWEN3 = (
    "--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --group-query-attention --num-query-groups 4 "
    "--kv-channels 128 --ffn-hidden-size 6144 --moe-ffn-hidden-size 768 --num-experts 128 --moe-router-topk 8 "
    "--moe-grouped-gemm --seq-length 4096 --max-position-embeddings 4096 --swiglu --disable-bias-linear --bf16 "
    "--normalization RMSNorm --position-embedding-type rope --qk-layernorm --untie-embeddings-and-output-weights "
    "--vocab-size 151936 --tokenizer-type NullTokenizer --micro-batch-size 4 --global-batch-size 1024 "
    "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type flex "
    "--train-iters 100 --lr 1e-4 --use-distributed-optimizer"
)
OFFLOAD = "--fine-grained-activation-offloading --offload-modules expert_fc1 moe_act"
CAPACITY = "--moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 1.5"
OVERLAP = "--overlap-moe-expert-parallel-comm"


@pytest.mark.parametrize(
    ("fewer", "more", "signs", "note"),
    [
        # Signs of the changes of memory and step time by the flags in `more`, beside the flags in `fewer`.
        ("", "--optimizer dist_muon", "+-", "priced by its memory traffic alone"),
        ("", "--optimizer adaptive_muon", "++", ""),
        ("", "--optimizer soap", "++", "--optimizer soap is priced by its memory traffic alone"),
        ("", OFFLOAD, "-0", "Activations go to the host"),
        (OFFLOAD, "--activation-offload-fraction 0.2", "+0", ""),
        (f"{OFFLOAD} --pipeline-model-parallel-size 4", "--delta-offload-bytes-across-pp-ranks 1000000000", "+0", ""),
        ("", f"{OFFLOAD[:54]} fused_group_mlp --use-transformer-engine-op-fuser", "-0", "--use-transformer-engine-op"),
        ("", CAPACITY, "+0", ""),
        (CAPACITY, "--moe-paged-stash --use-transformer-engine-op-fuser", "-0", "not priced"),
        ("--no-check-for-nan-in-loss-and-grad", "--cuda-graph-impl full_iteration", "+-", "up to twice"),
        ("", "--freeze-all-layers", "--", ""),
        ("", "--moe-flex-dispatcher-backend ncclep", "00", "ncclep is not in the predicted step time"),
        ("--moe-flex-dispatcher-backend ncclep", "--moe-combine-bwd-dtype mxfp8", "0-", ""),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "--fp8-output-proj", "0-", ""),
        ("", "--high-priority-a2a-comm-stream", "00", "not priced"),
        (OVERLAP, "--delay-wgrad-compute", "00", "not priced"),
        ("", "--optimizer-cuda-graph", "00", "not priced"),
        ("", "--use-sharp", "00", "--use-sharp is not in the predicted step time"),
        ("--mtp-num-layers 1", "--mtp-detach-heads", "00", "not priced"),
        ("", "--output-logit-dtype fp32", "00", "not priced"),
        ("--no-create-attention-mask-in-dataloader", "--dataloader-inter-document-masking", "00", "single documents"),
    ],
)
def test_flags_of_late_2026_are_priced_or_noted(fewer: str, more: str, signs: str, note: str) -> None:
    """A flag changes memory and time in the right direction, or a note of the prediction names the flag."""
    plain, found = (
        predict(f"{QWEN3} {words}".split(), gpu="GB200", world_size=64, megatron_version="0.20.0")
        for words in (fewer, f"{fewer} {more}")
    )
    sizes = [(sum(stage.model_peak_bytes for stage in each.stages), each.step_time_s) for each in (plain, found)]

    changes = [0 if new == old else new > old or -1 for old, new in zip(*sizes, strict=True)]
    assert "".join("0+-"[change] for change in changes) == signs
    assert not note or any(note in each for each in {*found.notes} - {*plain.notes})


@pytest.mark.parametrize(
    ("words", "seq_length", "nodes"),
    [
        ("--num-experts 128 --expert-model-parallel-size 32 --overlap-moe-expert-parallel-comm", 4096, 4),
        ("--num-experts 128 --expert-model-parallel-size 64 --overlap-moe-expert-parallel-comm", 4096, 8),
        ("--num-experts 128 --expert-model-parallel-size 64 --overlap-moe-expert-parallel-comm", 1024, 8),
        ("--num-experts 128 --expert-model-parallel-size 16", 8192, 2),
        ("--tensor-model-parallel-size 8 --sequence-parallel --tp-comm-overlap", 2048, 1),
        ("--tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2", 2048, 2),
        ("--pipeline-model-parallel-size 4", 1024, 1),
    ],
)
def test_graphs_never_make_a_step_longer(words: str, seq_length: int, nodes: int) -> None:
    """Time in which devices wait for launches hides each collective once, not in two formulas."""
    line = (
        "--num-layers 16 --hidden-size 4096 --ffn-hidden-size 1024 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --max-position-embeddings 8192 --vocab-size 32000 "
        "--tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 512 --train-iters 100 --lr 1e-4 "
        f"--bf16 --swiglu --disable-bias-linear --normalization RMSNorm --use-distributed-optimizer --te-rng-tracker "
        f"{words} --seq-length {seq_length}"
    )
    parts = "mlp"
    if "experts" in words:
        line += (
            " --moe-router-topk 8 --moe-grouped-gemm --moe-ffn-hidden-size 1024 --moe-token-dispatcher-type alltoall"
        )
        parts = "moe_router moe_preprocess"
    by_engine = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn"
    graphs = ("", by_engine, f"{by_engine} {parts}")
    steps_s = [
        predict(f"{line} {flags}".split(), gpu="H100", nodes=nodes, megatron_version="0.20.0").step_time_s or 0.0
        for flags in graphs
    ]

    assert min(steps_s) > 0
    assert steps_s[2] <= steps_s[1] * (1 + 1e-12)
    assert steps_s[1] <= steps_s[0] * (1 + 1e-12)


def test_sparse_attention_is_priced_with_its_doubts() -> None:
    """Torch's scores take longer than kernels, and cp is no ring."""
    words = (
        "--experimental-attention-variant dsa --multi-latent-attention --kv-lora-rank 512 --no-rope-fusion "
        "--dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 1024 --context-parallel-size 2 "
        "--cp-comm-type allgather --seq-length 4096"
    ).split()
    line = [word for word in MISTRAL if word not in ("--group-query-attention", "--num-query-groups", "8")]
    options = {"world_size": 8, "gpu": "H100", "megatron_version": "0.20"}
    torch, kernels = (
        predict((*line, *words, "--dsa-kernel-backend", name), **options) for name in ("none", "tilelang")
    )

    assert torch.step_time_s > 2 * kernels.step_time_s
    kept = [found.stages[0].parts_bytes["activations"] for found in (torch, kernels)]
    assert kept[0] > 2 * kept[1]
    assert any("No published run had sparse attention." in note for note in kernels.notes)
    assert any(note.startswith("Scores of sparse attention that torch computes are in fp32") for note in torch.notes)
    assert not any("priced as a ring" in note for note in torch.notes)


def test_a_flag_that_is_not_priced_has_a_note() -> None:
    """A note says that an optimizer on the host is not in the predicted step."""
    flags = "--bf16 --optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer"
    line = (*PIPELINE, "--transformer-impl", "transformer_engine", *flags.split())
    found = predict(line, world_size=8, gpu="H100", megatron_version="0.16.1")

    assert any(note.startswith("--optimizer-cpu-offload is not in the predicted step time") for note in found.notes)


def test_attention_within_documents_has_a_note() -> None:
    """The lengths of documents are unknown, and a note gives the direction of the error."""
    found = predict((*PIPELINE, "--sft"), world_size=8, gpu="H100", megatron_version="0.20.0")

    assert any(
        "whole sequences instead of single documents, and the step may be too long" in note for note in found.notes
    )


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (
            "--cuda-graph-impl transformer_engine",
            "--cuda-graph-impl: the memory of captured graphs is not in the predicted",
        ),
        ("--enable-cuda-graph", "--enable-cuda-graph: the memory of captured graphs is not in the predicted memory"),
    ],
)
def test_memory_that_is_not_counted_has_a_note(words: str, begins: str) -> None:
    """The note names the flag, and whether the real memory is larger or smaller."""
    plain, with_flag = (
        predict(line, world_size=8, gpu="H100", megatron_version="0.16.1")
        for line in (PIPELINE, (*PIPELINE, *words.split()))
    )

    assert [begins] == [begins for note in with_flag.notes if note.startswith(begins)]
    assert not any(note.startswith(begins) for note in plain.notes)


def test_flags_that_megatron_does_not_have_are_named() -> None:
    """An unknown flag has no effect, so a note names it; a release may be given as Megatron's tag."""
    found = predict((*PIPELINE, "--num-layres", "3"), cluster=measured(), megatron_version="core_v0.16.1")
    clean = predict(PIPELINE, cluster=measured(), megatron_version="0.16.1")

    note = (
        "not flags of Megatron 0.16.1, so without effect here: --num-layres (did you mean --num-layers?); "
        "the script stops at these flags unless the script defines them"
    )
    assert [note] == [each for each in found.notes if each not in clean.notes]
    assert clean.stages == found.stages


@pytest.mark.parametrize(
    ("words", "least_gib", "most_gib"),
    [
        ("--seq-length 524288 --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 16", 256, 330),
        ("--seq-length 131072 --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 16", 16, 60),
        ("--seq-length 262144 --context-parallel-size 8 --pipeline-model-parallel-size 8", 64, 240),
        (f"--seq-length 1048576 --context-parallel-size 64 {FULL}", 1024, 1200),
    ],
)
def test_long_sequences_need_their_whole_mask(words: str, least_gib: int, most_gib: int) -> None:
    """The peak of a 7B model includes the whole mask of s x s bytes; the flag removes it."""
    length = words.split()[1]
    asked = (*MISTRAL, *words.split(), "--max-position-embeddings", length)
    options: dict[str, Any] = {"world_size": 64, "gpu": "H100-SXM", "megatron_version": "0.16.1"}
    found = predict(asked, **options)
    bare = predict((*asked, "--no-create-attention-mask-in-dataloader"), **options)

    assert least_gib << 30 < max(one.peak_bytes for one in found.stages) < most_gib << 30
    assert max(one.peak_bytes for one in bare.stages) < max(one.peak_bytes for one in found.stages)
    assert any("--no-create-attention-mask-in-dataloader leaves the mask out" in note for note in found.notes)
    assert not any("attention mask" in note for note in bare.notes)


def test_the_allocators_cache_alone_makes_a_job_tight() -> None:
    """DeepSeek-V3 of 14 layers trained on 64 H100 with 67.09 GiB allocated; the device has 79.1 GiB."""
    found = predict(DEEPSEEK, nodes=8, gpu="H100", megatron_version="0.20")
    fullest, screen = found.fullest, " ".join(prediction_screen(found).split())

    assert ("tight", False) == (found.verdict, found.fits)
    assert 67.09 == pytest.approx(fullest.model_peak_bytes / GIB, rel=0.005)
    assert found.capacity_bytes is not None
    assert fullest.least_bytes < found.capacity_bytes < fullest.peak_bytes
    assert "It is tight: stage 0, the fullest, needs at least 69.34 GiB of the 79.10 GiB of a device." in screen
    assert "With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it needs about 74.80 GiB." in screen
    assert () == found.remedies


def test_what_expands_already_is_not_proposed() -> None:
    """With expandable segments the job is tight by the margin alone, and nothing more is proposed."""
    eased = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    found = predict(DEEPSEEK, nodes=8, gpu="H100", megatron_version="0.20", environment=eased)

    assert ("tight", None) == (found.verdict, found.expandable_peak_bytes)
    assert 74.80 == pytest.approx(found.fullest.peak_bytes / GIB, abs=0.01)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in prediction_screen(found)


def test_expandable_segments_are_a_remedy_where_the_job_then_fits() -> None:
    """A margin that only the smaller cache leaves free: the verdict names the variable."""
    found = predict(DEEPSEEK, nodes=8, gpu="H100", megatron_version="0.20", memory_margin=0.05)
    screen = " ".join(prediction_screen(found).split())

    assert ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",) == found.remedies
    assert "With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it would fit." in screen


def test_tensors_that_exceed_the_device_do_not_fit() -> None:
    """With moments of Adam in fp32, the job needs more than the device has even without the allocator's cache."""
    wide = [word for word in DEEPSEEK if word not in {"--exp-avg-dtype", "--exp-avg-sq-dtype", "bf16"}]
    found = predict(wide, nodes=8, gpu="H100", megatron_version="0.20")
    screen = " ".join(prediction_screen(found).split())

    assert "too large" == found.verdict
    assert found.capacity_bytes is not None
    more_bytes = found.fullest.least_bytes - found.capacity_bytes
    assert f"{bytes_text(more_bytes)} more than the 79.10 GiB of a device." in screen
    assert more_bytes > 0


@pytest.mark.parametrize(
    ("words", "gpu", "verdict", "is_remedy"),
    [
        ("--seq-length 524288 --context-parallel-size 16", "H100-SXM", "too large", True),
        ("--seq-length 524288 --context-parallel-size 16", "A100-40GB", "too large", False),
        ("--seq-length 131072 --context-parallel-size 16", "H100-SXM", "fits", False),
        (
            "--seq-length 524288 --context-parallel-size 16 --no-create-attention-mask-in-dataloader",
            "H100-SXM",
            "fits",
            False,
        ),
    ],
)
def test_the_mask_is_named_in_the_verdict_where_the_job_would_fit_without(
    words: str, gpu: str, verdict: str, is_remedy: bool
) -> None:
    """The verdict names the flag only if the job fits with it and not without it."""
    degrees = "--tensor-model-parallel-size 4 --context-parallel-size 16 --sequence-parallel".split()
    degrees += ["--max-position-embeddings", "524288"]
    found = predict(
        (*MISTRAL, *degrees, *words.split()), world_size=64, gpu=gpu, megatron_version="0.16.1", memory_margin=0.05
    )
    screen = " ".join(prediction_screen(found).split())

    assert verdict == found.verdict
    assert (("--no-create-attention-mask-in-dataloader",) if is_remedy else ()) == found.remedies
    assert is_remedy == ("With --no-create-attention-mask-in-dataloader it would fit." in screen)
