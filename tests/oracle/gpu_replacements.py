"""Replacements for torch and megatron-core that imitate a GPU with abstract tensors.

The `meta` device replaces `cuda`, and no message is sent. An abstract tensor has no values, so code that reads a value
gets False, 0 or 1. Megatron's own router, dispatchers and experts run with balanced routing, so every shape is fixed.
Megatron's own code decides which activations are offloaded and when they return. Offloaded tensors do not count.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.distributed.distributed_c10d
import torch.nn.functional
from oracle.kernels import balanced, kernel, routed_rows
from oracle.meter import as_one_kernel
from oracle.transformer_engine import LayerNorm, RMSNorm

from pipette_patches.replacements import Replacement, answer, in_module, instead, nothing, wrapping
from pipette_patches.storage_meter import current, recounting, under
from pipette_patches.without_cuda import FinishedWork, no_coalescing, torch_without_cuda, without_fp8

DEVICE = torch.device("meta")
_MESSAGES = """
_all_gather_base _reduce_scatter_base all_gather all_gather_into_tensor all_reduce all_to_all all_to_all_single
broadcast gather irecv isend recv reduce reduce_scatter reduce_scatter_tensor scatter send
"""


def _for_abstract(successor: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call `successor` for an abstract tensor or storage, and the original function for real tensors and storages."""

    def call(original: Callable[..., Any], given: Any, *args: Any, **kwargs: Any) -> Any:
        return (successor if given.device.type == "meta" else original)(given, *args, **kwargs)

    return wrapping(call)


def _cuda_module(module: Any, *_args: object) -> Any:
    """Move the parameters and buffers of a module to the meta device. Parameters keep their attributes."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.device.type != "meta":
                moved = torch.nn.Parameter(parameter.detach().to(DEVICE), requires_grad=parameter.requires_grad)
                vars(moved).update(vars(parameter))
                part._parameters[name] = moved
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.cuda()
    return module


def _scalar(tensor: Any) -> Any:
    """Return a value by the tensor's type: False (no overflow), 0.0 (a norm below every limit) or 1 (a count)."""
    if tensor.dtype is torch.bool:
        return False
    return 0.0 if tensor.dtype.is_floating_point else 1


def _gather_own(objects: list[Any], own: Any, **_kwargs: Any) -> None:
    objects[:] = [own] * len(objects)


def _dropout(given: Any, p: float = 0.5, training: bool = True, *_inplace: bool, **_options: bool) -> Any:
    """Replace dropout: make an output and a mask with one byte for each element, as the CUDA kernel does."""
    if not training or p == 0.0:
        return given
    return kernel(lambda given: (torch.empty_like(given), (torch.empty_like(given, dtype=torch.bool),)), given)


_PROPERTIES = SimpleNamespace(
    name="abstract", major=9, minor=0, multi_processor_count=132, total_memory=1 << 40, gcnArchName=""
)
_NO_RNG_STATE = torch.zeros(16, dtype=torch.uint8)
_DISTRIBUTED = {
    **dict.fromkeys(_MESSAGES.split(), answer(FinishedWork())),
    "P2POp": instead(lambda _operation, tensor, *_peer, **_group: tensor),
    "batch_isend_irecv": instead(lambda _operations: []),
    "barrier": nothing,
    "all_gather_object": instead(_gather_own),
    "_coalescing_manager": instead(no_coalescing),
}
# torch's optimizers step on lists of tensors on CUDA, but not on the meta device.
_STEP_ON_LISTS = {
    "_default_to_fused_or_foreach": instead(lambda _params, differentiable, **_fused: (False, not differentiable))
}
TORCH = (
    *torch_without_cuda(
        DEVICE,
        properties=_PROPERTIES,
        functions={
            "current_device": lambda: DEVICE,
            "device_count": lambda: 1,
            "is_current_stream_capturing": lambda: False,
            **dict.fromkeys(("manual_seed", "set_rng_state"), lambda *_, **__: None),
            **dict.fromkeys(("get_rng_state", "random.get_rng_state"), lambda *_, **__: _NO_RNG_STATE),
        },
    ),
    *in_module(
        "torch",
        {
            "Tensor.cpu": _for_abstract(lambda tensor, *_, **__: torch.zeros(tensor.shape, dtype=tensor.dtype)),
            "Tensor.item": _for_abstract(_scalar),
            "Tensor.tolist": _for_abstract(lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype).tolist()),
            "Tensor.__bool__": _for_abstract(lambda _: False),
            "Tensor.__int__": _for_abstract(lambda _: 1),
            "Tensor.__float__": _for_abstract(lambda _: 0.0),
            "Tensor.is_cuda": instead(property(lambda tensor: tensor.device.type == "meta")),
            "UntypedStorage.resize_": recounting,
            "UntypedStorage.copy_": _for_abstract(lambda storage, *_source: storage),
        },
    ),
    Replacement(module="torch.nn", path="Module.cuda", make=instead(_cuda_module)),
    Replacement(module="torch.nn.functional", path="dropout", make=_for_abstract(_dropout)),
    *in_module("torch.optim.adam", _STEP_ON_LISTS),
    *in_module("torch.optim.sgd", _STEP_ON_LISTS),
    *in_module("torch.distributed", _DISTRIBUTED),
    *in_module("torch.distributed.distributed_c10d", _DISTRIBUTED),
)
"""Replacements in torch, for a process that only runs abstract tensors."""


