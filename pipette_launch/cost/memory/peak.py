"""Peak bytes on each pipeline rank: an analytic sum, every term with its source.

Facts: memory.md section 4 ("Assembled"): the peak is the larger of the forward-backward part and of the optimizer step.
Not in it: what lies outside the model's tensors (context, communicators, workspaces, fragmentation; measured by the
warm-up as `Measurements.overhead_bytes`), CP ring buffers, alignment of each parameter within its bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.cost.layers import activations, attention, embedding_and_head, experts
from pipette_launch.cost.layers.dummy_gradients import dummy_gradient_bytes
from pipette_launch.cost.layers.fp8_weights import fp8_weight_bytes
from pipette_launch.cost.layers.optimizer import buffered_parameters, gradient_bytes_per_parameter, optimizer_bytes
from pipette_launch.cost.layers.parameters import Parameters, stage_parameters
from pipette_launch.cost.memory.live_chunks import peak_live_bytes
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """Bytes on one pipeline rank at its peak, by kind."""

    weights: int
    """With their copies in FP8."""
    gradients: int
    optimizer: int
    shared_buffer: int
    """Megatron's global buffer, which lives on once it was used."""
    dummy_gradients: int
    """What stands in for gradients that are added to the buffer as they are computed, kept for good."""
    activations: int
    """Kept by the layers of all live micro-batches."""
    embedding: int
    """Inputs of the model for all live micro-batches, on the first rank."""
    recompute: int
    """What a recomputed layer needs while its backward runs, once."""
    backward: int
    """What any layer's backward needs for a while."""
    mask: int
    """The data loader's attention mask, while a forward pass runs."""
    head: int
    """Final norm, logits and loss of one micro-batch."""
    deferred: int
    """What the head's deferred weight gradients wait with."""
    buffers: int
    """The pipeline's tensors in flight."""
    optimizer_step: int
    """Temporaries of the optimizer step, when no activation lives any more."""

    @property
    def static(self) -> int:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer + self._lasting

    @property
    def total(self) -> int:
        """The peak: static, and the larger of forward-backward and optimizer step."""
        return self.static + max(self._kept + max(self._instants), self.optimizer_step)

    def by_kind(self) -> dict[str, int]:
        """Split the peak as users read it; the values add up to `total`.

        At the peak one of three things happens: the loss with its logits, the backward of a layer, or the step of the
        optimizer, whose temporaries count as buffers.
        """
        kinds = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        if self._kept + max(self._instants) < self.optimizer_step:
            return {**kinds, "activations": 0, "logits": 0, "buffers": self._lasting + self.optimizer_step}
        at_loss, at_backward = self._instants
        is_loss = at_loss >= at_backward
        return {
            **kinds,
            "activations": self.activations + self.embedding + (self.mask if is_loss else at_backward),
            "logits": self.deferred + (self.head if is_loss else 0),
            "buffers": self._lasting + self.buffers,
        }

    @property
    def _lasting(self) -> int:
        return self.shared_buffer + self.dummy_gradients

    @property
    def _kept(self) -> int:
        return self.activations + self.embedding + self.deferred + self.buffers

    @property
    def _instants(self) -> tuple[int, int]:
        """The end of a forward pass, where the loss is, and the backward of a layer: never at once."""
        return self.mask + self.head, self.recompute + self.backward


def peak_memory_bytes(job: Job, layout: Layout) -> tuple[MemoryParts, ...]:
    """Predict every pipeline rank's peak.

    Raises:
        LayoutError: the layout cuts the layers or the batch unevenly.

    """
    microbatches = layout.num_microbatches(job.batch.global_batch_size)
    chunk_bytes = chunk_activation_bytes(job, layout)
    kinds = _kinds(job)
    recompute = max(recompute_working_set_bytes(job, layout, moe=moe) for moe in kinds)
    backward = max(activations.backward_bytes(job, layout, moe=moe) for moe in kinds)
    copies = fp8_weight_bytes(job, layout)
    parts = []
    for rank, parameters in enumerate(stage_parameters(job.model, layout)):
        is_last = rank == layout.pp - 1
        weights, gradients, states, step = rank_states(job, parameters, layout)
        parts.append(
            MemoryParts(
                weights=weights + copies[rank],
                gradients=gradients,
                optimizer=states,
                shared_buffer=shared_buffer_bytes(job, layout, rank),
                dummy_gradients=dummy_gradient_bytes(job, layout, has_head=is_last),
                activations=peak_live_bytes(layout, rank, microbatches, chunk_bytes[rank :: layout.pp]),
                embedding=input_bytes(job, layout, rank, microbatches),
                recompute=recompute,
                backward=backward,
                mask=mask_bytes(job, layout, rank),
                head=embedding_and_head.head_bytes(job, layout) if is_last else 0,
                deferred=embedding_and_head.deferred_bytes(job, layout, microbatches) if is_last else 0,
                buffers=in_flight_bytes(job, layout),
                optimizer_step=step,
            )
        )
    return tuple(parts)


