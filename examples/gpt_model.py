"""From arguments to megatron-core's own objects: configuration, model chunks, optimizer and learning rate."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


@dataclass(kw_only=True)
class Trainee:
    """The model, its optimizer and its learning rate."""

    config: TransformerConfig
    chunks: list[Any]
    """Model chunks of this rank, wrapped for data parallelism; several with virtual stages."""
    optimizer: Any
    scheduler: OptimizerParamScheduler


def build(args: Namespace, device: torch.device) -> Trainee:
    """Make model, optimizer and schedule on this rank."""
    seed_everything(args.seed)
    config = transformer_config(args)
    modules = [_chunk(args, config, vp_stage) for vp_stage in range(args.virtual_pipeline_model_parallel_size or 1)]
    if args.use_cpu_initialization:
        seed_everything(args.seed)
    _say_size(modules)
    chunks = [_wrap(args, config, module.to(device), first=index == 0) for index, module in enumerate(modules)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**_fields_of(OptimizerConfig, args)),
        chunks,
        use_gloo_process_groups=args.enable_gloo_process_groups,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    _overlap(args, config, chunks)
    return Trainee(config=config, chunks=chunks, optimizer=optimizer, scheduler=_scheduler(args, optimizer))


def seed_everything(seed: int) -> None:
    """Seed as Megatron-LM does: other numbers on other pipeline stages, and other dropout on other tensor ranks."""
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def transformer_config(args: Namespace) -> TransformerConfig:
    """Translate the flags; where the names agree, the flag is the field."""
    fields = _fields_of(TransformerConfig, args)
    uses_te = args.transformer_impl == "transformer_engine"
    has_apex = importlib.util.find_spec("apex") is not None
    has_fused_gradients = uses_te or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    fields |= {
        "attention_backend": AttnBackend[args.attention_backend],
        "batch_p2p_comm": not args.overlap_p2p_comm,
        "bias_activation_fusion": args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
        "deallocate_pipeline_outputs": True,
        "gradient_accumulation_fusion": args.gradient_accumulation_fusion and has_fused_gradients,
        "apply_rope_fusion": args.apply_rope_fusion and uses_te and args.position_embedding_type == "rope",
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
        "num_moe_experts": args.num_experts,
        "params_dtype": params_dtype(args),
        "persist_layer_norm": (uses_te or has_apex) and not args.no_persist_layer_norm,
        "pipeline_dtype": params_dtype(args),
    }
    if args.bias_gelu_fusion and not (args.add_bias_linear or args.swiglu):
        fields["bias_activation_fusion"] = False
    if args.swiglu:
        fields |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
    elif args.squared_relu:
        fields |= {"activation_func": _squared_relu, "bias_activation_fusion": False}
    return TransformerConfig(**fields)


def params_dtype(args: Namespace) -> torch.dtype:
    """The number format of weights and activations."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def unwrapped(chunk: Any) -> GPTModel:
    """Take off the wrappers for data parallelism and half precision."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def _fields_of(kind: Any, args: Namespace) -> dict[str, Any]:
    """Arguments that bear the name of a field of `kind`, those that were left to their own default excepted."""
    given = vars(args)
    names = {field.name for field in dataclasses.fields(kind)} & set(given)
    return {name: given[name] for name in names if given[name] is not None} | (
        {"params_dtype": params_dtype(args)} if kind is OptimizerConfig else {}
    )


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.relu(x).square()


def _chunk(args: Namespace, config: TransformerConfig, vp_stage: int) -> GPTModel:
    vpp = args.virtual_pipeline_model_parallel_size
    stage = {} if vpp is None else {"vp_stage": vp_stage}
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        **stage,
    )
    if args.use_cpu_initialization:
        torch.manual_seed(args.seed)
        spec.layer_specs = [_seeded(layer, args.seed) for layer in spec.layer_specs]
    place = {"ignore_virtual": False, "vp_stage": vp_stage}
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        **stage,
    )
    chunk.model_type = ModelType.encoder_or_decoder
    for parameter in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunk


def _seeded(spec: Any, seed: int) -> Any:
    """Let a layer draw its weights from a seed of its own, so that no cut of the pipeline changes them."""

    class SeededLayer(spec.module):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            offset = get_transformer_layer_offset(given["config"], given.get("vp_stage"))
            torch.manual_seed(seed + 1000 * (given["layer_number"] + offset))
            super().__init__(**given)

    mlp = spec.submodules.mlp
    # From megatron-core 0.18 on, MLPs and experts are partial functions instead of specs.
    is_partial = isinstance(mlp, functools.partial)
    parts = mlp.keywords["submodules"] if is_partial else mlp.submodules
    experts = getattr(parts, "experts", None)
    if is_partial and experts is not None and experts.func is SequentialMLP:
        parts = dataclasses.replace(parts, experts=functools.partial(_AllExpertsDrawn, **experts.keywords))
        mlp = functools.partial(mlp.func, **(mlp.keywords | {"submodules": parts}))
    elif not is_partial and experts is not None and experts.module is SequentialMLP:
        parts = dataclasses.replace(parts, experts=dataclasses.replace(experts, module=_AllExpertsDrawn))
        mlp = dataclasses.replace(mlp, submodules=parts)
    return dataclasses.replace(spec, module=SeededLayer, submodules=dataclasses.replace(spec.submodules, mlp=mlp))


class _AllExpertsDrawn(SequentialMLP):  # type: ignore[misc]
    """Draws the weights of all ranks' experts in turn and keeps its own, so that no cut of the experts changes them."""

    def __init__(self, *given: Any, **named: Any) -> None:
        own: Any = None
        for rank in range(parallel_state.get_expert_model_parallel_world_size()):
            super().__init__(*given, **named)
            if rank == parallel_state.get_expert_model_parallel_rank():
                own = self.local_experts
        self.local_experts: Any = own


