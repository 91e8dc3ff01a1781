"""The layers of the user's model and their optimizer step on one device, without other ranks.

The job's own script builds a small model: the embedding, one layer of each kind, and the output layer. `play` stops the
script in its first forward. The layers are then run with the arguments that the script gave to each layer.
Communication takes no time, so each device measures alone, and devices measure different shapes at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils._pytree

from pipette_launch.errors import PipetteError
from pipette_launch.facts import ComputeCase, Job, Layout, ModelSpec
from pipette_launch.facts.measurements import Part as PartName
from pipette_launch.facts.model import BLOCKS, KINDS_WITH_ATTENTION, KINDS_WITH_EXPERTS, TRANSFORMER_KINDS, LayerKind
from pipette_launch.megatron.layout import STACKS
from pipette_launch.megatron.performance import given_options
from pipette_patches import registry
from pipette_patches.play import Play, PlayError, Step, Stop, played

Run = Callable[[torch.Tensor], torch.Tensor]
MakeProgram = Callable[[Job, Layout], Callable[[], object]]
"""Returns the job's own script as a function that runs the script for another model size and layout."""


class WorkloadError(PipetteError):
    """The script cannot run this case on this device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the model that runs forward and backward by itself."""

    name: PartName
    parameters: tuple[torch.nn.Parameter, ...]
    source: torch.Tensor | None = None
    """The input for which a pipeline would send back a gradient; None for the embedding."""
    forward: Callable[[int], torch.Tensor]
    """Runs the part N times in a row, each time on its last output. If `chains` is False, runs the part once."""
    chains: bool = False
    """If False, each forward needs its backward before the next forward, as in a layer with a CUDA graph."""
    share: float = 1.0
    """Share of this layer's attention window among all layers of this kind."""
    num_layers: int = 1
    """Number of layers in one run of the part."""
    accumulating: Callable[[], contextlib.AbstractContextManager[object]]
    """Context in which each weight gradient is added to a main gradient right away, as in all micro-batches but the
    last."""
    recomputed: Callable[[int], torch.Tensor] | None = None
    """`forward` under full recompute: the backward runs each layer again. None if Megatron recomputes no such part."""

    def backward(self, output: torch.Tensor) -> None:
        """Compute the gradients of the input and of all parameters that are not frozen, from an output."""
        if self.source is not None:
            self.source.grad = None
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))

    def freeze(self, frozen: bool) -> None:
        """If `frozen`, skip weight gradients in later backwards. Backwards then make only the gradient of the input."""
        for parameter in self.parameters:
            parameter.requires_grad_(not frozen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The parts of the model, built for one compute case (TP, CP and micro-batch size)."""

    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    """One sentence for each difference from the real job."""
    wrapped: Any
    """The model that contains the parts, in Megatron's DistributedDataParallel."""
    optimizer: Any
    """Megatron's optimizer of the model."""


MOST_VARIANTS = 64
"""Compiled variants that torch.compile keeps of one function, for the many tensor shapes of a warm-up. By default torch
keeps 8 and runs further variants uncompiled (torch/_dynamo/config.py, recompile_limit)."""


def import_megatron() -> None:
    """Import the parts of megatron-core that a rank runs, which takes seconds."""
    with warnings.catch_warnings():
        # megatron-core warns about each optional library that is missing.
        warnings.simplefilter("ignore")
        import megatron.core.distributed
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.gpt.gpt_model
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel.schedules  # noqa: F401


def load(device_kind: str) -> None:
    """Import all modules that a compute case needs, which takes seconds. On a CPU, apply the patch `cpu_backend`."""
    if device_kind == "cpu":
        registry.apply("cpu_backend")
    import_megatron()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo

        # Import this module now, because megatron-core 0.19 would import this module with the first optimizer.
        with contextlib.suppress(ImportError):
            importlib.import_module("megatron.core.models.mimo.model.base")
        if device_kind == "cuda":
            # Megatron's `jit_fuser` is torch.compile (megatron/core/jit.py), whose first call imports its compiler.
            import torch._inductor.compile_fx

            torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, MOST_VARIANTS)


