"""A worker for the tests: builds workloads with megatron-core and prints its findings as one line of JSON."""

import contextlib
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from facts_for_tests import changed_job, fine_grained_model, tiny_job, tiny_model
from oracle.one_rank import Trainer, program_from_flags, train_from_flags

from pipette_launch.facts import ComputeCase, GatedDelta, Job, Layout
from pipette_launch.facts.model import HybridLayers
from pipette_patches.workload import Part, Workload, WorkloadError, load, one_of_each, optimizer_step, workload

CASE = ComputeCase(tp=1, cp=1, micro_batch_size=2)
WATCHED: list[Any] = []
"""The module of the layer in hand."""
built = partial(workload, device_kind="cpu", program=program_from_flags)
JOB = replace(tiny_job(1), model=tiny_model(untie_embeddings_and_output_weights=True))


def token_ids(work: Workload) -> torch.Tensor:
    """Return the token ids of the model's input, which are also the labels of its loss."""
    found: list[torch.Tensor] = []
    hook = work.wrapped.module.embedding.register_forward_pre_hook(
        lambda _module, _args, given: found.append(given["input_ids"]), with_kwargs=True
    )
    next(part for part in work.parts if part.name == "embedding").forward(1)
    hook.remove()
    return found[0]


def open_mask(work: Workload) -> torch.Tensor:
    """Return the attention mask of models that are built from flags, which masks nothing."""
    size, length = token_ids(work).shape
    return torch.zeros(size, 1, length, length, dtype=torch.bool)


def take_gradients(part: Part) -> list[torch.Tensor]:
    """Return the main gradients of a part and clear them."""
    taken = []
    for parameter in part.parameters:
        taken.append(parameter.main_grad.clone())  # type: ignore[attr-defined]
        parameter.main_grad.zero_()  # type: ignore[attr-defined]
    return taken


def whole_and_parts(work: Workload) -> list[float]:
    """Return the loss of Megatron's own forward over a hidden state, and the loss of the layer and then the head."""
    layer, _, head, _ = work.parts
    hidden = layer.source
    assert hidden is not None
    whole = work.wrapped.module(None, None, open_mask(work), decoder_input=hidden, labels=token_ids(work)).mean()
    with torch.no_grad():
        hidden.copy_(layer.forward(1))
    return [whole.item(), head.forward(1).item()]


def gradients(part: Part, frozen: bool) -> tuple[torch.Tensor, list[bool]]:
    """The input's gradient, and which parameters got one."""
    take_gradients(part)
    part.freeze(frozen)
    part.backward(part.forward(1))
    assert part.source is not None
    assert part.source.grad is not None
    found = [bool(gradient.any()) for gradient in take_gradients(part)]
    part.freeze(False)
    return part.source.grad.clone(), found


def accumulated(part: Part) -> list[bool]:
    """Return whether two backwards give twice the main gradient of one, and leave no other gradient."""
    take_gradients(part)
    with part.accumulating():
        part.backward(part.forward(1))
        once = [parameter.main_grad.clone() for parameter in part.parameters]  # type: ignore[attr-defined]
        part.backward(part.forward(1))
        twice = [parameter.main_grad for parameter in part.parameters]  # type: ignore[attr-defined]
        doubled = all(torch.allclose(2 * a, b, atol=1e-6) for a, b in zip(once, twice, strict=True))
        nonzero = any(bool(a.any()) for a in once)
        clean = all(parameter.grad is None for parameter in part.parameters)
    return [doubled, nonzero, clean]


def moved(work: Workload) -> list[Any]:
    """Return whether a step moves every matrix, and the number of parameters."""
    before = [parameter.detach().clone() for parameter in work.wrapped.module.parameters()]
    step = optimizer_step(work)
    gradients = [parameter.main_grad.clone() for parameter in work.wrapped.module.parameters()]
    step.run_on_single_elements()
    step.run()
    norms = [
        sum(float((each**2).sum()) for each in some) ** 0.5
        for some in (gradients, [parameter.main_grad for parameter in work.wrapped.module.parameters()])
    ]
    after = list(work.wrapped.module.parameters())
    return [all(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), step.num_parameters, *norms]