def _say_size(modules: list[GPTModel]) -> None:
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        tp, pp = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        size = sum(parameter.numel() for module in modules for parameter in module.parameters())
        print(f" > number of parameters on (tensor, pipeline) model parallel rank ({tp}, {pp}): {size}", flush=True)


def _wrap(args: Namespace, config: TransformerConfig, module: GPTModel, *, first: bool) -> Any:
    inner = Float16Module(config, module) if args.bf16 or args.fp16 else module
    if args.use_torch_fsdp2:
        reshard = TorchFullyShardedDataParallelConfig(reshard_after_forward=args.torch_fsdp2_reshard_after_forward)
        return TorchFullyShardedDataParallel(config, reshard, inner)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        align_param_gather=args.align_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        bucket_size=args.ddp_bucket_size,
        use_megatron_fsdp=args.use_megatron_fsdp,
        data_parallel_sharding_strategy=args.data_parallel_sharding_strategy,
    )
    wrapper = FullyShardedDataParallel if args.use_megatron_fsdp else DistributedDataParallel
    # Later chunks hide their communication behind the compute of others and need no buckets.
    return wrapper(config, ddp_config, inner, disable_bucketing=not first)


def _overlap(args: Namespace, config: TransformerConfig, chunks: list[Any]) -> None:
    """Tell the schedule when gradients and parameters may travel."""

    def each(method: str) -> Any:
        functions = [getattr(chunk, method) for chunk in chunks]
        return functions if len(functions) > 1 else functions[0]

    if args.overlap_grad_reduce:
        config.no_sync_func = each("no_sync")
        if args.align_grad_reduce:
            config.grad_sync_func = each("start_grad_sync")
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = each("start_param_sync")


def _scheduler(args: Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """Count in samples, as Megatron-LM does."""
    decay_steps = (args.lr_decay_iters or args.train_iters) * args.global_batch_size
    if args.lr_warmup_fraction is None:
        warmup_steps = args.lr_warmup_iters * args.global_batch_size
    else:
        warmup_steps = args.lr_warmup_fraction * decay_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
    )
