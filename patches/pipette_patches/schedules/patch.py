"""The patch `schedules`: Megatron's pipelined functions follow the schedule of a file.

The file is named by PIPETTE_SCHEDULE and is the same on every rank. Before the first step every rank checks that the
schedule can run, and that all ranks have the same.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from packaging.specifiers import SpecifierSet

from pipette_launch.facts import files
from pipette_launch.facts.schedule import Schedule
from pipette_launch.facts.schedule_file import VARIABLE, ScheduleFile
from pipette_patches.errors import PatchError
from pipette_patches.replacements import Replacement, Replacements
from pipette_patches.schedules import executor, v_placement, weight_gradients
from pipette_patches.schedules.lowering import Program, forward_passes, programs
from pipette_patches.schedules.watchdog import Watchdog

MODULE = "megatron.core.pipeline_parallel.schedules"
PIPELINED = ("forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving")
GLOO_AHEAD = 1
"""A message over gloo travels only once it is asked for."""


@functools.lru_cache(maxsize=1)
def _schedule(path: str) -> Schedule:
    """Read the schedule; raises PatchError where ranks have different ones."""
    found = files.read(Path(path), ScheduleFile)
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, files.digest(found))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise PatchError(f"RANK {other} has another schedule in {path} than RANK 0")
    return found.schedule()


@functools.lru_cache(maxsize=4)
def _programs(known: Schedule, num_microbatches: int, *, forward_only: bool, ahead: int) -> tuple[Program, ...]:
    """Return what each rank does; raises PatchError where the schedule cannot run or is for other steps."""
    if forward_only:
        return programs(forward_passes(known.rank_S, num_microbatches), known.rank_S, ahead=ahead)
    if num_microbatches != known.num_microbatches:
        raise PatchError(
            f"the schedule {known.name} is for {known.num_microbatches} micro-batches a step; this one has "
            f"{num_microbatches}"
        )
    return programs(known.ranks, known.rank_S, ahead=ahead)


@functools.lru_cache(maxsize=1)
def _watchdog(rank: int) -> Watchdog:
    """Return the one of this process, which is watching."""
    watchdog = Watchdog(rank)
    watchdog.start()
    return watchdog


def _following(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the successor of a pipelined function of Megatron."""

    @functools.wraps(original)
    def forward_backward(
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        decoder_seq_length: int | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
        **_others: Any,
    ) -> list[Any]:
        import megatron.core.pipeline_parallel.schedules as megatron_schedules

        chunks = model if isinstance(model, list) else [model]
        call = executor.Call(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator if isinstance(data_iterator, list) else [data_iterator],
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=decoder_seq_length or seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            force_all_reduce=bool(force_all_reduce),
            groups=pg_collection or _groups(),
            config=megatron_schedules.get_model_config(chunks[0]),
        )
        known = _schedule(os.environ[VARIABLE])
        if adjust_tensor_shapes_fn is not None or call.config.variable_seq_lengths:
            raise PatchError(f"the schedule {known.name} needs micro-batches of one shape")
        if (call.groups.pp.size(), len(chunks)) != (known.pp, known.vpp):
            raise PatchError(
                f"the schedule {known.name} is for {known.pp} pipeline ranks of {known.vpp} chunks; this job has "
                f"{call.groups.pp.size()} of {len(chunks)}"
            )
        if known.placement == "v":
            _check_fold(known, chunks, call.groups.pp.rank(), megatron_schedules.get_attr_wrapped_model)
        ahead = GLOO_AHEAD if dist.get_backend(call.groups.pp) == "gloo" else 0
        program = _programs(known, num_microbatches, forward_only=forward_only, ahead=ahead)[call.groups.pp.rank()]
        return executor.run(call, program, known.rank_S, megatron_schedules, _watchdog(call.groups.pp.rank()).begin)

    return forward_backward


def _check_fold(known: Schedule, chunks: list[Any], rank: int, attribute: Callable[..., Any]) -> None:
    """Raise PatchError where a model was not built, or cannot be, with both its ends on the first rank."""
    if attribute(chunks[0], "share_embeddings_and_output_weights"):
        raise PatchError(f"the schedule {known.name} needs --untie-embeddings-and-output-weights")
    heads = [bool(attribute(chunk, "post_process")) for chunk in chunks]
    if heads != [False, rank == 0]:
        raise PatchError(
            f"the schedule {known.name} has the model's head on the second chunk of pipeline rank 0; the script has "
            f"built its chunks without asking Megatron where the last stage is"
        )


def _groups() -> Any:
    """Return the process groups as Megatron's pipelined functions collect them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
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
    supports = SpecifierSet(">=0.16,<0.20")

    def __init__(self) -> None:
        self._replacements = Replacements(())

    def apply(self) -> None:
        """Replace Megatron's functions as their modules are imported; raises PatchError where no file is named."""
        if VARIABLE not in os.environ:
            raise PatchError(f"the patch 'schedules' follows a file that {VARIABLE} names; it is not set")
        replacements = [Replacement(module=MODULE, path=path, make=_following) for path in PIPELINED]
        replacements += weight_gradients.REPLACEMENTS
        if files.read(Path(os.environ[VARIABLE]), ScheduleFile).placement == "v":
            replacements += v_placement.REPLACEMENTS
        self._replacements = Replacements(replacements)
        self._replacements.apply()

    def revert(self) -> None:
        """Put every original object back."""
        self._replacements.revert()


PATCH = Schedules()
