"""Checkpoints in megatron-core's torch_dist format and Megatron-LM's folder layout, loadable under another layout."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpt_model import Trainee, unwrapped
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

TRACKER = "latest_checkpointed_iteration.txt"
LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
FULL_LAYOUT = (*LAYOUT, "context_parallel_size", "data_parallel_size", "expert_model_parallel_size")
RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")
"""Forms of the distributed optimizer's state that another TP and PP can take."""


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded into this layout."""


def save(args: Namespace, trainee: Trainee, iteration: int) -> None:
    """Write weights, optimizer, schedule and random states below `--save`, then name the iteration as the latest."""
    folder = Path(args.save) / f"iter_{iteration:07d}"
    if args.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": _form(args),
    }
    state = _state(args, trainee, metadata, optimizer=not args.no_save_optim, rng=not args.no_save_rng, loading=False)
    own = ("rank", "local_rank")
    state["args"] = Namespace(**{name: value for name, value in vars(args).items() if name not in own})
    state["iteration"] = iteration
    dist_checkpointing.save(state, str(folder), content_metadata=metadata)
    torch.distributed.barrier()
    if args.rank == 0:
        (Path(args.save) / TRACKER).write_text(str(iteration))
        print(f"  saved checkpoint of iteration {iteration} to {args.save}", flush=True)


def load(args: Namespace, trainee: Trainee) -> int:
    """Read the latest checkpoint below `--load` and return its iteration; 0 without a checkpoint.

    Raises:
        CheckpointError: the optimizer state was saved in a form that this layout cannot take.

    """
    tracker = Path(args.load) / TRACKER
    if not tracker.is_file():
        if args.rank == 0:
            print(f"WARNING: no {TRACKER} in {args.load}: training starts from random weights", flush=True)
        return 0
    folder = str(tracker.with_name(f"iter_{int(tracker.read_text()):07d}"))
    common = dist_checkpointing.load_common_state_dict(folder)
    saved = common["args"]
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    optimizer = not (args.finetune or args.no_load_optim or saved.no_save_optim)
    rng = not (args.finetune or args.no_load_rng or saved.no_save_rng) and _same_streams(args, saved)
    if optimizer:
        _check_optimizer(args, saved, metadata)
    state = _state(args, trainee, metadata, optimizer=optimizer, rng=rng, loading=True)
    state = dist_checkpointing.load(state, folder)
    for index, chunk in enumerate(trainee.chunks):
        chunk.load_state_dict(state[_key(trainee, index)])
    if optimizer:
        with torch.no_grad():  # in float32 the main parameters are views of the model's own, which require gradients
            trainee.optimizer.load_state_dict(state["optimizer"])
        trainee.scheduler.load_state_dict(state["opt_param_scheduler"])
    else:
        trainee.optimizer.reload_model_params()
    if rng:
        _set_random_states(state["rng_state"][0])
    if args.rank == 0:
        without = [name for name, loaded in (("optimizer", optimizer), ("random states", rng)) if not loaded]
        print(f"  loaded checkpoint {folder}{' without ' if without else ''}{' and '.join(without)}", flush=True)
    return 0 if args.finetune else int(common["iteration"])


def _state(
    args: Namespace, trainee: Trainee, metadata: dict[str, Any], *, optimizer: bool, rng: bool, loading: bool
) -> dict[str, Any]:
    """Say what lies where: the shards of this rank, and what all ranks have in common."""
    # The process group is for making the shards; it cannot be written.
    local = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {"checkpoint_version": 3.0}
    for index, chunk in enumerate(trainee.chunks):
        state[_key(trainee, index)] = unwrapped(chunk).sharded_state_dict(metadata=local)
    if optimizer:
        state["optimizer"] = trainee.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=local)
        state["opt_param_scheduler"] = trainee.scheduler.state_dict()
    if rng:
        state["rng_state"] = _random_states(args)
    return state


def _form(args: Namespace) -> str:
    """Name the form in which the distributed optimizer is saved."""
    if not hasattr(DistributedOptimizer, "sharded_param_state_fully_reshardable"):
        return RESHARDABLE[1]
    return RESHARDABLE[0] if args.dist_ckpt_optim_fully_reshardable else "dp_reshardable"


def _key(trainee: Trainee, index: int) -> str:
    return "model" if len(trainee.chunks) == 1 else f"model{index}"


def _check_optimizer(args: Namespace, saved: Namespace, metadata: dict[str, Any]) -> None:
    form = metadata.get("distrib_optim_sharding_type", RESHARDABLE[-1])
    now, then = ([getattr(source, name) for name in LAYOUT] for source in (args, saved))
    if args.use_distributed_optimizer and form not in RESHARDABLE and now != then:
        raise CheckpointError(
            f"the optimizer state in {args.load} was saved as {form} with TP, PP = {then} and cannot be loaded with "
            f"{now}; train with {then}, save with --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim"
        )


def _same_streams(args: Namespace, saved: Namespace) -> bool:
    names = FULL_LAYOUT if args.num_experts else LAYOUT
    return all(getattr(args, name) == getattr(saved, name) for name in names)


def _random_states(args: Namespace) -> ShardedObject:
    """Random states are the same on all data-parallel ranks, except that every rank of a model with experts differs."""
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),  # noqa: NPY002 - the state that libraries may use
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    shape = [
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    ]
    place = [parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()]
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if args.num_experts:
        shape.append(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
        place.append(replica)
        replica = 0
    return ShardedObject("rng_state", [states], tuple(shape), tuple(place), replica_id=replica)


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])  # noqa: NPY002 - see _random_states
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
