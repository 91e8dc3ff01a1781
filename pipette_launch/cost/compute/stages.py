"""Seconds that a stage computes for one micro-batch on a slot of speed 1, from the warm-up's times of its parts."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from pipette_launch.cost.compute.carried_over import repriced
from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.cost.layers.block import recompute_modules
from pipette_launch.cost.layers.kinds import attention_core_share, column_share, offloaded, recompute_share
from pipette_launch.cost.layers.loads import Hiding
from pipette_launch.errors import PlanError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import LAYERS, ComputeCase, ComputeTime, LoadingTime, Measurements, StageReading
from pipette_launch.facts.model import LayerKind
from pipette_launch.text import counted

_CORE, _PREDICTION = "core_attention", "prediction"
_MODELLED = "Compute time of {} was not measured. A model of the device carried it over from a measured case."


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of the passes of one micro-batch."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    """Seconds of the forward passes that the backward runs again; not part of `backward_s`."""
    weight_grad_s: float = 0.0
    """Seconds of weight gradients, a part of `backward_s` that a schedule can delay."""
    forward_idle_s: float = 0.0
    """Seconds of the forward in which the device waits for the host."""
    backward_idle_s: float = 0.0
    """Seconds of backward and recompute in which the device waits for the host."""
    recompute_idle_s: float = 0.0
    """The part of `backward_idle_s` in the recompute."""

    def __add__(self, other: PassSeconds) -> PassSeconds:
        # The sum is written out for speed, because a search adds up ten thousand `PassSeconds`.
        return PassSeconds(
            self.forward_s + other.forward_s,
            self.backward_s + other.backward_s,
            self.recompute_s + other.recompute_s,
            self.weight_grad_s + other.weight_grad_s,
            self.forward_idle_s + other.forward_idle_s,
            self.backward_idle_s + other.backward_idle_s,
            self.recompute_idle_s + other.recompute_idle_s,
        )

    def __mul__(self, factor: float) -> PassSeconds:
        return PassSeconds(*[seconds * factor for seconds in _seconds(self)])

    def again(self, share: float) -> PassSeconds:
        """Return the passes of a layer whose backward runs the share `share` of the forward again."""
        again_s, idle_s = self.forward_s * share, self.forward_idle_s * share
        return replace(
            self, recompute_s=again_s, backward_idle_s=self.backward_idle_s + idle_s, recompute_idle_s=idle_s
        )

    @property
    def busy(self) -> PassSeconds:
        """The same passes without the time in which the device waits for the host."""
        backward_s = self.backward_s - (self.backward_idle_s - self.recompute_idle_s)
        return PassSeconds(
            forward_s=self.forward_s - self.forward_idle_s,
            backward_s=backward_s,
            recompute_s=self.recompute_s - self.recompute_idle_s,
            weight_grad_s=self.weight_grad_s * (backward_s / self.backward_s if self.backward_s else 0.0),
        )


_seconds = attrgetter(*PassSeconds.__slots__)


class ComputeTable:
    """Measured compute times of a job, and times of unmeasured cases derived from them.

    The time of an unmeasured case is the time of a measured case, multiplied by the ratio of their tokens (micro-batch
    over cp). The measured case, called the source, has the same tp as the unmeasured case, and the nearest number of
    tokens. The time of a case is not used for another tp, because the widths of its kernels depend on tp.
    """

    def __init__(self, job: Job, measurements: Measurements) -> None:
        self._job = job
        self.device_kind = measurements.cluster.device_kind
        """`cuda` or `cpu`, the same for all slots."""
        self._repriced = repriced(job, measurements)
        compute = self._repriced.compute
        self._passes: dict[tuple[ComputeCase, str], PassSeconds] = {}
        # Times of parts with experts for each (EP, ETP), if the warm-up timed several pairs (EP, ETP).
        self._shared: dict[tuple[ComputeCase | None, int, int], dict[str, PassSeconds]] = {}
        for (case, part, ep, etp), one in _median_passes(compute, measurements.cluster.slot_speed).items():
            if ep:
                self._shared.setdefault((case, ep, etp), {})[part] = one
            else:
                self._passes[case, part] = one
        self.knows_shares = bool(self._shared)
        """True if the warm-up timed layers for several numbers of experts on a rank."""
        self._modelled = {time.case for time in compute if time.source == "modelled"}
        shares: dict[tuple[ComputeCase, str], list[float]] = {}
        for time in compute:
            if time.recompute and time.recompute.median_s and time.forward.median_s:
                share = time.recompute.median_s / time.forward.median_s
                shares.setdefault((time.case, time.part), []).append(share)
        # Time of a layer's full recompute divided by the layer's forward time: median over the slots with both times.
        self._again = {key: statistics.median(each) for key, each in shares.items()}
        self._usual_again = {
            part: statistics.median([share for (_, name), share in self._again.items() if name == part] or [1.0])
            for part in LAYERS
        }
        self._host_bytes_per_s = measurements.host_bytes_per_s
        self.copies_to_host = job.options.fine_grained_activation_offloading and self._host_bytes_per_s > 0
        """True if offloading copies activations to the host, so that passes depend on all degrees that cut tensors."""
        self._loading = measurements.loading or LoadingTime(batch_s=0.0, sample_s=0.0)
        self._parts = ("embedding", "head", *sorted({*job.model.layer_kinds, *job.model.prediction_kinds})[::-1])
        self._scaled: dict[ComputeCase, dict[str, PassSeconds]] = {}
        cases = sorted({case for case, _ in self._passes})
        self._complete = [case for case in cases if all((case, part) in self._passes for part in self._parts)]
        self._sources: dict[ComputeCase, ComputeCase | None] = {case: case for case in self._complete}
        self.stages_note = ""
        """Sentence about the factor of measured stages; empty without such a factor."""
        # On CPUs, single stages took 1.00 to 1.23 times the sum of their parts, but trained steps 0.96 to 1.06 times.
        if self.device_kind == "cuda":
            self._scale_to(measurements.timed_stages_of(job), measurements.cluster.slot_speed)

    def source(self, case: ComputeCase) -> ComputeCase | None:
        """Return the measured case whose times `case` uses: `case` itself, the nearest case of equal tp, or None."""
        if case not in self._sources:
            self._sources[case] = min(
                (measured for measured in self._complete if measured.tp == case.tp),
                key=lambda measured: (abs(math.log(_tokens(case, measured))), measured),
                default=None,
            )
        return self._sources[case]

    def note(self, case: ComputeCase) -> str | None:
        """Return a sentence about the source of a case's time; None if the time was measured or has no source."""
        source = self.source(case)
        if source is None:
            return None
        if source == case:
            return _MODELLED.format(_words(case)) if case in self._modelled else None
        return (
            f"Compute time of {_words(case)} was not measured. The time of {_words(source)} is multiplied by "
            f"{_tokens(case, source):g}, in proportion to the tokens."
        )

    def flags_note(self, case: ComputeCase) -> str | None:
        """Return a sentence about flags that the timed layers lacked, with their factor; None without such flags."""
        _, factors, flags, origin = self._repriced
        source = self.source(case)
        if not flags or source is None:
            return None
        if source not in factors:
            return f"Layers were timed and priced without {flags}: {origin}."
        return f"Layers were timed without {flags}. A model of {origin} multiplies their time by {factors[source]:.2f}."

    def chunk_passes(self, layout: Layout) -> tuple[PassSeconds, ...]:
        """Return the passes of one micro-batch on each chunk in model order, with recompute, without communication.

        Raises PlanError if no case with the layout's tp was measured.
        """
        chunks = self._unloaded(layout)
        loaded = PassSeconds(forward_s=self._loading.seconds(layout.micro_batch_size))
        # If the pipeline has a single stage, the time for loading its tokens already includes loading its labels.
        readers = {0, layout.num_chunks - 1, *((layout.mtp_chunk,) if layout.chunks_after_mtp else ())}
        return tuple(chunk + loaded if index in readers else chunk for index, chunk in enumerate(chunks))

    def _scale_to(self, readings: Sequence[StageReading], speed: Sequence[float]) -> None:
        """Multiply all times by the median ratio of a measured stage's seconds to the sum of its parts.

        Layers that are timed alone lack the code between passes, the sum of gradients, and what other layers do to
        caches. Stages whose parts were not timed have no ratio.
        """
        ratios = []
        for reading in readings:
            layout, case = reading.layout, case_of(reading.layout)
            if self.source(case) != case or case in self._modelled:
                continue
            chunks = self._unloaded(layout)[reading.pp_rank :: layout.pp]
            parts_s = sum(chunk.forward_s + chunk.backward_s + chunk.recompute_s for chunk in chunks)
            # The measured stage lacks the same flags as the timed layers.
            as_timed_s = parts_s / self._repriced.factors.get(case, 1.0)
            ratios.append(speed[reading.slot] * reading.schedule_s / reading.num_microbatches / as_timed_s)
        if not ratios:
            return
        factor = statistics.median(ratios)
        self._passes = {key: one * factor for key, one in self._passes.items()}
        self._shared = {key: {name: one * factor for name, one in each.items()} for key, each in self._shared.items()}
        self._scaled.clear()
        self.stages_note = (
            f"Compute times of layers are multiplied by {factor:.3f}: {counted(len(ratios), 'whole stage')} took "
            f"{min(ratios):.2f} to {max(ratios):.2f} times the sum of {'its' if len(ratios) == 1 else 'their'} parts."
        )

    def _unloaded(self, layout: Layout) -> list[PassSeconds]:
        """Return the passes of one micro-batch on each chunk in model order, without the loading of batches."""
        model, part = self._job.model, self._passes_of(layout)
        chunks, first = [], 0
        seen: dict[tuple[LayerKind, ...], PassSeconds] = {}
        for layers in layout.chunk_layers(model.num_layers):
            kinds = model.layer_kinds[first : first + layers]
            first += layers
            if kinds not in seen:
                seen[kinds] = sum((self._layer(layout, part, *each) for each in enumerate(kinds)), PassSeconds())
            chunks.append(seen[kinds])
        # Schedules never delay weight gradients of embedding and head, because the head would have to keep its logits'
        # gradients.
        chunks[0] += replace(part["embedding"], weight_grad_s=0.0)
        head, prediction = self._ends(layout, part)
        chunks[-1] += head
        chunks[layout.mtp_chunk] += prediction
        return chunks

    def unit_passes(self, layout: Layout) -> tuple[PassSeconds, ...]:
        """Return the passes of each unit that `chunk_passes` adds up; 0 s for kinds of layers that the model lacks.

        Each kind of layer has two units: a layer without full recompute (but with selective recompute), and a layer
        with full recompute. The units of embedding, heads and multi-token prediction depths follow the units of layers.

        Raises PlanError if no case with the layout's tp was measured.
        """
        part = self._passes_of(layout)
        layers = (
            self._whole_layer(layout, part, kind, again=again)
            for kind in self._job.model.possible_kinds
            for again in (False, True)
        )
        return (*layers, part["embedding"], *self._ends(layout, part))

    def hiding(self, layout: Layout) -> Hiding:
        """Return compute seconds that can hide collectives: of the first layer, or of the mean of mixed layers.

        Time in which the device waits for the host hides collectives of its whole pass instead (`work.pass_s`).
        """
        model, part = self._job.model, {name: passes.busy for name, passes in self._passes_of(layout).items()}
        kinds = model.layer_kinds if model.hybrid or model.linear_layers else model.layer_kinds[:1]
        shares = {kind: count / len(kinds) for kind, count in Counter(kinds).items()}
        layer = sum((part[kind] * share for kind, share in shares.items()), PassSeconds())
        column = sum(
            (part[kind] * (share * column_share(self._job, kind)) for kind, share in shares.items()), PassSeconds()
        )
        whole = {kind: self._whole_layer(layout, part, kind) for kind in model.possible_kinds}
        return Hiding(
            core_attention_s=self._core_s(part, kinds),
            input_grad_s=column.backward_s - column.weight_grad_s,
            weight_grad_s=column.weight_grad_s,
            forward_s=column.forward_s,
            other_layer_s=(layer.forward_s + layer.backward_s) / 4,
            layers_s={("forward", kind): one.forward_s for kind, one in whole.items()}
            | {("backward", kind): one.backward_s + one.recompute_s for kind, one in whole.items()},
        )

    def _core_s(self, part: Mapping[str, PassSeconds], kinds: Sequence[LayerKind]) -> float:
        """Return the forward seconds of scores and context in a layer that has attention: measured, else by FLOPs."""
        if _CORE in part:
            return part[_CORE].forward_s
        shares = [(kind, attention_core_share(self._job, kind)) for kind in kinds]
        found_s = [part[kind].forward_s * share for kind, share in shares if share > 0]
        return sum(found_s) / len(found_s) if found_s else 0.0

    def part_seconds(self, case: ComputeCase) -> dict[str, float] | None:
        """Return the seconds of forward and backward of each part, by its name (`layer`, ..); None if unknown."""
        if self.source(case) is None:
            return None
        return {name: passes.forward_s + passes.backward_s for name, passes in self._part_passes(case).items()}

    def _passes_of(self, layout: Layout) -> dict[str, PassSeconds]:
        """Return the passes of each part for a layout's compute case and for its number of experts on a rank."""
        case = case_of(layout)
        passes, source = self._part_passes(case), self.source(case)
        shared = self._shared.get((source, layout.ep, layout.etp))
        if not shared or source is None:
            return passes
        return passes | {name: one * _tokens(case, source) for name, one in shared.items()}

    def _part_passes(self, case: ComputeCase) -> dict[str, PassSeconds]:
        if case in self._scaled:
            return self._scaled[case]
        source = self.source(case)
        if source is None:
            raise PlanError(
                f"compute time of {_words(case)} is unknown, and nothing with tp={case.tp} was measured; "
                f"let the warm-up measure it"
            )
        factor = _tokens(case, source)
        known = (*self._parts, *(name for name in (_CORE, _PREDICTION) if (source, name) in self._passes))
        self._scaled[case] = {name: self._passes[source, name] * factor for name in known}
        return self._scaled[case]

    def _ends(self, layout: Layout, part: dict[str, PassSeconds]) -> tuple[PassSeconds, PassSeconds]:
        """Return the passes of all heads, and of all depths of multi-token prediction without their heads.

        Every depth has its own head, on the stage of the model's head (gpt_model.py:611-660; DeepSeek-V3, section 2.2).
        If no whole depth of multi-token prediction was timed, the time of a depth is the time of its layers. Layers of
        a depth are recomputed like all layers, but not by method `block` (multi_token_prediction.py,
        _checkpointed_forward). No schedule delays the weight gradients of heads or depths.
        """
        model, head = self._job.model, replace(part["head"], weight_grad_s=0.0)
        if not model.mtp_num_layers:
            return head, PassSeconds()
        kinds = model.prediction_kinds
        plain = sum((part[kind] for kind in kinds), PassSeconds())
        layers = sum((self._layer(layout, part, layout.recompute.num_layers, kind) for kind in kinds), PassSeconds())
        depth, whole = plain, part.get(_PREDICTION)
        if whole:
            timed = ("forward_s", "backward_s", "forward_idle_s", "backward_idle_s")
            depth = PassSeconds(**{name: max(0.0, getattr(whole, name) - getattr(head, name)) for name in timed})
        idle_s = depth.backward_idle_s + layers.backward_idle_s - plain.backward_idle_s
        again = {"recompute_s": layers.recompute_s, "recompute_idle_s": layers.recompute_idle_s}
        depth = replace(depth, **again, backward_idle_s=idle_s, weight_grad_s=0.0)
        return head * (1 + model.mtp_num_layers), depth * model.mtp_num_layers

    def _whole_layer(
        self, layout: Layout, part: dict[str, PassSeconds], kind: LayerKind, *, again: bool = False
    ) -> PassSeconds:
        """Return the passes of one layer, with full recompute if `again`; 0 s if the model has no layer of the kind."""
        if kind not in self._parts:
            return PassSeconds()
        return self._layer(layout, part, 0 if again else layout.recompute.num_layers, kind)

    def _layer(self, layout: Layout, part: dict[str, PassSeconds], index_in_chunk: int, kind: LayerKind) -> PassSeconds:
        layer, source = part[kind], self.source(case_of(layout))
        share = recompute_share(self._job, layout, index_in_chunk, kind)
        if layout.recompute.granularity == "full" and source:
            # The ratio of recompute to forward is 1 if the warm-up timed no recompute. If the warm-up timed recompute
            # only in other cases, the ratio's median over these cases is used, because the ratio hardly differs between
            # cases.
            share *= self._again.get((source, kind), self._usual_again[kind])
        if _CORE in part and "core_attn" in recompute_modules(layout):
            core_share = attention_core_share(self._job, kind)
            share += part[_CORE].forward_s / layer.forward_s - core_share if core_share else 0.0
        layer = layer.again(share)
        copies = self.copies_to_host or (layout.recompute.offload_modules and self._host_bytes_per_s)
        if not copies or (layout.recompute.granularity == "full" and share):
            return layer
        # The backward of each module requests the offloaded tensors of the same module in the layer below. So the
        # backward of each layer hides the copy of the next layer's tensors to the device. No pass waits until an
        # activation has been copied to the host (megatron-core, pipeline_parallel/fine_grained_activation_offload.py).
        away = offloaded(self._job, layout, kind)
        exposed_s = away.moved / self._host_bytes_per_s - layer.backward_s - layer.recompute_s
        return replace(layer, backward_s=layer.backward_s + away.share * max(0.0, exposed_s))


