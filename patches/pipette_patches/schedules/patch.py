"""The patch `schedules`: Megatron's pipelined functions follow the schedule of a file.

The file is named by PIPETTE_SCHEDULE and is the same on every rank. Before the first step every rank checks that the
schedule can run, and that all ranks have the same.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.known_schedules import FOLDING_RELEASE, RELEASES
from pipette_launch.facts.schedule import VARIABLE, Message, Program, Schedule, ScheduleFile, forward_passes, programs
from pipette_patches.replacements import PatchError, Replacement, Replacements, megatron_core_version, wrapping
from pipette_patches.schedules import executor, v_placement

PATIENCE_S = 120.0
"""Longer than any pass and its messages should take, and shorter than the half hour of NCCL's and gloo's deadlines."""


class Watchdog:
    """Keeps what a rank does now, and since when."""

    def __init__(
        self, rank: int, *, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._patience_s = patience_s
        self._clock = clock
        self._doing = ""
        self._since_s = 0.0

    def begin(self, doing: str) -> None:
        """Note what the rank begins; empty where it leaves the pipeline."""
        self._doing, self._since_s = doing, self._clock()

    def complaint(self) -> str:
        """Say what takes so long, once for each time; empty while nothing does."""
        taken_s = self._clock() - self._since_s
        if not self._doing or taken_s < self._patience_s:
            return ""
        doing, self._doing = self._doing, ""
        return f"pipeline rank {self._rank} has been at {doing} for {taken_s:.0f} s"

    def start(self) -> None:
        """Look now and then from a thread of its own, and complain on stderr."""
        threading.Thread(target=self._watch, name="schedule-watchdog", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(self._patience_s / 4)
            complaint = self.complaint()
            if complaint:
                sys.stderr.write(f"pipette_patches.schedules: {complaint}\n")
                sys.stderr.flush()


TOLERANCE = 1e-3
"""Kernels that add up in any order change a norm by a tenth of this; one product that is missing changes it by more."""


class Replay:
    """A data iterator that can give the same items again."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._given: list[Any] = []
        self._at = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._at == len(self._given):
            self._given.append(next(self._source))
        self._at += 1
        return self._given[self._at - 1]

    def rewind(self) -> None:
        """Begin again at the first item."""
        self._at = 0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a step gave on one rank."""

    losses: tuple[float, ...]
    """Everything that the script's losses reported; on ranks of the last stage alone."""
    norms: tuple[float, ...]
    """Of each buffer of gradients."""

    @classmethod
    def of(cls, results: list[Any], chunks: list[Any]) -> Figures:
        """Read the results of a step, and the gradients that it left."""
        reports = [each for result in results if isinstance(result, dict) for each in result.values()]
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return cls(
            losses=tuple(float(torch.as_tensor(each).float().sum()) for each in reports),
            norms=tuple(float(torch.linalg.vector_norm(each.grad_data, dtype=torch.float32)) for each in buffers),
        )

    def difference(self, expected: Figures) -> str:
        """Say what differs from what was expected; empty where nothing does."""
        for what in ("losses", "norms"):
            ours, theirs = getattr(self, what), getattr(expected, what)
            if len(ours) != len(theirs):
                return f"{len(ours)} {what} for {len(theirs)}"
            for one, other in zip(ours, theirs, strict=True):
                is_same = math.isclose(one, other, rel_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))
                if not is_same:
                    return f"{'a loss' if what == 'losses' else 'a norm of gradients'} of {one:g} for {other:g}"
        return ""


def compared(
    chunks: list[Any],
    data: list[Any],
    ours: Callable[[list[Any]], list[Any]],
    megatrons: Callable[[list[Any]], list[Any]],
) -> tuple[list[Any], str]:
    """Run a step twice from the same state.

    Args:
        chunks: of the model, in Megatron's `DistributedDataParallel`.
        data: an iterator for each chunk, or None on ranks that get their data from others.
        ours: runs the step under our schedule, given the data.
        megatrons: runs it under Megatron's own.

    Returns:
        Results of our schedule, whose gradients are left; where any rank has other figures, those of Megatron's own,
        run once more, and what differs.

    """
    from megatron.core.tensor_parallel.random import _get_all_rng_states, _set_all_rng_states

    replays = [None if each is None else Replay(each) for each in data]
    states = _get_all_rng_states()

    def again(run: Callable[[list[Any]], list[Any]]) -> list[Any]:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        for each in replays:
            if each is not None:
                each.rewind()
        _set_all_rng_states(*states)
        return run(replays)

    expected = Figures.of(megatrons(replays), chunks)
    results = again(ours)
    mine = Figures.of(results, chunks).difference(expected)
    everyones: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    found = next((f"RANK {rank} has {fault}" for rank, fault in enumerate(everyones) if fault), "")
    return (again(megatrons), found) if found else (results, "")


