"""A checkpoint whose optimizer state lies in gradient buckets needs replicas that make buckets of the same size."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_lines import SMALL, job

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Job
from pipette_launch.megatron import continuation

SHARDED = "--use-distributed-optimizer --overlap-grad-reduce"
BATCH = "--global-batch-size 10080"


def saved(root: Path, dp: int, *, sharding: str | None = "dp_reshardable", **changes: Any) -> str:
    """A torch_dist checkpoint that TP 2, PP 3 and so many replicas wrote; gives the flag that loads it."""
    folder = root / "iter_0000010"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    values = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 3,
        "context_parallel_size": 1,
        "data_parallel_size": dp,
        "world_size": 6 * dp,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": False,
        "ddp_bucket_size": None,
        "ddp_num_buckets": None,
    }
    kept = {name: value for name, value in {**values, **changes}.items() if value != "absent"}
    state: dict[str, Any] = {"args": argparse.Namespace(**kept), "iteration": 10}
    if sharding:
        state["content_metadata"] = {"distrib_optim_sharding_type": sharding}
    torch.save(state, folder / "common.pt")
    return f"--load {root}"


def read(load: str, flags: str = "", *, dp: int, purpose: str = "for_planning", version: str = "0.16.1") -> Job:
    """The job that loads it on six times as many ranks as replicas, with layers that three stages share."""
    asked: Any = {purpose: True} if purpose else {}
    sizes = "--num-layers 6 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3"
    return job(load, SHARDED, BATCH, sizes, flags, world_size=6 * dp, version=version, **asked)


def test_replicas_that_make_other_buckets_are_one_sentence(tmp_path: Path) -> None:
    """Of 48 replicas on 30 hosts of 8, which make 40: no plan, or a note where no plan is asked for."""
    load = saved(tmp_path, 48)
    with pytest.raises(MegatronError) as error:
        read(load, dp=40)
    said = (
        f"{tmp_path / 'iter_0000010'} holds optimizer state in gradient buckets of 48 data-parallel ranks (dp*cp), and "
        "240 ranks make 40, whose buckets may differ: use 288 ranks, add --ddp-bucket-size 48000000, or leave the "
        "state out with --no-load-optim"
    )

    assert said == str(error.value)
    assert said in read(load, dp=40, purpose="for_prediction").notes
    assert said in read(load, dp=40, purpose="").notes
    assert said not in read(load, dp=48, purpose="for_prediction").notes


@pytest.mark.parametrize(
    ("dp", "flags", "changes"),
    [
        (48, "", {}),
        (40, "--ddp-bucket-size 48000000", {}),
        (40, "--no-load-optim", {}),
        (40, "--finetune", {}),
        (40, "", {"sharding": "fully_reshardable"}),
        (40, "", {"sharding": "fully_sharded_model_space"}),
        (40, "", {"sharding": "dp_zero_gather_scatter"}),
        (40, "", {"sharding": None, "ckpt_fully_parallel_save": True}),
        (40, "", {"sharding": None, "ckpt_fully_parallel_save": False}),
        (40, "", {"no_save_optim": True}),
        (40, "", {"overlap_grad_reduce": False}),
        (40, "--ddp-bucket-size 50000000", {"ddp_bucket_size": 50_000_000}),
        (40, "--ddp-num-buckets 4", {"ddp_num_buckets": 4}),
    ],
)
def test_state_that_loads_is_read(tmp_path: Path, dp: int, flags: str, changes: dict[str, Any]) -> None:
    """Equal buckets, one bucket, state of another type, or no state."""
    assert dp == read(saved(tmp_path, 48, **changes), flags, dp=dp).own.dp


@pytest.mark.parametrize(
    ("dp", "now", "flags", "changes", "remedy"),
    [
        (8, 41, "", {}, "use at most 240 ranks, add --ddp-bucket-size 40000000,"),
        (64, 60, "", {}, "use 384 ranks, add --ddp-bucket-size 64000000,"),
        (8, 8, "", {"ddp_bucket_size": 25_000_000}, "add --ddp-bucket-size 25000000,"),
        (8, 8, "--ddp-bucket-size 25000000", {}, "add --ddp-bucket-size 40000000,"),
        (24, 40, "", {"context_parallel_size": 2}, "of 48 data-parallel ranks (dp*cp), and 240 ranks make 40"),
        (0, 40, "", {"world_size": 288}, "of 48 data-parallel ranks (dp*cp), and 240 ranks make 40"),
        (48, 40, "", {"sharding": "fully_sharded_bucket_space"}, "use 288 ranks"),
        (48, 40, "", {"sharding": None}, "use 288 ranks"),
        (48, 40, "", {"overlap_grad_reduce": "absent", "ddp_bucket_size": "absent"}, "use 288 ranks"),
    ],
)
def test_every_difference_of_buckets_is_found(
    tmp_path: Path, dp: int, now: int, flags: str, changes: dict[str, Any], remedy: str
) -> None:
    """Fewer or more replicas, a size that only one of the runs was given, and replicas known from other arguments."""
    with pytest.raises(MegatronError, match=re.escape(remedy)):
        read(saved(tmp_path, dp, **changes), flags, dp=now)


def test_a_checkpoint_that_is_not_here_is_a_note(tmp_path: Path) -> None:
    """A plan made on another machine cannot know what the checkpoint fixes; a prediction changes nothing."""
    note = (
        f"no checkpoint is at --load {tmp_path} here, so nothing is kept for one: on other machines it may fix tp, pp "
        "and more; --pipette-fix keeps them"
    )

    assert note in read(f"--load {tmp_path}", dp=4).notes
    assert note not in read(f"--load {tmp_path}", dp=4, purpose="for_prediction").notes
    assert note not in read(f"--load {tmp_path}", dp=4, purpose="").notes
    assert note not in read(saved(tmp_path, 4), dp=4).notes


@settings(max_examples=40)
@given(st.integers(1, 120), st.integers(1, 120))
def test_a_plan_and_the_rule_for_lost_hosts_agree(before: int, after: int) -> None:
    """A checkpoint is refused exactly where a job that loses hosts may not go on so."""
    with TemporaryDirectory() as folder:
        load = saved(Path(folder), before)
        words = [*SMALL, *SHARDED.split(), "--save", folder, *load.split()]
        layout = replace(read("", dp=before).own, overlap_grad_reduce=True)
        can_load = continuation(words, read("", dp=before), layout).can_load(layout, replace(layout, dp=after))
        try:
            found = read(load, dp=after).own.dp == after
        except MegatronError:
            found = False

    assert can_load == found


def test_an_older_release_names_its_own_format() -> None:
    """A save by 0.14 that is not parallel gathers the state on one rank, so its buckets do not matter."""
    words = [*SMALL, *SHARDED.split(), *"--save /c --load /c --no-ckpt-fully-parallel-save".split()]
    layout = read("", dp=48, version="0.14.0").own
    found = continuation(words, read("", dp=48, version="0.14.0"), layout)

    assert found.can_load(layout, replace(layout, dp=40))
    assert "saves its state as dp_zero_gather_scatter" in found.note
