"""The Megatron that a script would import is found without importing it, and trials leave no files."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from megatron_lines import SMALL, job

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Layout
from pipette_launch.megatron import (
    environment,
    newest_release,
    read_job,
    script_version,
    stated_layout,
    trial_arguments,
    version_or_newest,
)
from pipette_launch.megatron.flags import Arguments, flag_table, releases
from pipette_launch.megatron.script import (
    ENDS,
    GROWING,
    REFUSED,
    TAKEN_OUT,
    WRITERS,
    foreign_model,
    played_arguments,
    trains_nothing,
)


def checkout(folder: Path, version: str) -> Path:
    """Write a checkout of some release: a script, and the file with the version."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    numbers = dict(zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True))
    core.joinpath("package_info.py").write_text("".join(f"{name} = {number}\n" for name, number in numbers.items()))
    script = folder / "pretrain_gpt.py"
    script.write_text("")
    return script


def test_sources_beside_the_script_come_first(tmp_path: Path) -> None:
    """The script's own folder comes before PYTHONPATH, also for a linked script, as in Python."""
    script = checkout(tmp_path / "a", "0.14.2")
    checkout(tmp_path / "b", "0.15.0")
    link = tmp_path / "link.py"
    link.symlink_to(script)

    assert [script_version(str(path), {"PYTHONPATH": str(tmp_path / "b")}) for path in (script, link)] == ["0.14.2"] * 2


def test_pythonpath_comes_before_what_is_installed(tmp_path: Path) -> None:
    """Entries are tried in order, and entries without Megatron are skipped."""
    checkout(tmp_path / "b", "0.15.0")
    script = tmp_path / "mine.py"
    script.write_text("")

    assert script_version(str(script), {"PYTHONPATH": f"/nowhere:{tmp_path / 'b'}"}) == "0.15.0"


def test_a_module_is_looked_for_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For `-m pretrain_gpt` the working directory comes first."""
    checkout(tmp_path, "0.17.0")
    monkeypatch.chdir(tmp_path)

    assert script_version("pretrain_gpt", {}) == "0.17.0"


def test_installed_package_is_the_rest(tmp_path: Path) -> None:
    """Without sources the installed megatron-core counts."""
    assert metadata.version("megatron-core") == script_version(str(tmp_path / "mine.py"), {})


def test_no_megatron_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any Megatron the error says what to do; a checkout above the script still counts."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)

    with pytest.raises(MegatronError, match="install megatron-core"):
        script_version(str(tmp_path / "mine.py"), {})
    checkout(tmp_path, "0.16.0")
    assert script_version(str(tmp_path / "examples" / "mine.py"), {}) == "0.16.0"


def test_a_named_release_comes_first_and_the_newest_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag of Megatron is accepted as a version; without any Megatron a note says which release is assumed."""
    script = str(checkout(tmp_path / "a", "0.14.2"))

    assert ("0.15.1", ()) == version_or_newest("core_v0.15.1", script, {})
    assert ("0.14.2", ()) == version_or_newest(None, script, {})

    monkeypatch.setattr("pipette_launch.megatron.script.script_version", _no_megatron)
    version, notes = version_or_newest(None, "mine.py", {})
    assert f"{newest_release()}.0" == version
    assert "--megatron-version" in notes[0]


def _no_megatron(script: str, environ: object) -> str:
    raise MegatronError(f"none beside {script}")


