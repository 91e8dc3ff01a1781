"""Megatron has every attribute that `cpu_backend` replaces, with the expected parameters."""

import ast
import importlib.util
from pathlib import Path

import pytest
from patches.checkout import megatron_lm

from pipette_patches.cpu_backend import CORE, TRAINING
from pipette_patches.replacements import Replacement, megatron_core_version

# First parameters by qualified name: later releases append more. None: a name that is only assigned, or used without
# being defined.
EXPECTED = {
    "megatron.core.model_parallel_config.ModelParallelConfig.__post_init__": ["self"],
    "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__": [
        "cls", "config", "hidden_size", "eps", "persist_layer_norm", "zero_centered_gamma", "normalization",
    ],
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": ["device", "clone", "graph_safe"],
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": ["new_state", "device", "graph_safe"],
    "megatron.core.tensor_parallel.random.CheckpointWithoutOutput.__init__": ["self", "fp8"],
    "megatron.core.models.bert.bert_layer_specs.get_bert_layer_with_transformer_engine_spec": [],
    "megatron.core.models.vision.clip_vit_model.CLIPViTModel.__init__": [
        "self", "transformer_config", "transformer_layer_spec", "ln_pre_impl", "ln_post_impl",
    ],
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": None,
    "megatron.core.transformer.multi_latent_attention.TELinear": None,
    "megatron.core.transformer.dot_product_attention.DotProductAttention.__init__": [
        "self", "config", "layer_number", "attn_mask_type", "attention_type", "attention_dropout", "softmax_scale",
        "cp_comm_type", "pg_collection",
    ],
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding.YarnRotaryEmbedding.__init__": [
        "self", "kv_channels", "rotary_percent", "rotary_interleaved", "seq_len_interpolation_factor", "rotary_base",
        "use_cpu_initialization", "scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "correction_range_round_to_int", "cp_group",
    ],
    "megatron.core.transformer.moe.moe_utils.maybe_move_tensor_to_cpu": ["tensor", "as_numpy", "record_stream"],
    "megatron.core.extensions.transformer_engine.TENorm": None,
    "megatron.core.extensions.transformer_engine.TEColumnParallelLinear": None,
    "megatron.core.extensions.transformer_engine.TERowParallelLinear": None,
    "megatron.core.extensions.transformer_engine.TELayerNormColumnParallelLinear": None,
    "megatron.core.extensions.transformer_engine.TEDotProductAttention": None,
    "megatron.core.extensions.transformer_engine.TELinear": None,
    "megatron.core.extensions.transformer_engine_spec_provider.TESpecProvider.grouped_mlp_modules": [
        "self", "moe_use_grouped_gemm",
    ],
    "megatron.core.jit.jit_fuser": None,
    "megatron.core.parallel_state.get_nccl_options": ["pg_name", "nccl_comm_cfgs"],
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter.TELinear": None,
    "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer.gradient_reduce_preprocessing": [
        "grad_data", "scaling_factor", "ddp_config",
    ],
    "megatron.core.tensor_parallel.inference_layers.InferenceColumnParallelLinear": None,
    "megatron.core.tensor_parallel.inference_layers.InferenceLayerNormColumnParallelLinear": None,
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.state_dict": ["self"],
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict": ["self", "state_dict"],
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states": [
        "self", "model_param", "tensors",
    ],
    "megatron.core.datasets.utils.compile_helpers": [],
    "megatron.training.arguments.validate_args": ["args", "defaults"],
    "megatron.legacy.fused_kernels.load": ["args"],
}  # fmt: skip
# Copied names: where a replacement acts on the copy that a module took by `from ... import`.
MOE = "megatron.core.transformer.moe"
COPIED_FROM = {
    f"{MOE}.token_dispatcher.maybe_move_tensor_to_cpu": f"{MOE}.moe_utils",
    "megatron.training.initialize.validate_args": "megatron.training.arguments",
    "megatron.training.training.initialize_megatron": "megatron.training.initialize",
}


def source(root: Path, module: str) -> str:
    """The text of a module or package below a folder."""
    path = root.joinpath(*module.split("."))
    return (path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py").read_text()


def parameters(root: Path, module: str, path: str) -> list[str]:
    """The parameter names of a function or method, found without importing it."""
    body: list[ast.stmt] = ast.parse(source(root, module)).body
    *classes, name = path.split(".")
    for each in classes:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == each)
    function = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
    return [argument.arg for argument in function.args.args + function.args.kwonlyargs]


def check(root: Path, replacement: Replacement) -> None:
    """Hold one replaced attribute against the table."""
    name = f"{replacement.module}.{replacement.path}"
    module = COPIED_FROM.get(name, replacement.module)
    if module != replacement.module:
        assert replacement.path in source(root, replacement.module)
    if replacement.path == "initialize_megatron":
        assert "allow_no_cuda" in parameters(root, module, replacement.path)
        return
    expected = EXPECTED[f"{module}.{replacement.path}"]
    if expected is None:
        assert replacement.path in source(root, module)
    else:
        assert expected == parameters(root, module, replacement.path)[: len(expected)]


def label(replacement: Replacement) -> str:
    """A test's name: the attribute."""
    return f"{replacement.module}.{replacement.path}"


@pytest.mark.parametrize("replacement", CORE, ids=label)
def test_the_installed_megatron_core_has_what_is_replaced(replacement: Replacement) -> None:
    """Each replaced attribute of megatron-core exists with its parameters."""
    if not replacement.fits(megatron_core_version()):
        pytest.skip(f"only in megatron-core {replacement.versions}")
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None

    folders = [Path(folder) for folder in spec.submodule_search_locations]
    check(next(folder.parent for folder in folders if (folder / "core").is_dir()), replacement)


@pytest.mark.parametrize("replacement", TRAINING, ids=label)
def test_a_checkout_of_megatron_lm_has_what_is_replaced(replacement: Replacement) -> None:
    """Each replaced attribute of Megatron-LM's training programs exists with its parameters."""
    check(megatron_lm(replacement), replacement)
