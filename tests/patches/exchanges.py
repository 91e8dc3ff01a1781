"""Layouts whose exchanges the tests record, and the exchanges that the formulas count for them.

Two programs are played: NVIDIA's pretrain_gpt.py from a checkout, and the example trainer of this repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipette_launch.cost.communication.exchanges import LayerCounts, exchanges_of, group_sizes, step_traffic
from pipette_launch.cost.layers.block import FP32_BYTES, Sizes, recompute_modules, residual_bytes
from pipette_launch.cost.layers.mlp import Experts
from pipette_launch.cost.layers.parameters import (
    chunk_kinds,
    reduced_gradient_bytes,
    word_embedding_parameters,
)
from pipette_launch.facts import Cell, Job
from pipette_launch.megatron.read import read_job

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("exchange_worker.py")
RELEASE = "0.16.1"
COMMON = (
    "--hidden-size 128 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --vocab-size 1000 "
    "--no-persist-layer-norm --lr 1e-4 --train-iters 10 --transformer-impl local --eval-iters 0 --eval-interval 100 "
    "--micro-batch-size 2 --no-check-for-nan-in-loss-and-grad --attention-dropout 0 --hidden-dropout 0"
)
GPT = "--num-layers 4 --global-batch-size 32"
UNTIED = "--untie-embeddings-and-output-weights"
LLAMA = (
    f"{GPT} {UNTIED} --swiglu --disable-bias-linear --normalization RMSNorm --use-rotary-position-embeddings "
    "--group-query-attention --num-query-groups 4 --ffn-hidden-size 384"
)
ROPE = "--use-rotary-position-embeddings"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-router-load-balancing-type none"
MOE = f"{LLAMA} {EXPERTS}"
ALLTOALL = "--moe-token-dispatcher-type alltoall"
AUX_LOSS = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
SHARED = "--moe-shared-expert-intermediate-size 256"
MLA = (
    f"{GPT} {UNTIED} --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--ffn-hidden-size 384 --multi-latent-attention --kv-lora-rank 64 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 16"
)
Q_LORA, NORMS = "--q-lora-rank 96", "--qk-layernorm"
TP2, TP4, TP8 = (f"--tensor-model-parallel-size {size}" for size in (2, 4, 8))
PP2, PP4 = (f"--pipeline-model-parallel-size {size}" for size in (2, 4))
CP = "--context-parallel-size"
CP2, CP4 = (f"{CP} {size}" for size in (2, 4))
EP2, EP4 = (f"--expert-model-parallel-size {size}" for size in (2, 4))
ETP1, ETP2 = (f"--expert-tensor-parallel-size {size}" for size in (1, 2))
SP, VPP2 = "--sequence-parallel", "--num-layers-per-virtual-pipeline-stage 1"
DIST, REDUCE = "--use-distributed-optimizer", "--overlap-grad-reduce"
OVERLAP = f"{DIST} {REDUCE} --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
CORE = "--recompute-granularity selective"
MLP, WHOLE_MOE = (f"{CORE} --recompute-modules {module}" for module in ("mlp", "moe"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout of one model."""

    name: str
    words: tuple[str, ...]
    world_size: int

    @classmethod
    def of(cls, name: str, world_size: int, *flags: str, dtype: str = "--bf16") -> Case:
        """Make a case from flags; later flags win."""
        return cls(name=name, words=tuple(" ".join((COMMON, dtype, *flags)).split()), world_size=world_size)

    def job(self) -> Job:
        """Return the job as our reader reads it."""
        # Megatron's own layers refuse context parallelism. The formulas of these cases do not depend on the layers.
        words = ["transformer_engine" if CP in self.words and word == "local" else word for word in self.words]
        return read_job(
            words, world_size=self.world_size, megatron_version=RELEASE, device_kind="cuda", for_prediction=True
        )

    def pp_ranks(self) -> list[int]:
        """Return the pipeline ranks that are played: first, second, last."""
        pp = self.job().own.pp
        return sorted({0, min(1, pp - 1), pp - 1})