@pytest.mark.parametrize(
    ("layout", "kind", "name", "expected"),
    [
        (Layout(tp=2, etp=2), "cuda", "NVIDIA H200", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (Layout(cp=2), "cuda", "NVIDIA A100-SXM4-80GB", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (Layout(tp=2, etp=2), "cpu", "Some CPU", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (Layout(tp=2, etp=2), "cuda", "NVIDIA B200", {}),
        (Layout(tp=2, etp=2), "cuda", "NVIDIA GB300", {}),
        (Layout(tp=2, etp=2), "cuda", "NVIDIA GeForce RTX 5090", {}),
        (Layout(tp=2, etp=2), "cuda", "RTX-PRO-6000-Server", {}),
        (Layout(tp=2, etp=2), "cuda", "NVIDIA RTX 6000 Ada Generation", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (Layout(pp=2, dp=4), "cuda", "NVIDIA H200", {}),
    ],
)
def test_connections_follow_the_layout(layout: Layout, kind: str, name: str, expected: dict[str, str]) -> None:
    """Tensor or context parallelism before Blackwell needs one connection; other layouts need no variable."""
    assert expected == environment(job(device_name=name, device_kind=kind), layout, device_kind=kind)


EXPERTS = "--num-experts 8 --disable-bias-linear --bf16 --expert-model-parallel-size 2"


@pytest.mark.parametrize(
    "words",
    [
        "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor",
        f"{EXPERTS} --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm",
    ],
)
def test_connections_stay_the_users_where_megatron_does_not_need_one(words: str) -> None:
    """FSDP refuses one connection, and the overlap of expert exchanges leaves the choice to the user."""
    assert {} == environment(job(words, device_name="NVIDIA H200"), Layout(tp=2, etp=2), device_kind="cuda")


SUSPICIOUS = re.compile(
    r"save|_dir$|_path$|dump|wandb|tensorboard|one_logger|profil|snapshot|progress|trace|record_|exit_|otel"
)
HARMLESS = {
    # They read, or say how something else is done.
    *("block_data_path", "data_args_path", "data_path", "embedding_path", "evidence_data_path"),
    *("heterogeneous_layers_config_path", "logits_load_dir", "nccl_communicator_config_path"),
    *("per_dataset_sequences_path", "per_split_data_args_path", "titles_data_path"),
    *("test_data_path", "train_data_path", "valid_data_path", "save_tokenizer_assets", "no_save_optim", "no_save_rng"),
    *("ckpt_fully_parallel_save", "ckpt_fully_parallel_save_deprecated", "ckpt_fully_parallel_save_process_group"),
    *(
        "dist_ckpt_save_pre_mcore_014",
        "distribute_saved_activations",
        "exit_on_missing_checkpoint",
        *("ckpt_convert_save", "use_mamba_mem_eff_path", "metadata_path"),
    ),
    # Index files of the data: the training writes the same ones.
    *("data_cache_path", "object_storage_cache_path"),
    # Without effect once the folder or the switch is gone.
    *("memory_snapshot_path", "profile_ranks", "profile_step_end", "profile_step_start", "tensorboard_log_interval"),
    *("tensorboard_queue_size", "log_loss_scale_to_tensorboard", "log_memory_to_tensorboard", "enable_one_logger"),
    *("log_timers_to_tensorboard", "log_validation_ppl_to_tensorboard", "log_world_size_to_tensorboard"),
    *("ckpt_pg_tensors_cache_path", "flight_recorder_dump_on_timeout", "flight_recorder_extra_dump_on_exec"),
    *(
        "flight_recorder_include_only_active",
        "flight_recorder_include_stack_trace",
        "flight_recorder_trace_buffer_size",
    ),
    # Flags of jobs that are not planned.
    *("rl_rollout_bank_dir", "inprocess_progress_watchdog_interval"),
}


def test_every_flag_that_may_write_was_looked_at() -> None:
    """Every flag that sounds like writing is either removed for a trial or listed here as harmless."""
    dests = {flag.dest for version in releases() for flag in flag_table(version).values()}
    refused = {dest for dest, _ in REFUSED}
    handled = {dest for dest in dests if TAKEN_OUT.fullmatch(dest)} | refused

    assert refused <= dests
    assert all(any(re.fullmatch(one, dest) for dest in dests) for one in (*WRITERS, *ENDS, *GROWING))
    assert set() == {dest for dest in dests if SUSPICIOUS.search(dest)} - handled - HARMLESS
    assert set() == handled & HARMLESS


def test_what_writes_goes_and_the_rest_stays() -> None:
    """Flags of checkpoints, loggers, profiles and exits go; model, data, schedule and `--load` stay word for word."""
    kept = [*SMALL, "--load", "/ckpt", "--lr-decay-style", "cosine", "--data-path", "1.0", "/data", "--eval-iters", "3"]
    gone = (
        "--save /ckpt --save-interval 2 --tensorboard-dir /tb --wandb-project w --wandb-exp-name e --log-progress "
        "--profile --use-pytorch-profiler --exit-interval 3 --exit-duration-in-mins 5 --async-save "
        "--enable-ft-package --calc-ft-timeouts "
        "--exit-signal-handler --non-persistent-save-interval 1 --rampup-batch-size 8 8 100"
    ).split()

    words, warm_ups = trial_arguments([*kept, *gone], "0.16.1")

    assert ((*kept, "--log-interval", "1"), 2) == (words, warm_ups)
    assert ((*kept, "--log-interval", "1"), 2) == trial_arguments(words, "0.16.1")


def test_the_log_interval_becomes_1() -> None:
    """The log interval becomes 1 in the place of the user's own flag."""
    words, _ = trial_arguments(["--log-interval", "100", *SMALL], "0.16.1")

    assert ("--log-interval", "1", *SMALL) == words


def test_one_logger_is_switched_off_where_it_was_on() -> None:
    """The switch is added only if flags of the logger are given, as small scripts may not know it."""
    words, _ = trial_arguments([*SMALL, "--one-logger-project", "p"], "0.16.1")

    assert (*SMALL, "--no-one-logger", "--log-interval", "1") == words


def test_graphs_are_captured_before_it_counts() -> None:
    """CUDA graphs need warm-up iterations of their own."""
    words = [*SMALL, "--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "5"]

    assert 6 == trial_arguments(words, "0.16.1").warm_ups


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--my-dump-folder out", "--my-dump-folder: no flag of Megatron 0.16.1"),
        ("--ckpt-convert-format torch", "--ckpt-convert-format torch: the script converts a checkpoint"),
        ("--moe-use-upcycling", "--moe-use-upcycling: the script first writes"),
    ],
)
def test_what_cannot_be_cut_safely_is_refused(more: str, expected: str) -> None:
    """The error names the flag and the reason."""
    with pytest.raises(MegatronError, match=re.escape(expected)):
        trial_arguments([*SMALL, *more.split()], "0.16.1")


def test_a_played_script_gets_a_layout_and_neither_data_nor_checkpoint() -> None:
    """Layers, windows, experts and samples are those of the small job; precision and model stay word for word."""
    words = (
        "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 1 --global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 128 "
        "--num-experts 8 --expert-model-parallel-size 4 --moe-layer-freq 2 --pipeline-model-parallel-size 2 "
        "--load /ckpt --save /ckpt --data-path /data --fp8-format hybrid --lr 1e-3 --train-iters 5 --window-size 8,0 "
        "--window-attn-skip-freq 4 --first-last-layers-bf16"
    ).split()
    job = read_job(words, world_size=8, megatron_version="0.16.1", device_kind="cuda")
    model = replace(job.model, num_layers=2, num_experts=2, moe_layer_freq=(0, 1), attention_windows=(9, 0))
    small = replace(job, model=model, batch=replace(job.batch, global_batch_size=4))

    found = played_arguments(
        words, job=small, layout=Layout(tp=2, etp=1, micro_batch_size=4), mocks_data=True, single_layers=True
    )

    assert (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 4 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 128 "
        "--num-experts 2 --expert-model-parallel-size 1 --moe-layer-freq [0,1] --pipeline-model-parallel-size 1 "
        "--fp8-format hybrid --lr 1e-3 --train-iters 10 --window-size 8,0 "
        "--mock-data --num-workers 0 --moe-router-force-load-balancing --window-attn-skip-freq [1,0] "
        "--no-check-for-nan-in-loss-and-grad "
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
    ).split() == list(found)


def test_a_played_script_has_the_mixers_of_the_small_job() -> None:
    """Megatron reads the list of layers with gated delta networks as Python."""
    words = (
        "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 1 --global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 128 --train-iters 5 "
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --lr 1e-3"
    ).split()
    job = read_job(words, world_size=1, megatron_version="0.19.0", device_kind="cuda")
    small = replace(job, model=replace(job.model, num_layers=2, linear_layers=(1, 0)))

    found = played_arguments(words, job=small, layout=Layout(), mocks_data=True, single_layers=True)

    assert "[1,0]" == found[found.index("--linear-attention-freq") + 1]
    assert "gated_delta_net" == found[found.index("--experimental-attention-variant") + 1]


@pytest.mark.parametrize("captures", [False, True])
def test_a_played_script_captures_graphs_after_its_first_step_or_never(captures: bool) -> None:
    """Graphs of layers stay if the play captures them; a graph of the optimizer goes."""
    graphs = ["--cuda-graph-impl", "local", "--cuda-graph-scope", "attn", "--cuda-graph-warmup-steps"]
    words = [*SMALL, *graphs, "3", "--optimizer-cuda-graph"]
    job = read_job(SMALL, world_size=2, megatron_version="0.19.0", device_kind="cuda")

    found = played_arguments(words, job=job, layout=job.own, mocks_data=False, single_layers=False, captures=captures)

    assert [*SMALL, *([*graphs, "1"] if captures else []), "--no-check-for-nan-in-loss-and-grad"] == list(found)


def test_a_played_stage_keeps_shards_and_its_own_data() -> None:
    """A whole stage keeps the model, Megatron-FSDP and windows; a script without Megatron's trainer keeps its data."""
    words = [*SMALL, "--use-megatron-fsdp", "--window-size", "8,0", "--data-path", "/data", "--load", "/ckpt"]
    job = read_job(SMALL, world_size=2, megatron_version="0.16.1", device_kind="cpu")

    found = played_arguments(words, job=job, layout=job.own, mocks_data=False, single_layers=False)

    assert [*words[:-2], "--no-check-for-nan-in-loss-and-grad"] == list(found)


@pytest.mark.parametrize(
    ("name", "text", "words", "expected"),
    [
        ("mine.py", "from megatron.core.models.bert.bert_model import BertModel", "", ("bert", True)),
        ("mine.py", "import megatron.core.models.T5\ndef provider(add_encoder): ...", "", ("t5", False)),
        ("mine.py", "from megatron.core.models.audio import Model", "", ("audio", True)),
        ("pretrain_bert.py", "from megatron.core.models.gpt import GPTModel", "", ("", False)),
        ("mine.py", "from megatron.core.models.common import Embedding", "", ("", False)),
        ("pretrain_bert.py", None, "", ("bert", False)),
        ("pretrain_my_llava.py", None, "", ("llava", False)),
        ("finetune_qwen2_vl.py", None, "", ("vl", False)),
        ("pretrain_albert.py", None, "", ("", False)),
        ("pretrain_gpt.py", None, "", ("", False)),
        ("pretrain_gpt.py", None, "--decoder-seq-length=8", ("non-GPT", False)),
        ("mine.py", "", "--tokenizer-type BertWordPieceCase", ("non-GPT", False)),
    ],
)
def test_imports_name_and_flags_show_the_model(
    tmp_path: Path, name: str, text: str | None, words: str, expected: tuple[str, bool]
) -> None:
    """The imports of a script decide; without the script its name decides, and some flags always count."""
    if text is not None:
        (tmp_path / name).write_text(text)

    assert expected == foreign_model(str(tmp_path / name), Arguments.parse(words.split(), "0.16.1"))


def test_a_played_script_keeps_the_proportion_of_its_stacks() -> None:
    """All stacks count as layers of the model, and single layers keep the ratio of the numbers."""
    sizes = "--encoder-num-layers 8 --decoder-num-layers 12 --encoder-seq-length 32 --decoder-seq-length 16".split()
    words = [*sizes, *SMALL[2:6], *SMALL[8:], "--ckpt-format", "torch"]
    job = read_job(words, world_size=2, megatron_version="0.16.1", device_kind="cpu", script="pretrain_t5.py")
    small = replace(job, model=replace(job.model, num_layers=1))

    found = played_arguments(words, job=small, layout=job.own, mocks_data=True, single_layers=True)

    assert (20, 32, "t5") == (job.model.num_layers, job.model.seq_length, job.model.foreign)
    assert "--encoder-num-layers 2 --decoder-num-layers 3".split() == list(found[:4])
    assert "--ckpt-format" in found


@pytest.mark.parametrize(
    "words",
    [
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size=2",
        "model.tensor_model_parallel_size=2 model.pipeline_model_parallel_size=2 train.train_iters=5",
        "--parallelism.tensor_parallel_degree 2 --parallelism.pipeline_parallel_degree 2",
        "++policy.megatron_cfg.tensor_model_parallel_size=2 policy.megatron_cfg.pipeline_model_parallel_size=2",
    ],
)
def test_degrees_of_any_dialect_are_read(words: str) -> None:
    """Flags and overrides of several frameworks give one layout, with the other ranks as replicas."""
    assert Layout(tp=2, pp=2, dp=4) == stated_layout(words.split(), 16)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--lr 1",
        "--tensor-model-parallel-size 3",
        "--tensor-model-parallel-size auto",
        "a.tensor_model_parallel_size=2 b.tensor_model_parallel_size=4",
        "--tensor-model-parallel-size 0",
        "--expert-model-parallel-size 3",
    ],
)
def test_doubtful_degrees_are_unknown(words: str) -> None:
    """No degree, two values, a word, or a degree that does not divide the ranks give no layout."""
    assert stated_layout(words.split(), 16) is None


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("text_generation.py", True),
        ("tools/checkpoint/transform.py", True),
        ("examples.inference.offline", True),
        ("pretrain_generative.py", False),
        ("tools/pretrain.py", False),
        ("main.py", False),
    ],
)
def test_a_script_that_trains_nothing_is_known_by_its_path(script: str, *, expected: bool) -> None:
    """The path of an absent script may say that no step is trained."""
    assert expected is trains_nothing(script)


def test_a_script_that_is_here_is_not_judged_by_its_path(tmp_path: Path) -> None:
    """Its words decide."""
    (tmp_path / "generate.py").touch()

    assert trains_nothing(str(tmp_path / "other" / "generate.py"))
    assert not trains_nothing(str(tmp_path / "generate.py"))
