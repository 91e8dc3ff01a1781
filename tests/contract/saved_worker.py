"""A worker for the tests: builds layers with megatron-core and prints, as a line of JSON, what autograd saves."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from pipette_patches.workload import load

SAVED = torch.autograd.graph.saved_tensors_hooks


class KeepsWhatFlashKeeps(torch.autograd.Function):
    """Attention that computes nothing of use, but keeps query, key, value and output."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Take the value for the output."""
        output = value.clone()
        ctx.save_for_backward(query, key, value, output)
        return output


class CoreAttention(torch.nn.Module):
    """Stands in for Megatron's local attention core, which keeps every score."""

    def __init__(self, **_: Any) -> None:
        """Take whatever Transformer Engine's takes."""
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Heads in, one row a token out."""
        output: torch.Tensor = KeepsWhatFlashKeeps.apply(query, key, value)
        return output.flatten(-2)


class KeepsWhatKernelsKeep(torch.autograd.Function):
    """A kernel that computes nothing of use, but keeps its arguments and `extra` in fp32."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, extra: tuple[int, ...], *kept: torch.Tensor) -> torch.Tensor:
        """Copy the first argument into the output."""
        result = output.contiguous().clone()
        ctx.save_for_backward(*kept, *((result.new_empty(extra, dtype=torch.float32),) if extra else ()))
        return result


class Normalised(torch.autograd.Function):
    """A norm of vectors, which keeps its output and a number for each vector."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor) -> torch.Tensor:
        """Copy the input into the output."""
        output = source.clone()
        ctx.save_for_backward(output, source.new_empty(source.shape[:-1], dtype=torch.float32))
        return output


def _convolved(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
    return KeepsWhatKernelsKeep.apply(x, (), x, weight)


def _delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: Any, beta: Any, **_: Any) -> tuple[Any, None]:
    # 64 scores of 2 bytes for each head take as many bytes as 32 numbers in fp32.
    return KeepsWhatKernelsKeep.apply(v, (*q.shape[:3], 32), q, k, v, g, beta), None


def stand_in_for_kernels() -> None:
    """Register modules with the names of flash-linear-attention and causal-conv1d."""
    parts = {
        "fla.modules.convolution": {"causal_conv1d": lambda **given: (_convolved(**given), None)},
        "fla.modules.l2norm": {"l2norm": Normalised.apply},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _delta_rule},
        "causal_conv1d": {"causal_conv1d_fn": _convolved},
    }
    for name in ("fla", "fla.modules", "fla.ops", *parts):
        module = sys.modules[name] = ModuleType(name)
        module.__dict__.update(parts.get(name, {}), __path__=[])


class WholeLinear(torch.nn.Linear):
    """Stands in for Transformer Engine's linear that every rank has in full."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **_: Any) -> None:
        """Take whatever Transformer Engine's takes."""
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, source: torch.Tensor) -> Any:
        """Return no bias beside the output."""
        return super().forward(source), None


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group with nobody else in it."""
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def config_of(case: dict[str, Any]) -> Any:
    """Megatron's own configuration of a case."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if case["config"].get("multi_latent_attention") else TransformerConfig
    gated = case["config"].get("gated_linear_unit", False)
    fields = {
        "num_layers": 1,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "activation_func": functional.silu if gated else functional.gelu,
    }
    return kind(**(fields | case["config"]))


def layer_spec(config: Any) -> Any:
    """A layer of megatron-core's own modules."""
    from megatron.core.models.gpt import gpt_layer_specs

    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    if config.multi_latent_attention or config.__dict__.get("attention_output_gate"):
        spec.submodules.self_attention.submodules.core_attention = CoreAttention
    return spec


def delta_net(config: Any, groups: Any) -> torch.nn.Module:
    """A gated delta network between Megatron's own linears."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    net: torch.nn.Module = GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)
    return net


def saved_bytes(module: torch.nn.Module, source: torch.Tensor, *rest: Any) -> int:
    """Bytes of every storage that autograd saves in a forward, but for the parameters and the input."""
    own = [source, *module.parameters(), *module.buffers()]
    seen = {tensor.untyped_storage().data_ptr(): 0 for tensor in own}
    held = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage.data_ptr(), storage.nbytes())
        held.append(tensor)
        return tensor

    with SAVED(keep, lambda tensor: tensor):
        module(source, *rest)
    return sum(seen.values())


def layer_facts(case: dict[str, Any]) -> dict[str, int]:
    """Parameters of a layer, and what its experts or its attention save."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    config = config_of(case)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    source = torch.randn(case["tokens"], case["batch"], config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    if config.__dict__.get("experimental_attention_variant"):
        net = delta_net(config, groups).to(torch.bfloat16)
        return {"parameters": sum(map(torch.numel, net.parameters())), "saved": saved_bytes(net, source, None)}
    layer = build_module(layer_spec(config), config=config, layer_number=1, pg_collection=groups)
    layer = layer.to(torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    saved = (
        saved_bytes(layer.mlp, source) if config.num_moe_experts else saved_bytes(layer.self_attention, source, None)
    )
    return {"parameters": parameters, "saved": saved}


def model_facts(case: dict[str, Any]) -> dict[str, int]:
    """Parameters of a whole model with multi-token prediction, and what one forward saves."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = config_of(case)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    predicts = None
    if config.mtp_num_layers:
        predicts = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=case["vocab"],
        max_sequence_length=case["tokens"],
        position_embedding_type="none",
        share_embeddings_and_output_weights=case["tied"],
        mtp_block_spec=predicts,
    ).to(torch.bfloat16)
    ids = torch.randint(case["vocab"], (case["batch"], case["tokens"]))
    positions = torch.arange(case["tokens"]).expand_as(ids)
    saved = saved_bytes(model, ids, positions, None, None, ids)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "saved": saved}


def main() -> None:
    """Answer every case on standard input."""
    found = []
    for case in json.load(sys.stdin):
        with one_rank():
            found.append(model_facts(case) if "vocab" in case else layer_facts(case))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    load("cpu")
    stand_in_for_kernels()
    from megatron.core.transformer.moe import moe_layer

    moe_layer.HAVE_TE, moe_layer.TELinear = True, WholeLinear
    main()
