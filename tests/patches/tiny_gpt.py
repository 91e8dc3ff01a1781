"""A worker for the tests: a tiny GPT of megatron-core's own modules learns to count, in each parallel way asked for.

Prints one line a step, `NAME loss 4.86854`.

    python -m torch.distributed.run --nproc-per-node 2 tests/patches/tiny_gpt.py '{"my case": {"tp": 2}}'
"""

import json
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from pipette_patches import registry

registry.apply("cpu_backend")

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

SEQ_LENGTH, VOCAB, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE = 16, 128, 4, 2


def build(options: dict[str, Any]) -> tuple[list[torch.nn.Module], Any]:
    """Build the model chunks of this rank and their optimizer."""
    bf16 = options.get("bf16", False)
    config = TransformerConfig(
        num_layers=options.get("layers", 4), hidden_size=32, num_attention_heads=4, bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        tensor_model_parallel_size=options.get("tp", 1), pipeline_model_parallel_size=options.get("pp", 1),
        virtual_pipeline_model_parallel_size=options.get("vpp"), overlap_p2p_comm=bool(options.get("vpp")),
        batch_p2p_comm=not options.get("vpp"), deallocate_pipeline_outputs=True,
        **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False} | options.get("config", {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(config.num_moe_experts)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=options.get("distributed_optimizer", False),
        overlap_grad_reduce=options.get("overlap_grad_reduce", False),
    )
    chunks: list[torch.nn.Module] = []
    for vpp_rank in range(options.get("vpp") or 1):
        where = {"vp_stage": vpp_rank if options.get("vpp") else None}
        model = GPTModel(
            config, spec, VOCAB, SEQ_LENGTH, share_embeddings_and_output_weights=options.get("tied", False),
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, **where),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, **where), **where,
        )  # fmt: skip
        if options.get("named_weights"):
            name_weights(model)
        chunks.append(
            DistributedDataParallel(config, ddp, model.cuda(torch.cuda.current_device()).to(config.params_dtype))
        )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-2, bf16=bf16, use_distributed_optimizer=ddp.use_distributed_optimizer, clip_grad=1.0),
        chunks,
    )
    return chunks, optimizer


def global_name(name: str, model: torch.nn.Module) -> str:
    """The name of a parameter with its layer's number in the whole model."""
    words = name.split(".")
    if "layers" in words:
        at = words.index("layers")
        layers: Any = model.get_submodule(".".join(words[: at + 1]))
        words[at + 1] = str(layers[int(words[at + 1])].layer_number)
    return ".".join(words)


def name_weights(model: torch.nn.Module) -> None:
    """Draw each matrix by its global name, so that it is the same wherever its layer lies; tied ends stay tied."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and ("layers" in name or not model.share_embeddings_and_output_weights):
            seed = zlib.crc32(f"{global_name(name, model)} {mpu.get_tensor_model_parallel_rank()}".encode())
            with torch.no_grad():
                weight.copy_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Give sequences that count up modulo 32, from a start that no other micro-batch of the step has."""
    start = mpu.get_data_parallel_rank() * 100
    while True:
        start += MICRO_BATCH_SIZE
        tokens = (torch.arange(SEQ_LENGTH + 1, device="cuda") + start + torch.arange(MICRO_BATCH_SIZE)[:, None]) % 32
        yield {"tokens": tokens[:, :-1].cuda(), "labels": tokens[:, 1:].cuda()}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> Any:
    """Run one micro-batch; the loss is the mean over its tokens."""
    batch = next(data)
    positions = torch.arange(SEQ_LENGTH, device="cuda").expand(MICRO_BATCH_SIZE, -1)
    losses = model(batch["tokens"], positions, None, labels=batch["labels"])
    return losses, partial(lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()}))


def train(name: str, options: dict[str, Any]) -> None:
    """Train, and print each step's loss on the last stage."""
    mpu.initialize_model_parallel(
        options.get("tp", 1), options.get("pp", 1), options.get("vpp"), expert_model_parallel_size=options.get("ep", 1)
    )
    model_parallel_cuda_manual_seed(7)
    chunks, optimizer = build(options)
    step = get_forward_backward_func()
    data = [batches() for _ in chunks]
    for _ in range(options.get("steps", 5)):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = step(
            forward_step_func=forward_step, data_iterator=data if len(chunks) > 1 else data[0], model=chunks,
            num_microbatches=NUM_MICRO_BATCHES, seq_length=SEQ_LENGTH, micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )  # fmt: skip
        optimizer.step()
        if losses:
            loss = torch.stack([each["loss"] for each in losses]).mean()
            torch.distributed.all_reduce(loss, group=mpu.get_data_parallel_group())
            if mpu.get_data_parallel_rank() == 0 and mpu.get_tensor_model_parallel_rank() == 0:
                print(f"{name} loss {loss.item() / mpu.get_data_parallel_world_size():.5f}", flush=True)
    mpu.destroy_model_parallel()


if __name__ == "__main__":
    torch.distributed.init_process_group("nccl")
    for name, options in json.loads(sys.argv[1]).items():
        train(name, options)
    torch.distributed.destroy_process_group()