@contextlib.contextmanager
def workload(
    job: Job, case: ComputeCase, *, device_kind: str, program: MakeProgram, captures: bool = False
) -> Iterator[Workload]:
    """Build the parts of a compute case for the block, and free all tensors afterwards.

    `load` must have run, and no process group may exist in this process. `program` is the job's own script. `captures`
    is True if the script captures CUDA graphs of its layers after its first training step. Raise WorkloadError if the
    script refuses the case. Out-of-memory errors are raised as torch raises them.
    """
    small, layout, notes = one_of_each(job, case, device_kind=device_kind)
    seen = _Seen(captures=captures)
    look = functools.partial(seen.look, job)
    try:
        with contextlib.ExitStack() as stack:
            with refusals_named(case_words(case)):
                start = program(small, layout)
                play = stack.enter_context(played(start, rank=0, world_size=layout.world_size, on_step=look))
                if captures:
                    _check_graphs(seen)
                parts = _parts(seen, small, layer_variants(job.model))
            yield Workload(parts=parts, notes=notes, wrapped=seen.wrapped, optimizer=play.optimizers[-1])
    finally:
        seen.calls.clear()


def layer_variants(model: ModelSpec) -> list[tuple[LayerKind, int]]:
    """Return the kind and the attention window of each layer; 0 = no window."""
    windows = model.attention_windows or (0,) * model.num_layers
    pairs = zip(model.layer_kinds, windows, strict=True)
    return [(kind, window if kind in KINDS_WITH_ATTENTION else 0) for kind, window in pairs]


_OF_MANY_RANKS = ("--use-megatron-fsdp", "--num-distributed-optimizer-instances")


