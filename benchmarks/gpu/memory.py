"""Compare measured peaks of single ranks of large jobs with predictions; each rank runs under a fake process group.

The warm-up's own stage probe (`probe.compute.benches`) measures. On CUDA torch's allocator and NVML count; on a
CPU tensors are counted one by one in the place of the allocator, and there is nothing in the place of NVML.
"""

from __future__ import annotations

import gc
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from os import cpu_count
from tempfile import gettempdir

from torch.distributed import HashStore

from benchmarks.abstract_worker import Executor
from benchmarks.gpu.jobs import FULL
from benchmarks.gpu.notebook import Notebook, Record, of_kind
from benchmarks.gpu.shapes import SHAPES, has_transformer_engine, job_of, without_engine
from pipette_launch.cost.memory.overhead import overhead_of
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.errors import PipetteError
from pipette_launch.facts import ComputeCase, Host, Job, Layout, Recompute
from pipette_launch.facts.messages import StageCase
from pipette_launch.probe.compute.benches import StageBench
from pipette_launch.probe.instruments import MemoryMeter, meter
from pipette_launch.probe.lockstep import Budget, Lockstep
from pipette_launch.probe.messages import WarmupOrder
from pipette_launch.text import MIB
from pipette_patches import workload

HALF = Recompute(granularity="full", method="block", num_layers=2)
CORE = Recompute(granularity="selective", modules=("core_attn",))
SHARDED = Layout(use_distributed_optimizer=True)
STRIDE = {"cuda": 1, "cpu": 3}
"""A CPU runs every third case: it shows that the check runs, no more."""
CASE_S = 4.0
"""Less time is not enough for one more rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One rank of one job."""

    model: str
    layout: Layout
    pp_rank: int = 0

    @property
    def words(self) -> str:
        """As people write it."""
        return f"{self.model}, {self.layout.words()}, stage {self.pp_rank}"


def cases() -> Iterator[Case]:
    """Ranks of jobs of 8 to 1,024 ranks: what each saver and each axis does to a stage, the cheapest first."""

    def of(model: str, *pp_ranks: int, **changes: object) -> Iterator[Case]:
        layout = replace(SHARDED, **changes)  # type: ignore[arg-type]
        if layout.tp > 1:
            layout = replace(layout, sequence_parallel=True)
        yield from (Case(model=model, layout=layout, pp_rank=rank) for rank in pp_ranks)

    yield from of("1B", 0, dp=8, use_distributed_optimizer=False)
    for size in (1, 2, 4):
        yield from of("1B", 0, dp=8, micro_batch_size=size)
    for recompute in (FULL, HALF, CORE):
        yield from of("1B", 0, dp=8, micro_batch_size=4, recompute=recompute)
    yield from of("1B", 0, dp=8, overlap_grad_reduce=True, overlap_param_gather=True)
    yield from of("1B", 0, dp=64, tp=2, micro_batch_size=2)
    yield from of("1B", 0, dp=64, tp=8, micro_batch_size=4)
    yield from of("1B", 0, 1, 3, dp=16, pp=4)
    yield from of("1B", 0, 3, dp=8, pp=4, vpp=2)
    yield from of("1B", 1, dp=8, tp=2, pp=4, vpp=4)
    yield from of("8 experts", 0, dp=8, ep=8)
    yield from of("8 experts", 0, dp=16, ep=4, micro_batch_size=2)
    yield from of("8 experts", 0, dp=8, ep=8, micro_batch_size=2, recompute=FULL)
    yield from of("8 experts", 0, 3, dp=8, ep=8, pp=4)
    yield from of("8 experts", 0, dp=16, tp=2, ep=4)
    yield from of("7B", 0, dp=16, tp=8)
    yield from of("7B", 0, 2, 3, dp=16, tp=4, pp=4)
    yield from of("7B", 0, dp=64, tp=2, pp=8, micro_batch_size=2)
    yield from of("7B", 0, dp=32, tp=4, pp=8, micro_batch_size=4, recompute=FULL)
    yield from of("8B GQA", 0, 3, dp=16, tp=4, pp=4)
    yield from of("8B GQA", 0, dp=32, tp=8)
    yield from of("8B GQA", 0, dp=64, pp=8)
    yield from of("8B GQA", 3, dp=8, tp=2, pp=4, vpp=4)
    yield from of("70B GQA", 0, 15, dp=8, tp=8, pp=16)
    yield from of("70B GQA", 7, dp=8, tp=8, pp=16, micro_batch_size=2, recompute=FULL)
    # megatron-core's own attention knows no context parallelism: this runs where Transformer Engine is.
    yield from of("1B", 0, dp=8, cp=2)


