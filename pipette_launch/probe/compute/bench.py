"""What the two benches of a slot share: the least memory of a case, and that a case that fails leaves a note."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from pipette_launch.facts import ComputeCase, Job, Layout, ModelSpec
from pipette_launch.probe.compute.peak_memory import MemoryMeter
from pipette_launch.probe.options import ProbeOptions
from pipette_launch.text import bytes_text
from pipette_patches.workload.layers import WorkloadError, is_out_of_memory

OPTIMIZER_BYTES = {"adam": 8, "sgd": 4}
FP32_BYTES = 4
"""Of a main gradient, and of a master weight."""


def _layer_parameters(model: ModelSpec) -> tuple[int, int, int]:
    """The matrices of a layer: its attention, its dense MLP, and all experts of an MoE layer."""
    latent = model.latent_attention
    attention = latent.weights(model.hidden_size, model.num_attention_heads) if latent else model.attention_parameters()
    experts = model.num_experts * model.mlp_parameters(model.moe_ffn_hidden_size) if model.num_experts else 0
    return attention, model.mlp_parameters(), experts


def weight_bytes(job: Job, case: ComputeCase) -> int:
    """Least memory of one layer, embedding and head: weights, their gradients, and main gradients in fp32.

    Of the experts, which no tensor parallelism cuts here, it is one rank's share. Multi-token prediction has a layer of
    its own beside the other.
    """
    model = job.model
    attention, mlp, experts = _layer_parameters(model)
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    table = model.padded_vocab_size(case.tp) * model.hidden_size
    layers = 2 if model.mtp_num_layers else 1
    cut = layers * (0 if experts else attention + mlp) + tables * table
    parameters = cut // case.tp + layers * experts // job.own.ep
    return parameters * (2 * model.dtype_bytes + FP32_BYTES)


def state_bytes(job: Job, layout: Layout, pp_rank: int) -> int:
    """Least memory of a stage's rank: the matrices of its layers, their gradients and the optimizer's states.

    Raises:
        LayoutError: the layout cuts the layers unevenly.

    """
    model = job.model
    layers = layout.stage_layers(model.num_layers)[pp_rank]
    attention, mlp, experts = _layer_parameters(model)
    ends = (pp_rank == 0) + (pp_rank == layout.pp - 1 and model.untie_embeddings_and_output_weights)
    table = model.padded_vocab_size(layout.tp) * model.hidden_size
    parameters = (layers * (attention if experts else attention + mlp) + ends * table) // layout.tp
    # A layer may have no experts: then this counts none.
    if all(model.moe_layer_freq):
        parameters += layers * experts // (layout.ep * layout.etp)
    gradient = 2 if job.grad_reduce_in_bf16 else FP32_BYTES
    master = FP32_BYTES if model.dtype_bytes == 2 else 0
    shards = layout.dp * layout.cp if layout.use_distributed_optimizer else 1
    optimizer = (OPTIMIZER_BYTES.get(job.optimizer, 0) + master) // shards
    return parameters * (model.dtype_bytes + gradient + optimizer)


@dataclass(kw_only=True)
class Bench:
    """One slot, which measures case by case, and its notes."""

    PHASE: ClassVar[str]

    options: ProbeOptions
    slot: int
    meter: MemoryMeter
    notes: list[str] = field(default_factory=list)

    def check_room(self, words: str, needed_bytes: int, purpose: str = "") -> None:
        """Refuse a case that cannot fit, by a WorkloadError: on CPU the kernel would kill this process, or another."""
        free = self.options.device(self.slot).memory_free_bytes
        if needed_bytes > free:
            raise WorkloadError(
                f"{words} needs {bytes_text(needed_bytes)}{purpose}, slot {self.options.slot_name(self.slot)} has "
                f"{bytes_text(free)}"
            )

    def note_out_of_memory(self, words: str) -> None:
        """Note that a case ran out of memory here."""
        self.notes.append(f"{self.PHASE}: {words} ran out of memory on slot {self.options.slot_name(self.slot)}")

    @contextmanager
    def noting(self, words: str, fail: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Turn a failure of a case into a note, and call `fail`: the other cases may work."""
        try:
            yield
        except WorkloadError as error:
            self.notes.append(f"{self.PHASE}: {error}")
            fail()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.note_out_of_memory(words)
            fail()