CASES = (
    Case.of("gpt tp2", 4, GPT, TP2),
    Case.of("gpt tp2 sp", 4, GPT, TP2, SP),
    Case.of("gpt rope tp2 sp", 4, GPT, ROPE, TP2, SP),
    Case.of("gpt rope tp2", 4, GPT, ROPE, TP2),
    Case.of("gpt untied tp2", 4, GPT, TP2, UNTIED),
    Case.of("gpt dp4", 4, GPT),
    Case.of("gpt dp4 dist", 4, GPT, DIST),
    Case.of("gpt dp4 overlap", 4, GPT, OVERLAP),
    Case.of("gpt dp4 grad overlap", 4, GPT, REDUCE),
    Case.of("gpt dp4 dist grad overlap", 4, GPT, DIST, REDUCE),
    Case.of("gpt dp4 bf16 gradients", 4, GPT, "--grad-reduce-in-bf16"),
    Case.of("gpt pp2", 4, GPT, PP2),
    Case.of("gpt pp2 dist", 4, GPT, PP2, DIST),
    Case.of("gpt pp4", 8, GPT, PP4),
    Case.of("gpt pp4 overlap", 8, GPT, PP4, OVERLAP),
    Case.of("gpt pp2 vpp2", 4, GPT, PP2, VPP2),
    Case.of("gpt pp2 vpp2 overlap", 4, GPT, PP2, VPP2, OVERLAP),
    Case.of("gpt untied pp2 dist", 4, GPT, PP2, DIST, UNTIED),
    Case.of("gpt tp2 pp2 sp dist", 8, GPT, TP2, PP2, SP, DIST),
    Case.of("gpt tp2 pp2 vpp2 sp overlap", 8, GPT, TP2, PP2, VPP2, SP, OVERLAP),
    Case.of("gpt tp4 sp", 8, GPT, TP4, SP),
    Case.of("gpt tp2 full", 4, GPT, TP2, FULL),
    Case.of("gpt tp2 sp full", 4, GPT, TP2, SP, FULL),
    Case.of("gpt tp2 sp block", 4, GPT, TP2, SP, BLOCK),
    Case.of("gpt tp2 sp core", 4, GPT, TP2, SP, CORE),
    Case.of("gpt tp2 pp2 block", 4, GPT, TP2, PP2, BLOCK),
    Case.of("gpt tp2 pp2 dp order", 8, GPT, TP2, PP2, "--use-tp-pp-dp-mapping"),
    Case.of("llama tp2 sp dist", 4, LLAMA, TP2, SP, DIST),
    Case.of("llama tp2", 4, LLAMA, TP2),
    Case.of("llama tp4 sp pp2 overlap", 16, LLAMA, TP4, SP, PP2, OVERLAP),
    Case.of("llama pp4 dist", 8, LLAMA, PP4, DIST),
    Case.of("llama pp2 vpp2 full", 8, LLAMA, PP2, VPP2, FULL),
    Case.of("llama tp2 sp mlp recompute", 4, LLAMA, TP2, SP, MLP),
    Case.of("llama tp2 sp mbs4", 4, LLAMA, TP2, SP, "--micro-batch-size 4"),
    Case.of("moe ep2 allgather", 4, MOE, EP2),
    Case.of("moe ep4 allgather dist", 8, MOE, EP4, DIST),
    Case.of("moe ep2 alltoall", 4, MOE, ALLTOALL, EP2),
    Case.of("moe ep4 alltoall overlap", 8, MOE, ALLTOALL, EP4, OVERLAP),
    Case.of("moe dp4 no ep", 4, MOE),
    Case.of("moe tp2 sp ep2 etp1 alltoall", 4, MOE, ALLTOALL, TP2, SP, EP2, ETP1),
    Case.of("moe tp2 sp ep2 etp2 alltoall", 4, MOE, ALLTOALL, TP2, SP, EP2, ETP2),
    Case.of("moe tp2 sp ep2 etp2 allgather", 4, MOE, TP2, SP, EP2, ETP2),
    Case.of("moe tp2 sp ep2 etp1 allgather dist", 8, MOE, TP2, SP, EP2, ETP1, DIST),
    Case.of("moe tp2 sp etp2 alltoall", 4, MOE, ALLTOALL, TP2, SP, ETP2),
    Case.of("moe ep2 pp2 alltoall dist", 8, MOE, ALLTOALL, EP2, PP2, DIST),
    Case.of("moe ep2 pp2 vpp2 alltoall overlap", 8, MOE, ALLTOALL, EP2, PP2, VPP2, OVERLAP),
    Case.of("moe ep2 alltoall full", 4, MOE, ALLTOALL, EP2, FULL),
    Case.of("moe ep2 allgather full", 4, MOE, EP2, FULL),
    Case.of("moe ep2 alltoall moe recompute", 4, MOE, ALLTOALL, EP2, WHOLE_MOE),
    Case.of("moe shared tp2 sp ep2 alltoall", 4, MOE, ALLTOALL, TP2, SP, EP2, ETP1, SHARED),
    Case.of("moe alternate ep2 alltoall", 4, MOE, ALLTOALL, EP2, "--moe-layer-freq 2"),
    Case.of("moe aux loss tp2 sp ep2 alltoall", 4, MOE, ALLTOALL, TP2, SP, EP2, ETP1, AUX_LOSS),
    Case.of("moe fp32 router ep2 alltoall", 4, MOE, ALLTOALL, EP2, "--moe-router-dtype fp32"),
    Case.of("mla tp2 sp", 4, MLA, TP2, SP),
    Case.of("mla tp2", 4, MLA, TP2),
    Case.of("mla q-lora tp2 sp", 4, MLA, Q_LORA, TP2, SP),
    Case.of("mla q-lora tp2", 4, MLA, Q_LORA, TP2),
    Case.of("mla q-lora tp4 sp full", 4, MLA, Q_LORA, TP4, SP, FULL),
    Case.of("mla q-lora norms tp2 sp dist", 4, MLA, Q_LORA, TP2, SP, DIST, NORMS),
    Case.of("mla pp2 dist", 4, MLA, PP2, DIST),
    Case.of(
        "mla experts tp2 sp ep2 alltoall pp2",
        8,
        MLA,
        Q_LORA,
        TP2,
        SP,
        EP2,
        ETP1,
        PP2,
        ALLTOALL,
        EXPERTS,
        SHARED,
        "--moe-layer-freq ([0]*1+[1]*3)",
    ),
    Case.of("gpt mtp tp2 sp", 4, LLAMA, TP2, SP, "--mtp-num-layers 1"),
    Case.of("gpt mtp pp2 dist", 4, LLAMA, PP2, DIST, "--mtp-num-layers 1"),
    Case.of("llama cp2", 4, LLAMA, CP2),
    Case.of("llama cp4 tp2 sp dist", 8, LLAMA, CP4, TP2, SP, DIST),
    Case.of("llama cp2 pp2 overlap", 8, LLAMA, CP2, PP2, OVERLAP),
    Case.of("llama cp2 full", 4, LLAMA, CP2, FULL),
    Case.of("llama cp2 tp8 sp", 16, LLAMA, CP2, TP8, SP),
    Case.of("moe cp2 ep4 alltoall dist", 8, MOE, ALLTOALL, CP2, EP4, DIST),
    Case.of("moe tp2 sp ep1 etp1", 4, MOE, TP2, SP, ETP1),
    Case.of("gpt fp32 tp2 pp2", 4, GPT, TP2, PP2, dtype=""),
    Case.of("gpt tp2 sp dp3 dist", 6, GPT, TP2, SP, DIST, "--global-batch-size 24"),
    Case.of("llama 6 layers pp2 uneven", 4, LLAMA, PP2, "--num-layers 6 --decoder-first-pipeline-num-layers 2"),
)