def run_again(layer: Part) -> list[Any]:
    """Return whether two layers under full recompute give the same value and gradients, and the number of forwards."""
    assert layer.source is not None
    assert layer.recomputed is not None
    runs: list[bool] = []
    module = WATCHED[0]
    hook = module.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    outputs, inputs, weights = [], [], []
    for forward in (layer.forward, layer.recomputed):
        take_gradients(layer)
        output = forward(2)
        layer.backward(output)
        assert layer.source.grad is not None
        outputs.append(output.detach())
        inputs.append(layer.source.grad.clone())
        weights.append(take_gradients(layer))
    hook.remove()
    close = [torch.allclose(a, b, atol=1e-5) for a, b in zip(*weights, strict=True)]
    return [torch.allclose(*outputs), torch.allclose(*inputs, atol=1e-5), all(close) and len(close), runs]


def core_alone(work: Workload) -> list[Any]:
    """Return whether the core gets what it gets inside the layer, and gradients to queries, keys and values."""
    layer, core = work.parts[0], work.parts[-1]
    seen: list[list[Any]] = []
    module = WATCHED[0].self_attention.core_attention
    hook = module.register_forward_hook(
        lambda _, args, output: seen.append([each.shape for each in (*args[:3], output)])
    )
    with torch.no_grad():
        layer.forward(1)
        core.forward(1)
    hook.remove()
    core.backward(core.forward(3))
    assert core.source is not None
    return [seen[0] == seen[1], core.chains, core.source.grad is not None]


def fused_and_unfused_losses() -> list[float]:
    """The head's loss as megatron-core fuses it, and as it does without."""
    losses = []
    for flags in ((), ("--cross-entropy-loss-fusion",)):
        with built(changed_job(JOB, performance_flags=flags), CASE) as work:
            torch.manual_seed(1)
            head = next(part for part in work.parts if part.name == "head")
            assert head.source is not None
            with torch.no_grad():
                head.source.copy_(torch.randn_like(head.source))
                for parameter in head.parameters:
                    parameter.fill_(0.01).mul_(torch.arange(parameter.numel()).view_as(parameter) % 7 - 3)
            loss = head.forward(1)
            head.backward(loss)
            losses += [loss.item(), head.source.grad.norm().item()]  # type: ignore[union-attr]
    return losses


def low_precision() -> list[Any]:
    """Return the recipes in whose context a layer runs again, if Transformer Engine's FP8 was on in its first call."""
    entered: list[Any] = []

    def autocast(*, enabled: bool, fp8_recipe: str) -> Any:
        entered.append([enabled, fp8_recipe])
        return contextlib.nullcontext()

    manager = SimpleNamespace(is_fp8_enabled=lambda: True, get_fp8_recipe=lambda: "the job's recipe", reset=bool)
    engine = SimpleNamespace(FP8GlobalStateManager=manager, fp8_autocast=autocast)
    with (
        mock.patch.dict(sys.modules, {"transformer_engine.pytorch.fp8": engine}),
        built(JOB, CASE) as work,
    ):
        entered.clear()
        work.parts[0].forward(2)
    return entered


def windows() -> list[Any]:
    """Return name, share and attention window of each timed layer and attention core, of two windows in four layers."""
    job = changed_job(
        JOB, model=replace(JOB.model, attention_windows=(4, 0, 4, 4)), performance_flags=("--window-size 3,0",)
    )
    with built(job, CASE) as work:
        cores = [layer.self_attention.core_attention for layer in work.wrapped.module.decoder.layers]
        parts = [[part.name, part.share] for part in work.parts if part.name in ("layer", "core_attention")]
        for part in work.parts:
            part.backward(part.forward(1))
        return [parts, [core.scale_mask_softmax.window_size for core in cores]]


def refusal(action: Any) -> str:
    """The message of a WorkloadError."""
    try:
        action()
    except WorkloadError as error:
        return str(error)
    return "not refused"


def without_its_engine() -> str:
    """Return the error if megatron-core uses a name that is not there."""

    def miss(*_args: object, **_kwargs: object) -> None:
        raise NameError("name 'te_general_gemm' is not defined")

    def build() -> None:
        with (
            mock.patch("megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec", miss),
            built(JOB, CASE),
        ):
            pass

    return refusal(build)


def splits_sequence() -> list[bool]:
    """Return whether a tensor-parallel layer is timed with sequence parallelism, on a GPU and on a CPU."""
    case = replace(CASE, tp=2)
    return [one_of_each(JOB, case, device_kind=kind)[1].sequence_parallel for kind in ("cuda", "cpu")]


