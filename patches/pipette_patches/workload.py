"""The layers of the user's model and their optimizer step on one device, without other ranks.

The process group of tp*cp ranks is fake. Communication takes no time, and the data that a collective would have
received stays uninitialised, which changes no time. So each device measures alone. The devices of a job measure
layers of different shapes at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pipette_launch.errors import PipetteError
from pipette_launch.facts import ComputeCase, Job, Layout
from pipette_patches import registry
from pipette_patches.megatron_config import DTYPES, PartName, layers_config
from pipette_patches.one_rank import import_megatron, one_rank

_REFUSALS = (AssertionError, AttributeError, ImportError, NameError, RuntimeError, TypeError, ValueError)
"""Errors that megatron-core raises for a case that it cannot run (NameError: MoE without Transformer Engine, 0.16)."""
_OPTIMIZERS = ("adam", "sgd")


class WorkloadError(PipetteError):
    """megatron-core cannot run this case on this device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the model that runs forward and backward by itself."""

    name: PartName
    parameters: tuple[torch.nn.Parameter, ...]
    source: torch.Tensor | None
    """The input for which a pipeline would send back a gradient; None for the embedding."""
    forward: Callable[[int], torch.Tensor]
    """Runs the part N times in a row, each time on its last output. If `chains` is False, runs the part once."""
    chains: bool
    main_grad_dtype: torch.dtype
    recomputed: Callable[[int], torch.Tensor] | None = None
    """`forward` under full recompute: the backward runs each layer again. None if Megatron never does so."""

    def backward(self, output: torch.Tensor) -> None:
        """Compute the gradients of the input and of all parameters that are not frozen, from an output."""
        if self.source is not None:
            self.source.grad = None
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))

    def freeze(self, frozen: bool) -> None:
        """If `frozen`, skip weight gradients in later backwards. Such backwards make only the gradient of the input."""
        for parameter in self.parameters:
            parameter.requires_grad_(not frozen)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add each weight gradient to a main gradient right away, as Megatron's data parallelism does."""

        def add(parameter: Any) -> None:
            # Skip the gradient if a kernel of Transformer Engine has added it already.
            if not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        parameters: tuple[Any, ...] = self.parameters
        for parameter in parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=self.main_grad_dtype)
            parameter.grad_added_to_main_grad = False
        hooks = [parameter.register_post_accumulate_grad_hook(add) for parameter in parameters]
        try:
            yield
        finally:
            for parameter, hook in zip(parameters, hooks, strict=True):
                hook.remove()
                parameter.grad = None
                del parameter.main_grad


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The parts of the model, built for one compute case (TP, CP and micro-batch size)."""

    parts: tuple[Part, ...]
    model: Any
    """The GPTModel that contains the parts."""
    token_ids: torch.Tensor
    """Token ids of the input, which are also the labels of the loss."""
    notes: tuple[str, ...]
    """One sentence for each difference from the real job."""


MOST_VARIANTS = 64
"""Compiled variants that torch.compile keeps of one function. By default torch keeps 8 and runs further variants
uncompiled (torch/_dynamo/config.py, recompile_limit). The warm-up needs more, for all its tensor shapes."""


def load(device_kind: str) -> None:
    """Import all modules that a compute case needs, which takes seconds. On a CPU, apply the patch `cpu_backend`."""
    if device_kind == "cpu":
        registry.apply("cpu_backend")
    import_megatron()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo

        # megatron-core 0.19 would import this module with the first optimizer.
        with contextlib.suppress(ImportError):
            importlib.import_module("megatron.core.models.mimo.model.base")
        if device_kind == "cuda":
            # Megatron's `jit_fuser` is torch.compile (megatron/core/jit.py), whose first call imports its compiler.
            import torch._inductor.compile_fx

            torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, MOST_VARIANTS)


@contextlib.contextmanager
def workload(job: Job, case: ComputeCase, *, device_kind: str) -> Iterator[Workload]:
    """Build the parts of a compute case for the block, and free all tensors afterwards.

    `load` must have run, and no process group may exist in this process.

    Raises:
        WorkloadError: megatron-core refuses the case. Out-of-memory errors are raised as torch raises them.

    """
    try:
        with one_rank(Layout(tp=case.tp, cp=case.cp, etp=1)):
            with refusals_named(case_words(case)):
                built = _build(job, case, device_kind)
            yield built
    finally:
        forget_dummy_gradients()


def forget_dummy_gradients() -> None:
    """Free the empty weight gradients that Transformer Engine keeps, one gradient for each weight shape.

    A training keeps only the shapes of its own layers (transformer_engine/pytorch/module/base.py, get_dummy_wgrad, in
    `_dummy_wgrads` from release 2.2 to 2.18).
    """
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    getattr(base, "_dummy_wgrads", {}).clear()


@contextlib.contextmanager
def refusals_named(name: str) -> Iterator[None]:
    """Turn an error of megatron-core into a WorkloadError with a name and the reason. Keep out-of-memory errors."""
    try:
        yield
    except _REFUSALS as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise WorkloadError(f"megatron-core refuses {name}: {reason[0]}") from error


def case_words(case: ComputeCase) -> str:
    """Return the name of a compute case for messages."""
    return f"tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the host has no memory left."""
    text = str(error)
    # Without memory for the buffer of a new kernel, oneDNN raises this error and names no cause.
    no_kernel = text.strip().endswith("could not create a primitive")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text or no_kernel