FAST = (
    "gpt tp2 sp",
    "gpt tp2 pp2 vpp2 sp overlap",
    "gpt pp2 dist",
    "gpt tp2 sp block",
    "llama tp2 sp mlp recompute",
    "llama cp2 pp2 overlap",
    "moe ep4 allgather dist",
    "moe tp2 sp ep2 etp2 alltoall",
    "moe ep2 alltoall full",
)
"""Cases of the normal test run, played with the example trainer."""


class Program(NamedTuple):
    """A training program that is played."""

    script: Path
    more: str
    paths: tuple[str, ...]
    """Folders in front of Python's search path."""
    is_nvidias: bool


EXAMPLE = Program(ROOT / "examples" / "pretrain_gpt.py", "--use-cpu-initialization", (), is_nvidias=False)


def nvidias(folder: str) -> Program:
    """Return NVIDIA's pretrain_gpt.py in a checkout of Megatron-LM."""
    more = "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --rerun-mode disabled"
    return Program(Path(folder) / "pretrain_gpt.py", more, (folder,), is_nvidias=True)


Key = tuple[str, str, str]
"""Phase, operation, group."""
SUM = 1
"""Key of a sum of bytes, in place of the bytes of one exchange."""
Found = Mapping[Key, Counter[int]]
"""Number of exchanges by bytes, by phase, operation and group."""