def _median_passes(
    compute: Sequence[ComputeTime], speed: Sequence[float]
) -> dict[tuple[ComputeCase, str, int, int], PassSeconds]:
    """Convert the times of all measured slots to speed 1, and return their medians by (case, part, EP, ETP)."""
    times: dict[tuple[ComputeCase, str, int, int], list[dict[str, float]]] = {}
    for time in compute:
        seconds = {
            "forward_s": time.forward.median_s,
            "backward_s": time.input_grad.median_s + time.weight_grad.median_s,
            "weight_grad_s": time.weight_grad.median_s,
            "forward_idle_s": time.forward_idle_s,
            "backward_idle_s": time.backward_idle_s,
        }
        scaled = {name: speed[time.slot] * each for name, each in seconds.items()}
        times.setdefault((time.case, time.part, time.ep, time.etp), []).append(scaled)
    return {
        key: PassSeconds(**{name: statistics.median([one[name] for one in group]) for name in group[0]})
        for key, group in times.items()
    }


def _tokens(case: ComputeCase, source: ComputeCase) -> float:
    """Return the tokens of a case on each slot, divided by the tokens of `source`."""
    return (case.micro_batch_size * source.cp) / (case.cp * source.micro_batch_size)


def _words(case: ComputeCase) -> str:
    return f"tp={case.tp} cp={case.cp} micro-batch {case.micro_batch_size}"
