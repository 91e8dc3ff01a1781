"""Build the user's own layers with megatron-core on one device, with no peer: communication costs nothing here.

The process group of tp*cp ranks is fake, and what a collective would have received stays uninitialised, which changes
no time. So each device measures alone, and all devices of a job measure different shapes at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pipette_launch.errors import PipetteError
from pipette_launch.facts import ComputeCase, Job, Layout
from pipette_patches import registry
from pipette_patches.megatron_config import DTYPES, PartName, layers_config
from pipette_patches.one_rank import one_rank

_REFUSALS = (AssertionError, AttributeError, ImportError, NameError, RuntimeError, TypeError, ValueError)
"""What megatron-core raises for a case that it cannot run; NameError where it misses Transformer Engine (0.16, MoE)."""


class WorkloadError(PipetteError):
    """megatron-core cannot run this case on this device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the model that can be run forward and backward by itself."""

    name: PartName
    parameters: tuple[torch.nn.Parameter, ...]
    source: torch.Tensor | None
    """The input that a pipeline would send a gradient back for; the embedding has none."""
    forward: Callable[[int], torch.Tensor]
    """Run the part so many times in a row, each on the output of the one before (once if it has no such chain)."""
    chains: bool
    main_grad_dtype: torch.dtype
    recomputed: Callable[[int], torch.Tensor] | None = None
    """The same under full recompute: the backward runs each layer again; None where Megatron never does so."""

    def backward(self, output: torch.Tensor) -> None:
        """Run the backward of an output, down to the input and to whatever parameters are not frozen."""
        if self.source is not None:
            self.source.grad = None
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))

    def freeze(self, frozen: bool) -> None:
        """Ask for no weight gradients in what runs forward from now on: its backward is then the input's alone."""
        for parameter in self.parameters:
            parameter.requires_grad_(not frozen)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add each weight gradient to a main gradient as soon as it is there, as Megatron's data parallelism does."""

        def add(parameter: Any) -> None:
            # Transformer Engine may have added it inside its own kernel.
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
    """The parts of one compute case."""

    parts: tuple[Part, ...]
    model: Any
    """The GPTModel that they are parts of."""
    token_ids: torch.Tensor
    """What goes in, and what the head should say."""
    notes: tuple[str, ...]
    """In what this differs from the real job, one sentence each."""


MOST_VARIANTS = 64
"""Number of variants that torch.compile keeps of one function. The warm-up's shapes, with and without gradients, reach
its own limit of 8, and from then on it runs the function uncompiled (torch/_dynamo/config.py, recompile_limit)."""


def load(device_kind: str) -> None:
    """Import all that a case runs, which takes seconds; on CPU the patch `cpu_backend` stays in force from here on."""
    if device_kind == "cpu":
        registry.apply("cpu_backend")
    with warnings.catch_warnings():
        # It warns of each optional library that is absent.
        warnings.simplefilter("ignore")
        import megatron.core.distributed
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.gpt.gpt_model
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel.schedules  # noqa: F401
        import torch._dynamo

        if device_kind == "cuda":
            # Megatron's `jit_fuser` is torch.compile (megatron/core/jit.py), whose first call imports its compiler.
            import torch._inductor.compile_fx

            torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, MOST_VARIANTS)


@contextlib.contextmanager
def workload(job: Job, case: ComputeCase, *, device_kind: str) -> Iterator[Workload]:
    """Build the parts of a case, and take everything down afterwards.

    No process group may exist in this process, and `load` came before.

    Raises:
        WorkloadError: megatron-core refuses the case; running out of memory is left as torch raises it.

    """
    try:
        with one_rank(Layout(tp=case.tp, cp=case.cp, etp=1)):
            with refusals_named(case_words(case)):
                built = _build(job, case, device_kind)
            yield built
    finally:
        forget_dummy_gradients()


def forget_dummy_gradients() -> None:
    """Drop the empty weight gradients of Transformer Engine, which keeps one of each shape for the process' life.

    A training has the shapes of its own layers only (transformer_engine/pytorch/module/base.py, get_dummy_wgrad, in
    `_dummy_wgrads` from release 2.2 to 2.18).
    """
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    getattr(base, "_dummy_wgrads", {}).clear()


@contextlib.contextmanager
def refusals_named(what: str) -> Iterator[None]:
    """Raise WorkloadError with megatron-core's reason where it refuses `what`; keep an out-of-memory error."""
    try:
        yield
    except _REFUSALS as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise WorkloadError(f"megatron-core refuses {what}: {reason[0]}") from error


def case_words(case: ComputeCase) -> str:
    """A case as people write it."""
    return f"tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host has no memory left."""
    said = str(error)
    # oneDNN names no cause: what it cannot get is the buffer of a kernel that it makes for a new shape.
    no_kernel = said.strip().endswith("could not create a primitive")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in said or no_kernel