def record(cases: Sequence[tuple[Case, int]], program: Program, *, timeout_s: float) -> list[Any]:
    """Play each case and pipeline rank in one process; return the records, or a text for a case that failed."""
    requests = []
    for case, pp_rank in cases:
        rank = case.job().own.rank_of(Cell(pp=pp_rank, dp=0, cp=0, tp=0))
        arguments = [*case.words, *program.more.split()]
        requests.append(
            {"script": str(program.script), "arguments": arguments, "rank": rank, "world_size": case.world_size}
        )
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([*(str(ROOT / folder) for folder in (".", "patches", "tests")), *program.paths, before])
    worker = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER)],
        input=json.dumps(requests),
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert worker.returncode == 0, worker.stderr[-5000:]
    return [json.loads(line) for line in worker.stdout.splitlines()]


def recorded(records: Any) -> Found:
    """Sort the records of a rank by phase, operation and group; groups of one rank exchange nothing.

    Gradient reductions and parameter gathers count as exchanges of the step, in whichever pass they overlap. Messages
    of ring attention count as their sum, because one message may have keys, values and gradients.
    """
    found = _Counts()
    for phase, _layer, operation, group, num_ranks, size, _element_type, count in records:
        if num_ranks == 1:
            continue
        if group == "cp":
            found.add(phase, operation, group, SUM, size * count)
        elif group in ("dp_cp", "expert_dp"):
            found.add("step", operation, group, size, count)
        else:
            # With two pipeline ranks, one direction uses the group of all ranks (p2p_communication.py).
            found.add(phase, operation, "pp" if operation in ("send", "receive") else group, size, count)
    return found.found


def predicted(job: Job, pp_rank: int) -> Found:
    """Return the exchanges of one rank of the job's own layout as the formulas count them.

    The formulas price some of a step's exchanges as one exchange of the same bytes; these are split here.
    """
    layout, found = job.own, _Counts()
    microbatches = layout.num_microbatches(job.batch.global_batch_size)
    stages = range(layout.num_chunks)[pp_rank :: layout.pp]
    members = group_sizes(layout)
    for item in exchanges_of(job, layout, LayerCounts.of(job, layout)):
        for phase, counts in (("forward", item.forward), ("backward", item.backward)):
            count = microbatches * int(sum(counts[stage] for stage in stages))
            if item.group == "cp":
                hop_bytes = int(item.size_bytes) // layout.cp
                for kind in ("send", "receive"):
                    found.add(phase, kind, "cp", SUM, (layout.cp - 1) * hop_bytes * count)
            elif members[item.group] > 1:
                found.add(phase, item.kind, item.group, int(item.size_bytes), count)
    hops = [(stage > 0) + (stage < layout.num_chunks - 1) for stage in stages]
    for kind in ("send", "receive"):
        found.add("between", kind, "pp", residual_bytes(job, layout), microbatches * sum(hops))
    _add_step(found, job, stages)
    traffic = step_traffic(job, layout)
    if pp_rank in (0, layout.pp - 1):
        found.add("end", "all_reduce", "embedding", traffic.embedding_bytes, 1)
    return found.found


