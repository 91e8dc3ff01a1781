"""Megatron's constraints on a layout, each with the reason that is counted when it is broken."""

# Facts: validate_args (mt/arguments.py) and TransformerConfig (TC) of core_v0.14.0 to v0.19.0, line numbers of v0.16.1,
# and what fails only at run time.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pipette_launch.facts import Job, Layout
from pipette_launch.search.layouts import memory_option_rules
from pipette_launch.search.layouts.terms import Degrees, Saver, Terms


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules(Terms):
    """What Megatron allows for one job on one kind of device.

    There is a check for each axis, which sees that axis and those before it only: TP, PP, CP, DP, EP with ETP, chunks,
    micro-batches, savers.
    """

    @classmethod
    def of(cls, job: Job, *, device_kind: str) -> Rules:
        """Read the rules that a job's own flags add."""
        words = (flag.replace("=", " ").split() for flag in job.performance_flags)
        return cls(job=job, device_kind=device_kind, flags={name: tuple(values) for name, *values in words})

    def fault(self, layout: Layout) -> str | None:
        """Name the first constraint that a layout breaks, or None for a legal one."""
        degrees = Degrees(
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            cp=layout.cp,
            ep=layout.ep,
            etp=layout.etp,
            use_tp_pp_dp_mapping=layout.use_tp_pp_dp_mapping,
        )
        saver = Saver(*(getattr(layout, name) for name in Saver._fields))
        return (
            self.degrees_fault(degrees)
            or self.chunks_fault(layout.pp, layout.vpp, layout.layers_per_chunk)
            or self.batch_fault(layout.dp, layout.micro_batch_size)
            or self.schedule_fault(layout.pp, layout.vpp, layout.microbatch_group_size, self.num_microbatches(layout))
            or self.state_fault(layout.tp, layout.cp, saver)
            or self.recompute_fault(layout.tp, self.layers_of_chunks(layout), saver)
        )

    def degrees_fault(self, degrees: Degrees) -> str | None:
        """Check what depends on TP, PP, DP, CP, EP and ETP alone."""
        return (
            self.tensor_fault(degrees.tp)
            or self.pipeline_fault(degrees.pp)
            or self.context_fault(degrees.tp, degrees.cp)
            or self.replicas_fault(degrees.dp, degrees.cp)
            or self.expert_fault(degrees)
        )

    def tensor_fault(self, tp: int) -> str | None:
        """Check the widths that tensor parallelism cuts."""
        return next(self._tensor_faults(tp), None)

    def pipeline_fault(self, pp: int) -> str | None:
        """Check flags that ask for a pipeline, or for none."""
        return next(self._pipeline_faults(pp), None)

    def context_fault(self, tp: int, cp: int) -> str | None:
        """Check the sequence that context parallelism cuts, and how it exchanges keys and values."""
        return next(self._context_faults(tp, cp), None)

    def replicas_fault(self, dp: int, cp: int) -> str | None:
        """Check the replicas of the dense weights against the global batch and the optimizer's instances."""
        return next(self._replicas_faults(dp, cp), None)

    def expert_fault(self, degrees: Degrees) -> str | None:
        """Check the grid of the experts."""
        return next(self._expert_faults(degrees), None)

    def chunks_fault(self, pp: int, vpp: int, layers_per_chunk: tuple[int, ...]) -> str | None:
        """Check how the layers are cut into stages and virtual stages."""
        return next(self._chunks_faults(pp, vpp, layers_per_chunk), None)

    def batch_fault(self, dp: int, micro_batch_size: int) -> str | None:
        """Check the micro-batches of one step against the global batch and its ramp-up."""
        return next(self._batch_faults(dp, micro_batch_size), None)

    def schedule_fault(self, pp: int, vpp: int, group_size: int, num_microbatches: int) -> str | None:
        """Check that there are enough micro-batches for interleaving (schedules.py:996-1019)."""
        if vpp == 1:
            return None
        group = group_size or pp
        if not pp <= group <= num_microbatches:
            return "interleaving needs at least pp micro-batches"
        if 0 < num_microbatches % group < pp:
            return "interleaving needs micro-batches in multiples of pp"
        return None

    def state_fault(self, tp: int, cp: int, saver: Saver) -> str | None:
        """Check sequence parallelism, the distributed optimizer and the overlap of its communication."""
        sequence = next(memory_option_rules.sequence_faults(self, tp, cp, saver), None)
        return sequence or next(memory_option_rules.optimizer_faults(self, saver), None)

    def recompute_fault(self, tp: int, layers: frozenset[int], saver: Saver) -> str | None:
        """Check recompute against the chunks' layers and the flags that exclude it or ask for it."""
        return next(memory_option_rules.recompute_faults(self, tp, layers, saver), None)

    def layers_of_chunks(self, layout: Layout) -> frozenset[int]:
        """The different numbers of layers that chunks have."""
        return frozenset(layout.layers_per_chunk or (self.job.model.num_layers // layout.num_chunks,))

    def num_microbatches(self, layout: Layout) -> int:
        """Micro-batches of one step, rounded down where they do not divide."""
        return self.job.batch.global_batch_size // (layout.micro_batch_size * layout.dp)

    def _tensor_faults(self, tp: int) -> Iterator[str]:
        model = self.job.model
        groups = model.num_query_groups
        # megatron-core 0.16 learned to replicate query groups over more tensor ranks than there are groups.
        replicates = self.release >= (0, 16)
        padded = int(self.flags.get("--padded-vocab-size", ("0",))[0])
        if model.num_attention_heads % tp:
            yield f"tp does not divide num_attention_heads={model.num_attention_heads}"
        if groups % tp and not (replicates and tp % groups == 0):
            yield f"tp is no divisor{' or multiple' if replicates else ''} of num_query_groups={groups}"
        if model.ffn_hidden_size % tp:
            yield f"tp does not divide ffn_hidden_size={model.ffn_hidden_size}"
        if padded % tp:
            yield f"tp does not divide --padded-vocab-size={padded}"
        if model.moe_shared_expert_intermediate_size % tp:
            yield "tp does not divide moe_shared_expert_intermediate_size"

    def _pipeline_faults(self, pp: int) -> Iterator[str]:
        if pp == 1 and self.job.model.mtp_num_layers and "--overlap-moe-expert-parallel-comm" in self.flags:
            yield "--overlap-moe-expert-parallel-comm with multi-token prediction needs pp > 1"
        if pp > 1 and "--cpu-offloading-num-layers" in self.flags:
            yield "--cpu-offloading-num-layers needs pp = 1"
        if pp == 1 and "--defer-embedding-wgrad-compute" in self.flags:
            yield "--defer-embedding-wgrad-compute needs pp > 1"

    def _context_faults(self, tp: int, cp: int) -> Iterator[str]:
        model = self.job.model
        if math.prod(int(size) for size in self.flags.get("--hierarchical-context-parallel-sizes", (str(cp),))) != cp:
            yield "cp is not the product of --hierarchical-context-parallel-sizes"
        if cp == 1:
            return
        if self.device_kind == "cpu":
            yield "context parallelism does not run on CPU"
        if model.transformer_impl == "local":
            yield "context parallelism needs Transformer Engine's attention"
        if model.seq_length % (2 * cp):
            yield f"2*cp does not divide seq_length={model.seq_length}"
        groups = max(1, model.num_query_groups // tp)
        if "a2a" in self.flags.get("--cp-comm-type", ()) and (model.num_attention_heads // tp % cp or groups % cp):
            yield "--cp-comm-type a2a needs heads/tp and query groups/tp divisible by cp"

    def _replicas_faults(self, dp: int, cp: int) -> Iterator[str]:
        batch_size = self.job.batch.global_batch_size
        instances = int(self.flags.get("--num-distributed-optimizer-instances", ("1",))[0])
        if batch_size % dp:
            yield f"micro_batch_size*dp does not divide global_batch_size={batch_size}"
        if dp * cp % instances:
            yield "--num-distributed-optimizer-instances does not divide dp*cp"

    def _expert_faults(self, degrees: Degrees) -> Iterator[str]:
        instances = int(self.flags.get("--num-distributed-optimizer-instances", ("1",))[0])
        if degrees.world_size % (degrees.etp * degrees.ep * degrees.pp):
            yield "etp*ep*pp does not divide the ranks"
        if degrees.expert_dp % instances:
            yield "--num-distributed-optimizer-instances does not divide dp*cp"
        if self.job.model.num_experts:
            yield from self._expert_width_faults(degrees)
            yield from self._expert_flag_faults(degrees)
        elif degrees.ep > 1:
            yield "expert parallelism needs experts"

    def _expert_width_faults(self, degrees: Degrees) -> Iterator[str]:
        model = self.job.model
        if (model.num_experts or 1) % degrees.ep:
            yield f"ep does not divide num_experts={model.num_experts}"
        if model.moe_ffn_hidden_size % degrees.etp:
            yield f"etp does not divide moe_ffn_hidden_size={model.moe_ffn_hidden_size}"
        # TC:1574, from core_v0.15.0 on.
        if model.add_bias_linear and degrees.etp > 1 and self.release >= (0, 15):
            yield "experts with biases need etp = 1 (--disable-bias-linear would free it)"
        if degrees.use_tp_pp_dp_mapping and degrees.pp > 1 and degrees.expert_dp != degrees.dp:
            yield "--use-tp-pp-dp-mapping needs as many expert replicas as replicas where pp > 1"

    def _expert_flag_faults(self, degrees: Degrees) -> Iterator[str]:
        if self.flags.get("--moe-token-dispatcher-type", ("",))[0] == "flex" and degrees.etp * degrees.ep == 1:
            yield "the flex dispatcher needs etp*ep > 1"
        if degrees.ep == 1 and "--overlap-moe-expert-parallel-comm" in self.flags:
            yield "--overlap-moe-expert-parallel-comm needs ep > 1"
        if degrees.ep > 1 and self.job.own.ep == 1 and self.flags.get("--cuda-graph-impl", ("",))[0] == "local":
            yield "--cuda-graph-impl local with ep > 1 needs --moe-pad-experts-for-cuda-graph-inference"

    def _chunks_faults(self, pp: int, vpp: int, layers_per_chunk: tuple[int, ...]) -> Iterator[str]:
        layers = self.job.model.num_layers
        if vpp > 1 and pp == 1:
            yield "virtual stages need pp > 1"
        if layers_per_chunk:
            divides = len(layers_per_chunk) == pp * vpp and sum(layers_per_chunk) == layers
        else:
            divides = layers % (pp * vpp) == 0
        if not divides:
            yield f"pp*vpp does not divide num_layers={layers}"
        if vpp > 1 and pp == 2 and "--no-overlap-p2p-communication" in self.flags:
            yield "--no-overlap-p2p-communication allows virtual stages only with pp > 2"
        if vpp == 1 and pp > 1 and "--overlap-moe-expert-parallel-comm" in self.flags:
            yield "--overlap-moe-expert-parallel-comm needs virtual stages where pp > 1"
        if vpp == 1 and "--overlap-param-gather-with-optimizer-step" in self.flags:
            yield "--overlap-param-gather-with-optimizer-step needs virtual stages"

    def _batch_faults(self, dp: int, micro_batch_size: int) -> Iterator[str]:
        batch_size, samples = self.job.batch.global_batch_size, micro_batch_size * dp
        if batch_size % samples:
            yield f"micro_batch_size*dp does not divide global_batch_size={batch_size}"
        if any(int(size) % samples for size in self.flags.get("--rampup-batch-size", ())[:2]):
            yield "micro_batch_size*dp does not divide every --rampup-batch-size"
        # From core_v0.18.0 on; without their flags both are as in training.
        evaluated = int(self.flags.get("--eval-global-batch-size", (str(batch_size),))[0])
        at_once = int(self.flags.get("--eval-micro-batch-size", (str(micro_batch_size),))[0])
        if evaluated % (at_once * dp):
            yield "dp does not divide the micro-batches of --eval-global-batch-size"
