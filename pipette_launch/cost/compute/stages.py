"""Seconds that a stage computes for one micro-batch, from the warm-up's times of its parts, on a slot of speed 1."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from pipette_launch.cost.communication.traffic import Hiding
from pipette_launch.cost.layers.activations import recompute_modules
from pipette_launch.errors import PlanError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import LAYERS, ComputeCase, ComputeTime, LoadingTime, Measurements
from pipette_launch.facts.model import KINDS_WITH_EXPERTS, TRANSFORMER_KINDS, LayerKind, ModelSpec

_CORE = "core_attention"
_WITH_ATTENTION: tuple[LayerKind, ...] = (*TRANSFORMER_KINDS, "attention_layer")
_MODELLED = "Compute time of {} was not measured; it is carried over from a measured case by a model of the device."
_CACHED = "Compute time of {} was not measured now; it is that of an earlier warm-up of these machines."


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Seconds of the passes of one micro-batch."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    """Forward passes run again inside the backward; not in `backward_s`."""
    weight_grad_s: float = 0.0
    """The part of `backward_s` that the weights' gradients take, as far as a schedule can put them off."""
    forward_idle_s: float = 0.0
    """Of the forward, while the device waits for the host."""
    backward_idle_s: float = 0.0
    """The same of backward and recompute."""

    def __add__(self, other: Passes) -> Passes:
        """Add the passes of two parts that run one after the other."""
        return Passes(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def __mul__(self, factor: float) -> Passes:
        """Scale all passes."""
        return Passes(**{name: getattr(self, name) * factor for name in self.__slots__})

    def again(self, share: float) -> Passes:
        """Run a share of the forward once more in the backward."""
        return replace(
            self,
            recompute_s=self.forward_s * share,
            backward_idle_s=self.backward_idle_s + self.forward_idle_s * share,
        )


def case_of(layout: Layout) -> ComputeCase:
    """Return the shape of computation that a layout runs on each slot."""
    return ComputeCase(tp=layout.tp, cp=layout.cp, micro_batch_size=layout.micro_batch_size)


class ComputeTable:
    """The measured compute times of a job, and the stated way to get one that was not measured.

    A case that was not measured is taken from the measured one of equal tp that is nearest in tokens, in proportion to
    the tokens (micro-batch over cp). No time is carried over to another tp: kernels of other widths were not seen.
    """

    def __init__(self, job: Job, measurements: Measurements) -> None:
        self._job = job
        self.device_kind = measurements.cluster.device_kind
        """Of all slots: `cuda` or `cpu`."""
        self._passes = _median_passes(measurements)
        self._origins = {time.case: time.source for time in measurements.compute if time.source != "measured"}
        shares: dict[tuple[ComputeCase, str], list[float]] = {}
        for time in measurements.compute:
            if time.recompute and time.recompute.median_s and time.forward.median_s:
                share = time.recompute.median_s / time.forward.median_s
                shares.setdefault((time.case, time.part), []).append(share)
        # What full recompute of a layer took, in forwards of that layer: median over the slots that measured it.
        self._again = {key: statistics.median(each) for key, each in shares.items()}
        self._loading = measurements.loading or LoadingTime(batch_s=0.0, sample_s=0.0)
        self.wake = Passes(forward_s=measurements.wake_s / 2, backward_s=measurements.wake_s / 2)
        self._usual_again = {
            part: statistics.median([share for (_, name), share in self._again.items() if name == part] or [1.0])
            for part in LAYERS
        }
        kinds = {*job.model.layer_kinds, *job.model.prediction_kinds}
        self._parts = ("embedding", "head", *sorted(kinds)[::-1])
        self._sources: dict[ComputeCase, ComputeCase | None] = {}
        self._scaled: dict[ComputeCase, dict[str, Passes]] = {}
        # By tp and tokens: of cases with equally many tokens the first stands for all.
        self._complete: dict[int, dict[Fraction, ComputeCase]] = {}
        for measured in sorted({measured for measured, _ in self._passes}):
            if all((measured, part) in self._passes for part in self._parts):
                tokens = Fraction(measured.micro_batch_size, measured.cp)
                self._complete.setdefault(measured.tp, {}).setdefault(tokens, measured)
                # A case that was measured stands for itself; the rest are looked for when they are asked for.
                self._sources[measured] = measured

    def source(self, case: ComputeCase) -> ComputeCase | None:
        """Return the measured case that prices `case`: itself, the nearest of equal tp, or None."""
        if case not in self._sources:
            self._sources[case] = min(
                self._complete.get(case.tp, {}).values(),
                key=lambda measured: (abs(math.log(_tokens(case, measured))), measured),
                default=None,
            )
        return self._sources[case]

    def note(self, case: ComputeCase) -> str | None:
        """Say in a sentence how the time of a case came about, where it was not measured."""
        source = self.source(case)
        if source is None:
            return None
        if source == case:
            said = {"modelled": _MODELLED, "cached": _CACHED}.get(self._origins.get(case, "measured"))
            return said and said.format(_words(case))
        return (
            f"Compute time of {_words(case)} was not measured; it is that of {_words(source)} times "
            f"{_tokens(case, source):g}, in proportion to the tokens."
        )

    def chunk_passes(self, layout: Layout) -> tuple[Passes, ...]:
        """Seconds of one micro-batch on each chunk in model order, without communication, with recompute.

        Raises:
            PlanError: no case of this tp was measured.

        """
        model = self._job.model
        part = self._part_passes(case_of(layout))
        loaded = Passes(forward_s=self._loading.seconds(layout.micro_batch_size))
        chunks = []
        first = 0
        seen: dict[tuple[LayerKind, ...], Passes] = {}
        for layers in layout.chunk_layers(model.num_layers):
            kinds = model.layer_kinds[first : first + layers]
            first += layers
            if kinds not in seen:
                layers_passes = (self._layer(layout, part, index, kind) for index, kind in enumerate(kinds))
                seen[kinds] = sum(layers_passes, Passes())
            chunks.append(seen[kinds])
        # The weights' gradients of the model's ends are never put off: the head's would keep its logits' gradients.
        chunks[0] += replace(part["embedding"], weight_grad_s=0.0) + loaded
        # A single stage has loaded the labels with the tokens.
        ends = replace(part["head"] + self._prediction(part), weight_grad_s=0.0)
        chunks[-1] += ends + (loaded if layout.pp > 1 else Passes())
        # In pipelines each pass of a chunk comes after a wait; elsewhere the first of each step, after the exchange of
        # gradients. A step of four ranks on two cores took 24.2 ms of processor time, the same passes without any
        # exchange 19.6 ms.
        waits = 1.0 if layout.pp > 1 else 1 / layout.num_microbatches(self._job.batch.global_batch_size)
        return tuple(chunk + self.wake * waits for chunk in chunks)

    def unit_passes(self, layout: Layout) -> tuple[Passes, ...]:
        """Return what `chunk_passes` adds up; of layers that the model has none of, passes of 0 s.

        These are, for each kind of layer that the model may have, one that full recompute leaves alone (selective
        recompute is in it) and one that it runs again; then embedding, and head with multi-token prediction.

        Raises:
            PlanError: no case of this tp was measured.

        """
        part = self._part_passes(case_of(layout))
        layers = (
            self._layer(layout, part, 0 if again else layout.recompute.num_layers, kind)
            if kind in self._parts
            else Passes()
            for kind in self._job.model.possible_kinds
            for again in (False, True)
        )
        return (*layers, part["embedding"], part["head"] + self._prediction(part))

    def hiding(self, layout: Layout) -> Hiding:
        """Return what collectives pass behind in one layer: of the first layer, or of a hybrid model's mean."""
        model = self._job.model
        part = self._part_passes(case_of(layout))
        kinds = model.layer_kinds if model.hybrid else model.layer_kinds[:1]
        shares = {kind: count / len(kinds) for kind, count in Counter(kinds).items()}
        layer = sum((part[kind] * share for kind, share in shares.items()), Passes())
        column = sum((part[kind] * (share * column_share(model, kind)) for kind, share in shares.items()), Passes())
        return Hiding(
            core_attention_s=part[_CORE].forward_s
            if _CORE in part
            else layer.forward_s * attention_core_share(model, kinds[0]),
            input_grad_s=column.backward_s - column.weight_grad_s,
            weight_grad_s=column.weight_grad_s,
            forward_s=column.forward_s,
            other_layer_s=(layer.forward_s + layer.backward_s) / 4,
        )

    def part_seconds(self, case: ComputeCase) -> dict[str, float] | None:
        """Seconds of forward and backward of each part, by its name (`layer`, `head`, ..); None where it is unknown."""
        if self.source(case) is None:
            return None
        return {name: passes.forward_s + passes.backward_s for name, passes in self._part_passes(case).items()}

    def _part_passes(self, case: ComputeCase) -> dict[str, Passes]:
        if case in self._scaled:
            return self._scaled[case]
        source = self.source(case)
        if source is None:
            raise PlanError(
                f"compute time of {_words(case)} is unknown, and nothing with tp={case.tp} was measured; "
                f"let the warm-up measure it"
            )
        factor = _tokens(case, source)
        known = (*self._parts, *((_CORE,) if (source, _CORE) in self._passes else ()))
        self._scaled[case] = {name: self._passes[source, name] * factor for name in known}
        return self._scaled[case]

    def _prediction(self, part: dict[str, Passes]) -> Passes:
        """Each depth of multi-token prediction runs its layers and the head once more (DeepSeek-V3, section 2.2)."""
        model = self._job.model
        if not model.mtp_num_layers:
            return Passes()
        return sum((part[kind] for kind in model.prediction_kinds), part["head"]) * model.mtp_num_layers

    def _layer(self, layout: Layout, part: dict[str, Passes], index_in_chunk: int, kind: LayerKind) -> Passes:
        model, layer, source = self._job.model, part[kind], self.source(case_of(layout))
        share = recompute_share(model, layout, index_in_chunk, kind)
        if layout.recompute.granularity == "full" and source:
            # 1 where the warm-up timed no recompute. Where it timed that in other cases alone, they stand for this one:
            # it hardly differs between shapes.
            share *= self._again.get((source, kind), self._usual_again[kind])
        core_share = attention_core_share(model, kind)
        if _CORE in part and core_share and "core_attn" in recompute_modules(layout):
            share += part[_CORE].forward_s / layer.forward_s - core_share
        return layer.again(share)


def recompute_share(model: ModelSpec, layout: Layout, index_in_chunk: int, kind: LayerKind) -> float:
    """Part of a layer's forward that its backward runs again.

    Full recompute runs the whole layer again: all with method uniform, the first `num_layers` of each chunk with block
    (transformer_block.py). Selective recompute runs its modules, priced by their share of the layer's FLOPs; norms and
    activation functions count as nothing.
    """
    recompute = layout.recompute
    if recompute.granularity == "full":
        return 1.0 if recompute.method == "uniform" or index_in_chunk < recompute.num_layers else 0.0
    if recompute.granularity == "none":
        return 0.0
    flops = _module_flops(model, kind)
    names = set(recompute_modules(layout))
    names -= {"shared_experts"} if "moe" in names else set()
    return sum(flops.get(name, 0.0) for name in names) / model.kind_flops_per_token(kind)


def column_share(model: ModelSpec, kind: LayerKind) -> float:
    """Part of a layer's FLOPs in one column-parallel matrix: the mean of those it has, 0 where it has none.

    Behind the input gradient of such a matrix its input is gathered again, behind its weight gradient the input's
    gradients are summed (layers.py, LinearWithGradAccumulationAndAsyncCommunication).
    """
    heads = model.num_attention_heads + 2 * model.num_query_groups
    columns = []
    if kind == "mamba_layer" and model.hybrid:
        columns.append(2.0 * model.hidden_size * model.hybrid.mamba_projected)
    elif kind in _WITH_ATTENTION and model.latent_attention:
        # Two of them: up to the queries, and up to keys and values.
        columns.append(1.0 * model.latent_attention.up_weights(model.num_attention_heads))
    elif kind in _WITH_ATTENTION:
        columns.append(2.0 * model.hidden_size * heads * model.kv_channels)
    if kind in ("layer", "mlp_layer"):
        columns.append(2.0 * model.hidden_size * model.ffn_hidden_size * (2 if model.gated_linear_unit else 1))
    return statistics.mean(columns or [0.0]) / model.kind_flops_per_token(kind)


def attention_core_share(model: ModelSpec, kind: LayerKind = "layer") -> float:
    """Part of a layer's FLOPs that is attention scores and context."""
    return _module_flops(model, kind).get("core_attn", 0.0) / model.kind_flops_per_token(kind)


def _module_flops(model: ModelSpec, kind: LayerKind) -> dict[str, float]:
    """Forward FLOPs for each token, 2 for each weight (Narayanan et al. 2021, appendix)."""
    found = {}
    if kind in _WITH_ATTENTION:
        found["core_attn"] = model.core_flops_per_token
        if model.latent_attention:
            found["mla_up_proj"] = 2.0 * model.latent_attention.up_weights(model.num_attention_heads)
    if kind in ("layer", "mlp_layer"):
        found["mlp"] = 2.0 * model.mlp_parameters()
    if kind in KINDS_WITH_EXPERTS:
        shared_width = model.moe_shared_expert_intermediate_size
        shared = 2.0 * model.mlp_parameters(shared_width) if shared_width else 0.0
        routed = 2.0 * model.moe_router_topk * model.mlp_parameters(model.moe_ffn_hidden_size)
        found |= {"moe": routed + shared, "shared_experts": shared}
    return found


def _median_passes(measurements: Measurements) -> dict[tuple[ComputeCase, str], Passes]:
    """Median over the slots that measured a part, each brought to speed 1 first."""
    times: dict[tuple[ComputeCase, str], list[ComputeTime]] = {}
    for time in measurements.compute:
        times.setdefault((time.case, time.part), []).append(time)
    speed = measurements.cluster.slot_speed

    def median(group: Sequence[ComputeTime], seconds: Callable[[ComputeTime], float]) -> float:
        scaled = [speed[time.slot] * seconds(time) for time in group]
        return scaled[0] if len(scaled) == 1 else statistics.median(scaled)

    return {
        key: Passes(
            forward_s=median(group, lambda time: time.forward.median_s),
            backward_s=median(group, lambda time: time.input_grad.median_s + time.weight_grad.median_s),
            weight_grad_s=median(group, lambda time: time.weight_grad.median_s),
            forward_idle_s=median(group, lambda time: time.forward_idle_s),
            backward_idle_s=median(group, lambda time: time.backward_idle_s),
        )
        for key, group in times.items()
    }


def _tokens(case: ComputeCase, source: ComputeCase) -> float:
    """How many times the tokens of `source` a case has on each slot."""
    return (case.micro_batch_size * source.cp) / (case.cp * source.micro_batch_size)


def _words(case: ComputeCase) -> str:
    return f"tp={case.tp} cp={case.cp} micro-batch {case.micro_batch_size}"