def _add_step(found: _Counts, job: Job, stages: range) -> None:
    """Add gradient reductions and parameter gathers, with one exchange for each bucket."""
    model, layout, traffic, members = job.model, job.own, step_traffic(job, job.own), group_sizes(job.own)
    sharded = layout.use_distributed_optimizer
    # The optimizer of the experts gathers all parameters, and so does the other optimizer.
    gathers = 2 if model.num_experts and layout.ep > 1 and not layout.overlap_param_gather else 1
    words = word_embedding_parameters(model, layout.tp)
    uses = [("reduce_scatter" if sharded else "all_reduce", traffic.gradient_bytes, 1, reduced_gradient_bytes(job))]
    if sharded:
        uses.append(("all_gather", traffic.parameter_bytes, gathers, model.dtype_bytes))
    for kind, bytes_of_stage, times, element in uses:
        for stage in stages:
            dense, expert = (size // times for size in bytes_of_stage[stage])
            if layout.ep == 1:
                # Experts lie in the buffer of all other parameters.
                dense, expert = dense + expert, 0
            # An embedding that two stages share has a bucket of its own in the distributed optimizer.
            is_apart = sharded and traffic.embedding_bytes and stage in (0, layout.num_chunks - 1)
            shared = words * element if is_apart else 0
            if members["dp_cp"] > 1:
                found.add("step", kind, "dp_cp", dense - shared, times)
                found.add("step", kind, "dp_cp", shared, times)
            if members["expert_dp"] > 1:
                found.add("step", kind, "expert_dp", expert, times)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Exchanges of Megatron that no formula prices."""

    reason: str
    key: Key
    size_bytes: int
    count: int


BATCH = "data of the batch: tokens, labels, positions, loss mask and attention mask"
NORM = "gradient norm and checks of the step: 4 bytes each"
DEPTHS = "projections of multi-token prediction"
REPEATED = "gradients of parameters that tensor-parallel ranks repeat"
LOSS = "report of the losses"
ROUTING = "routing: probabilities, maps and numbers of tokens"
BALANCE = "balancing loss of the router"


def left_out(job: Job, pp_rank: int, *, is_nvidias: bool) -> Iterator[LeftOut]:
    """Yield the exchanges that the formulas leave out, with the exact counts and bytes."""
    yield from _left_out_of_step(job, pp_rank, is_nvidias=is_nvidias)
    yield from _left_out_of_experts(job, pp_rank)
    yield from _left_out_of_depths(job, pp_rank)
    if is_nvidias and job.own.tp > 1:
        yield from _batch(job, pp_rank)


def _left_out_of_step(job: Job, pp_rank: int, *, is_nvidias: bool) -> Iterator[LeftOut]:
    model, layout = job.model, job.own
    sharded, replicas = layout.use_distributed_optimizer, layout.dp * layout.cp
    # NVIDIA's trainer also agrees on the success of the step, on the norm and on the number of zeros.
    checks = (3 if is_nvidias else 0) + (not sharded)
    if layout.tp * layout.pp > 1 and checks:
        yield LeftOut(reason=NORM, key=("end", "all_reduce", "mp"), size_bytes=FP32_BYTES, count=checks)
    if sharded:
        yield LeftOut(reason=NORM, key=("end", "all_reduce", "world"), size_bytes=FP32_BYTES, count=1)
    elif model.num_experts and layout.ep > 1:
        key = ("end", "all_reduce", "ep_etp_pp")
        yield LeftOut(reason=NORM, key=key, size_bytes=FP32_BYTES, count=1)
    if layout.tp > 1 and layout.sequence_parallel:
        size = FP32_BYTES * _repeated_parameters(job, pp_rank)
        yield LeftOut(reason=REPEATED, key=("end", "all_reduce", "tp"), size_bytes=size, count=1)
    if replicas > 1 and pp_rank == layout.pp - 1:
        key = ("step", "all_reduce", "dp_cp")
        yield LeftOut(reason=LOSS, key=key, size_bytes=8 if is_nvidias else 16, count=1)
        if model.mtp_num_layers:
            yield LeftOut(reason=LOSS, key=key, size_bytes=FP32_BYTES * model.mtp_num_layers, count=1)


def _repeated_parameters(job: Job, pp_rank: int) -> int:
    """Count the parameters that see a part of the tokens under sequence parallelism: norms, biases, routers."""
    model, layout = job.model, job.own
    chunks = [kinds for kinds, _ in chunk_kinds(model, layout)][pp_rank :: layout.pp]
    kinds = [kind for chunk in chunks for kind in chunk]
    is_last, latent = pp_rank == layout.pp - 1, model.latent_attention
    kinds += model.prediction_kinds if is_last and model.mtp_num_layers else ()
    biases = 2 * model.hidden_size if model.add_bias_linear else 0
    latents = (latent.kv_lora_rank + (latent.q_lora_rank or 0)) if latent and model.qk_layernorm else 0
    count = len(kinds) * (2 * model.norm_parameters() + biases + latents)
    count += sum(Experts(job, layout).router_parameters() for kind in kinds if kind == "moe_layer")
    return count + is_last * model.norm_parameters() * (1 + 3 * model.mtp_num_layers)


def _left_out_of_experts(job: Job, pp_rank: int) -> Iterator[LeftOut]:
    layout, options = job.own, job.options
    microbatches = layout.num_microbatches(job.batch.global_batch_size)
    chunks = chunk_kinds(job.model, layout)[pp_rank :: layout.pp]
    forwards = microbatches * sum(kinds.count("moe_layer") for kinds, _ in chunks)
    again = microbatches * sum(kinds[:count].count("moe_layer") for kinds, count in chunks)
    again = forwards if "moe" in recompute_modules(layout) else again
    for forward, backward, group, size in _routing(job):
        for phase, kind, count in (("forward", forward, forwards), ("backward", forward, again)):
            yield LeftOut(reason=ROUTING, key=(phase, kind, group), size_bytes=size, count=count)
        if backward:
            yield LeftOut(reason=ROUTING, key=("backward", backward, group), size_bytes=size, count=forwards)
    if "aux_loss" in options.moe_router_load_balancing_type and any(options.moe_aux_loss_coeff):
        if layout.tp * layout.cp > 1:
            key = ("forward", "all_reduce", "tp_cp")
            yield LeftOut(reason=BALANCE, key=key, size_bytes=8 * (job.model.num_experts or 0), count=forwards)
        for group in ("tp_cp", "dp"):
            size = FP32_BYTES * job.model.num_layers
            yield LeftOut(reason=BALANCE, key=("end", "all_reduce", group), size_bytes=size, count=1)


def _left_out_of_depths(job: Job, pp_rank: int) -> Iterator[LeftOut]:
    """Yield the gathers of the projection from 2h to h, whose columns tp splits (MTP, _concat_embeddings).

    With sequence parallelism the projection's input is also gathered first, and the gathered output is split again.
    """
    layout = job.own
    depths = job.model.mtp_num_layers * layout.num_microbatches(job.batch.global_batch_size)
    if layout.tp == 1 or pp_rank != layout.mtp_chunk % layout.pp or not depths:
        return
    size = job.model.dtype_bytes * Sizes(job, layout).tokens * job.model.hidden_size
    uses = [("forward", "all_gather", size), ("backward", "all_reduce", 2 * size)]
    if layout.sequence_parallel:
        gathers = [(phase, "all_gather", each) for phase in ("forward", "backward") for each in (size, 2 * size)]
        uses = [*gathers, ("backward", "reduce_scatter", 2 * size)]
    for phase, operation, size_bytes in uses:
        yield LeftOut(reason=DEPTHS, key=(phase, operation, "tp"), size_bytes=size_bytes, count=depths)


def _routing(job: Job) -> Iterator[tuple[str, str, str, int]]:
    """Yield (operation of the forward, of the backward, group, bytes) for each layer of experts.

    The operation of the backward is empty for numbers without gradients.
    """
    model, layout, members = job.model, job.own, group_sizes(job.own)
    local, experts, together = Sizes(job, layout).local_tokens, model.num_experts or 0, members["ep_etp"]
    probability = FP32_BYTES if job.options.moe_router_dtype == "fp32" else model.dtype_bytes
    if together == 1:
        return
    if "alltoall" not in job.options.moe_token_dispatcher_type:
        yield "all_gather", "", "ep_etp", local * experts * together
        yield "all_gather", "reduce_scatter", "ep_etp", local * experts * together * probability
        return
    chosen = local * model.moe_router_topk * probability
    yield "all_gather", "", "ep_etp", 8 * experts * together
    if layout.ep > 1:
        yield "all_to_all", "all_to_all", "ep", chosen
    if layout.etp > 1:
        yield "all_gather", "reduce_scatter", "etp", chosen * layout.etp


def _batch(job: Job, pp_rank: int) -> Iterator[LeftOut]:
    """Yield the broadcasts of NVIDIA's trainer from the first tensor-parallel rank (training/utils.py:598-780)."""
    layout, rows = job.own, job.own.cp * Sizes(job, job.own).tokens
    microbatches = layout.num_microbatches(job.batch.global_batch_size)
    is_first, is_last = pp_rank == 0, pp_rank == layout.pp - 1
    num_tables = 3 if is_first and is_last else 2 if is_first else 1 if is_last else 0
    num_masks = 1 if layout.pp == 1 or is_last else 0
    sizes = {8 * rows: num_tables, FP32_BYTES * rows: num_masks, rows * job.model.seq_length: int(num_tables > 0)}
    # The number of sequences of packed data is 0.
    sizes[8] = 2 if is_first else int(is_last)
    for size, count in sizes.items():
        if count:
            key = ("forward", "broadcast", "tp")
            yield LeftOut(reason=BATCH, key=key, size_bytes=size, count=count * microbatches)


class _Counts:
    """Counts of exchanges."""

    def __init__(self) -> None:
        self.found: dict[Key, Counter[int]] = defaultdict(Counter)

    def add(self, phase: str, operation: str, group: str, size_bytes: int, count: int) -> None:
        """Add exchanges; exchanges of no bytes do not count."""
        if count and size_bytes:
            self.found[phase, operation, group][size_bytes] += count


def expected(job: Job, pp_rank: int, *, is_nvidias: bool) -> Found:
    """Return the exchanges that the formulas count, and those that they leave out."""
    found = _Counts()
    for key, counter in predicted(job, pp_rank).items():
        for size, count in counter.items():
            found.add(*key, size, count)
    for item in left_out(job, pp_rank, is_nvidias=is_nvidias):
        found.add(*item.key, item.size_bytes, item.count)
    return found.found


def differences(ours: Found, megatrons: Found) -> list[str]:
    """Return one line for each phase, operation and group that differs."""
    lines = []
    for key in sorted({*ours, *megatrons}):
        one, other = (dict(sorted(found.get(key, Counter()).items())) for found in (ours, megatrons))
        if one != other:
            lines.append(f"{' '.join(key)}: ours {one}, Megatron's {other} (bytes: number)")
    return lines