class _OfDtype(type):
    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.dtype is cls.dtype


def _tensors_of(dtype: torch.dtype) -> Callable[[object], Any]:
    """Replace a tuple of tensor types by a class whose instances, for `isinstance`, are the tensors of a dtype."""
    return instead((_OfDtype(f"Tensor of {dtype}", (), {"dtype": dtype}),))


def _one_kernel(_original: object) -> Callable[[Any], Any]:
    """Run a compiled function without a compiler, and do not count its intermediate tensors."""
    return lambda function=None, **_options: _one_kernel(None) if function is None else as_one_kernel(function)


@wrapping
def _counted_backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Count the tensors of a backward pass under the label `backward`, and mark the beginning and end of the pass."""
    meter = current()
    if meter is None:
        return original(*args, **kwargs)
    meter.mark()
    with meter.labelled("backward"):
        result = original(*args, **kwargs)
    meter.mark()
    return result


def _local_norm(_cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> Any:
    """Make a norm that keeps its input and fp32 statistics, as the norms of Apex and torch do."""
    norm = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return norm(hidden_size, eps, sequence_parallel=config.sequence_parallel, params_dtype=config.params_dtype)


CORE = (
    *in_module(
        "megatron.core.transformer.module",
        {
            "_FLOAT_TYPES": _tensors_of(torch.float32),
            "_HALF_TYPES": _tensors_of(torch.float16),
            "_BF16_TYPES": _tensors_of(torch.bfloat16),
        },
    ),
    *in_module("megatron.core.jit", {"jit_fuser": _one_kernel}),
    *in_module(
        "megatron.core.transformer.torch_norm", {"WrappedTorchNorm.__new__": instead(staticmethod(_local_norm))}
    ),
    *in_module(
        "megatron.core.tensor_parallel.random",
        {
            "CudaRNGStatesTracker.fork": instead(lambda *_name: contextlib.nullcontext()),
            "_get_cuda_rng_state": instead(lambda *_args, **_kwargs: torch.zeros(16)),
            "_set_cuda_rng_state": nothing,
            "CheckpointWithoutOutput.__init__": without_fp8,
        },
    ),
    *in_module("megatron.core.pipeline_parallel.schedules", {"backward_step": _counted_backward}),
    *in_module(
        "megatron.core.pipeline_parallel.p2p_communication",
        {"P2PCommunicator._communicate": functools.partial(under, "buffers")},
    ),
    *in_module("megatron.core.utils", {"GlobalMemoryBuffer.get_tensor": functools.partial(under, "buffers")}),
)
"""Replacements in megatron-core for every model."""


def _masked_select(given: torch.Tensor, mask: torch.Tensor) -> Any:
    """Select the entries that balanced routing sets in a mask of (experts, tokens), and keep input and mask."""
    experts, tokens = mask.shape
    return kernel(lambda given: (given.new_empty(routed_rows(tokens, experts)), (given, mask)), given)


@wrapping
def _with_balanced_counts(original: Callable[..., Any], experts: Any, rows: Any, _counts: Any, probs: Any) -> Any:
    """Run the experts with an equal number of tokens for each expert."""
    return original(experts, rows, torch.tensor(balanced(rows.shape[0], experts.num_local_experts)), probs)


@wrapping
def _permute_balanced(original: Callable[..., Any], rows: Any, mapped: torch.Tensor, **options: Any) -> Any:
    """Permute as many token rows as balanced routing sends, because abstract counts have no values."""
    num_rows = {} if options.get("drop_and_pad") else {"num_out_tokens": routed_rows(*mapped.shape)}
    return original(rows, mapped, **options | num_rows)


@wrapping
def _in_equal_parts(original: Callable[..., Any], rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Exchange the same number of token rows with each rank, because abstract split sizes have no values."""
    sizes = ("input_split_sizes", "output_split_sizes")
    return original(rows, *args, **{name: value for name, value in kwargs.items() if name not in sizes})


