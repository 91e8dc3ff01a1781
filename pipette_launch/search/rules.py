"""Megatron's constraints on a layout, each with the reason that is counted when it is broken."""

# Facts: validate_args and TransformerConfig of core_v0.16.1, and what fails only at run time.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipette_launch.facts import Job, Layout

ONLY_ADAM_SHARDS = "the distributed optimizer shards only Adam"


class Degrees(NamedTuple):
    """How the ranks are divided, before chunks, micro-batches and memory savers are chosen."""

    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    etp: int

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert shard, where the expert grid divides the ranks."""
        return self.world_size // (self.etp * self.ep * self.pp)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What Megatron allows for one job on one kind of device."""

    job: Job
    device_kind: str
    flags: Mapping[str, tuple[str, ...]]
    """The user's flags without a field of their own, as name -> values."""

    @classmethod
    def of(cls, job: Job, *, device_kind: str) -> Rules:
        """Read the rules that a job's own flags add."""
        words = (flag.replace("=", " ").split() for flag in job.performance_flags)
        return cls(job=job, device_kind=device_kind, flags={name: tuple(values) for name, *values in words})

    def fault(self, layout: Layout) -> str | None:
        """Name the first constraint that a layout breaks, or None for a legal one."""
        degrees = Degrees(tp=layout.tp, pp=layout.pp, dp=layout.dp, cp=layout.cp, ep=layout.ep, etp=layout.etp)
        return (
            self.degrees_fault(degrees)
            or self.chunks_fault(layout.pp, layout.vpp, layout.layers_per_chunk)
            or self.batch_fault(layout)
            or self.state_fault(layout)
            or self.recompute_fault(layout)
        )

    def degrees_fault(self, degrees: Degrees) -> str | None:
        """Check what depends on TP, PP, DP, CP, EP and ETP alone."""
        return (
            self._tensor_fault(degrees)
            or self._context_fault(degrees)
            or self._expert_fault(degrees)
            or self._degree_flags_fault(degrees)
        )

    def chunks_fault(self, pp: int, vpp: int, layers_per_chunk: tuple[int, ...]) -> str | None:
        """Check how the layers are cut into stages and virtual stages."""
        layers = self.job.model.num_layers
        if layers_per_chunk:
            given = len(layers_per_chunk) == pp * vpp and sum(layers_per_chunk) == layers
            even = given
        else:
            even = layers % (pp * vpp) == 0
        return _first(
            (vpp > 1 and pp == 1, "virtual stages need pp > 1"),
            (not even, f"pp*vpp does not divide num_layers={layers}"),
            (
                vpp > 1 and pp == 2 and "--no-overlap-p2p-communication" in self.flags,
                "--no-overlap-p2p-communication allows virtual stages only with pp > 2",
            ),
            (
                vpp == 1 and pp > 1 and "--overlap-moe-expert-parallel-comm" in self.flags,
                "--overlap-moe-expert-parallel-comm needs virtual stages where pp > 1",
            ),
            (
                vpp == 1 and "--overlap-param-gather-with-optimizer-step" in self.flags,
                "--overlap-param-gather-with-optimizer-step needs virtual stages",
            ),
        )

    def batch_fault(self, layout: Layout) -> str | None:
        """Check the micro-batches of one step against the global batch, its ramp-up and the schedule."""
        per_round = layout.micro_batch_size * layout.dp
        batch_size = self.job.batch.global_batch_size
        rampup = [int(value) for value in self.flags.get("--rampup-batch-size", ())[:2]]
        num_microbatches = batch_size // per_round
        group = layout.microbatch_group_size or layout.pp
        rest = num_microbatches % group
        return _first(
            (batch_size % per_round != 0, f"micro_batch_size*dp does not divide global_batch_size={batch_size}"),
            (any(size % per_round for size in rampup), "micro_batch_size*dp does not divide every --rampup-batch-size"),
            (
                layout.vpp > 1 and not layout.pp <= group <= num_microbatches,
                "interleaving needs at least pp micro-batches",
            ),
            (layout.vpp > 1 and 0 < rest < layout.pp, "interleaving needs micro-batches in multiples of pp"),
        )

    def state_fault(self, layout: Layout) -> str | None:
        """Check sequence parallelism, the distributed optimizer and the overlap of its communication."""
        model = self.job.model
        sharded = layout.use_distributed_optimizer
        needs_sharding = [name for name in _NEEDS_DISTRIBUTED_OPTIMIZER if name in self.flags]
        return _first(
            (layout.sequence_parallel and layout.tp == 1, "sequence parallelism needs tp > 1"),
            (layout.sequence_parallel and self.device_kind == "cpu", "sequence parallelism does not run on CPU"),
            (
                layout.sequence_parallel and model.seq_length // layout.cp % layout.tp != 0,
                f"tp does not divide seq_length={model.seq_length}/cp for sequence parallelism",
            ),
            (
                bool(model.num_experts) and layout.tp > 1 and not layout.sequence_parallel,
                "experts with tp > 1 need sequence parallelism",
            ),
            (
                "--tp-comm-overlap" in self.flags and not layout.sequence_parallel,
                "--tp-comm-overlap needs sequence parallelism",
            ),
            (sharded and self.job.optimizer != "adam", ONLY_ADAM_SHARDS),
            (not sharded and bool(needs_sharding), f"{'/'.join(needs_sharding)} needs the distributed optimizer"),
            (
                layout.overlap_param_gather and not (sharded and layout.overlap_grad_reduce),
                "overlap_param_gather needs the distributed optimizer and overlap_grad_reduce",
            ),
        )

    def recompute_fault(self, layout: Layout) -> str | None:
        """Check recompute against the flags that exclude it or ask for it."""
        full = layout.recompute.granularity == "full"
        graphs = self.flags.get("--cuda-graph-impl", ("none",))[0] in {"local", "transformer_engine"}
        return _first(
            (full and "--overlap-moe-expert-parallel-comm" in self.flags, "MoE overlap excludes full recompute"),
            (full and graphs, "CUDA graphs exclude full recompute"),
            (
                layout.recompute.granularity != "none" and "--cpu-offloading-num-layers" in self.flags,
                "--cpu-offloading-num-layers excludes recompute",
            ),
            (
                "--distribute-saved-activations" in self.flags
                and not (full and layout.tp > 1 and not layout.sequence_parallel),
                "--distribute-saved-activations needs full recompute and tp > 1 without sequence parallelism",
            ),
        )

    def _tensor_fault(self, degrees: Degrees) -> str | None:
        model, tp = self.job.model, degrees.tp
        groups = model.num_query_groups
        # megatron-core 0.16 learned to replicate query groups over more tensor ranks than there are groups.
        replicates = _version(self.job.megatron_version) >= (0, 16)
        padded = int(self.flags.get("--padded-vocab-size", ("0",))[0])
        return _first(
            (
                model.num_attention_heads % tp != 0,
                f"tp does not divide num_attention_heads={model.num_attention_heads}",
            ),
            (
                groups % tp != 0 and not (replicates and tp % groups == 0),
                f"tp is no divisor{' or multiple' if replicates else ''} of num_query_groups={groups}",
            ),
            (model.ffn_hidden_size % tp != 0, f"tp does not divide ffn_hidden_size={model.ffn_hidden_size}"),
            (padded % tp != 0, f"tp does not divide --padded-vocab-size={padded}"),
            (
                bool(model.moe_shared_expert_intermediate_size % tp),
                "tp does not divide moe_shared_expert_intermediate_size",
            ),
        )

    def _context_fault(self, degrees: Degrees) -> str | None:
        model, cp = self.job.model, degrees.cp
        if cp == 1:
            sizes = self.flags.get("--hierarchical-context-parallel-sizes", ())
            return "cp is not the product of --hierarchical-context-parallel-sizes" if sizes else None
        sizes = self.flags.get("--hierarchical-context-parallel-sizes", (str(cp),))
        heads = model.num_attention_heads // degrees.tp
        return _first(
            (self.device_kind == "cpu", "context parallelism does not run on CPU"),
            (model.transformer_impl == "local", "context parallelism needs Transformer Engine's attention"),
            (model.seq_length % (2 * cp) != 0, f"2*cp does not divide seq_length={model.seq_length}"),
            (
                "a2a" in self.flags.get("--cp-comm-type", ()) and heads % cp != 0,
                "--cp-comm-type a2a needs heads/tp divisible by cp",
            ),
            (
                math.prod(int(size) for size in sizes) != cp,
                "cp is not the product of --hierarchical-context-parallel-sizes",
            ),
        )

    def _expert_fault(self, degrees: Degrees) -> str | None:
        model = self.job.model
        inside = degrees.etp * degrees.ep * degrees.pp
        if degrees.world_size % inside:
            return "etp*ep*pp does not divide the ranks"
        if not model.num_experts:
            return "expert parallelism needs experts" if degrees.ep > 1 else None
        swapped = self.job.own.use_tp_pp_dp_mapping and degrees.pp > 1
        dispatcher = self.flags.get("--moe-token-dispatcher-type", ("",))[0]
        return _first(
            (model.num_experts % degrees.ep != 0, f"ep does not divide num_experts={model.num_experts}"),
            (
                model.moe_ffn_hidden_size % degrees.etp != 0,
                f"etp does not divide moe_ffn_hidden_size={model.moe_ffn_hidden_size}",
            ),
            (
                swapped and degrees.expert_dp != degrees.dp,
                "--use-tp-pp-dp-mapping needs as many expert replicas as replicas where pp > 1",
            ),
            (dispatcher == "flex" and degrees.etp * degrees.ep == 1, "the flex dispatcher needs etp*ep > 1"),
            (
                degrees.ep == 1 and "--overlap-moe-expert-parallel-comm" in self.flags,
                "--overlap-moe-expert-parallel-comm needs ep > 1",
            ),
        )

    def _degree_flags_fault(self, degrees: Degrees) -> str | None:
        instances = int(self.flags.get("--num-distributed-optimizer-instances", ("1",))[0])
        return _first(
            (
                bool(degrees.dp * degrees.cp % instances or degrees.expert_dp % instances),
                "--num-distributed-optimizer-instances does not divide dp*cp",
            ),
            (
                degrees.pp > 1 and "--cpu-offloading-num-layers" in self.flags,
                "--cpu-offloading-num-layers needs pp = 1",
            ),
            (
                degrees.pp == 1 and "--defer-embedding-wgrad-compute" in self.flags,
                "--defer-embedding-wgrad-compute needs pp > 1",
            ),
        )


_NEEDS_DISTRIBUTED_OPTIMIZER = (
    "--fp8-param-gather",
    "--use-precision-aware-optimizer",
    "--overlap-param-gather-with-optimizer-step",
)


def _first(*cases: tuple[bool, str]) -> str | None:
    return next((reason for broken, reason in cases if broken), None)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