def hybrid_of_each() -> list[Any]:
    """Return the pattern and the layers of experts of a measured hybrid model whose letters repeat."""
    layers = HybridLayers(pattern="*E*E", mamba_state_dim=16, mamba_head_dim=8, mamba_num_groups=1, mamba_num_heads=16)
    model = tiny_model(hybrid=layers, num_experts=4, moe_layer_freq=(0, 1, 0, 1))
    small, _, _ = one_of_each(replace(JOB, model=model), CASE, device_kind="cpu")
    assert small.model.hybrid is not None
    return [small.model.hybrid.pattern, list(small.model.moe_layer_freq)]


def mixers_of_each() -> list[int]:
    """Return the layers with gated delta networks of a measured model that has such a network in three of four."""
    net = GatedDelta(**dict.fromkeys(GatedDelta.__slots__, 8))
    model = tiny_model(linear_attention=net, linear_layers=(1, 1, 1, 0))
    small, _, _ = one_of_each(replace(JOB, model=model), CASE, device_kind="cpu")
    return list(small.model.linear_layers)


def bert(job: Job, layout: Layout) -> Callable[[], None]:
    """Return a program that trains Megatron's encoder."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    model = job.model

    def chunk(trainer: Trainer, _index: int) -> Any:
        sizes = {"vocab_size": model.padded_vocab_size(1), "max_sequence_length": model.max_position_embeddings}
        return BertModel(trainer.config, 2, bert_layer_local_spec, share_embeddings_and_output_weights=True, **sizes)

    def forward_step(_trainer: Trainer, _batches: Any, chunk: Any) -> Any:
        ids = torch.arange(layout.micro_batch_size * model.seq_length).view(layout.micro_batch_size, -1) % 50
        return chunk(ids, torch.ones_like(ids), tokentype_ids=ids % 2, lm_labels=ids), None

    def run() -> None:
        with mock.patch.multiple(Trainer, _chunk=chunk, _forward_step=forward_step):
            train_from_flags(job, layout, changes={"perform_initialization": True})

    return run


def encoder() -> list[Any]:
    """Return the names of an encoder's parts, its outputs in one run and part by part, and a refusal."""
    job = replace(JOB, model=replace(JOB.model, foreign="bert", untie_embeddings_and_output_weights=False))
    with workload(job, CASE, device_kind="cpu", program=bert) as work:
        layer, embedding, head, _ = work.parts
        assert layer.source is not None
        with torch.no_grad():
            ids = token_ids(work)
            outputs = work.wrapped.module(ids, torch.ones_like(ids), tokentype_ids=ids % 2, lm_labels=ids)
            layer.source.copy_(embedding.forward(1))
            layer.source.copy_(layer.forward(1))
        last = head.forward(1)
        head.backward(last)
        reached = layer.source.grad is not None
        names = [part.name for part in work.parts]
        found = [names, sum(each.mean().item() for each in outputs), last.item(), reached]

    def build() -> None:
        with workload(JOB, CASE, device_kind="cpu", program=bert):
            pass

    return [*found, refusal(build)]


def compiler() -> list[Any]:
    """Return whether `load` for a GPU imports torch's compiler, and how many variants of a function it keeps."""
    load("cuda")
    return ["torch._inductor.compile_fx" in sys.modules, torch._dynamo.config.cache_size_limit]


def narrow_values(work: Workload) -> list[Any]:
    """Shape of the core's output, its distance from attention written out, and whether a gradient goes back."""
    core = next(part for part in work.parts if part.name == "core_attention")
    given: list[tuple[torch.Tensor, ...]] = []
    module = work.wrapped.module.decoder.layers[0].self_attention.core_attention
    hook = module.register_forward_pre_hook(lambda _, args: given.append(args[:3]))
    output = core.forward(1)
    hook.remove()
    query, key, value = (each.detach().permute(1, 2, 0, 3) for each in given[0])
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    core.backward(output)
    assert core.source is not None
    far = (output - expected.permute(2, 0, 1, 3).flatten(2)).abs().max().item()
    return [[*output.shape], far, core.chains, core.source.grad is not None]