def one_of_each(job: Job, case: ComputeCase, *, device_kind: str) -> tuple[Job, Layout, tuple[str, ...]]:
    """Return the job with one layer of each kind and window, the layout of a case, and notes on differences.

    The job has one micro-batch. Each expert gets as many tokens as in the user's job: the model has one rank's share of
    the experts, and no expert parallelism.
    """
    model, hybrid = job.model, job.model.hybrid
    notes: tuple[str, ...] = ()
    order = list(dict.fromkeys(model.layer_kinds) if hybrid else TRANSFORMER_KINDS)
    variants = sorted(set(layer_variants(model)), key=lambda one: (order.index(one[0]), one[1]))
    kinds, windows = zip(*variants, strict=True)
    changes: dict[str, Any] = {
        "num_layers": len(kinds),
        "mtp_num_layers": min(model.mtp_num_layers, 1),
        "attention_windows": windows if any(windows) else (),
    }
    if hybrid:
        letters = dict(zip(model.layer_kinds, hybrid.pattern, strict=True))
        changes["hybrid"] = dataclasses.replace(hybrid, pattern="".join(map(letters.__getitem__, kinds)))
    if model.linear_layers:
        changes["linear_layers"] = tuple(int("delta" in BLOCKS[kind]) for kind in kinds)
    if model.num_experts:
        local_experts = max(model.num_experts // job.own.ep, model.moe_router_topk)
        experts = tuple(int(kind in KINDS_WITH_EXPERTS) for kind in kinds)
        changes |= {"num_experts": local_experts, "moe_layer_freq": experts}
        if local_experts != model.num_experts:
            share = f"{local_experts} of {model.num_experts} experts, one rank's share at ep{job.own.ep}"
            notes = (f"MoE layers were measured with {share}",)
    # Plans for GPUs with TP use sequence parallelism, and experts with TP require it on every device.
    splits = case.tp > 1 and (device_kind == "cuda" or job.own.sequence_parallel or bool(model.num_experts))
    layout = Layout(tp=case.tp, cp=case.cp, etp=1, micro_batch_size=case.micro_batch_size, sequence_parallel=splits)
    small = dataclasses.replace(
        job,
        model=dataclasses.replace(model, **changes),
        batch=dataclasses.replace(job.batch, global_batch_size=case.micro_batch_size),
        # Megatron-FSDP gathers the weights of whole layers, whose time the planner adds.
        options=dataclasses.replace(job.options, use_megatron_fsdp=False, num_distributed_optimizer_instances=1),
        performance_flags=tuple(flag for flag in job.performance_flags if not flag.startswith(_OF_MANY_RANKS)),
    )
    return small, layout, notes


class _Call(NamedTuple):
    """Arguments and output of a part's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    precision: Callable[[], contextlib.AbstractContextManager[object]]
    output: Any


class _Seen:
    """Recorded calls of the model, its layers, embedding and prediction block in the first forward of a program."""

    def __init__(self, *, captures: bool) -> None:
        self.captures = captures
        self.calls: dict[Any, list[_Call]] = {}
        self.model: Any = None
        self.wrapped: Any = None
        self.stacks: list[Any] = []
        self.embedding: Any = None

    def look(self, job: Job, play: Play, step: Step) -> Any:
        """Keep the arguments of each part in the first forward, and stop the program.

        If the program captures CUDA graphs, its first step runs to the end, and the second step begins with graphs.
        """
        if play.num_steps > 1:
            raise Stop
        (self.wrapped,) = step.chunks
        self.model = self.wrapped
        while hasattr(self.model, "module"):
            self.model = self.model.module

        self.stacks = _stacks(self.model)
        layers = [layer for stack in self.stacks for layer in stack.layers]
        names = {name.rpartition(".")[2]: module for name, module in self.model.named_modules()}
        self.embedding = names.get("embedding")
        is_known = bool(job.model.foreign) or self.stacks == [getattr(self.model, "decoder", None)]
        if self.embedding is None or not is_known:
            raise WorkloadError(f"the script builds a {type(self.model).__name__}, which its flags do not describe")

        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # The layers run again without the other layers, so their arguments carry no graph.
            args, kwargs, output = torch.utils._pytree.tree_map(_cut, (args, kwargs, output))
            self.calls.setdefault(module, []).append(_Call(args, kwargs, _precision(), output))

        def end(*_call: object) -> None:
            # The capture of a CUDA graph must not run these hooks.
            for hook in hooks:
                hook.remove()
            if not self.captures:
                raise Stop

        cores = [module.core_attention for module in self.model.modules() if hasattr(module, "core_attention")]
        parts = [*layers, *cores, self.embedding, getattr(self.model, "mtp", None), self.model]
        hooks = [part.register_forward_hook(keep, with_kwargs=True) for part in parts if part is not None]
        hooks.append(self.model.register_forward_hook(end))
        return step.run(num_microbatches=1)

    def again(self, module: Any, number: int = 0, **changes: Any) -> Any:
        """Call a part of the model with the arguments of its first or a later call, with some arguments changed."""
        call = self.calls[module][number]
        with call.precision():
            return module(*call.args, **{**call.kwargs, **changes})


def _cut(value: Any) -> Any:
    """Return a tensor without its graph, and every other value unchanged."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _stacks(module: Any) -> list[Any]:
    """Return the stacks of layers of a model, in the model's order, without blocks of multi-token prediction."""
    if isinstance(getattr(module, "layers", None), torch.nn.ModuleList):
        return [module]
    return [stack for name, child in module.named_children() if name != "mtp" for stack in _stacks(child)]


def _check_graphs(seen: _Seen) -> None:
    """Raise PlayError if Megatron captured no CUDA graph of a layer; let replays keep the weights that are in FP8."""
    graphs: Any = sys.modules["megatron.core.transformer.cuda_graphs"]
    layers = [layer for stack in seen.stacks for layer in stack.layers]
    has_graphs = any(getattr(layer, "cuda_graphs", None) for layer in layers)
    if not has_graphs and not graphs._CudagraphGlobalRecord.cudagraph_created:
        raise PlayError("no layer has a CUDA graph after the first training step")
    for layer in layers:
        # The first micro-batch of a step, number 0, converts the weights to FP8.
        layer.current_microbatch = 1


def _precision() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return a function that makes a context like Transformer Engine's present FP8 or FP4 context, if there is one.

    Megatron's blocks enter this context around their layers, so a layer that runs alone must enter the context too.
    """
    engine: Any = sys.modules.get("transformer_engine.pytorch.fp8")
    if engine is None or not engine.FP8GlobalStateManager.is_fp8_enabled():
        return contextlib.nullcontext
    recipe = engine.FP8GlobalStateManager.get_fp8_recipe()
    return lambda: engine.fp8_autocast(enabled=True, fp8_recipe=recipe)


@contextlib.contextmanager
def refusals_named(name: str) -> Iterator[None]:
    """Turn an error of the script, except for lack of memory, into a WorkloadError with the reason."""
    try:
        yield
    except Exception as error:
        # A user's script may raise an error of any type.
        if is_out_of_memory(error) or isinstance(error, WorkloadError):
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise WorkloadError(f"the script refuses {name}: {reason[0]}") from error


def case_words(case: ComputeCase) -> str:
    """Return the name of a compute case for messages."""
    return f"tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the host has no memory left."""
    text = str(error)
    # Without memory for the buffer of a new kernel, oneDNN raises this error and names no cause.
    no_kernel = text.strip().endswith("could not create a primitive")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text or no_kernel


def _parts(seen: _Seen, job: Job, whole: list[tuple[LayerKind, int]]) -> tuple[Part, ...]:
    """Return the parts of a built model; `whole` has kind and window of each layer of the user's model."""
    gpt, model, variants = seen.model, job.model, layer_variants(job.model)
    if model.foreign:
        return _foreign_parts(seen, job)
    args, kwargs = seen.calls[seen.embedding][0][:2]
    ids: torch.Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    layers = list(gpt.decoder.layers)
    # Hybrid models name their last norm in another way than GPTModel.
    norm = getattr(gpt.decoder, "final_norm", None) or gpt.decoder.final_layernorm
    hidden = _input(seen, layers)
    tied = None if model.untie_embeddings_and_output_weights else gpt.shared_embedding_or_output_weight()

    def loss_of(normed: torch.Tensor) -> torch.Tensor:
        logits, _bias = gpt.output_layer(normed, weight=tied)
        loss: torch.Tensor = gpt.compute_language_model_loss(ids, logits)
        return loss.mean()

    def predict(_: int) -> torch.Tensor:
        # The multi-token prediction block returns its input, followed by the output of its only depth.
        return loss_of(seen.again(gpt.mtp, hidden_states=hidden).chunk(2)[1])

    part = functools.partial(_part, seen)
    found = []
    for (kind, window), layer in zip(variants, layers, strict=True):
        share = whole.count((kind, window)) / [one for one, _ in whole].count(kind)
        run = _in_turn(seen, [layer])
        found.append(dataclasses.replace(_layer_part(seen, kind, layer.parameters(), hidden, run), share=share))
    words = gpt.embedding if tied is not None else gpt.output_layer
    head = torch.nn.ModuleList([norm, words])
    found.append(part("embedding", gpt.embedding.parameters(), lambda _: seen.again(gpt.embedding)))
    found.append(part("head", head.parameters(), lambda _: loss_of(norm(hidden)), source=hidden))
    sizes = [window for kind, window in whole if kind in KINDS_WITH_ATTENTION]
    for size in sorted(set(sizes)):
        alike = [layer for one, layer in zip(variants, layers, strict=True) if one[1] == size]
        cores = _core_part(seen, alike, most=1)
        found += [dataclasses.replace(core, share=sizes.count(size) / len(sizes)) for core in cores]
    if model.mtp_num_layers:
        modules = torch.nn.ModuleList([gpt.mtp, gpt.embedding, words])
        found.append(part("prediction", modules.parameters(), predict, source=hidden))
    return tuple(found)


def _foreign_parts(seen: _Seen, job: Job) -> tuple[Part, ...]:
    """Return the parts of a model of another kind: its layers, the embedding, and the rest as head."""
    # The script has built as many layers of each stack as keep the proportion of the flags for their numbers.
    given = given_options(job)
    sizes = [given[dest] for dest in STACKS if dest in given] or [1]
    count = sum(sizes) // math.gcd(*sizes)
    layers = [layer for stack in seen.stacks for layer in stack.layers]
    if (len(layers) != job.model.num_layers) if len(seen.stacks) == 1 else "pp" not in job.pinned:
        raise WorkloadError(f"the script builds {len(layers)} layers, but its flags name {job.model.num_layers}")
    inner = [each for layer in layers for each in layer.parameters()]
    inputs = [_input(seen, stack.layers) for stack in seen.stacks]
    source, run = _side_by_side(inputs, [_in_turn(seen, stack.layers) for stack in seen.stacks])

    def embed(_: int) -> torch.Tensor:
        rows = [seen.again(seen.embedding, number) for number, _ in enumerate(seen.calls[seen.embedding])]
        return rows[0] if len(rows) == 1 else torch.cat([each.flatten() for each in rows])

    def rest(_: int) -> torch.Tensor:
        pieces: Any = torch.split(source.flatten(), [each.numel() for each in inputs])
        answers = {seen.embedding: [call.output for call in seen.calls[seen.embedding]]}
        for stack, like, piece in zip(seen.stacks, inputs, pieces, strict=True):
            answers |= {each: [(piece.view_as(like), *seen.calls[each][0].output[1:])] for each in stack.layers}
        with contextlib.ExitStack() as replaced:
            for module, outputs in answers.items():
                answer = functools.partial(_next, iter(outputs))
                replaced.enter_context(mock.patch.object(module, "forward", answer))
            found = torch.utils._pytree.tree_leaves(seen.again(seen.model))
        return torch.stack([each.float().mean() for each in found if getattr(each, "requires_grad", False)]).sum()

    others = {*seen.model.parameters()} - {*inner}
    return (
        dataclasses.replace(_layer_part(seen, "layer", inner, source, run), num_layers=count),
        _part(seen, "embedding", seen.embedding.parameters(), embed),
        _part(seen, "head", others, rest, source=source),
        *(dataclasses.replace(part, num_layers=count) for part in _core_part(seen, layers)),
    )


def _next(outputs: Iterator[Any], *_args: Any, **_kwargs: Any) -> Any:
    return next(outputs)


def _part(seen: _Seen, name: PartName, parameters: Iterable[Any], forward: Any, **options: Any) -> Part:
    return Part(name=name, parameters=tuple(parameters), forward=forward, accumulating=seen.wrapped.no_sync, **options)


def _layer_part(seen: _Seen, kind: PartName, parameters: Iterable[Any], source: torch.Tensor, run: Any) -> Part:
    # Megatron excludes full recompute of layers with CUDA graphs.
    again = None if seen.captures else _chain(_checkpointed(run), source)
    chain, chains = _chain(run, source), not seen.captures
    return _part(seen, kind, parameters, chain, source=source, chains=chains, recomputed=again)


def _core_part(seen: _Seen, layers: list[Any], most: int | None = None) -> list[Part]:
    """Return the first attention cores of layers, side by side, as one part; no part if the layers have no core."""
    modules = [module for layer in layers for module in layer.modules() if hasattr(module, "core_attention")][:most]
    if not modules:
        return []
    queries, calls, fits = zip(*(_attention_core(seen, each.core_attention) for each in modules), strict=True)
    query, once = _side_by_side(queries, calls)
    parameters = [each for module in modules for each in module.core_attention.parameters()]
    run = _chain(once, query) if all(fits) else lambda _: once(query)
    return [_part(seen, "core_attention", parameters, run, source=query, chains=all(fits))]


def _input(seen: _Seen, layers: Sequence[Any]) -> torch.Tensor:
    """Return random hidden states of the shape that the first of several layers received."""
    hidden: torch.Tensor = seen.calls[layers[0]][0].kwargs["hidden_states"]
    return hidden.detach().normal_().requires_grad_()


def _in_turn(seen: _Seen, layers: Sequence[Any]) -> Run:
    """Return a function that runs layers one after the other."""

    def forward(flow: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            output = seen.again(layer, hidden_states=flow)
            # A transformer layer also returns its context, a Mamba layer does not.
            flow = output[0] if isinstance(output, tuple) else output
        return flow

    return forward


def _side_by_side(inputs: Sequence[torch.Tensor], runs: Sequence[Run]) -> tuple[torch.Tensor, Run]:
    """Join several inputs to one tensor, and return a function that runs each input's function on its piece."""
    if len(inputs) == 1:
        return inputs[0], runs[0]
    sizes = [each.numel() for each in inputs]

    def run(flow: torch.Tensor) -> torch.Tensor:
        pieces = zip(runs, torch.split(flow, sizes), inputs, strict=True)
        return torch.cat([one(piece.view_as(each)).flatten() for one, piece, each in pieces])

    return torch.cat([each.detach().flatten() for each in inputs]).requires_grad_(), run


def _chain(run: Run, source: torch.Tensor) -> Callable[[int], torch.Tensor]:
    def forward(times: int) -> torch.Tensor:
        flow = source
        for _ in range(times):
            flow = run(flow)
        return flow

    return forward


def _checkpointed(run: Run) -> Run:
    """Run a layer as Megatron's full recompute of single layers does (`TransformerBlock._checkpointed_forward`)."""
    from megatron.core import tensor_parallel

    return lambda flow: tensor_parallel.checkpoint(run, False, flow)


def _attention_core(seen: _Seen, core: Any) -> tuple[torch.Tensor, Run, bool]:
    """Return the queries of an attention core, a function that runs it, and True if its output fits as input."""
    given, options = seen.calls[core][0][:2]
    query, key, value = (each.detach().clone().requires_grad_() for each in given[:3])

    def once(flow: torch.Tensor) -> torch.Tensor:
        shaped = flow if flow is query else flow.view_as(query)
        output: torch.Tensor = core(shaped, key, value, *given[3:], **options)
        return output

    with torch.no_grad():
        # In latent attention values are narrower than queries, so the output does not fit as a query.
        return query, once, bool(once(query).numel() == query.numel())


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """One optimizer step of Megatron, including clipping and master weights."""

    run: Callable[[], None]
    run_on_single_elements: Callable[[], None]
    """The same optimizer step with the same number of tensors, each with one element."""
    num_parameters: int
    gradient_bytes: int


def optimizer_step(work: Workload) -> OptimizerStep:
    """Give the workload's parameters random gradients, and return the step of the optimizer that the program has made.

    The step changes the parameters. The distributed optimizer is off: it does the same work on fewer parameters.
    """
    from megatron.core.optimizer import get_megatron_optimizer

    parameters: list[Any] = [each for each in work.wrapped.parameters() if each.requires_grad]
    single = torch.nn.Module()
    single.elements = torch.nn.ParameterList(each.detach().flatten()[:1].clone() for each in parameters)
    few = type(work.wrapped)(config=work.wrapped.config, ddp_config=work.wrapped.ddp_config, module=single)
    for parameter in (*parameters, *few.parameters()):
        # Random gradients have a norm far above Megatron's limit of 1, so the step clips gradients.
        parameter.main_grad.copy_(torch.randn_like(parameter))
    return OptimizerStep(
        run=work.optimizer.step,
        run_on_single_elements=get_megatron_optimizer(work.optimizer.config, [few], use_gloo_process_groups=False).step,
        num_parameters=sum(each.numel() for each in parameters),
        gradient_bytes=sum(each.main_grad.numel() * each.main_grad.element_size() for each in parameters),
    )
