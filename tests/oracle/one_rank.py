"""A program that trains one rank of a job whose model is built from the job's flags.

It stands in for a script in the tests. The code follows Megatron-LM core_v0.16.1:
training/training.py (get_model, train_step, train), gpt_builders.py and pretrain_gpt.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from oracle import megatron_config

from pipette_launch.facts import Job, Layout
from pipette_launch.facts.schedule import schedule_table
from pipette_patches.storage_meter import StorageMeter, current, local, under
from pipette_patches.whole_stage import inner_optimizers


def initialize(job: Job, layout: Layout) -> None:
    """Make the process groups of the rank that this process plays, and seed its random numbers."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import random

    dist.init_process_group()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_distributed_optimizer_instances=job.options.num_distributed_optimizer_instances,
        order="tp-cp-ep-pp-dp" if layout.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    random.initialize_rng_tracker(force_reset=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def train_from_flags(
    job: Job,
    layout: Layout,
    pp_rank: int = 0,
    *,
    layers_per_chunk: tuple[int, ...] = (),
    meter: StorageMeter | None = None,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Train a model that is built from the job's flags, without end.

    The meter begins a phase with each schedule (`step 1`), and with each step of the optimizer (`update 1`). `changes`
    override fields of TransformerConfig.
    """
    initialize(job, layout)
    meter = meter or current() or StorageMeter()
    chunks = layers_per_chunk or layout.chunk_layers(job.model.num_layers)
    trainer = Trainer(job, layout, pp_rank, chunks=chunks, meter=meter, changes=changes or {})
    for number in itertools.count(1):
        trainer.step(number)


def program_from_flags(job: Job, layout: Layout, pp_rank: int = 0, **changes: Any) -> Callable[[], None]:
    """Return a program that trains with Megatron's local layers. `changes` override fields of TransformerConfig.

    The weights are initialised, because the router chooses experts by the values of the weights.
    """
    local = dataclasses.replace(job.model, transformer_impl="local", attention_backend="local")
    changed = {"perform_initialization": True, **changes}
    return functools.partial(train_from_flags, dataclasses.replace(job, model=local), layout, pp_rank, changes=changed)


class Trainer:
    """The model, buffers and optimizer of one rank, set up as Megatron's `setup_model_and_optimizer` does."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        pp_rank: int,
        *,
        chunks: tuple[int, ...],
        meter: StorageMeter,
        changes: Mapping[str, Any],
    ) -> None:
        """Set up model, buffers and optimizer. The parameters are explained at `train_from_flags`."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import get_megatron_optimizer

        self.job, self.layout, self.pp_rank, self.meter = job, layout, pp_rank, meter
        self.num_microbatches = layout.num_microbatches(job.batch.global_batch_size)
        self.config = megatron_config.rank_config(job, layout, chunks=chunks, changes=changes)
        with meter.labelled("weights"):
            models = [self._chunk(index) for index in range(layout.vpp)]
        self.chunks = self._wrapped(models)
        del models
        with meter.labelled("optimizer"):
            self.optimizer: Any = get_megatron_optimizer(
                megatron_config.optimizer_config(job, layout), self.chunks, use_gloo_process_groups=False
            )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = under("backward", finalize_model_grads)
        if layout.overlap_grad_reduce:
            # Set the same functions of the configuration as Megatron's `train`.
            functions = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = functions if layout.vpp > 1 else functions[0]
            if layout.vpp > 1:
                self.config.grad_sync_func = [chunk.start_grad_sync for chunk in self.chunks]

    def _replace_shape_exchange(self) -> None:
        """Compute the shapes that this rank would receive from its neighbours in the next step.

        Megatron exchanges shapes if multi-token prediction is not on the last chunk. Behind the chunk of multi-token
        prediction, tensors have one more sequence for each depth. Shapes arrive in the order of the schedule.
        """
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        model, layout = self.job.model, self.layout
        length = model.seq_length // layout.cp // (layout.tp if layout.sequence_parallel else 1)

        def shapes(model_chunks: Iterable[int]) -> Iterator[list[int]]:
            # The last chunk sends no output, and the first chunk receives no input.
            inner = [chunk for chunk in model_chunks if 0 <= chunk < layout.num_chunks - 1]
            for chunk in itertools.cycle(inner):
                sequences = 1 + model.mtp_num_layers * (chunk >= layout.mtp_chunk)
                yield [length * sequences, layout.micro_batch_size, model.hidden_size]

        group = layout.microbatch_group_size or layout.pp
        turns = schedule_table(layout.vpp, self.num_microbatches, group)[1].tolist()
        received = shapes(turn * layout.pp + self.pp_rank - 1 for turn in turns)
        gradients = shapes((layout.vpp - 1 - turn) * layout.pp + self.pp_rank for turn in turns)

        def exchange(_communicator: Any, _next: Any, _previous: Any, recv_prev: bool, recv_next: bool) -> Any:
            return next(received) if recv_prev else [0, 0, 0], next(gradients) if recv_next else [0, 0, 0]

        P2PCommunicator._communicate_shapes = exchange

    def _chunk(self, index: int) -> Any:
        """Build one model chunk, as Megatron's gpt_builder does."""
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.models.gpt.gpt_model import GPTModel

        model, layout = self.job.model, self.layout
        uses_te = model.transformer_impl == "transformer_engine"
        stage = index if layout.vpp > 1 else None
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=uses_te, normalization=model.normalization, vp_stage=stage
        )
        prediction_spec = None
        if model.mtp_num_layers:
            # If the chunk has no decoder layer, take Megatron's default layer specifications.
            layers = spec.layer_specs or gpt_layer_specs.get_gpt_decoder_layer_specs(
                self.config, uses_te, normalization=model.normalization
            )
            prediction_spec = gpt_layer_specs.get_gpt_mtp_block_spec(
                self.config, layers[-1], use_transformer_engine=uses_te, vp_stage=stage
            )
        chunk = GPTModel(
            config=self.config,
            transformer_layer_spec=spec,
            vocab_size=model.padded_vocab_size(layout.tp),
            max_sequence_length=model.max_position_embeddings,
            pre_process=self.pp_rank == 0 and index == 0,
            post_process=self.pp_rank == layout.pp - 1 and index == layout.vpp - 1,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
            mtp_block_spec=prediction_spec,
            vp_stage=stage,
        ).cuda()
        # Count the tensors of embedding and output layer under separate labels.
        if chunk.pre_process:
            chunk.embedding.forward = _marked_backward(under("embedding", chunk.embedding.forward))
        if hasattr(chunk, "output_layer"):
            chunk.output_layer.forward = under("head", chunk.output_layer.forward)
            chunk.compute_language_model_loss = under("head", chunk.compute_language_model_loss)
        return chunk

    def _wrapped(self, chunks: Sequence[Any]) -> list[Any]:
        """Convert each chunk to the training type, and give each chunk gradient buffers."""
        from megatron.core import tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, FullyShardedDataParallel
        from megatron.core.transformer.module import Float16Module

        count = 0
        for chunk in chunks:
            for parameter in chunk.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
                count += parameter.numel()
        if self.job.model.params_dtype != "fp32":
            with self.meter.labelled("weights"):
                chunks = [Float16Module(self.config, chunk) for chunk in chunks]
        ddp = megatron_config.ddp_config(self.job, self.layout, num_parameters=count)
        options = self.job.options
        no_buckets = options.overlap_param_gather_with_optimizer_step
        wrapper = FullyShardedDataParallel if options.use_megatron_fsdp else DistributedDataParallel
        with self.meter.labelled("gradients"):
            wrapped = [
                wrapper(config=self.config, ddp_config=ddp, module=chunk, disable_bucketing=index > 0 or no_buckets)
                for index, chunk in enumerate(chunks)
            ]
        for tensor, label in (each for chunk in wrapped for each in _weights_and_masters(chunk)):
            if tensor is not None:
                self.meter.recount(tensor.untyped_storage(), label)
        return wrapped

    def step(self, number: int) -> None:
        """Run one training step as Megatron's `train_step` does."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if self.layout.chunks_after_mtp:
            self._replace_shape_exchange()
        self.meter.mark(f"step {number}")
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [iter(self._batch, None) for _ in self.chunks]
        interleaved = self.layout.vpp > 1
        # Like Megatron, keep the losses of all micro-batches until the optimizer's step has ended.
        _losses = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=batches if interleaved else batches[0],
            model=self.chunks if interleaved else self.chunks[0],
            num_microbatches=self.num_microbatches,
            seq_length=self.job.model.seq_length,
            micro_batch_size=self.layout.micro_batch_size,
            forward_only=False,
        )
        self.meter.mark(f"update {number}")
        with self.meter.labelled("optimizer_step"):
            self.optimizer.step()
        for inner in inner_optimizers(self.optimizer):
            for states in inner.optimizer.state.values() if inner.optimizer is not None else ():
                for state in states.values():
                    if isinstance(state, torch.Tensor):
                        self.meter.recount(local(state).untyped_storage(), "optimizer")

    def _batch(self) -> dict[str, torch.Tensor]:
        """Make one micro-batch on the device, as Megatron's data loader does."""
        size, length, vocab = self.layout.micro_batch_size, self.job.model.seq_length, self.job.model.vocab_size
        batch = {
            "tokens": torch.randint(vocab, (size, length), dtype=torch.int64, device="cuda"),
            "labels": torch.randint(vocab, (size, length), dtype=torch.int64, device="cuda"),
            "loss_mask": torch.ones(size, length, dtype=torch.float32, device="cuda"),
            "position_ids": torch.zeros(size, length, dtype=torch.int64, device="cuda"),
        }
        if self.job.options.create_attention_mask_in_dataloader:
            batch["attention_mask"] = torch.zeros(size, 1, length, length, dtype=torch.bool, device="cuda")
        if self.layout.cp == 1:
            return batch
        # get_batch_on_this_cp_rank copies two of 2*cp pieces of the sequence for each rank.
        own = length // self.layout.cp
        return {
            name: whole.narrow(2 if name == "attention_mask" else 1, 0, own).clone() for name, whole in batch.items()
        }

    def _forward_step(
        self, batches: Any, chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Run one micro-batch on one chunk, as `forward_step` of pretrain_gpt does."""
        inner = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        batch: dict[str, Any] = {}
        # A middle stage without multi-token prediction reads no data.
        if inner.pre_process or inner.post_process or inner.mtp_process:
            with self.meter.labelled("embedding"):
                batch = next(batches)
        run = chunk.build_schedule_plan if return_schedule_plan else chunk
        inputs = [batch.get(name) for name in ("tokens", "position_ids", "attention_mask")]
        out = run(*inputs, labels=batch.get("labels"), loss_mask=batch.get("loss_mask"))
        return out, under("head", functools.partial(_loss, batch.get("loss_mask")))


def _weights_and_masters(chunk: Any) -> Iterator[tuple[torch.Tensor | None, str]]:
    """Yield weights and master weights of a wrapped chunk, each with the label under which its bytes count."""
    if hasattr(chunk, "param_and_grad_buffer"):
        for group in chunk.param_and_grad_buffer.parameter_groups:
            yield getattr(group.model_weight_buffer, "data", None), "weights"
            yield getattr(group.main_weight_buffer, "data", None), "optimizer"
        return
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        yield buffer.param_data, "weights"


def _loss(loss_mask: Any, output: torch.Tensor) -> Any:
    """Sum the losses as `loss_func` of pretrain_gpt does."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def _marked_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the meter mark the moment when the backward reaches the output of a function."""

    def mark(_gradient: torch.Tensor) -> None:
        if (meter := current()) is not None:
            meter.mark()

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        if out.requires_grad:
            out.register_hook(mark)
        return out

    return forward
