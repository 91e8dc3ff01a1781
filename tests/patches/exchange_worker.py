"""A worker for the tests: plays one rank of each case, and prints the exchanges of one training step as JSON.

Reads a list of cases from standard input: `{"script", "arguments", "rank", "world_size"}`. Prints one line of JSON for
each case: a list of `[phase, layer, operation, group, num_ranks, bytes, element_type, count]`, or the error as text.
The step lasts from the second call of Megatron's schedule to the third, so it includes the optimizer.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pipette_patches import play, registry
from pipette_patches.replacements import Replacements, in_module, instead, wrapping
from pipette_patches.run import Program
from pipette_patches.without_cuda import no_coalescing

FORWARD, BACKWARD, BETWEEN, END = "forward", "backward", "between", "end"
"""Phases of a step: a pass of a micro-batch, the time between two passes, and the time after the last pass."""


class Exchange(NamedTuple):
    """One collective or message."""

    phase: str
    layer: str
    operation: str
    group: str
    num_ranks: int
    size_bytes: int
    """Bytes of the full tensor on one rank, without the padding of Megatron's buckets."""
    element_type: str


OPERATIONS = {
    # Name in `torch.ops.c10d`: (name here, argument with the full tensor)
    "allreduce_": ("all_reduce", "tensors"),
    "allgather_": ("all_gather", "output_tensors"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "broadcast_": ("broadcast", "tensors"),
    "send": ("send", "tensors"),
    "recv_": ("receive", "tensors"),
}
GROUPS: dict[str, tuple[str, dict[str, bool]]] = {
    # Name here: (function of megatron.core.parallel_state, its arguments)
    "tp": ("get_tensor_model_parallel_group", {}),
    "cp": ("get_context_parallel_group", {}),
    "tp_cp": ("get_tensor_and_context_parallel_group", {}),
    "pp": ("get_pipeline_model_parallel_group", {}),
    "mp": ("get_model_parallel_group", {}),
    "dp": ("get_data_parallel_group", {}),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}),
    "embedding": ("get_embedding_group", {}),
    "ep": ("get_expert_model_parallel_group", {}),
    "etp": ("get_expert_tensor_parallel_group", {}),
    "ep_etp": ("get_expert_tensor_and_model_parallel_group", {}),
    "ep_etp_pp": ("get_expert_tensor_model_pipeline_parallel_group", {}),
    "expert_dp": ("get_expert_data_parallel_group", {}),
}


def group_names() -> dict[str, str]:
    """Return our name of each process group of parallel_state, by torch's name of the group."""
    from megatron.core import parallel_state

    found: dict[str, str] = {}
    # From 0.19 on, the norm of expert gradients uses a second group of the same ranks.
    again = ("ep_etp_pp", (GROUPS["ep_etp_pp"][0], {"with_egtp_remat": True}))
    for name, (function, arguments) in (*GROUPS.items(), again):
        try:
            group = getattr(parallel_state, function)(**arguments)
        except (AssertionError, TypeError):
            # This rank is not in such a group, or this release has no such group.
            continue
        found.setdefault(getattr(group, "group_name", ""), name)
    return found


def unpadded_bytes(chunks: list[Any]) -> dict[int, int]:
    """Return the bytes of the parameters in each bucket of gradients or weights, by the bucket's padded bytes."""
    found: dict[int, int] = {}
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                count = sum(parameter.numel() for parameter in bucket.params)
                for data in (bucket.grad_data, bucket.param_data):
                    if data is not None:
                        found[data.numel() * data.element_size()] = count * data.element_size()
    return found


