"""Which fields of a layout a checkpoint keeps, by the format of its optimizer and its random state."""

from __future__ import annotations

from pipette_launch.megatron.chunks import Split
from pipette_launch.megatron.flags import Arguments, release_of
from pipette_launch.megatron.pins import OPTIMIZER_FIELDS

MODEL_FIELDS = ("tp", "pp", *Split._fields, "ep", "etp")
"""What cuts the model into shards."""
IN_BUCKETS = ("dp_reshardable", "fully_sharded_bucket_space")
"""Types of sharding that save each gradient bucket by itself: the run that loads needs buckets of the same size."""
EQUAL_BUCKETS_DP = 40
"""Replicas up to which gradient buckets have the same size; with more they grow (core_v0.16 training.py:1317)."""
REPLICA_ELEMENTS = 1_000_000
"""Elements of a bucket for each replica."""
RNG_OF_EXPERTS = "0.16 loads expert-parallel random state only at the same dp and cp"


def fixes_random_state(arguments: Arguments, ep: int) -> bool:
    """Whether this release loads the random state of experts, and only where dp and cp are as they were."""
    return ep > 1 and release_of(arguments.version) == (0, 16) and not arguments.get("no_load_rng")


def kept_fields(arguments: Arguments, sharding: str | None, *, is_sharded: bool) -> tuple[str, ...]:
    """Return what another layout must keep to load the optimizer's state.

    Args:
        arguments: of the run that loads or saves.
        sharding: how a distributed optimizer was saved; None where the checkpoint does not tell: as its release does.
        is_sharded: whether the optimizer is distributed.

    """
    usual = "fully_sharded_model_space" if release_of(arguments.version) < (0, 15) else "dp_reshardable"
    # The plain optimizer's state follows its parameters.
    if not is_sharded or (sharding or usual) in ("fully_reshardable", "fully_sharded_model_space"):
        return ("use_distributed_optimizer",)
    # Buckets must be equal too, and those depend on whether gradients are reduced early.
    return (*MODEL_FIELDS, *OPTIMIZER_FIELDS)