def say(words: str) -> None:
    """Print a line on RANK 0."""
    if dist.get_rank() == 0:
        sys.stderr.write(f"pipette_patches.schedules: {words}\n")
        sys.stderr.flush()


MODULE = "megatron.core.pipeline_parallel.schedules"
PIPELINED = ("forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving")


@functools.lru_cache(maxsize=1)
def _document(path: str) -> ScheduleFile:
    """Read the file; raises PatchError where ranks have different ones."""
    found = files.read(Path(path), ScheduleFile)
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, files.digest(found))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise PatchError(f"RANK {other} has another schedule in {path} than RANK 0")
    return found


@functools.lru_cache(maxsize=1)
def _schedule(document: ScheduleFile) -> Schedule:
    return document.schedule()


@functools.lru_cache(maxsize=4)
def _programs(known: Schedule, num_microbatches: int, *, forward_only: bool, in_streams: bool) -> tuple[Program, ...]:
    """Return what each rank does; raises PatchError where the schedule cannot run or is for other steps."""
    if not forward_only and num_microbatches != known.num_microbatches:
        raise PatchError(
            f"the schedule {known.name} is for {known.num_microbatches} micro-batches a step; this one has "
            f"{num_microbatches}"
        )
    passes = forward_passes(known.rank_S, num_microbatches) if forward_only else known.ranks
    try:
        return programs(passes, known.rank_S, known.times if in_streams else None, in_streams=in_streams)
    except FactError as fault:
        raise PatchError(str(fault)) from fault


@functools.lru_cache(maxsize=1)
def _open_ways(path: str, group: Any) -> None:
    """Open the communicators of a pipeline, once."""
    known = _schedule(_document(path))
    ranks = programs(known.ranks, known.rank_S)
    ways = {step.way for steps in ranks for step in steps if isinstance(step, Message)}
    # Results leave the rank of the last stage for the last rank.
    executor.open_ways(group, ways | ({(known.rank_S[-1], known.pp - 1)} if known.placement == "v" else set()))


@functools.lru_cache(maxsize=1)
def _watchdog(rank: int) -> Watchdog:
    """Return the one of this process, which is watching."""
    watchdog = Watchdog(rank)
    watchdog.start()
    return watchdog


_follows: dict[str, bool] = {}
"""By file: whether training follows its schedule, once its first step is checked; Megatron's own otherwise."""


@wrapping
def _following(original: Callable[..., list[Any]], **arguments: Any) -> list[Any]:
    """Make the successor of a pipelined function of Megatron."""
    import megatron.core.pipeline_parallel.schedules as megatron_schedules

    path = os.environ[VARIABLE]
    if not _follows.get(path, True):
        return original(**arguments)
    document = _document(path)
    known = _schedule(document)
    call = _call(arguments, inspect.signature(original).parameters, megatron_schedules)
    rank, attribute = call.groups.pp.rank(), megatron_schedules.get_attr_wrapped_model
    _check_shapes(known, call, arguments)
    if known.placement == "v":
        _check_fold(known, call.model, rank, attribute)
        call = replace(call, tied_weights=_tied_weights(call.model, attribute))
    if call.in_streams:
        _open_ways(path, call.groups.pp)
    program = _programs(known, call.num_microbatches, forward_only=call.forward_only, in_streams=call.in_streams)[rank]

    def ours(data: list[Any]) -> list[Any]:
        step = replace(call, data_iterator=data)
        return executor.run(step, program, known.rank_S, megatron_schedules, _watchdog(rank).begin)

    def megatrons(data: list[Any]) -> list[Any]:
        is_list = isinstance(arguments["data_iterator"], list)
        return original(**{**arguments, "data_iterator": data if is_list else data[0]})

    if call.forward_only or not document.checks_first_step or path in _follows:
        return ours(call.data_iterator)
    results, fault = compared(call.model, call.data_iterator, ours, megatrons)
    _follows[path] = not fault
    say(
        f"the first step under {known.name} has {fault} under Megatron's own schedule, which goes on training"
        if fault
        else f"the first step under {known.name} has the losses and gradients of Megatron's own schedule"
    )
    return results