def _build(job: Job, case: ComputeCase, device_kind: str) -> Workload:
    """Build a model with one layer of each kind that the user's model has."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    model = job.model
    dense: tuple[PartName, ...] = ("layer",) if 0 in model.moe_layer_freq or not model.num_experts else ()
    kinds = (*dense, "moe_layer") if 1 in model.moe_layer_freq else dense
    wants_te = device_kind == "cuda" and model.transformer_impl == "transformer_engine"
    uses_te = wants_te and bool(getattr(gpt_layer_specs, "HAVE_TE", False))
    notes = []
    if wants_te and not uses_te:
        notes.append("compute was measured with megatron-core's local layers: transformer-engine is not installed")
    config, config_notes = layers_config(job, case, kinds, device_kind=device_kind, uses_te=uses_te)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=uses_te, normalization=None if uses_te else model.normalization
    )
    prediction = None
    if model.mtp_num_layers:
        last = spec.layer_specs[kinds.index("moe_layer" if model.has_expert_prediction else "layer")]
        prediction = gpt_layer_specs.get_gpt_mtp_block_spec(config, last, use_transformer_engine=uses_te)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=prediction,
        vocab_size=model.padded_vocab_size(case.tp),
        max_sequence_length=model.max_position_embeddings,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
    )
    # Megatron's Float16Module also converts norms to the training type.
    gpt = gpt.to(device=device_kind, dtype=DTYPES[model.params_dtype]).train()
    ids = torch.randint(model.vocab_size, (case.micro_batch_size, model.seq_length // case.cp), device=device_kind)
    parts = _parts(gpt, job, case, kinds=kinds, ids=ids)
    return Workload(parts=parts, model=gpt, token_ids=ids, notes=(*notes, *config_notes))


def _parts(
    gpt: Any, job: Job, case: ComputeCase, *, kinds: tuple[PartName, ...], ids: torch.Tensor
) -> tuple[Part, ...]:
    model = job.model
    # Under sequence parallelism a rank has one TP-th of the sequence.
    rows = ids.shape[1] // (case.tp if gpt.config.sequence_parallel else 1)
    shape = (rows, case.micro_batch_size, model.hidden_size)
    hidden = torch.randn(shape, dtype=DTYPES[model.params_dtype], device=ids.device, requires_grad=True)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    main_grad_dtype = torch.bfloat16 if job.grad_reduce_in_bf16 else torch.float32
    # Latent attention makes its own rotary embedding.
    has_rope = model.position_embedding_type == "rope" and not model.latent_attention
    rope = gpt.rotary_pos_emb(model.seq_length) if has_rope else None
    tied = None if model.untie_embeddings_and_output_weights else gpt.shared_embedding_or_output_weight()

    def run(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda flow: layer(flow, attention_mask=None, rotary_pos_emb=rope)[0]

    def loss_of(normed: torch.Tensor) -> torch.Tensor:
        logits, _bias = gpt.output_layer(normed, weight=tied)
        loss: torch.Tensor = gpt.compute_language_model_loss(ids, logits)
        return loss.mean()

    def predict(_: int) -> torch.Tensor:
        # The multi-token prediction block returns its input, followed by the output of its only depth.
        both = gpt.mtp(ids, positions, hidden, None, rotary_pos_emb=rope, embedding=gpt.embedding)
        return loss_of(both.chunk(2)[1])

    def part(name: PartName, module: Any, forward: Callable[[int], torch.Tensor], **options: Any) -> Part:
        parameters = tuple(module.parameters())
        return Part(name=name, parameters=parameters, forward=forward, main_grad_dtype=main_grad_dtype, **options)

    layers = [
        part(
            kind,
            layer,
            _chain(run(layer), hidden),
            source=hidden,
            chains=True,
            recomputed=_chain(_checkpointed(run(layer)), hidden),
        )
        for kind, layer in zip(kinds, gpt.decoder.layers, strict=True)
    ]
    first = gpt.decoder.layers[0]
    query, core, chains = _attention_core(first, lambda: run(first)(hidden))
    words = gpt.embedding if tied is not None else gpt.output_layer
    head = torch.nn.ModuleList([gpt.decoder.final_layernorm, words])
    found = [
        *layers,
        part("embedding", gpt.embedding, lambda _: gpt.embedding(ids, positions), source=None, chains=False),
        part("head", head, lambda _: loss_of(gpt.decoder.final_layernorm(hidden)), source=hidden, chains=False),
        part("core_attention", first.self_attention.core_attention, core, source=query, chains=chains),
    ]
    if model.mtp_num_layers:
        modules = torch.nn.ModuleList([gpt.mtp, gpt.embedding, words])
        found.append(part("prediction", modules, predict, source=hidden, chains=False))
    return tuple(found)


def _chain(run: Callable[[torch.Tensor], torch.Tensor], source: torch.Tensor) -> Callable[[int], torch.Tensor]:
    def forward(times: int) -> torch.Tensor:
        flow = source
        for _ in range(times):
            flow = run(flow)
        return flow

    return forward


def _checkpointed(run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Run a layer as Megatron's full recompute of single layers does: autograd keeps only the layer's input.

    `TransformerBlock._checkpointed_forward` calls the same function for method uniform with one layer, and for the
    first layers of method block.
    """
    from megatron.core import tensor_parallel

    return lambda flow: tensor_parallel.checkpoint(run, False, flow)


