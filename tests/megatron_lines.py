"""Command lines for tests of the megatron room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipette_launch.facts import Job
from pipette_launch.megatron import read_job

TEXT = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 1000 --tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 32 --train-iters 10"
)
SMALL = TEXT.split()


def job(
    *more: str,
    base: Sequence[str] = SMALL,
    world_size: int = 8,
    version: str = "0.16.1",
    device_kind: str = "cuda",
    script: str = "",
    fix: Sequence[str] = (),
    for_prediction: bool = False,
    without_probes: bool = False,
    for_planning: bool = False,
    environment: Mapping[str, str] | None = None,
    device_name: str = "",
    capability: float | None = None,
) -> Job:
    """Read the small job with more flags, each a string of words."""
    argv = [*base, *(word for text in more for word in text.split())]
    return read_job(
        argv,
        world_size=world_size,
        megatron_version=version,
        device_kind=device_kind,
        script=script,
        fix=fix,
        for_prediction=for_prediction,
        without_probes=without_probes,
        for_planning=for_planning,
        environment=environment,
        device_name=device_name,
        capability=capability,
    )