@wrapping
def _sort_equal_chunks(original: Callable[..., Any], rows: Any, _sizes: Any, order: Any, **options: Any) -> Any:
    sizes = torch.tensor(balanced(rows.shape[0], len(order)))
    return original(rows, sizes, torch.arange(len(order)), **options)


def _rope_for_key_value(
    both: Any, shared: Any, _cos: Any, _sin: Any, rope_width: int, width: int, value_width: int, *_: Any
) -> Any:
    """Make the keys and values of latent attention in one kernel: two new tensors."""
    shapes = [(*both.shape[:-1], channels) for channels in (width + rope_width, value_width)]
    return kernel(lambda both, _: (tuple(both.new_empty(shape) for shape in shapes), ()), both, shared)


EXPERTS = (
    *in_module("torch", {"Tensor.masked_select": _for_abstract(_masked_select)}),
    *in_module(
        "megatron.core.transformer.moe.experts",
        {"SequentialMLP.forward": _with_balanced_counts, "TEGroupedMLP.forward": _with_balanced_counts},
    ),
    *in_module(
        "megatron.core.transformer.moe.token_dispatcher",
        {
            # With balanced routing each rank receives as many token rows as the rank sends.
            "all_to_all": lambda original: lambda group, rows, *_splits, **_more: original(group, rows),
            "gather_from_sequence_parallel_region": _in_equal_parts,
            "reduce_scatter_to_sequence_parallel_region": _in_equal_parts,
            "permute": _permute_balanced,
            "sort_chunks_by_idxs": _sort_equal_chunks,
            "pad_routing_map": instead(lambda mapped, _multiple: mapped),
        },
    ),
    *in_module(
        "megatron.core.transformer.multi_latent_attention",
        {
            # Transformer Engine's kernel rotates queries in place.
            "fused_apply_mla_rope_for_q": instead(lambda query, *_, **_options: query),
            "fused_apply_mla_rope_for_kv": instead(_rope_for_key_value),
        },
    ),
)
"""Replacements for experts and latent attention, whose original code reads values of tensors."""


def _to_host(_handler: Any, tensor: torch.Tensor, **_options: bool) -> tuple[Any, ...]:
    """Return a tuple instead of the tensor, because Megatron recognises an offloaded tensor by a tuple."""
    # Megatron makes a contiguous copy on the GPU before it copies the tensor to the host.
    tensor.contiguous()
    return tensor.shape, tensor.dtype, tensor.device


def _from_host(_handler: Any, state: tuple[Any, ...], **_options: bool) -> torch.Tensor:
    shape, dtype, device = state
    return torch.empty(shape, dtype=dtype, device=device)


OFFLOADING = in_module(
    "megatron.core.pipeline_parallel.fine_grained_activation_offload",
    {
        # From 0.18 on Megatron offloads a tensor only if its device is `cuda` and it is no parameter.
        "ChunkOffloadHandler._can_manage_tensor_for_offload": instead(lambda _, tensor: type(tensor) is torch.Tensor),
        "ChunkOffloadHandler.offload": instead(_to_host),
        "ChunkOffloadHandler.reload": instead(_from_host),
        "print_offload_summary_table": nothing,
    },
    # If a release lacks an attribute, only jobs that offload activations fail.
    may_be_absent=True,
)
"""Replacements for fine-grained activation offloading (megatron-core 0.16.1): copies between device and host."""