def _call(arguments: Mapping[str, Any], known: Collection[str], megatron_schedules: Any) -> executor.Call:
    """Read what a pipelined function was called with, of what is known to it in this release."""
    data, model = arguments["data_iterator"], arguments["model"]
    chunks = model if isinstance(model, list) else [model]
    # 0.14 has another name for it.
    collection = "pg_collection" if "pg_collection" in known else "grad_finalize_pgs"
    finalize_arguments = {collection: arguments.get(collection) or _groups(megatron_schedules)}
    if "force_all_reduce" in known:
        finalize_arguments["force_all_reduce"] = bool(arguments.get("force_all_reduce"))
    return executor.Call(
        forward_step_func=arguments["forward_step_func"],
        data_iterator=data if isinstance(data, list) else [data],
        model=chunks,
        num_microbatches=arguments["num_microbatches"],
        seq_length=arguments.get("decoder_seq_length") or arguments["seq_length"],
        micro_batch_size=arguments["micro_batch_size"],
        forward_only=arguments.get("forward_only", False),
        collect_non_loss_data=arguments.get("collect_non_loss_data", False),
        first_val_step=arguments.get("first_val_step"),
        groups=finalize_arguments[collection],
        finalize_arguments=finalize_arguments,
        in_streams=executor.runs_in_streams(finalize_arguments[collection].pp),
        config=megatron_schedules.get_model_config(chunks[0]),
    )


def _check_shapes(known: Schedule, call: executor.Call, arguments: Mapping[str, Any]) -> None:
    """Raise PatchError where the job is not what the schedule is for."""
    if arguments.get("adjust_tensor_shapes_fn") is not None or call.config.variable_seq_lengths:
        raise PatchError(f"the schedule {known.name} needs micro-batches of one shape")
    if (call.groups.pp.size(), len(call.model)) != (known.pp, known.vpp):
        raise PatchError(
            f"the schedule {known.name} is for {known.pp} pipeline ranks of {known.vpp} chunks; this job has "
            f"{call.groups.pp.size()} of {len(call.model)}"
        )


def _check_fold(known: Schedule, chunks: list[Any], rank: int, attribute: Callable[..., Any]) -> None:
    """Raise PatchError where a model was not built, or cannot be, with both its ends on the first rank."""
    heads = [bool(attribute(chunk, "post_process")) for chunk in chunks]
    if heads != [False, rank == 0]:
        raise PatchError(
            f"the schedule {known.name} has the model's head on the second chunk of pipeline rank 0; the script has "
            f"built its chunks without asking Megatron where the last stage is"
        )


def _tied_weights(chunks: list[Any], attribute: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the embedding and the head of a rank that has both of a model that ties them; else nothing."""
    if not attribute(chunks[0], "share_embeddings_and_output_weights") or not attribute(chunks[0], "pre_process"):
        return ()
    return tuple(attribute(chunk, "shared_embedding_or_output_weight")() for chunk in chunks)


def _groups(megatron_schedules: Any) -> Any:
    """Return the process groups as Megatron's pipelined functions collect them."""
    if hasattr(megatron_schedules, "_build_default_pg_collection"):
        # From 0.19 on; 0.20 reads groups of weight shards too.
        return megatron_schedules._build_default_pg_collection()
    from megatron.core import parallel_state

    groups = SimpleNamespace()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups


class Schedules:
    """Pipelines of more than one rank follow the named schedule."""

    name = "schedules"
    supports = SpecifierSet(">={}.{},<{}.{}".format(*RELEASES[0], *RELEASES[1]))

    def __init__(self) -> None:
        self._replacements = Replacements(())

    def apply(self) -> None:
        """Replace Megatron's functions as their modules are imported; raises PatchError where no file is named."""
        if VARIABLE not in os.environ:
            raise PatchError(f"the patch 'schedules' follows a file that {VARIABLE} names; it is not set")
        replacements = [Replacement(module=MODULE, path=path, make=_following) for path in PIPELINED]
        replacements += executor.REPLACEMENTS
        if files.read(Path(os.environ[VARIABLE]), ScheduleFile).placement == "v":
            version = megatron_core_version()
            if Version(version).release < FOLDING_RELEASE:
                raise PatchError(
                    "the patch 'schedules' folds pipelines from megatron-core {}.{} on".format(*FOLDING_RELEASE)
                )
            replacements += [each for each in v_placement.REPLACEMENTS if each.fits(version)]
        self._replacements = Replacements(replacements)
        self._replacements.apply()

    def revert(self) -> None:
        """Put every original object back."""
        self._replacements.revert()


PATCH = Schedules()
