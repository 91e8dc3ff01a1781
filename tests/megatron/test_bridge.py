"""Jobs of Megatron-Bridge are read from its configuration, and layouts are written as its overrides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipette_launch.cost.layers.parameters import gradient_bytes_per_parameter
from pipette_launch.errors import FileFormatError, MegatronError
from pipette_launch.facts import Job, Recompute
from pipette_launch.facts.job import ENGINE
from pipette_launch.launch import plan_reports
from pipette_launch.megatron import dialect_of, is_bridge, read_job
from pipette_launch.megatron.bridge import VPP, Overrides
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.performance import options_of
from pipette_launch.planning.plan import plan
from pipette_launch.planning.predict import predict
from pipette_launch.report.screen import arguments_diff

LEFT_OUT = {"--moe-router-dtype", "--num-virtual-stages-per-pipeline-rank"}
VERSION = "0.16.1"
MODEL = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 256,
    "ffn_hidden_size": 1024,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "sequence_parallel": True,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "make_vocab_size_divisible_by": 128,
    "position_embedding_type": "rope",
    "rotary_base": 1e6,
    "gated_linear_unit": True,
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "num_query_groups": 4,
    "share_embeddings_and_output_weights": False,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "params_dtype": {"_target_": "torch.float32", "_call_": False},
}
FULL = Recompute(granularity="full", method="uniform", num_layers=1)
CONFIG: dict[str, Any] = {
    "model": MODEL,
    "train": {"micro_batch_size": 1, "global_batch_size": 16, "train_iters": 10},
    "ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True, "overlap_param_gather": True, "lr": 1e-4},
    "comm_overlap": {"tp_comm_overlap": False, "overlap_grad_reduce": None, "overlap_param_gather": None},
    "mixed_precision": "bf16_mixed",
    "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 32000},
    "dataset": {"_target_": "megatron.bridge.training.config.GPTDatasetConfig", "seq_length": 256},
    "peft": None,
}
PACKAGE = {
    "__init__.py": "",
    "training/__init__.py": "",
    "training/mixed_precision.py": "get_mixed_precision_config = {'bf16_mixed': {'bf16': True}}.get\n",
    "training/pretrain.py": "def pretrain(config, forward_step_func):\n    raise SystemExit('trained')\n",
}
SCRIPT = """
import sys
from types import SimpleNamespace
from megatron.bridge.training.pretrain import pretrain
import json
config = json.loads(sys.argv[1])
class Config(SimpleNamespace):
    def to_yaml(self, path):
        open(path, "w").write(json.dumps(vars(self)))
print("words of the script")
pretrain(Config(**config), forward_step_func=None)
"""


def bridge_of(path: Path, *words: str, **sections: Any) -> Overrides:
    """Return the dialect of words with a saved configuration."""
    file = path / "config.json"
    file.write_text(json.dumps({**CONFIG, **sections}))
    found = dialect_of(words, script="run_recipe.py", world_size=8, saved=file)
    assert isinstance(found, Overrides)
    return found


def job_of(overrides: Overrides) -> Job:
    """Read the job of a dialect for eight GPUs."""
    words = overrides.flags(VERSION)
    return read_job(words, world_size=8, megatron_version=VERSION, device_kind="cuda", without_probes=True)


def test_a_configuration_and_overrides_describe_a_job(tmp_path: Path) -> None:
    """Shape, precision and layout come from the file, and overrides among the words win."""
    job = job_of(bridge_of(tmp_path, "--recipe", "x", "model.tensor_model_parallel_size=4", "train.micro_batch_size=2"))
    model, own = job.model, job.own
    assert (model.hidden_size, model.num_query_groups, model.gated_linear_unit, model.vocab_size) == (
        512,
        4,
        True,
        32000,
    )
    assert (model.params_dtype, model.normalization, model.untie_embeddings_and_output_weights) == (
        "bf16",
        "RMSNorm",
        True,
    )
    assert (own.tp, own.pp, own.dp, own.micro_batch_size) == (4, 2, 1, 2)
    assert own.sequence_parallel
    assert own.overlap_param_gather
    assert job.batch.global_batch_size == 16


def test_options_of_bridges_runner_count_and_overrides_win(tmp_path: Path) -> None:
    """Short and long options change the saved settings, and the data set's sequence length is the model's."""
    words = ("-tp", "4", "--micro_batch_size=2", "-sl", "128", "-gb", "8", "train.global_batch_size=32")
    job = job_of(bridge_of(tmp_path, *words))
    assert (job.own.tp, job.own.micro_batch_size, job.batch.global_batch_size) == (4, 2, 32)
    assert job.model.seq_length == 128


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"moe_router_dtype": "bf16"}, "--moe-router-dtype"),
        ({"rotary_base": [10000, 1000000]}, "--rotary-base=1000000"),
        ({"window_size": 512, "interleaved_attn_pattern": [5, 1]}, "--window-attn-skip-freq=6"),
        ({"window_size": 512}, "--window-size=511,0"),
        ({"bias_activation_fusion": False}, "--no-bias-swiglu-fusion"),
        ({"bias_activation_fusion": False, "gated_linear_unit": False}, "--no-bias-gelu-fusion"),
        ({"hybrid_layer_pattern": "M*|M-|M*|M-", VPP: 2}, "--num-virtual-stages-per-pipeline-rank"),
    ],
)
def test_settings_that_megatrons_parser_spells_otherwise(tmp_path: Path, settings: dict[str, Any], flag: str) -> None:
    """Settings whose values or names differ from a flag's are translated, or left out if no flag says the same."""
    words = bridge_of(tmp_path, model={**MODEL, **settings}).flags(VERSION)
    assert any(word.startswith(flag) for word in words) == (flag not in LEFT_OUT)


