"""The patch `schedules`: Megatron's pipelined functions follow the schedule of a file.

The file is named by PIPETTE_SCHEDULE and is the same on every rank. Before the first step every rank checks that the
schedule can run, and that all ranks have the same.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.known_schedules import FOLDING_RELEASE, RELEASES
from pipette_launch.facts.schedule import VARIABLE, Message, Program, Schedule, ScheduleFile, forward_passes, programs
from pipette_patches import registry
from pipette_patches.errors import PatchError
from pipette_patches.replacements import Replacement, Replacements
from pipette_patches.schedules import executor, first_step, messages, v_placement, weight_gradients
from pipette_patches.schedules.watchdog import Watchdog

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
    messages.open_ways(group, ways | ({(known.rank_S[-1], known.pp - 1)} if known.placement == "v" else set()))


@functools.lru_cache(maxsize=1)
def _watchdog(rank: int) -> Watchdog:
    """Return the one of this process, which is watching."""
    watchdog = Watchdog(rank)
    watchdog.start()
    return watchdog


_follows: dict[str, bool] = {}
"""By file: whether training follows its schedule, once its first step is checked; Megatron's own otherwise."""


def _following(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Make the successor of a pipelined function of Megatron."""

    @functools.wraps(original)
    def forward_backward(**arguments: Any) -> list[Any]:
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
        program = _programs(known, call.num_microbatches, forward_only=call.forward_only, in_streams=call.in_streams)[
            rank
        ]

        def ours(data: list[Any]) -> list[Any]:
            step = replace(call, data_iterator=data)
            return executor.run(step, program, known.rank_S, megatron_schedules, _watchdog(rank).begin)

        def megatrons(data: list[Any]) -> list[Any]:
            is_list = isinstance(arguments["data_iterator"], list)
            return original(**{**arguments, "data_iterator": data if is_list else data[0]})

        if call.forward_only or not document.checks_first_step or path in _follows:
            return ours(call.data_iterator)
        results, fault = first_step.compared(call.model, call.data_iterator, ours, megatrons)
        _follows[path] = not fault
        first_step.say(
            f"the first step under {known.name} has {fault} under Megatron's own schedule, which goes on training"
            if fault
            else f"the first step under {known.name} has the losses and gradients of Megatron's own schedule"
        )
        return results

    return forward_backward


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
        in_streams=messages.runs_in_streams(finalize_arguments[collection].pp),
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
        replacements += weight_gradients.REPLACEMENTS
        if files.read(Path(os.environ[VARIABLE]), ScheduleFile).placement == "v":
            version = registry.megatron_core_version()
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
