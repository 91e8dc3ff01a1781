"""The patch `schedules`: Megatron's pipelined functions follow the schedule of a file.

PIPETTE_SCHEDULE names the file, which is the same on every rank. Before the first step every rank checks that the
schedule can run and that all ranks have the same schedule. A training may also run its first step under Megatron's own
schedule. The losses and gradients of the two runs must then agree.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet

from pipette_launch.defaults import PASS_S
from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.programs import Message, Program, forward_passes, programs
from pipette_launch.facts.schedule import RELEASES, VARIABLE, Schedule, ScheduleFile
from pipette_patches.replacements import Patch, PatchError, Replacement, in_module, wrapping
from pipette_patches.schedules import executor, v_placement

TOLERANCE = 1e-3
"""Largest relative difference of losses or gradient norms that count as equal: 10 times the effect of sum order."""


def _print(words: str) -> None:
    sys.stderr.write(f"pipette_patches.schedules: {words}\n")
    sys.stderr.flush()


@dataclass
class Watchdog:
    """Prints the current pass of a rank if the pass takes too long, so that the user sees which rank waits."""

    rank: int
    patience_s: float = PASS_S
    clock: Callable[[], float] = time.monotonic
    _doing: str = ""
    _since_s: float = 0.0

    def begin(self, doing: str) -> None:
        """Store the name of the pass that begins; an empty string after the last pass."""
        self._doing, self._since_s = doing, self.clock()

    def complaint(self) -> str:
        """Return a line if the current pass takes too long, once for each pass; else an empty string."""
        taken_s = self.clock() - self._since_s
        if not self._doing or taken_s < self.patience_s:
            return ""
        doing, self._doing = self._doing, ""
        return f"pipeline rank {self.rank} has been at {doing} for {taken_s:.0f} s"

    def start(self) -> None:
        """Start a thread that checks the current pass and prints complaints on stderr."""
        threading.Thread(target=self._watch, name="schedule-watchdog", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(self.patience_s / 4)
            complaint = self.complaint()
            if complaint:
                _print(complaint)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Losses and gradients of a step on one rank."""

    losses: tuple[float, ...]
    """Each value that the script's loss function reported. Only ranks of the last stage have losses."""
    norms: tuple[float, ...]
    """Norm of each gradient buffer."""

    @classmethod
    def of(cls, results: list[Any], chunks: list[Any]) -> Figures:
        """Read the results of a step and its gradients."""
        reports = [each for result in results if isinstance(result, dict) for each in result.values()]
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return cls(
            losses=tuple(float(torch.as_tensor(each).float().sum()) for each in reports),
            norms=tuple(float(torch.linalg.vector_norm(each.grad_data, dtype=torch.float32)) for each in buffers),
        )

    def difference(self, expected: Figures) -> str:
        """Describe the first difference to the expected figures. Return an empty string if the figures agree."""
        for name in ("losses", "norms"):
            ours, theirs = getattr(self, name), getattr(expected, name)
            if len(ours) != len(theirs):
                return f"{len(ours)} {name} for {len(theirs)}"
            for one, other in zip(ours, theirs, strict=True):
                is_same = math.isclose(one, other, rel_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))
                if not is_same:
                    return f"{'a loss' if name == 'losses' else 'a norm of gradients'} of {one:g} for {other:g}"
        return ""


_Run = Callable[[list[Any]], list[Any]]
"""Runs a step with a data iterator for each chunk, and returns its results."""


def _compared(chunks: list[Any], data: list[Any], ours: _Run, megatrons: _Run) -> tuple[list[Any], str]:
    """Run a step under our schedule and under Megatron's own, from the same state.

    `data` has an iterator for each chunk, or None on ranks that get their data from other ranks. Return the results,
    and an empty string if the figures of all ranks agree. Otherwise Megatron's schedule runs once more, and its results
    come with the first difference. The gradients belong to the returned results.
    """
    from megatron.core.tensor_parallel.random import _get_all_rng_states, _set_all_rng_states

    # Megatron's own iterators have no `__iter__`.
    iterators = [None if each is None else map(next, itertools.repeat(each)) for each in data]
    copies = [itertools.repeat(None) if each is None else iter(itertools.tee(each, 3)) for each in iterators]
    *states, tracked = _get_all_rng_states()

    def again(run: _Run) -> list[Any]:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        # A run changes the dict of states that it gets.
        _set_all_rng_states(*states, copy.copy(tracked))
        return run([next(each) for each in copies])

    expected = Figures.of(again(megatrons), chunks)
    results = again(ours)
    mine = Figures.of(results, chunks).difference(expected)
    everyones: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    found = next((f"RANK {rank} has {fault}" for rank, fault in enumerate(everyones) if fault), "")
    return (again(megatrons), found) if found else (results, "")


@functools.lru_cache(maxsize=1)
def _document(path: str) -> tuple[ScheduleFile, Schedule]:
    """Read the file and its schedule; raise PatchError if another rank has a different file."""
    found = files.read(Path(path), ScheduleFile)
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, files.digest(found))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise PatchError(f"RANK {other} has another schedule in {path} than RANK 0")
    return found, found.schedule()


@functools.lru_cache(maxsize=4)
def _programs(known: Schedule, num_microbatches: int, *, forward_only: bool, in_streams: bool) -> tuple[Program, ...]:
    """Return the program of each rank; raise PatchError if the schedule cannot run or does not fit the step."""
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
    """Open the communicators of a pipeline at the first step."""
    _, known = _document(path)
    ways = {step.way for steps in programs(known.ranks, known.rank_S) for step in steps if isinstance(step, Message)}
    # Results travel from the rank of the last stage to the last rank.
    executor.open_ways(group, ways | ({(known.rank_S[-1], known.pp - 1)} if known.placement == "v" else set()))