def test_the_gather_of_weights_overlaps_only_with_the_reduction(tmp_path: Path) -> None:
    """Bridge accepts the second overlap alone, and the layout that Megatron-LM would refuse has none of them."""
    assert not job_of(bridge_of(tmp_path, "comm_overlap.overlap_grad_reduce=false")).own.overlap_param_gather


@pytest.mark.parametrize(("in_fp32", "expected"), [(True, 4), (False, 2)])
def test_the_type_of_gradients_is_that_of_the_ddp_config(tmp_path: Path, *, in_fp32: bool, expected: int) -> None:
    """`grad_reduce_in_fp32` alone chooses the type of gradients, because Bridge has no check of Megatron's parser."""
    narrow = {"_target_": "torch.bfloat16", "_call_": False}
    optimizer = {**CONFIG["optimizer"], "use_precision_aware_optimizer": True, "main_grads_dtype": narrow}
    precision = {"bf16": True, "grad_reduce_in_fp32": in_fp32}

    job = job_of(bridge_of(tmp_path, optimizer=optimizer, mixed_precision=precision))

    assert expected == gradient_bytes_per_parameter(job)


def test_the_job_of_a_saved_plan_is_read_again(tmp_path: Path) -> None:
    """A plan keeps Megatron's flags of a recipe, by which reports and traces read the job without the recipe."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 8, "budget_s": 1}
    found = plan(("--recipe", "x"), **options, bridge_config=tmp_path / "config.json")
    assert plan_reports.job_of(found, None).own.tp == MODEL["tensor_model_parallel_size"]


def test_checks_of_megatrons_parser_do_not_apply(tmp_path: Path) -> None:
    """Bridge allows Transformer Engine's loss, which the parser of Megatron-LM 0.19 refuses."""
    config = {**CONFIG, "model": {**MODEL, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 8, "megatron_version": "0.19.0"}
    assert predict((), **options, bridge_config=tmp_path / "config.json").layout.tp == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 4, "etp": 4, "pp": 1, "dp": 2},
        {"tp": 1, "etp": 1, "pp": 4, "dp": 2, "sequence_parallel": False, "vpp": 2},
        {
            "pp": 4,
            "dp": 1,
            "layers_per_chunk": (1, 2, 2, 3),
            "recompute": Recompute(granularity="full", method="uniform", num_layers=1),
        },
        {"recompute": Recompute(granularity="selective", modules=("core_attn", "mlp")), "micro_batch_size": 2},
        {"use_distributed_optimizer": False, "overlap_param_gather": False, "overlap_grad_reduce": False},
    ],
)
def test_a_written_layout_is_read_again(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The overrides of a layout, applied to the recipe's configuration, give the same layout and the same model."""
    mine = bridge_of(tmp_path, "--recipe", "x", "model.tensor_model_parallel_size=2")
    job = job_of(mine)
    layout = replace(job.own, **changes)
    again = job_of(bridge_of(tmp_path, *mine.written(job, layout)))
    assert again.own == layout
    assert again.batch == job.batch
    assert again.model.padded_vocab_size(again.own.tp) == job.model.padded_vocab_size(job.own.tp)


@pytest.mark.parametrize(
    ("modules", "recomputed"), [([], Recompute(granularity="none")), (["mlp"], None), (None, None)]
)
def test_an_empty_list_of_modules_recomputes_nothing(
    tmp_path: Path, modules: list[str] | None, recomputed: Recompute | None
) -> None:
    """An empty list recomputes no module, and core attention is recomputed only if the list is left out."""
    model = {**MODEL, "recompute_granularity": "selective", "recompute_modules": modules}
    found = job_of(bridge_of(tmp_path, model=model)).own.recompute

    assert found == (recomputed or Recompute(granularity="selective", modules=tuple(modules or ["core_attn"])))


def test_written_words_keep_the_users_words_and_name_what_the_runner_would_derive(tmp_path: Path) -> None:
    """Overrides replace the user's own, and the split of the layers and the batch are always stated with a new PP."""
    mine = bridge_of(tmp_path, "--recipe", "x", "model.pipeline_model_parallel_size=2", "scheduler.lr_warmup_iters=3")
    job = job_of(mine)
    words = mine.written(job, replace(job.own, pp=1, dp=4))
    assert words[:3] == ("--recipe", "x", "scheduler.lr_warmup_iters=3")
    assert "model.pipeline_model_parallel_layout=null" in words
    assert "train.global_batch_size=16" in words
    assert ("~", "model.pipeline_model_parallel_size=2 → 1") in arguments_diff(mine.words, words)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"peft": {"dim": 8}}, "peft: .*--mode sft"),
        ({"model": {**MODEL, "vision_config": {"depth": 2}}}, "several towers"),
        ({"mixed_precision": "bf16_with_mxfp8_mixed"}, "only Bridge knows"),
    ],
)
def test_jobs_that_no_flags_describe_are_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    """Adapters, several towers, and named precisions of Bridge raise an error with the setting."""
    with pytest.raises(MegatronError, match=message):
        bridge_of(tmp_path, **sections).flags(VERSION)


