"""Run one training step, or one evaluation, by a program of passes and messages.

Around the passes, `run` does the same as Megatron's pipelined functions (megatron/core/pipeline_parallel/schedules.py).
Each pass is Megatron's own `forward_step` or `backward_step`. Each message is posted alone, and a rank waits for the
message before it uses the tensor.

Some schedules split a backward into I (gradient of the input) and W (gradients of the weights). Megatron's linear
layers make both gradients in one autograd function. With torch's own split, this function would compute gradients of
the weights twice (pytorch issues 166577, 174017). So the executor wraps the backward of this autograd function. The
wrapped backward still communicates, but skips the matrix product for the weight gradient. A switch of Megatron skips
the product for the weight gradient: `--defer-embedding-wgrad-compute` sets the switch for the vocabulary, but the
switch works for every layer.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipette_launch.facts.programs import Message, Program, message_of
from pipette_launch.facts.schedule import Action
from pipette_patches.replacements import PatchError, Replacement
from pipette_patches.schedules.v_placement import carry


def runs_in_streams(group: Any) -> bool:
    """Return True if the messages of a pipeline go over NCCL, with one stream for each direction.

    In each process group, PyTorch opens a communicator with its own stream for each pair of ranks that exchange
    unbatched messages (ProcessGroupNCCL.cpp, pointToPoint). A group bound to a device has one stream for all pairs. In
    this stream a late message would delay the others, so such a group raises PatchError.
    """
    if "nccl" not in dist.get_backend(group):
        return False
    if any(getattr(each, "bound_device_id", None) is not None for each in (group, dist.group.WORLD)):
        raise PatchError(
            "the script binds its process groups to devices (device_id of init_process_group), so all messages of a "
            "rank would wait for each other; remove device_id, or keep Megatron's own schedules"
        )
    return True


def open_ways(group: Any, ways: Collection[tuple[int, int]]) -> None:
    """Open the communicator of each way (source, target) of a pipeline that begins or ends on this rank.

    Opening a communicator blocks until the rank at the other end opens the same communicator. All ranks open their
    communicators in the same order, so no ranks wait in a circle. Neighbour pairs that begin with an even rank come
    first and open at the same time.
    """
    rank = dist.get_rank(group)
    messages = PendingMessages(group, lambda: torch.empty(1, device=torch.cuda.current_device()), in_streams=True)
    for way in sorted(ways, key=lambda way: (min(way) % 2, *sorted(way), way)):
        if rank in way:
            greeting = Message(*way, is_gradient=False, stage=0, microbatch=0)
            messages.give(greeting, torch.zeros(1, device=torch.cuda.current_device()), then=_nothing)
            messages.post(greeting)
            messages.wait(greeting)


class PendingMessages:
    """Posts messages between the ranks of a pipeline, and keeps each tensor until its message was sent or received.

    `empty` makes the tensor that receives a message. With `in_streams`, each direction has its own NCCL stream.
    """

    def __init__(self, group: Any, empty: Callable[[], torch.Tensor], *, in_streams: bool) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._peers = dist.get_process_group_ranks(group)
        self._empty = empty
        self._in_streams = in_streams
        self._outgoing: dict[Message, tuple[torch.Tensor, Callable[[], None]]] = {}
        self._under_way: dict[Message, tuple[Any, torch.Tensor, Callable[[], None]]] = {}

    def give(self, message: Message, tensor: torch.Tensor, *, then: Callable[[], None]) -> None:
        """Keep a tensor until its message is posted. Call `then` after the tensor was sent."""
        self._outgoing[message] = tensor, then

    def post(self, message: Message) -> None:
        """Start to send or receive a message, without waiting."""
        # Two process groups carry the two directions of a pair, as in Megatron's own `_p2p_ops` with two ranks.
        goes_up = self._in_streams and message.source > message.target
        group = dist.group.WORLD if goes_up else self._group
        if message.source == self._rank:
            tensor, then = self._outgoing.pop(message)
            work = dist.isend(tensor, self._peers[message.target], group)
        else:
            tensor, then = self._empty(), _nothing
            work = dist.irecv(tensor, self._peers[message.source], group)
        self._under_way[message] = work, tensor, then

    def wait(self, message: Message) -> torch.Tensor:
        """Wait until a message was received or sent, and return its tensor."""
        work, tensor, then = self._under_way.pop(message)
        work.wait()
        then()
        return tensor

    def wait_for_sent(self, message: Message) -> None:
        """Wait until a message was sent; return at once if an earlier call has waited for the same message."""
        if message in self._under_way:
            self.wait(message)

    def reap(self) -> None:
        """Release the tensors of messages that have been sent."""
        for message in [one for one in self._under_way if one.source == self._rank]:
            if self._under_way[message][0].is_completed():
                self.wait(message)

    def finish(self) -> None:
        """Wait for all messages."""
        for message in list(self._under_way):
            self.wait(message)


def _nothing() -> None:
    pass


_OF_BIAS = 2
"""Index of the bias among the gradients of a linear layer, after input and weight."""
Deferred = list[Callable[[], None]]
"""The matrix products for weight gradients that a backward left out, in the order of the backward."""


class _Open:
    """Global lists of the current split backward, not thread-local: torch may run a backward on another thread."""

    products: Deferred | None = None
    weights: list[Any] | None = None


_open = _Open()


@contextlib.contextmanager
def deferred() -> Iterator[Deferred]:
    """Collect the matrix products for weight gradients during the block instead of computing these products."""
    products: Deferred = []
    weights: list[Any] = []
    _open.products, _open.weights = products, weights
    try:
        yield products
    finally:
        _open.products = _open.weights = None
        for weight in weights:
            # The value True kept hooks of this backward from adding a missing gradient. The next backward may not be
            # split.
            weight.grad_added_to_main_grad = False


def _splitting(original: Any) -> Any:
    """Make a linear layer with the same forward, whose backward can leave out the product for the weights."""

    class Splitting(original):  # type: ignore[misc]
        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            total_input, weight = ctx.saved_tensors
            # If Megatron itself defers the product (for the vocabulary), run Megatron's backward. From 0.19 on, a
            # weight may be in parts, and only Megatron's backward joins the parts.
            defers = ctx.grad_output_buffer is not None or getattr(ctx, "gtp_remat_size", 1) > 1
            # A deferred product of the head would keep the gradients of the logits, the largest tensor of the model.
            is_head = getattr(weight, "is_embedding_or_output_parameter", False)
            if _open.products is None or defers or is_head or not hasattr(weight, "main_grad"):
                return original.backward(ctx, grad_output)
            product = partial(_fused_product if ctx.gradient_accumulation_fusion else _product, weight)
            gather = ctx.tp_group if ctx.sequence_parallel else None
            _open.products.append(partial(_add, product, total_input, grad_output, gather))
            _open.weights.append(weight)  # type: ignore[union-attr]
            ctx.grad_output_buffer, ctx.wgrad_deferral_limit = [], 0
            ctx.gradient_accumulation_fusion, ctx.main_grad = True, weight.main_grad
            has_bias, ctx.use_bias = ctx.use_bias, False
            gradients = list(original.backward(ctx, grad_output))
            if has_bias:
                # Megatron's backward would sum the tokens in two steps, and BF16 would round differently.
                gradients[_OF_BIAS] = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0)
            return tuple(gradients)

    return Splitting


@torch.no_grad()
def _add(
    product: Callable[[torch.Tensor, torch.Tensor], None],
    layer_input: torch.Tensor,
    grad_output: torch.Tensor,
    gather: Any,
) -> None:
    """Add the weights' gradient of one layer and micro-batch, as the original backward would.

    `product` adds the product of `grad_output` and the input to a weight's gradient. `gather` is the process group that
    holds the other parts of the input; None without sequence parallelism.
    """
    from megatron.core.tensor_parallel.layers import dist_all_gather_func
    from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

    if gather is not None:
        shape = [layer_input.size(0) * gather.size(), *layer_input.shape[1:]]
        whole = torch.empty(shape, dtype=layer_input.dtype, device=layer_input.device)
        dist_all_gather_func(whole, layer_input, group=gather)
        layer_input = whole
    product(*prepare_input_tensors_for_wgrad_compute(grad_output, layer_input))


def _product(weight: Any, grad_output: torch.Tensor, layer_input: torch.Tensor) -> None:
    weight.main_grad.add_(grad_output.t().matmul(layer_input))


def _fused_product(weight: Any, grad_output: torch.Tensor, layer_input: torch.Tensor) -> None:
    from megatron.core.tensor_parallel.layers import fused_weight_gradient_mlp_cuda as kernels

    is_wide = weight.main_grad.dtype == torch.float32
    add = kernels.wgrad_gemm_accum_fp32 if is_wide else kernels.wgrad_gemm_accum_fp16
    add(layer_input, grad_output, weight.main_grad)


SPLITTING = Replacement(
    module="megatron.core.tensor_parallel.layers",
    path="LinearWithGradAccumulationAndAsyncCommunication",
    make=_splitting,
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of Megatron's pipelined functions, with model and data as lists of chunks."""

    forward_step_func: Callable[..., Any]
    data_iterator: list[Any]
    model: list[Any]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    groups: Any
    """Process groups by Megatron's names."""
    finalize_arguments: Mapping[str, Any]
    """Keyword arguments of `finalize_model_grads` in this release."""
    config: Any
    """Megatron's `TransformerConfig`."""
    in_streams: bool = False
    """True if the messages of each direction have their own NCCL stream."""
    tied_weights: tuple[Any, ...] = ()
    """Weights of embedding and head if the model ties these weights and this rank holds embedding and head."""