def _attention_core(layer: Any, run: Callable[[], object]) -> tuple[torch.Tensor, Callable[[int], torch.Tensor], bool]:
    """Return the queries of a layer's attention core, a function that runs the core, and True if the core chains.

    `run` runs the layer once, so that a hook can record the arguments of the attention core.
    """
    core: Any = layer.self_attention.core_attention
    recorded: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = core.register_forward_pre_hook(lambda _, args, kwargs: recorded.append((args, kwargs)), with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    finally:
        hook.remove()
    given, options = recorded[0]
    query, key, value = (each.detach().clone().requires_grad_() for each in given[:3])

    def once(flow: torch.Tensor) -> torch.Tensor:
        shaped = flow if flow is query else flow.view_as(query)
        output: torch.Tensor = core(shaped, key, value, *given[3:], **options)
        return output

    with torch.no_grad():
        # In latent attention values are narrower than queries, so the output does not fit as a query.
        chains = bool(once(query).numel() == query.numel())
    return query, _chain(once, query) if chains else lambda _: once(query), chains


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """One optimizer step of Megatron, including clipping and master weights."""

    run: Callable[[], None]
    run_on_single_elements: Callable[[], None]
    """The same step with the same number of tensors, each of one element."""
    num_parameters: int
    gradient_bytes: int


def optimizer_step(work: Workload, job: Job) -> OptimizerStep:
    """Make gradients and an optimizer for the workload's model, as a training job does.

    The distributed optimizer is off, because it does the same work on fewer parameters. Measure the parts of the model
    before, because the optimizer then changes the model's parameters.

    Raises:
        WorkloadError: the job's optimizer is neither adam nor sgd.

    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if job.optimizer not in _OPTIMIZERS:
        raise WorkloadError(f"the step of optimizer {job.optimizer!r} is not measured, only {', '.join(_OPTIMIZERS)}")
    dtype = job.model.params_dtype
    config = OptimizerConfig(
        optimizer=job.optimizer,
        lr=1e-6,
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        params_dtype=DTYPES[dtype],
        # Only fp16 checks gradients for values that are not finite before it steps.
        loss_scale=1.0 if dtype == "fp16" else None,
    )

    def step_of(module: torch.nn.Module) -> Callable[[], None]:
        wrapped = DistributedDataParallel(
            config=work.model.config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=not job.grad_reduce_in_bf16),
            module=module,
        )
        optimizer: Any = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                # Random gradients have a norm far above Megatron's limit of 1, so the step clips gradients.
                parameter.main_grad.copy_(torch.randn_like(parameter))
        step: Callable[[], None] = optimizer.step
        return step

    parameters: list[Any] = [each for each in work.model.parameters() if each.requires_grad]
    single = torch.nn.Module()
    single.elements = torch.nn.ParameterList(each.detach().flatten()[:1].clone() for each in parameters)
    return OptimizerStep(
        run=step_of(work.model),
        run_on_single_elements=step_of(single),
        num_parameters=sum(each.numel() for each in parameters),
        gradient_bytes=sum(each.main_grad.numel() * each.main_grad.element_size() for each in parameters),
    )