@functools.lru_cache(maxsize=1)
def _watchdog(rank: int) -> Watchdog:
    watchdog = Watchdog(rank)
    watchdog.start()
    return watchdog


_follows: dict[str, bool] = {}
"""Result of the check of the first step, by schedule file: True = training follows our schedule, False = Megatron's."""


@wrapping
def _following(original: Callable[..., list[Any]], **arguments: Any) -> list[Any]:
    """Run a step under the schedule of the file, in place of one of Megatron's pipelined functions."""
    import megatron.core.pipeline_parallel.schedules as megatron_schedules

    path = os.environ[VARIABLE]
    if not _follows.get(path, True):
        return original(**arguments)
    document, known = _document(path)
    call = _call(arguments, inspect.signature(original).parameters, megatron_schedules)
    rank = call.groups.pp.rank()
    _check_shapes(known, call, arguments)
    if known.placement == "v":
        call = _folded(known, call, rank, megatron_schedules.get_attr_wrapped_model)
    if call.in_streams:
        _open_ways(path, call.groups.pp)
    by_rank = _programs(known, call.num_microbatches, forward_only=call.forward_only, in_streams=call.in_streams)

    def ours(data: list[Any]) -> list[Any]:
        step = replace(call, data_iterator=data)
        return executor.run(step, by_rank[rank], known.rank_S, megatron_schedules, _watchdog(rank).begin)

    def megatrons(data: list[Any]) -> list[Any]:
        is_list = isinstance(arguments["data_iterator"], list)
        return original(**{**arguments, "data_iterator": data if is_list else data[0]})

    if call.forward_only or not document.checks_first_step or path in _follows:
        return ours(call.data_iterator)
    results, fault = _compared(call.model, call.data_iterator, ours, megatrons)
    _follows[path] = not fault
    if dist.get_rank() == 0:
        _print(
            f"the first step under {known.name} has {fault} under Megatron's own schedule, which goes on training"
            if fault
            else f"the first step under {known.name} has the losses and gradients of Megatron's own schedule"
        )
    return results


def _call(arguments: Mapping[str, Any], known: Collection[str], megatron_schedules: Any) -> executor.Call:
    """Convert the arguments of a pipelined function of Megatron; `known` are its parameters in this release."""
    data, model = arguments["data_iterator"], arguments["model"]
    chunks = model if isinstance(model, list) else [model]
    groups = arguments.get("pg_collection") or _groups(megatron_schedules)
    finalize_arguments = {"pg_collection": groups}
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
        groups=groups,
        finalize_arguments=finalize_arguments,
        in_streams=executor.runs_in_streams(groups.pp),
        config=megatron_schedules.get_model_config(chunks[0]),
    )


def _check_shapes(known: Schedule, call: executor.Call, arguments: Mapping[str, Any]) -> None:
    """Raise PatchError if the schedule does not fit the job."""
    if arguments.get("adjust_tensor_shapes_fn") is not None or call.config.variable_seq_lengths:
        raise PatchError(f"the schedule {known.name} needs micro-batches of one shape")
    if (call.groups.pp.size(), len(call.model)) != (known.pp, known.vpp):
        raise PatchError(
            f"the schedule {known.name} is for {known.pp} pipeline ranks of {known.vpp} chunks; this job has "
            f"{call.groups.pp.size()} of {len(call.model)}"
        )


def _folded(known: Schedule, call: executor.Call, rank: int, attribute: Callable[..., Any]) -> executor.Call:
    """Add the weights of embedding and head to the call if this rank ties these weights.

    Raise PatchError if the script did not put the embedding and the head of the model on the first rank.
    """
    first, last = call.model[0], call.model[-1]
    if [bool(attribute(chunk, "post_process")) for chunk in call.model] != [False, rank == 0]:
        raise PatchError(
            f"the schedule {known.name} has the model's head on the second chunk of pipeline rank 0; the script has "
            f"built its chunks without asking Megatron where the last stage is"
        )
    if not attribute(first, "share_embeddings_and_output_weights") or not attribute(first, "pre_process"):
        return call
    tied = tuple(attribute(chunk, "shared_embedding_or_output_weight")() for chunk in (first, last))
    return replace(call, tied_weights=tied)


def _groups(megatron_schedules: Any) -> Any:
    """Return the process groups as Megatron's pipelined functions collect them."""
    if hasattr(megatron_schedules, "_build_default_pg_collection"):
        # Megatron has this function from 0.19 on. From 0.20 on, Megatron also reads groups of weight shards.
        return megatron_schedules._build_default_pg_collection()
    from megatron.core import parallel_state

    return SimpleNamespace(
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        embd=parallel_state.get_embedding_group(check_initialized=False),
        pos_embd=parallel_state.get_position_embedding_group(check_initialized=False),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False),
    )


def _replacements() -> tuple[Replacement, ...]:
    """Return the replacements. Raise PatchError if no file is named or if the schedule of the file cannot run."""
    if VARIABLE not in os.environ:
        raise PatchError(f"the patch 'schedules' follows a file that {VARIABLE} names; it is not set")
    pipelined = (f"forward_backward_pipelining_{each}_interleaving" for each in ("with", "without"))
    replacements = (
        *in_module("megatron.core.pipeline_parallel.schedules", dict.fromkeys(pipelined, _following)),
        executor.SPLITTING,
    )
    if files.read(Path(os.environ[VARIABLE]), ScheduleFile).placement != "v":
        return replacements
    return (*replacements, *v_placement.REPLACEMENTS)


PATCH = Patch(
    name="schedules",
    supports=SpecifierSet(">={}.{},<{}.{}".format(*RELEASES[0], *RELEASES[1])),
    replacements=_replacements,
)