def measure(book: Notebook) -> None:
    """Run every case that time allows, while processes of their own foretell."""
    reads = meter(book.kind, book.device.uuid)
    workload.load(book.kind)
    gc.freeze()
    has_te = has_transformer_engine(book.kind)
    todo = list(cases())[:: STRIDE[book.kind]]
    jobs = [job_of(SHAPES[book.kind][case.model], case.layout, has_te=has_te) for case in todo]
    foretellers = Foretellers(1 if book.kind == "cpu" else min(6, (cpu_count() or 2) // 2))
    foretold = [foretellers.ask(job, case) for job, case in zip(jobs, todo, strict=True)]
    with without_engine(book.kind):
        for index, (case, job) in enumerate(zip(todo, jobs, strict=True)):
            if book.attempt(case.words, partial(_measure, book, reads, index, case, job), needs_s=CASE_S):
                book.attempt(f"closed form of {case.words}", partial(_closed, book, index, case, job))
    measured = {record["case"] for record in book.records}
    for index, (case, answer) in enumerate(zip(todo, foretold, strict=True)):
        if index in measured:
            book.attempt(f"abstract execution of {case.words}", partial(_abstract, book, index, answer))
    foretellers.close()


def _measure(book: Notebook, reads: MemoryMeter, index: int, case: Case, job: Job) -> None:
    """Run one rank as a warm-up runs the fullest stages of the plans that may win."""
    here = Host(name="here", address="", cores=1, devices=(book.device,))
    options = WarmupOrder(
        job=job,
        hosts=(here,),
        cases=(ComputeCase(tp=1, cp=1, micro_batch_size=1),),
        message_sizes_bytes=(8, 1 << 20, 16 << 20),
        output=gettempdir(),
        progress_dir=gettempdir(),
    )
    # No lap came before, so all that libraries keep counts.
    bench = StageBench(options=options, slot=0, meter=reads, workspace_bytes=1 << 40)
    lockstep = Lockstep(store=HashStore(), rank=0, world_size=1, timeout_s=60.0)
    budget = Budget(started_s=0.0, budget_s=1.0, clock=lambda: 0.0)
    bench.measure([StageCase(layout=case.layout, pp_rank=case.pp_rank)], lockstep, budget)
    if not bench.found.stages:
        raise PipetteError("; ".join(bench.found.notes))
    (reading,) = bench.found.stages
    book.add(
        "rank",
        case=index,
        model=case.model,
        layout=case.layout.words(),
        ranks=case.layout.world_size,
        stage=case.pp_rank,
        allocated_bytes=reading.allocator_peak_bytes,
        reserved_bytes=reading.reserved_peak_bytes,
        device_bytes=reading.device_peak_bytes,
        outside_bytes=reads.overhead_bytes(),
        workspace_bytes=reads.workspace_bytes(),
        ran_out=reading.ran_out,
        notes=list(bench.found.notes),
    )


def _closed(book: Notebook, index: int, case: Case, job: Job) -> None:
    overhead = overhead_of(job, case.layout, device_kind=book.kind, device_name=book.device.name)
    closed = peak_memory_bytes(job, case.layout)[case.pp_rank].total
    book.add(
        "closed form",
        case=index,
        bytes=closed,
        workspace_bytes=int(overhead.workspace.value),
        # No communicator is open beside a fake process group.
        device_bytes=overhead.device_peak_bytes(closed) - int(overhead.communicators.value),
        reserve=overhead.reserve.value,
        context_bytes=int(overhead.context.value),
    )


def _abstract(book: Notebook, index: int, answer: Future[int]) -> None:
    """Wait for abstract execution of a rank."""
    book.add("abstract", case=index, bytes=answer.result(max(book.left_s(), 0.1)))


class Foretellers:
    """Abstract execution of many ranks in a few processes, while this process has the device."""

    def __init__(self, num_processes: int) -> None:
        self._own = threading.local()
        self._executors: list[Executor] = []
        self._pool = ThreadPoolExecutor(num_processes)

    def ask(self, job: Job, case: Case) -> Future[int]:
        """Foretell the peak of a rank, in bytes."""
        return self._pool.submit(self._foretell, job, case)

    def close(self) -> None:
        """End the processes; open requests get no answer."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for executor in self._executors:
            executor.close()

    def _foretell(self, job: Job, case: Case) -> int:
        if not hasattr(self._own, "executor"):
            self._own.executor = Executor()
            self._executors.append(self._own.executor)
        (memory,) = self._own.executor.execute(job, case.layout, (case.pp_rank,))
        return int(memory.peak)


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Write a row for each rank, then the errors, and the errors of the default overheads."""
    ranks = of_kind(records, "rank")
    closed = {record["case"]: record for record in of_kind(records, "closed form")}
    abstract = {record["case"]: record["bytes"] for record in of_kind(records, "abstract")}
    yield "| model | layout | ranks | stage | held | abstract | error | closed form | error | NVML | foretold | error |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    errors: dict[str, list[float]] = {"Abstract execution": [], "Closed form": [], "Whole device (closed form)": []}
    for rank in ranks:
        form = closed.get(rank["case"])
        # Memory that libraries hold in the allocator is not part of the model's tensors.
        held = rank["allocated_bytes"] - (form["workspace_bytes"] if form and rank["reserved_bytes"] else 0)
        whole = rank["device_bytes"] if rank["reserved_bytes"] else 0
        pairs = (
            ("Abstract execution", abstract.get(rank["case"]), held),
            ("Closed form", form["bytes"] if form else None, held),
            ("Whole device (closed form)", form["device_bytes"] if form and whole else None, whole),
        )
        cells = []
        for name, said, real in pairs:
            error = said / real - 1 if said is not None and real and not rank["ran_out"] else None
            if error is not None:
                errors[name].append(error)
            cells += [_mib(said), "-" if error is None else f"{error:+.2%}"]
        cells.insert(4, _mib(whole or None))
        held_text = "ran out" if rank["ran_out"] else _mib(held)
        first = f"| {rank['model']} | {rank['layout']} | {rank['ranks']:,} | {rank['stage']} | {held_text} "
        yield f"{first}| {' | '.join(cells)} |"
    yield ""
    for name, found in errors.items():
        if found:
            yield f"{name}: {spread(found)}."
    yield from _overheads(ranks, closed)


def _overheads(ranks: Sequence[Record], closed: dict[int, Record]) -> Iterator[str]:
    """Reserve, context and workspaces, where there is an allocator."""
    on_cuda = [rank for rank in ranks if rank["reserved_bytes"] and not rank["ran_out"] and rank["case"] in closed]
    for name, is_moe in (("Dense", False), ("MoE", True)):
        ratios = [
            rank["reserved_bytes"] / rank["allocated_bytes"]
            for rank in on_cuda
            if ("experts" in rank["model"]) == is_moe
        ]
        if ratios:
            default = next(
                closed[rank["case"]]["reserve"] for rank in on_cuda if ("experts" in rank["model"]) == is_moe
            )
            yield (
                f"{name}: the allocator reserved {statistics.median(ratios):.3f} times what it allocated in the "
                f"median, {max(ratios):.3f} at most; the default is {default:g}."
            )
    if on_cuda:
        outside = [rank["outside_bytes"] for rank in on_cuda]
        form = closed[on_cuda[0]["case"]]
        yield (
            f"Outside the allocator, without communicators: {_mib(min(outside))} to {_mib(max(outside))}; the default "
            f"is {_mib(form['context_bytes'])}."
        )
        kept = [rank["workspace_bytes"] for rank in on_cuda]
        yield (
            f"In the allocator while nothing of a model was there: {_mib(min(kept))} to {_mib(max(kept))}; the default "
            f"is {_mib(form['workspace_bytes'])}."
        )


def spread(errors: Sequence[float]) -> str:
    """Median, largest and direction of relative errors."""
    sizes = [abs(error) for error in errors]
    return (
        f"median error {statistics.median(sizes):.2%}, largest {max(sizes):.2%}, "
        f"median with its sign {statistics.median(errors):+.2%}, of {len(errors)}"
    )


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / MIB:,.1f} MiB"