def _build(job: Job, case: ComputeCase, device_kind: str) -> Workload:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    model = job.model
    # One layer of each kind that the model has.
    dense: tuple[PartName, ...] = ("layer",) if 0 in model.moe_layer_freq or not model.num_experts else ()
    kinds = (*dense, "moe_layer") if 1 in model.moe_layer_freq else dense
    wants_te = device_kind == "cuda" and model.transformer_impl == "transformer_engine"
    has_te = bool(getattr(gpt_layer_specs, "HAVE_TE", False))
    uses_te = wants_te and has_te
    notes = []
    if wants_te and not has_te:
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
    # As Megatron's Float16Module does: norms too are kept in the training type.
    gpt = gpt.to(device=device_kind, dtype=DTYPES[model.params_dtype]).train()
    ids = torch.randint(model.vocab_size, (case.micro_batch_size, model.seq_length // case.cp), device=device_kind)
    parts = _parts(gpt, job, case, kinds=kinds, ids=ids)
    return Workload(parts=parts, model=gpt, token_ids=ids, notes=(*notes, *config_notes))


def _parts(
    gpt: Any, job: Job, case: ComputeCase, *, kinds: tuple[PartName, ...], ids: torch.Tensor
) -> tuple[Part, ...]:
    model = job.model
    hidden = _hidden_states(gpt, job, case, ids)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    main_grad_dtype = torch.bfloat16 if job.grad_reduce_in_bf16 else torch.float32
    # Latent attention makes its own.
    has_rope = model.position_embedding_type == "rope" and not model.latent_attention
    rope = gpt.rotary_pos_emb(model.seq_length) if has_rope else None
    tied = None if model.untie_embeddings_and_output_weights else gpt.shared_embedding_or_output_weight()

    def run(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda flow: layer(flow, attention_mask=None, rotary_pos_emb=rope)[0]

    def embed(_: int) -> torch.Tensor:
        output: torch.Tensor = gpt.embedding(input_ids=ids, position_ids=positions)
        return output

    def loss_of(normed: torch.Tensor) -> torch.Tensor:
        logits, _bias = gpt.output_layer(normed, weight=tied)
        loss: torch.Tensor = gpt.compute_language_model_loss(ids, logits)
        return loss.mean()

    def head(_: int) -> torch.Tensor:
        return loss_of(gpt.decoder.final_layernorm(hidden))

    def predict(_: int) -> torch.Tensor:
        # The block returns what it was given, and behind it the output of its one depth.
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
    found = [
        *layers,
        part("embedding", gpt.embedding, embed, source=None, chains=False),
        part("head", torch.nn.ModuleList([gpt.decoder.final_layernorm, words]), head, source=hidden, chains=False),
        part("core_attention", first.self_attention.core_attention, core, source=query, chains=chains),
    ]
    if model.mtp_num_layers:
        modules = torch.nn.ModuleList([gpt.mtp, gpt.embedding, words])
        found.append(part("prediction", modules, predict, source=hidden, chains=False))
    return tuple(found)


def _hidden_states(gpt: Any, job: Job, case: ComputeCase, ids: torch.Tensor) -> torch.Tensor:
    """Draw what a layer of one rank is given: its share of the sequence under sequence parallelism."""
    rows = ids.shape[1] // (case.tp if gpt.config.sequence_parallel else 1)
    shape = (rows, case.micro_batch_size, job.model.hidden_size)
    return torch.randn(shape, dtype=DTYPES[job.model.params_dtype], device=ids.device, requires_grad=True)


def _chain(run: Callable[[torch.Tensor], torch.Tensor], source: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """Run something so many times in a row, each on the output of the one before."""

    def forward(times: int) -> torch.Tensor:
        flow = source
        for _ in range(times):
            flow = run(flow)
        return flow

    return forward


def _checkpointed(run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Run a layer as Megatron's full recompute does with one layer a unit: it keeps its input and nothing else.

    `TransformerBlock._checkpointed_forward` calls the same function of megatron-core, for method uniform of one layer
    and for the first layers of method block.
    """
    from megatron.core import tensor_parallel

    return lambda flow: tensor_parallel.checkpoint(run, False, flow)


def _attention_core(layer: Any, run: Callable[[], object]) -> tuple[torch.Tensor, Callable[[int], torch.Tensor], bool]:
    """The attention core of a layer on the queries, keys and values that the layer itself gives it.

    `run` runs the layer once, to catch what its core is called with. Returns the queries, what runs the core so many
    times on them, and whether it can be run on its own output.
    """
    core: Any = layer.self_attention.core_attention
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def catch(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))

    hook = core.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    finally:
        hook.remove()
    given, options = caught[0]
    query, key, value = (each.detach().clone().requires_grad_() for each in given[:3])

    def once(flow: torch.Tensor) -> torch.Tensor:
        shaped = flow if flow is query else flow.view_as(query)
        output: torch.Tensor = core(shaped, key, value, *given[3:], **options)
        return output

    with torch.no_grad():
        # Under latent attention values are narrower than queries.
        chains = bool(once(query).numel() == query.numel())
    return query, _chain(once, query) if chains else lambda _: once(query), chains


_OPTIMIZERS = ("adam", "sgd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """One optimizer step as Megatron takes it, clipping, master weights and all."""

    run: Callable[[], None]
    run_on_single_elements: Callable[[], None]
    """The same with as many tensors, of one element each."""
    num_parameters: int
    gradient_bytes: int


def optimizer_step(work: Workload, job: Job) -> OptimizerStep:
    """Wrap the workload's model as a training job does, and give it an optimizer with gradients to step on.

    The distributed optimizer is left off: it does the same on fewer parameters. The model belongs to the optimizer
    afterwards, so this comes last.

    Raises:
        WorkloadError: the job's optimizer is none of Megatron's plain ones.

    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if job.optimizer not in _OPTIMIZERS:
        raise WorkloadError(f"the step of optimizer {job.optimizer!r} is not measured, only {', '.join(_OPTIMIZERS)}")
    model = job.model
    config = OptimizerConfig(
        optimizer=job.optimizer,
        lr=1e-6,
        bf16=model.params_dtype == "bf16",
        fp16=model.params_dtype == "fp16",
        params_dtype=DTYPES[model.params_dtype],
        # Only fp16 looks for gradients that are not finite before it steps.
        loss_scale=1.0 if model.params_dtype == "fp16" else None,
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
                # Their norm is the root of their number, above Megatron's limit of 1: clipping is in the time.
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