def run(
    call: Call, program: Program, rank_S: tuple[int, ...], schedules: Any, begin: Callable[[str], None]
) -> list[Any]:
    """Run a step and finalize its gradients. Return the results of the last stage's forwards, empty on other ranks.

    `program` has the passes and messages of this rank, `rank_S` has the pipeline rank of each stage, and `schedules` is
    Megatron's module with the pipelined functions. `begin` receives the name of each pass before it runs, and an empty
    string at the end.
    """
    config, groups = call.config, call.groups
    is_last = groups.pp.rank() == rank_S[-1]
    finalizes = config.finalize_model_grads_func is not None and not call.forward_only
    embedding = schedules.clear_embedding_activation_buffer(config, call.model, is_last) if finalizes else None
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    passes = PipelineStep(call, program, rank_S, schedules, begin)
    # Gradients of a chunk are reduced here, because W passes may come after the backward and trigger no backward hook.
    with contextlib.ExitStack() as stack:
        contexts = config.no_sync_func or []
        for enter in contexts if isinstance(contexts, list) else [contexts]:
            stack.enter_context(enter())
        passes.run()
    if rank_S[-1] != groups.pp.size() - 1:
        # Megatron reads losses on the last rank, and broadcasts the number of tokens from the last rank.
        carried = carry((passes.results, passes.num_tokens), groups.pp, rank_S[-1])
        passes.results, passes.num_tokens = carried or ([], passes.num_tokens)
    if finalizes:
        schedules.finish_embedding_wgrad_compute(config, embedding, is_last, groups.tp)
        num_tokens = passes.num_tokens if config.calculate_per_token_loss else None
        config.finalize_model_grads_func(call.model, num_tokens, **call.finalize_arguments)
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return passes.results


