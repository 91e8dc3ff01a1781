"""Megatron's constraints on a layout, each with the reason that is counted when it is broken."""

# Sources: validate_args (megatron/training/arguments.py) and TransformerConfig of core_v0.14.0 to v0.19.0, line
# numbers of v0.16.1, and what fails only at run time.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from pipette_launch.cost.layers.sharding import adds_gradients_twice
from pipette_launch.errors import LayoutError
from pipette_launch.facts import HybridLayers, Job, Layout, Recompute
from pipette_launch.facts.machines.rooms import Rooms
from pipette_launch.facts.performance import PerformanceOptions, flag_of
from pipette_launch.facts.together import expert_block, tensor_block
from pipette_launch.megatron.chunks import FIRST_CUT_PATTERNS
from pipette_launch.megatron.layout import OWN_MODULES_OF_TE
from pipette_launch.megatron.performance import performance_options
from pipette_launch.search.layouts.layout_parts import Degrees, MemoryOptions

ONLY_ADAM_SHARDS = "the distributed optimizer shards only Adam"
FSDP = ("use_megatron_fsdp", "use_torch_fsdp2")
NEEDS_DISTRIBUTED_OPTIMIZER = (
    "use_megatron_fsdp",
    "fp8_param_gather",
    "use_precision_aware_optimizer",
    "overlap_param_gather_with_optimizer_step",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What Megatron allows for one job on one kind of device.

    There is a check for each axis, which sees that axis and those before it only: TP, PP, CP, DP, EP with ETP, chunks,
    micro-batches, memory options. Each yields a sentence for every constraint that is broken.
    """

    job: Job
    device_kind: str
    options: PerformanceOptions
    rooms: Rooms | None = None
    """Which must hold the ranks that the job's flags demand together; None on CPU, and to ask Megatron alone."""

    @classmethod
    def of(cls, job: Job, *, device_kind: str, rooms: Rooms | None = None) -> Rules:
        """Read the rules that a job's own flags add."""
        rooms = rooms if device_kind == "cuda" else None
        return cls(job=job, device_kind=device_kind, options=performance_options(job), rooms=rooms)

    def fault(self, layout: Layout) -> str | None:
        """Name the first constraint that a layout breaks, or None for a legal one."""
        degrees = Degrees(*(getattr(layout, name) for name in Degrees._fields))
        options = MemoryOptions(*(getattr(layout, name) for name in MemoryOptions._fields))
        faults = chain(
            self.tensor_faults(layout.tp),
            self.pipeline_faults(layout.pp),
            self.context_faults(layout.tp, layout.cp),
            self.replicas_faults(layout.dp, layout.cp),
            self.expert_faults(degrees),
            self.chunks_faults(layout.pp, layout.vpp, layout.layers_per_chunk),
            self.batch_faults(layout.dp, layout.micro_batch_size),
            self.schedule_faults(layout.pp, layout.vpp, layout.microbatch_group_size, self.num_microbatches(layout)),
            self.state_faults(layout.tp, layout.cp, options),
            self.recompute_faults(layout.tp, self.layers_of_chunks(layout), options),
        )
        return next(faults, None)

    def schedule_faults(self, pp: int, vpp: int, group_size: int, num_microbatches: int) -> Iterator[str]:
        """Check that there are enough micro-batches for interleaving (schedules.py:996-1019).

        Args:
            pp: pipeline ranks.
            vpp: chunks of each.
            group_size: micro-batches that run through a chunk at a time; 0 = one for each pipeline rank.
            num_microbatches: of one step.

        """
        group = group_size or pp
        if vpp > 1 and not pp <= group <= num_microbatches:
            yield "interleaving needs at least pp micro-batches"
        elif vpp > 1 and 0 < num_microbatches % group < pp:
            yield "interleaving needs micro-batches in multiples of pp"

    def state_faults(self, tp: int, cp: int, options: MemoryOptions) -> Iterator[str]:
        """Check sequence parallelism, the distributed optimizer and the overlap of its communication."""
        yield from self._sequence_faults(tp, cp, options)
        yield from self._optimizer_faults(options)

    def recompute_faults(self, tp: int, layers: frozenset[int], options: MemoryOptions) -> Iterator[str]:
        """Check recompute against the different numbers of layers of chunks and the flags that exclude or need it."""
        recompute = options.recompute
        full = recompute.granularity == "full"
        yield from self._unit_faults(recompute, layers)
        yield from self._module_faults(recompute)
        if full and self.job.model.hybrid and self.job.release < (0, 18):
            yield "before 0.18 hybrid models have no full recompute"
        if full and self.options.overlap_moe_expert_parallel_comm:
            yield "MoE overlap excludes full recompute"
        graphs = self.options.cuda_graph_impl in ("local", "transformer_engine")
        if full and graphs and self.options.cuda_graph_scope != ("full_iteration",):
            yield "CUDA graphs exclude full recompute"
        if recompute.granularity != "none" and self.options.cpu_offloading_num_layers:
            yield f"{flag_of('cpu_offloading_num_layers')} excludes recompute"
        if self.options.distribute_saved_activations and not (full and tp > 1 and not options.sequence_parallel):
            flag = flag_of("distribute_saved_activations")
            yield f"{flag} needs full recompute and tp > 1 without sequence parallelism"

    def layers_of_chunks(self, layout: Layout) -> frozenset[int]:
        """The different numbers of layers that chunks have."""
        return frozenset(layout.layers_per_chunk or (self.job.model.num_layers // layout.num_chunks,))

    def num_microbatches(self, layout: Layout) -> int:
        """Micro-batches of one step, rounded down where they do not divide."""
        return self.job.batch.global_batch_size // (layout.micro_batch_size * layout.dp)

    def tensor_faults(self, tp: int) -> Iterator[str]:
        """Check the widths that tensor parallelism cuts."""
        model = self.job.model
        groups = model.num_query_groups
        # megatron-core 0.16 learned to replicate query groups over more tensor ranks than there are groups.
        replicates = self.job.release >= (0, 16)
        padded = self.options.padded_vocab_size
        if model.num_attention_heads % tp:
            yield f"tp does not divide num_attention_heads={model.num_attention_heads}"
        if groups % tp and not (replicates and tp % groups == 0):
            yield f"tp is no divisor{' or multiple' if replicates else ''} of num_query_groups={groups}"
        if model.ffn_hidden_size % tp:
            yield f"tp does not divide ffn_hidden_size={model.ffn_hidden_size}"
        if padded % tp:
            yield f"tp does not divide {flag_of('padded_vocab_size')}={padded}"
        if model.moe_shared_expert_intermediate_size % tp:
            yield "tp does not divide moe_shared_expert_intermediate_size"
        # It divides the heads then, too (mamba_mixer.py of core_v0.17.1).
        if model.hybrid and model.hybrid.mamba_num_groups % tp:
            yield f"tp does not divide mamba_num_groups={model.hybrid.mamba_num_groups}"
        if self.rooms:
            try:
                tensor_block(self.options, tp, self.rooms)
            except LayoutError as error:
                yield str(error)
        yield from self._latent_faults(tp)

    def _latent_faults(self, tp: int) -> Iterator[str]:
        """Check the latents, to which Transformer Engine's layers project on every rank in whole."""
        latent = self.job.model.latent_attention
        if latent and self.job.model.transformer_impl == "local":
            if (latent.q_lora_rank or 0) % tp:
                yield f"tp does not divide q_lora_rank={latent.q_lora_rank}"
            if (latent.kv_lora_rank + latent.qk_pos_emb_head_dim) % tp:
                yield f"tp does not divide kv_lora_rank={latent.kv_lora_rank} + {latent.qk_pos_emb_head_dim}"

    def pipeline_faults(self, pp: int) -> Iterator[str]:
        """Check flags that ask for a pipeline, or for none."""
        # Megatron-FSDP passes validation with a pipeline and then asserts that its data-parallel groups, of one stage
        # each, are those of a mesh over all ranks (core_v0.14.0 to v0.19.0, mcore_fsdp_adapter.py, _get_dp_tp_mesh).
        for name in FSDP:
            if pp > 1 and getattr(self.options, name):
                yield f"{flag_of(name)} needs pp = 1"
        depths = self.job.model.mtp_num_layers
        if depths and self.options.overlap_moe_expert_parallel_comm:
            if pp == 1:
                yield f"{flag_of('overlap_moe_expert_parallel_comm')} with multi-token prediction needs pp > 1"
            if depths > 1:
                yield f"{flag_of('overlap_moe_expert_parallel_comm')} allows one depth of multi-token prediction"
        if pp > 1 and self.options.cpu_offloading_num_layers:
            yield f"{flag_of('cpu_offloading_num_layers')} needs pp = 1"
        if pp == 1 and self.options.defer_embedding_wgrad_compute:
            yield f"{flag_of('defer_embedding_wgrad_compute')} needs pp > 1"

    def context_faults(self, tp: int, cp: int) -> Iterator[str]:
        """Check the sequence that context parallelism cuts, and how it exchanges keys and values."""
        model = self.job.model
        if math.prod(self.options.hierarchical_context_parallel_sizes or (cp,)) != cp:
            yield f"cp is not the product of {flag_of('hierarchical_context_parallel_sizes')}"
        if cp == 1:
            return
        if self.device_kind == "cpu":
            yield "context parallelism does not run on CPU"
        if model.transformer_impl == "local":
            yield "context parallelism needs Transformer Engine's attention"
        if model.seq_length % (2 * cp):
            yield f"2*cp does not divide seq_length={model.seq_length}"
        if any(model.attention_windows) and not {*self.options.cp_comm_type} <= {"a2a", "all_gather"}:
            yield f"with {flag_of('cp_comm_type')} p2p context parallelism has no attention windows"
        if model.hybrid:
            yield from self._mamba_context_faults(model.hybrid, tp, cp)
        groups = max(1, model.num_query_groups // tp)
        if "a2a" in self.options.cp_comm_type and (model.num_attention_heads // tp % cp or groups % cp):
            yield f"{flag_of('cp_comm_type')} a2a needs heads/tp and query groups/tp divisible by cp"

    def _mamba_context_faults(self, mamba: HybridLayers, tp: int, cp: int) -> Iterator[str]:
        """Check the heads and groups that ranks exchange for tokens (mamba_context_parallel.py of core_v0.17.1)."""
        groups = max(1, mamba.mamba_num_groups // tp)
        if mamba.mamba_num_heads // tp % cp:
            yield f"cp does not divide mamba_num_heads={mamba.mamba_num_heads}/tp"
        if groups % cp and cp % groups:
            yield f"cp is no divisor or multiple of mamba_num_groups={mamba.mamba_num_groups}/tp"

    def replicas_faults(self, dp: int, cp: int) -> Iterator[str]:
        """Check the replicas of the dense weights against the global batch and the optimizer's instances."""
        batch_size = self.job.batch.global_batch_size
        instances = self.options.num_distributed_optimizer_instances
        if batch_size % dp:
            yield f"micro_batch_size*dp does not divide global_batch_size={batch_size}"
        if dp * cp % instances:
            yield f"{flag_of('num_distributed_optimizer_instances')} does not divide dp*cp"

    def expert_faults(self, degrees: Degrees) -> Iterator[str]:
        """Check the grid of the experts."""
        instances = self.options.num_distributed_optimizer_instances
        if degrees.world_size % (degrees.etp * degrees.ep * degrees.pp):
            yield "etp*ep*pp does not divide the ranks"
        if adds_gradients_twice(self.job, degrees.dp * degrees.cp, degrees.expert_dp):
            yield "Megatron-FSDP adds gradients twice that one rank holds alone"
        if degrees.expert_dp % instances:
            yield f"{flag_of('num_distributed_optimizer_instances')} does not divide dp*cp"
        if self.job.model.num_experts:
            yield from self._expert_width_faults(degrees)
            yield from self._expert_flag_faults(degrees)
        elif degrees.ep > 1:
            yield "expert parallelism needs experts"
        if degrees.ep > 1 and self.options.use_torch_fsdp2:
            yield f"{flag_of('use_torch_fsdp2')} needs ep = 1"

    def _expert_width_faults(self, degrees: Degrees) -> Iterator[str]:
        model = self.job.model
        if (model.num_experts or 1) % degrees.ep:
            yield f"ep does not divide num_experts={model.num_experts}"
        if model.moe_ffn_hidden_size % degrees.etp:
            yield f"etp does not divide moe_ffn_hidden_size={model.moe_ffn_hidden_size}"
        # Checked by TransformerConfig from core_v0.15.0 on.
        if model.add_bias_linear and degrees.etp > 1 and self.job.release >= (0, 15):
            yield "experts with biases need etp = 1 (--disable-bias-linear would free it)"
        if degrees.use_tp_pp_dp_mapping and degrees.pp > 1 and degrees.expert_dp != degrees.dp:
            yield "--use-tp-pp-dp-mapping needs as many expert replicas as replicas where pp > 1"

    def _expert_flag_faults(self, degrees: Degrees) -> Iterator[str]:
        dispatcher = self.options.moe_token_dispatcher_type
        if dispatcher == "flex" and degrees.etp * degrees.ep == 1:
            yield "the flex dispatcher needs etp*ep > 1"
        if self.rooms:
            try:
                expert_block(self.options, degrees.etp * degrees.ep, self.rooms)
            except LayoutError as error:
                yield str(error)
        if degrees.ep == 1 and self.options.overlap_moe_expert_parallel_comm:
            yield f"{flag_of('overlap_moe_expert_parallel_comm')} needs ep > 1"
        if degrees.ep > 1 and self.job.own.ep == 1 and self.options.cuda_graph_impl == "local":
            yield f"{flag_of('cuda_graph_impl')} local with ep > 1 needs --moe-pad-experts-for-cuda-graph-inference"

    def chunks_faults(self, pp: int, vpp: int, layers_per_chunk: tuple[int, ...]) -> Iterator[str]:
        """Check how the layers are cut into stages and virtual stages."""
        layers = self.job.model.num_layers
        if vpp > 1 and pp == 1:
            yield "virtual stages need pp > 1"
        if layers_per_chunk:
            divides = len(layers_per_chunk) == pp * vpp and sum(layers_per_chunk) == layers
        else:
            divides = layers % (pp * vpp) == 0
        names_stages = self.job.release >= FIRST_CUT_PATTERNS
        if self.job.model.hybrid and not names_stages and (vpp > 1 or layers_per_chunk):
            yield "before 0.17 hybrid models have no virtual stages, and as many layers on each stage"
        if not divides:
            yield f"pp*vpp does not divide num_layers={layers}"
        if vpp > 1 and pp == 2 and not self.options.overlap_p2p_comm:
            yield f"{flag_of('overlap_p2p_comm')} allows virtual stages only with pp > 2"
        if vpp == 1 and pp > 1 and self.options.overlap_moe_expert_parallel_comm:
            yield f"{flag_of('overlap_moe_expert_parallel_comm')} needs virtual stages where pp > 1"
        if vpp == 1 and self.options.overlap_param_gather_with_optimizer_step:
            yield f"{flag_of('overlap_param_gather_with_optimizer_step')} needs virtual stages"

    def batch_faults(self, dp: int, micro_batch_size: int) -> Iterator[str]:
        """Check the micro-batches of one step against the global batch and its ramp-up."""
        batch_size, samples = self.job.batch.global_batch_size, micro_batch_size * dp
        if batch_size % samples:
            yield f"micro_batch_size*dp does not divide global_batch_size={batch_size}"
        if any(size % samples for size in self.options.rampup_batch_size[:2]):
            yield f"micro_batch_size*dp does not divide every {flag_of('rampup_batch_size')}"
        # From core_v0.18.0 on; without their flags both are as in training.
        evaluated = self.options.eval_global_batch_size or batch_size
        at_once = self.options.eval_micro_batch_size or micro_batch_size
        if evaluated % (at_once * dp):
            yield f"dp does not divide the micro-batches of {flag_of('eval_global_batch_size')}"

    def _sequence_faults(self, tp: int, cp: int, options: MemoryOptions) -> Iterator[str]:
        model = self.job.model
        if not options.sequence_parallel:
            if model.num_experts and tp > 1:
                yield "experts with tp > 1 need sequence parallelism"
            if self.options.tp_comm_overlap:
                yield f"{flag_of('tp_comm_overlap')} needs sequence parallelism"
            return
        if tp == 1:
            yield "sequence parallelism needs tp > 1"
        if self.device_kind == "cpu":
            yield "sequence parallelism does not run on CPU"
        if model.seq_length // cp % tp:
            yield f"tp does not divide seq_length={model.seq_length}/cp for sequence parallelism"

    def _optimizer_faults(self, options: MemoryOptions) -> Iterator[str]:
        sharded = options.use_distributed_optimizer
        needs_sharding = [flag_of(name) for name in NEEDS_DISTRIBUTED_OPTIMIZER if getattr(self.options, name)]
        if sharded and self.job.optimizer != "adam":
            yield ONLY_ADAM_SHARDS
        if sharded and self.options.use_torch_fsdp2:
            yield f"{flag_of('use_torch_fsdp2')} excludes the distributed optimizer"
        if needs_sharding and not (sharded or self.options.use_torch_fsdp2):
            yield f"{'/'.join(needs_sharding)} needs the distributed optimizer"
        if options.overlap_param_gather and not (sharded and options.overlap_grad_reduce):
            yield "overlap_param_gather needs the distributed optimizer and overlap_grad_reduce"
        if self.options.overlap_param_gather_with_optimizer_step and not options.overlap_param_gather:
            yield f"{flag_of('overlap_param_gather_with_optimizer_step')} needs overlap_param_gather"

    def _unit_faults(self, recompute: Recompute, layers: frozenset[int]) -> Iterator[str]:
        if recompute.method != "uniform":
            return
        # transformer_block.py:536-547 runs whole units, past the end of the chunk; from 0.17 on the last is cut short.
        if self.job.release < (0, 17) and any(size % recompute.num_layers for size in layers):
            yield "before 0.17 uniform recompute takes units that divide every chunk's layers"
        if self.job.model.mtp_num_layers and recompute.num_layers > 1:
            yield "uniform recompute with multi-token prediction takes units of one layer"

    def _module_faults(self, recompute: Recompute) -> Iterator[str]:
        """Check the modules of selective recompute."""
        if recompute.granularity != "selective":
            return
        model, modules = self.job.model, {*(recompute.modules or ("core_attn",))}
        if model.transformer_impl == "local" and modules & OWN_MODULES_OF_TE:
            yield "recompute of layernorm, moe_act and mla_up_proj needs Transformer Engine"
        # Seen with megatron-core 0.16.1: the backward never ends.
        if "mlp" in modules and model.add_bias_linear:
            yield "recompute of mlp hangs where layers have biases"
        if "moe_act" in modules and not self.options.moe_grouped_gemm:
            yield f"recompute of moe_act needs {flag_of('moe_grouped_gemm')}"
        if "mla_up_proj" in modules and model.latent_attention is None:
            yield "recompute of mla_up_proj needs multi-latent attention"
        if "shared_experts" in modules and self.options.moe_shared_expert_overlap:
            yield f"{flag_of('moe_shared_expert_overlap')} excludes recompute of shared_experts"
        is_delayed = self.options.fp8 is not None and self.options.fp8_recipe == "delayed"
        if is_delayed and modules & {"layernorm", "moe_act"}:
            yield "delayed scaling of FP8 excludes recompute of layernorm and moe_act"