def test_a_file_without_a_model_is_refused(tmp_path: Path) -> None:
    """Another YAML file raises an error that says which file is needed."""
    (tmp_path / "other.yaml").write_text("a: [1, 2]\n")
    with pytest.raises(FileFormatError, match=r"section `model`.*--dry-run"):
        dialect_of((), script="x.py", world_size=8, saved=tmp_path / "other.yaml")


def test_bridge_is_recognised_by_overrides_or_imports(tmp_path: Path) -> None:
    """Overrides and imports of Bridge count, and words of Megatron-LM do not."""
    (tmp_path / "train.py").write_text("from megatron.bridge.training.pretrain import pretrain\n")
    assert is_bridge(["model.seq_length=4096"], "absent.py")
    assert is_bridge([], str(tmp_path / "train.py"))
    assert not is_bridge(["--num-layers", "4", "--data-path", "a.b=c"], "pretrain_gpt.py")


def test_without_bridge_the_error_names_the_file_that_is_needed() -> None:
    """A recipe cannot be read without megatron-bridge, and the error names the flag for a saved configuration."""
    with pytest.raises(MegatronError, match=r"--bridge-config FILE"):
        dialect_of(["model.seq_length=4096"], script="run_recipe.py", world_size=8)


@pytest.mark.parametrize("ends", ["", "sys.exit(3)\n"])
def test_a_script_runs_up_to_pretrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """A script of a package with Bridge's names gives its configuration, or an error if it does not train."""
    pytest.importorskip("megatron.core")
    for name, text in PACKAGE.items():
        file = tmp_path / "megatron" / "bridge" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("import json\n", f"import json\n{ends}"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("pipette_launch.megatron.bridge.find_spec", lambda _name: True)
    words = (json.dumps(CONFIG),)
    if ends:
        with pytest.raises(MegatronError, match="exits with 3 before its first training step"):
            dialect_of(words, script=str(script), world_size=8)
        return
    found = dialect_of(words, script=str(script), world_size=8)
    assert isinstance(found, Overrides)
    assert found.config == {**CONFIG, "mixed_precision": {"bf16": True}}


@pytest.mark.parametrize(
    "words",
    [
        ["model.tensor_model_parallel_size=2", "trainer.num_nodes=4"],
        ["--config-name=gpt_7b", "model.micro_batch_size=1"],
        ["exp_manager.create_wandb_logger=true", "+model.seq_length=4096"],
    ],
)
def test_words_of_nemo_1_are_no_recipe_of_bridge(words: list[str]) -> None:
    """NeMo 1 has settings with the same section `model`, but its configuration file is not read."""
    with pytest.raises(MegatronError, match="a setting of NeMo 1 or another trainer with Hydra") as error:
        dialect_of(words, script="megatron_gpt_pretraining.py", world_size=8)

    assert next(word for word in words if not word.lstrip("+").startswith("model")) in str(error.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_dot_product_attention": True}, "fp8_dot_product_attention=true"),
        ({"fp8_dot_product_attention": True, "fp8_multi_head_attention": True}, ""),
        ({"transformer": {"activation_func_fp8_input_store": True}}, "activation_func_fp8_input_store=true"),
        ({"deallocate_pipeline_outputs": False}, "deallocate_pipeline_outputs=false"),
        ({"deallocate_pipeline_outputs": True, "use_kitchen": False, "quant_recipe": None}, ""),
    ],
)
def test_settings_without_a_flag_and_a_price_get_a_note(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    """A prediction names each setting that changes time or memory, has no flag, and differs from Megatron's value."""
    bridge_of(tmp_path, model={**MODEL, **settings})
    machines = {"gpu": "b200", "nodes": 1, "gpus_per_node": 8, "megatron_version": "0.19.0"}
    notes = predict((), **machines, bridge_config=tmp_path / "config.json").notes
    found = [note for note in notes if note.startswith("not priced")]

    start = "not priced, so time and memory are predicted as without these settings of Megatron-Bridge: model."
    assert ([start + named] if named else []) == found


def test_settings_of_mixed_precision_decide_on_fp8_attention(tmp_path: Path) -> None:
    """The note follows `mixed_precision`, which Bridge copies into the model."""
    precision = {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_dot_product_attention": True}
    model = {**MODEL, "fp8_dot_product_attention": False}

    (note,) = bridge_of(tmp_path, model=model, mixed_precision=precision).notes
    assert note.endswith(": model.fp8_dot_product_attention=true")


def test_settings_of_buckets_are_read(tmp_path: Path) -> None:
    """Settings of `ddp` become the flags that begin with `--ddp-`."""
    ddp = {**CONFIG["ddp"], "num_buckets": 3, "pad_buckets_for_high_nccl_busbw": True}
    words = bridge_of(tmp_path, ddp=ddp).flags("0.19.0")

    assert {"--ddp-num-buckets=3", "--ddp-pad-buckets-for-high-nccl-busbw"} <= {*words}


def test_words_of_a_recipe_are_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error about a recipe names the script and the first words, none of them cut."""
    monkeypatch.setattr("pipette_launch.megatron.bridge.find_spec", lambda _: None)
    words = ["--recipe", "a_very_long_name_of_a_recipe_with_many_words_and_a_size_7b_config", "model.seq_length=4096"]
    with pytest.raises(MegatronError) as error:
        dialect_of(words, script="scripts/training/run_recipe.py", world_size=8)

    assert str(error.value).startswith(
        f"scripts/training/run_recipe.py {' '.join(words[:2])} ...: a recipe of Megatron"
    )


LAYERS = {"transformer_impl": "transformer_engine"}


@pytest.mark.parametrize("version", ["0.16.1", "0.17.0", "0.18.0", "0.20.0"])
@pytest.mark.parametrize(
    ("settings", "graphs"),
    [
        ({"cuda_graph_impl": "none", "cuda_graph_modules": "full"}, ("none", set())),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, ("local", set())),
        ({"cuda_graph_impl": ENGINE, "cuda_graph_modules": ["attn", "mlp"]}, (ENGINE, {"attn", "mlp"})),
        ({"cuda_graph_impl": ENGINE, "cuda_graph_scope": "attn,mlp"}, (ENGINE, {"attn", "mlp"})),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": "full_iteration"}, ("full_iteration", set())),
        ({"enable_cuda_graph": True}, ("local", set())),
        ({"external_cuda_graph": True}, (ENGINE, set())),
    ],
)
def test_settings_of_graphs_have_one_meaning_in_each_release(
    tmp_path: Path, settings: dict[str, Any], graphs: tuple[str, set[str]], version: str
) -> None:
    """Both names of the setting for modules, and lists and texts, give the same graphs."""
    words = bridge_of(tmp_path, model={**MODEL, **LAYERS, **settings}).flags(version)

    assert graphs == options_of(Arguments.parse(words, version)).graphs