def rank_states(job: Job, parameters: Parameters, layout: Layout) -> tuple[int, int, int, int]:
    """Bytes of weights, gradients, optimizer states, and temporaries of the optimizer step on one pipeline rank."""
    buffered = buffered_parameters(job, parameters, layout)
    weights, gradients = buffered * job.model.dtype_bytes, buffered * gradient_bytes_per_parameter(job)
    return (weights, gradients, *optimizer_bytes(job, parameters, layout))


def input_bytes(job: Job, layout: Layout, rank: int, num_microbatches: int) -> int:
    """Count what the model's inputs keep for all live micro-batches.

    The first rank keeps token ids and the embedding's dropout mask. Full recompute keeps what its units are called
    with, and so the attention mask, where there is one: on the first and the last rank.
    """
    is_first, is_last = rank == 0, rank == layout.pp - 1
    first = embedding_and_head.embedding_bytes(job, layout) if is_first else 0
    mask = embedding_and_head.attention_mask_bytes(job, layout) if layout.recompute.granularity == "full" else 0
    rest = (0,) * (layout.vpp - 1)
    kept = peak_live_bytes(layout, rank, num_microbatches, (first + mask * is_first, *rest))
    if is_last and not is_first:
        kept += peak_live_bytes(layout, rank, num_microbatches, (*rest, mask))
    return kept


def mask_bytes(job: Job, layout: Layout, rank: int) -> int:
    """Count the attention mask of a forward pass, unless full recompute keeps it anyway (see `input_bytes`)."""
    if rank not in (0, layout.pp - 1) or layout.recompute.granularity == "full":
        return 0
    return embedding_and_head.attention_mask_bytes(job, layout)


def chunk_activation_bytes(job: Job, layout: Layout) -> tuple[int, ...]:
    """What each chunk's layers keep for one micro-batch, in model order, with the layout's recompute."""
    model = job.model
    kept = [activations.kept_bytes(job, layout, moe=moe) for moe in (False, bool(model.num_experts))]
    whole_input = activations.stream_bytes(job, layout)
    seen: dict[tuple[int, ...], int] = {}
    chunks = []
    first = 0
    for layers in layout.chunk_layers(model.num_layers):
        kinds = model.moe_layer_freq[first : first + layers] or (0,) * layers
        first += layers
        if kinds not in seen:
            seen[kinds] = _after_full_recompute([kept[kind] for kind in kinds], layout, whole_input)
        chunks.append(seen[kinds])
    chunks[-1] += activations.prediction_bytes(job, layout)
    return tuple(chunks)


def recompute_working_set_bytes(job: Job, layout: Layout, *, moe: bool) -> int:
    """What recompute brings back for a while: the unit that is run again (memory.md section 4: one layer, once).

    Of the block method only where every layer of a chunk is run again: otherwise the layers that were kept come first
    in the backward and are gone by then.
    """
    recompute = layout.recompute
    if recompute.granularity == "none":
        return 0
    layer = activations.layer_activations(job, layout, moe=moe)
    if recompute.granularity == "selective":
        return layer.recomputed(activations.recompute_modules(layout), moe=moe)
    chunks = [layers for layers in layout.chunk_layers(job.model.num_layers) if layers]
    if recompute.method == "uniform":
        return layer.total * min(recompute.num_layers, max(chunks))
    return layer.total if recompute.num_layers >= min(chunks) else 0


def in_flight_bytes(job: Job, layout: Layout) -> int:
    """Count the pipeline's tensors in flight: received, sent, and the one sent before (megatron.md 8.4).

    The last is held by its communication until NCCL's watchdog has seen it end (golden rows with a pipeline: one or two
    tensors of s*b*h beyond the first two, at 4 MiB and at 64 MiB).
    """
    return 3 * activations.stream_bytes(job, layout) if layout.pp > 1 else 0


def shared_buffer_bytes(job: Job, layout: Layout, rank: int) -> int:
    """Count Megatron's global buffer, as large as its largest user on this pipeline rank (megatron.md 8.4).

    Users: the gathered input of sequence parallelism, by Megatron's own linear layers, of which TransformerEngine's
    models have the head alone; the tokens that the all-gather dispatcher gathers; local attention's scores.
    """
    has_linear = job.model.transformer_impl == "local" or rank == layout.pp - 1
    gathers = layout.sequence_parallel and layout.tp > 1 and has_linear
    gathered = activations.residual_bytes(job.model, layout) * layout.tp if gathers else 0
    dispatched = experts.gather_buffer_bytes(job, layout)
    return max(gathered, dispatched, attention.scores_buffer_bytes(job.model, layout))


def _kinds(job: Job) -> tuple[bool, ...]:
    """Which of dense (False) and MoE (True) layers the model has."""
    return tuple(sorted({bool(kind) for kind in job.model.moe_layer_freq})) or (False,)


def _after_full_recompute(sizes: list[int], layout: Layout, layer_input: int) -> int:
    """Keep one input per unit: units of k layers, or each of the chunk's first k layers (megatron.md 8.3)."""
    recompute = layout.recompute
    if recompute.granularity != "full":
        return sum(sizes)
    if recompute.method == "uniform":
        return -(-len(sizes) // recompute.num_layers) * layer_input
    again = min(recompute.num_layers, len(sizes))
    return again * layer_input + sum(sizes[again:])