class Recorder(TorchDispatchMode):
    """Records every collective and message of this process, because torch dispatches each as an operation."""

    def __init__(self, chunks: list[Any]) -> None:
        """Record nothing yet. `chunks` are the wrapped model chunks of this rank."""
        super().__init__()
        self.phase, self.layer = BETWEEN, ""
        self.found: Counter[Exchange] = Counter()
        self._names = group_names()
        self._unpadded = unpadded_bytes(chunks)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it if it is a collective or a message."""
        if func.namespace == "c10d" and func._opname in OPERATIONS:
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: Any) -> None:
        given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)}
        operation, full = OPERATIONS[func._opname]
        group = dist.ProcessGroup.unbox(given["process_group"])
        tensors = list(_tensors(given[full]))
        size = sum(each.numel() * each.element_size() for each in tensors)
        name = self._names.get(group.group_name, "world" if group.size() == dist.get_world_size() else "unknown")
        if name in ("dp_cp", "expert_dp"):
            size = self._unpadded.get(size, size)
        element_type = str(tensors[0].dtype).removeprefix("torch.")
        self.found[Exchange(self.phase, self.layer, operation, name, group.size(), size, element_type)] += 1

    def within(self, phase: str, run: Callable[[], Any]) -> Any:
        """Run a function in a phase of the step."""
        before, self.phase = self.phase, phase
        try:
            return run()
        finally:
            self.phase, self.layer = before, ""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for each in value:
            yield from _tensors(each)


_recording: list[Recorder] = []
"""The recorder of the step that is being recorded."""


def _in_phase(phase: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    @wrapping
    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not _recording:
            return original(*args, **kwargs)
        return _recording[0].within(phase, lambda: original(*args, **kwargs))

    return run


@wrapping
def _balanced(original: Callable[..., Any], router: Any, *args: Any, **kwargs: Any) -> Any:
    """Let token i choose the experts i * k to i * k + k - 1, modulo the number of experts."""
    logits = original(router, *args, **kwargs)
    num_experts, topk = logits.shape[-1], router.topk
    token = torch.arange(logits.numel() // num_experts)[:, None]
    chosen = (token * topk + torch.arange(topk)) % num_experts
    wanted = torch.zeros(len(token), num_experts, dtype=logits.dtype).scatter_(1, chosen, 100.0)
    # A fake collective leaves any bits in the tokens, also those of infinity.
    return 1e-6 * logits.nan_to_num(0.0, 0.0, 0.0).clamp(-1.0, 1.0) + wanted.view_as(logits)


class _Ring(torch.autograd.Function):
    """Messages of ring attention as in TransformerEngine 2.8, context_parallel.py, AttnFuncWithCPAndKVP2P."""

    @staticmethod
    def forward(ctx: Any, group: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(query, key, value)
        pair = torch.cat((key.flatten(), value.flatten()))
        for _ in range(group.size() - 1):
            _Ring.hop(group, pair)
        return query.new_zeros(*query.shape[:2], query.shape[2] * value.shape[3])

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        query, key, value = ctx.saved_tensors
        pair = torch.cat((key.flatten(), value.flatten()))
        last = ctx.group.size() - 1
        for step in range(last + 1):
            # The first message has keys and values, the last has their gradients, the others have both.
            _Ring.hop(ctx.group, pair if step in (0, last) else torch.cat((pair, pair)))
        return None, *(torch.zeros_like(each) for each in (query, key, value))

    @staticmethod
    def hop(group: Any, tensor: torch.Tensor) -> None:
        ranks = dist.get_process_group_ranks(group)
        place = group.rank()
        dist.isend(tensor, ranks[(place + 1) % len(ranks)], group)
        dist.irecv(torch.empty_like(tensor), ranks[place - 1], group)


@wrapping
def _allowing_cp(original: Callable[..., Any], core: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Make Megatron's own attention core, which refuses context parallelism."""
    degree, config.context_parallel_size = config.context_parallel_size, 1
    try:
        original(core, config, *args, **kwargs)
    finally:
        config.context_parallel_size = degree


@wrapping
def _exchanging(
    original: Callable[..., Any], core: Any, query: Any, key: Any, value: Any, *args: Any, **kw: Any
) -> Any:
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return original(core, query, key, value, *args, **kw)
    return _Ring.apply(group, query, key, value)  # type: ignore[no-untyped-call]


@functools.cache
def prepare() -> None:
    """Put the replacements into megatron-core, for the life of this process."""
    core = "megatron.core.transformer.dot_product_attention"
    Replacements(
        (
            *in_module(
                "megatron.core.pipeline_parallel.schedules",
                {"forward_step": _in_phase(FORWARD), "backward_step": _in_phase(BACKWARD)},
            ),
            *in_module("megatron.core.transformer.moe.router", {"TopKRouter.gating": _balanced}),
            *in_module(
                core,
                {"DotProductAttention.__init__": _allowing_cp, "DotProductAttention.forward": _exchanging},
            ),
            *in_module(
                "megatron.core.distributed.param_and_grad_buffer", {"_coalescing_manager": instead(no_coalescing)}
            ),
        )
    ).apply()


def watch_layers(chunk: torch.nn.Module) -> None:
    """Note the layer at work: in the forward by hooks of modules, in the backward by the gradient that arrives."""

    def begins(name: str, *_: Any) -> None:
        if _recording:
            _recording[0].layer = name

    def ends(name: str, _module: Any, _given: Any, output: Any) -> None:
        begins("")
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(begins, name))

    for path, module in chunk.named_modules():
        number = getattr(module, "layer_number", None)
        is_layer = number is not None and hasattr(module, "self_attention")
        if is_layer or path.endswith((".embedding", ".output_layer")):
            name = f"layer {number}" if is_layer else path.rpartition(".")[2]
            module.register_forward_pre_hook(functools.partial(begins, name))
            module.register_forward_hook(functools.partial(ends, name))


def played(case: dict[str, Any]) -> list[Any]:
    """Play one rank, and return the exchanges from its second to its third training step."""
    found: list[Any] = []

    def on_step(current: play.Play, step: play.Step) -> Any:
        if current.num_steps == 1:
            for chunk in step.chunks:
                watch_layers(chunk)
                config = chunk.config
            config.finalize_model_grads_func = _in_phase(END)(config.finalize_model_grads_func)
            return step.run()
        if current.num_steps == 2:
            recorder = Recorder(step.chunks)
            _recording.append(recorder)
            recorder.__enter__()
            result = step.run()
            recorder.phase = END
            return result
        raise play.Stop

    program = Program(patches=(), name=case["script"], is_module=False, arguments=tuple(case["arguments"]))
    rank, world_size = case["rank"], case["world_size"]
    try:
        with play.played(
            functools.partial(play.run_script, program), rank=rank, world_size=world_size, on_step=on_step
        ):
            pass
    finally:
        for recorder in _recording:
            recorder.__exit__(None, None, None)
            found = [[*exchange, count] for exchange, count in sorted(recorder.found.items())]
        _recording.clear()
    return found


def main() -> None:
    """Play every case of standard input."""
    out, sys.stdout = sys.stdout, sys.stderr
    registry.apply("cpu_backend")
    prepare()
    for case in json.load(sys.stdin):
        try:
            answer: Any = played(case)
        except Exception as error:  # noqa: BLE001
            # One case that fails is one answer.
            answer = f"{type(error).__name__}: {error}"
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