def predicted(work: Workload) -> list[Any]:
    """Return the head's input of a depth: behind the layers in Megatron's own forward, and in the timed part."""
    dense, moe, *_, depth = work.parts
    hidden = depth.source
    assert hidden is not None
    ids = token_ids(work)
    read: list[torch.Tensor] = []
    hook = work.wrapped.module.output_layer.register_forward_pre_hook(lambda _, args: read.append(args[0].detach()))
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        # Before 0.16 megatron-core has no default for it.
        work.wrapped.module.config.mtp_loss_scaling_factor = 0.1
        mask = torch.ones_like(ids, dtype=torch.float32)
        work.wrapped.module(
            ids,
            positions,
            open_mask(work),
            decoder_input=hidden,
            labels=ids,
            loss_mask=mask,
        )
        for layer in (dense, moe):
            hidden.copy_(layer.forward(1))
        hidden.copy_(work.wrapped.module.decoder.final_layernorm(hidden))
    loss = depth.forward(1)
    hook.remove()
    depth.backward(loss)
    behind, _, timed = read
    reached = [bool(gradient.any()) for gradient in take_gradients(depth)]
    return [torch.allclose(behind, timed, atol=1e-6), loss.ndim, hidden.grad is not None, sum(reached), len(reached)]


def fine_grained() -> dict[str, Any]:
    """Parts of the model with everything: names, parameters, and values."""
    found: dict[str, Any] = {"parameters": {}}
    for tp in (1, 2):
        with built(
            changed_job(JOB, model=fine_grained_model(), performance_flags=("--qk-layernorm", "--rope-type rope")),
            replace(CASE, tp=tp),
        ) as work:
            found["parameters"][tp] = {part.name: sum(map(torch.numel, part.parameters)) for part in work.parts}
            for part in work.parts:
                part.backward(part.forward(1))
            if tp == 1:
                found["core"], found["predicted"] = narrow_values(work), predicted(work)
    return found


def loaded_later() -> list[str]:
    """Modules of megatron-core and of torch's compiler that a first case and its optimizer import after `load`."""
    load("cpu")
    before = set(sys.modules)
    with built(JOB, CASE) as work:
        for part in work.parts:
            part.backward(part.forward(1))
        optimizer_step(work).run()
    return sorted(name for name in set(sys.modules) - before if name.startswith(("megatron", "torch._")))


def main() -> None:
    """Find out everything."""
    found: dict[str, Any] = {"loaded later": loaded_later(), "fine-grained": fine_grained()}
    with built(JOB, CASE) as work:
        layer = work.parts[0]
        found["names"] = [part.name for part in work.parts]
        (full, with_weights), (frozen, without) = gradients(layer, False), gradients(layer, True)
        found["frozen"] = [torch.allclose(full, frozen), all(with_weights), any(without)]
        found["accumulated"] = accumulated(layer)
        WATCHED.append(work.wrapped.module.decoder.layers[0])
        found["again"] = run_again(layer)
        found["core"] = core_alone(work)
        found["losses"] = whole_and_parts(work)
        found["moved"] = moved(work)
        found["parameters"] = sum(parameter.numel() for parameter in work.wrapped.module.parameters())
    found["fused losses"] = fused_and_unfused_losses()
    found["group left"] = dist.is_initialized()
    shapes = {}
    for tp in (1, 2):
        with built(JOB, replace(CASE, tp=tp)) as work:
            shapes[tp] = sum(parameter.numel() for parameter in work.parts[0].parameters)
    found["layer parameters"] = [shapes[1], shapes[2]]
    flags = ("--cross-entropy-loss-fusion", "--qk-layernorm")
    with built(changed_job(JOB, performance_flags=flags), CASE) as work:
        config = work.wrapped.module.config
        found["flags"] = [config.qk_layernorm, config.cross_entropy_loss_fusion]
        found["norms"] = len(work.parts[0].parameters)
        work.parts[0].backward(work.parts[0].forward(1))
    found["low precision"] = low_precision()
    found["windows"] = windows()
    found["without its engine"] = without_its_engine()
    found["splits sequence"] = splits_sequence()
    found["hybrid of each"] = hybrid_of_each()
    found["mixers of each"] = mixers_of_each()
    found["encoder"] = encoder()
    # Last, as it changes what torch compiles.
    found["compiler"] = compiler()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    load("cpu")
    main()