class PipelineStep:
    """The passes of one training step on this rank. The parameters are explained at `run`.

    Tensors are kept by stage and micro-batch, so the passes may come in any order.
    """

    def __init__(
        self, call: Call, program: Program, rank_S: tuple[int, ...], schedules: Any, begin: Callable[[str], None]
    ) -> None:
        self._call = call
        self._config = call.config
        self._program = program
        self._rank_S = rank_S
        # Before release 0.17, backward_step also needs the kind of model.
        needs_type = "model_type" in inspect.signature(schedules.backward_step).parameters
        self._model_type = (schedules.get_model_type(call.model[0]),) if needs_type else ()
        self._schedules = schedules
        self._begin = begin
        self._messages = PendingMessages(call.groups.pp, self._empty, in_streams=call.in_streams)
        stages = [stage for stage, rank in enumerate(rank_S) if rank == call.groups.pp.rank()]
        self._chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
        passes = [step for step in program if isinstance(step, Action)]
        self._first_forward = {action.stage: action for action in reversed(passes) if action.kind == "F"}
        self._last_gradient = {action.stage: action for action in passes if action.kind in "BW"}
        self._chunks_in_order = list(dict.fromkeys(self._chunk_of[action.stage] for action in passes))
        """Chunks in the order of their first pass."""
        self._finished: list[int] = []
        """Chunks that have all their gradients."""
        self._inputs: dict[tuple[int, int], Any] = {}
        self._outputs: dict[tuple[int, int], Any] = {}
        self._handed_over: dict[Message, Any] = {}
        """Tensors that one stage makes for another stage on this rank."""
        self._weight_gradients: dict[tuple[int, int], Deferred] = {}
        self.results: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())

    def run(self) -> None:
        """Run every pass and message of the program."""
        self._gather_parameters(0)
        for step in self._program:
            if not isinstance(step, Action):
                self._messages.post(step)
                continue
            self._begin(step.word)
            self._messages.reap()
            if step.kind == "F":
                self._forward(step)
            elif step.kind == "W":
                for make in self._weight_gradients.pop((step.stage, step.microbatch)):
                    make()
            else:
                self._backward(step)
            if step == self._last_gradient.get(step.stage):
                self._reduce_gradients(self._chunk_of[step.stage])
        self._begin("its last messages")
        self._messages.finish()
        self._begin("")

    def _forward(self, action: Action) -> None:
        call, stage, microbatch = self._call, action.stage, action.microbatch
        chunk, is_first = self._chunk_of[stage], action == self._first_forward[stage]
        if is_first:
            self._gather_parameters(self._chunks_in_order.index(chunk) + 1)
        taken = self._take(stage - 1, microbatch, is_gradient=False) if stage > 0 else None
        output, num_tokens = self._schedules.forward_step(
            call.forward_step_func,
            call.data_iterator[chunk],
            call.model[chunk],
            call.num_microbatches,
            taken,
            self.results,
            self._config,
            cp_group_size=call.groups.cp.size(),
            collect_non_loss_data=call.collect_non_loss_data,
            is_first_microbatch=self._schedules.check_first_val_step(call.first_val_step, call.forward_only, is_first),
            current_microbatch=microbatch,
            vp_stage=chunk if len(call.model) > 1 else None,
            is_last_stage=stage == len(self._rank_S) - 1,
        )
        self.num_tokens += num_tokens
        if not call.forward_only:
            self._inputs[stage, microbatch], self._outputs[stage, microbatch] = taken, output
        if stage < len(self._rank_S) - 1:
            self._give(stage, microbatch, output, is_gradient=False)

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        gradient = None
        if stage < len(self._rank_S) - 1:
            gradient = self._take(stage + 1, microbatch, is_gradient=True)
            # Megatron's backward expects a freed output. The output is freed after its message was sent.
            self._messages.wait_for_sent(message_of(self._rank_S, stage, microbatch, is_gradient=False))
        taken, output = self._inputs.pop((stage, microbatch)), self._outputs.pop((stage, microbatch))
        with contextlib.ExitStack() as stack:
            if action.kind == "I":
                self._weight_gradients[stage, microbatch] = stack.enter_context(deferred())
            gradient = self._schedules.backward_step(taken, output, gradient, *self._model_type, self._config)
        if stage > 0:
            self._give(stage, microbatch, gradient, is_gradient=True)

    def _take(self, stage: int, microbatch: int, *, is_gradient: bool) -> Any:
        """Wait for the tensor of a stage and return the tensor."""
        message = message_of(self._rank_S, stage, microbatch, is_gradient=is_gradient)
        if message.source == message.target:
            return self._handed_over.pop(message)
        return self._messages.wait(message)

    def _give(self, stage: int, microbatch: int, tensor: Any, *, is_gradient: bool) -> None:
        """Hand over the tensor of a stage, or keep the tensor for sending. Free an output as soon as possible."""
        message = message_of(self._rank_S, stage, microbatch, is_gradient=is_gradient)
        release = partial(
            self._schedules.deallocate_output_tensor,
            None if is_gradient or self._call.forward_only else tensor,
            self._config.deallocate_pipeline_outputs,
        )
        if message.source == message.target:
            self._handed_over[message] = tensor if is_gradient else tensor.detach().requires_grad_()
            release()
        else:
            self._messages.give(message, tensor, then=release)

    def _empty(self) -> torch.Tensor:
        """Make the tensor that receives a message."""
        config, groups = self._config, self._call.groups
        length = self._call.seq_length // groups.cp.size()
        if config.sequence_parallel:
            length //= groups.tp.size()
        return torch.empty(
            (length, self._call.micro_batch_size, config.hidden_size),
            dtype=config.pipeline_dtype,
            device=torch.cuda.current_device(),
            requires_grad=True,
        )

    def _gather_parameters(self, turn: int) -> None:
        """Start to gather the parameters of chunk number `turn` in the order of first passes."""
        gather = self._config.param_sync_func
        if gather is not None and not self._call.forward_only and turn < len(self._chunks_in_order):
            chunk = self._chunks_in_order[turn]
            (gather[chunk] if isinstance(gather, list) else gather)(self._call.model[chunk].parameters())

    def _reduce_gradients(self, chunk: int) -> None:
        """Start to reduce the gradients of a finished chunk, if the job overlaps gradient reduction with passes."""
        tied, model = self._call.tied_weights, self._call.model
        self._finished.append(chunk)
        if tied and len(self._finished) < len(model):
            # The tied gradient of embedding and head is complete only after both chunks have finished.
            return
        if tied:
            _add_up(tied)
        for one in self._finished if tied else [chunk]:
            if getattr(getattr(model[one], "ddp_config", None), "overlap_grad_reduce", False):
                model[one].start_grad_sync()


def _add_up(tied_weights: tuple[Any, ...]) -> None:
    """Write the sum of the gradients of all tied weights to each tied weight, without a temporary tensor."""
    total, *others = (weight.main_grad for weight in tied_weights)
    for other in others:
        total.add_(other)
    for other in others:
        other.copy_(total)
