"""A checkpoint pins the fields that its format cannot reshard, at the values with which it was written."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from facts_for_tests import memory_need
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_lines import SMALL, job

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Choice, Job, Layout, Plan, Provenance, files
from pipette_launch.megatron import continuation, read_job, record_path, saved_iteration, write_arguments
from pipette_launch.megatron.checkpoint_files import read_saved

SHARDED = "--use-distributed-optimizer --overlap-grad-reduce"
MODEL = ("chunks_after_mtp", "ep", "etp", "layers_per_chunk")
KEPT = (*MODEL, "overlap_grad_reduce", "overlap_param_gather", "pp", "tp", "use_distributed_optimizer", "vpp")
Make = Callable[..., str]


def arguments(**changes: Any) -> argparse.Namespace:
    """Return the arguments that Megatron stores in a checkpoint, as far as these tests need them."""
    values: dict[str, Any] = {
        "some_path": "/data/tensor_model_parallel_size",
        "dist_ckpt_optim_fully_reshardable": False,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": False,
    }
    return argparse.Namespace(**(values | changes))


def distributed(root: Path, *, sharding: str | None = "dp_reshardable", common: bool = True, **changes: Any) -> str:
    """Write a torch_dist checkpoint of iteration 10 without tensors, and return the flag that loads it."""
    folder = root / "iter_0000010"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    if common:
        kinds = {} if sharding is None else {"distrib_optim_sharding_type": sharding}
        state = {"args": arguments(**changes), "iteration": 10, "content_metadata": kinds}
        torch.save(state, folder / "common.pt")
    return f"--load {root}"


def legacy(root: Path, *folders: str) -> str:
    """Write a checkpoint of the format torch, and return the flag that loads it."""
    for name in folders:
        (root / "iter_0000010" / name).mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("10\n")
    return f"--load {root}"


def record(root: Path, layout: Layout) -> None:
    """Write the plan that the launcher saves beside its checkpoints."""
    choice = Choice(
        layout=layout,
        placement=tuple(range(8)),
        schedule="1f1b",
        step_time_s=1.0,
        breakdown_s={"compute": 1.0},
        memory=memory_need((1,) * layout.pp, 2),
        bound_s=0.5,
    )
    plan = Plan(
        hosts=("a",),
        devices_per_host=8,
        device_kind="cuda",
        chosen=choice,
        alternatives=(),
        own=choice,
        keeps_own=True,
        reasons=(),
        notes=(),
        num_layouts=1,
        dropped={},
        solve_s=0.0,
        provenance=Provenance(key="k", made_at="now", versions={}, source="measured"),
    )
    files.write(root / "pipette-plan.json", plan)


def test_no_checkpoint_pins_nothing(tmp_path: Path) -> None:
    """A first start pins nothing, with and without the folder."""
    (tmp_path / "empty").mkdir()

    assert job(f"--load {tmp_path}/empty").pinned == ()
    assert job(f"--load {tmp_path}/nowhere --save {tmp_path}/nowhere").pinned == ()


def test_bytes_tell_how_it_was_written(tmp_path: Path) -> None:
    """Numbers, texts, truth values and None are read from the pickle without loading it."""
    layout = "Et|t*3|tt|ttL"
    distributed(tmp_path, pipeline_model_parallel_layout=layout, tensor_model_parallel_size=300)
    saved, sharding = read_saved(tmp_path / "iter_0000010")

    assert sharding == "dp_reshardable"
    assert (300, 2, None, layout, True, False) == tuple(
        saved[name]
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "pipeline_model_parallel_layout",
            "overlap_grad_reduce",
            "overlap_param_gather",
        )
    )


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 torn"])
def test_damaged_states_tell_nothing(tmp_path: Path, content: bytes) -> None:
    """A damaged checkpoint gives no values, so the plan beside it or the flags count."""
    (tmp_path / "common.pt").write_bytes(content)

    assert read_saved(tmp_path) == ({}, None)
    assert read_saved(tmp_path / "nowhere") == ({}, None)


def test_optimizer_state_of_0_15_pins_what_cuts_the_model(tmp_path: Path) -> None:
    """The checkpoint's values become the user's own layout and reach the command line."""
    load = distributed(tmp_path)
    asked = job(load, SHARDED)

    assert asked.pinned == KEPT
    assert asked.own == Layout(tp=2, pp=2, dp=2, etp=2, use_distributed_optimizer=True, overlap_grad_reduce=True)
    assert any("dp_reshardable" in note and "as in the checkpoint" in note for note in asked.notes)
    argv = (*SMALL, *load.split(), *SHARDED.split())
    sizes = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    assert write_arguments(argv, job=asked, layout=asked.own)[len(argv) :] == sizes


def test_virtual_stages_are_kept(tmp_path: Path) -> None:
    """Virtual stages are part of the buckets, so they stay, also if other flags set them."""
    even = distributed(tmp_path / "even", virtual_pipeline_model_parallel_size=2)
    uneven = distributed(
        tmp_path / "uneven", virtual_pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t*3|tt|ttL"
    )

    assert (2, ()) == (job(even, SHARDED).own.vpp, job(even, SHARDED).own.layers_per_chunk)
    assert (2, (1, 3, 2, 2)) == (job(uneven, SHARDED).own.vpp, job(uneven, SHARDED).own.layers_per_chunk)


@pytest.mark.parametrize("purpose", ["for_prediction", "for_planning", ""])
@pytest.mark.parametrize("flags", ["--pipeline-model-parallel-size 4", "--tensor-model-parallel-size 3", ""])
def test_sizes_of_a_checkpoint_come_before_those_of_the_flags(tmp_path: Path, flags: str, purpose: str) -> None:
    """Sizes from the checkpoint are used even if the layers do not divide by the flags' sizes."""
    fields = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    ends = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1}
    load = distributed(tmp_path, **fields, **ends)
    words = f"--num-layers 6 {flags} --use-checkpoint-args --use-mp-args-from-checkpoint-args"
    asked = job(load, SHARDED, words, **({purpose: True} if purpose else {}))

    assert (4, (1, 2, 2, 1), "") == (asked.own.pp, asked.own.layers_per_chunk, asked.own_refusal)
    assert not [note for note in asked.notes if "does not divide" in note or "needs a multiple" in note]


@pytest.mark.parametrize(("layout", "after"), [("Et*4|t*3|tmm|L", 1), ("Et*4|t*3|t|mmL", 0)])
def test_the_stage_of_token_prediction_is_kept(tmp_path: Path, layout: str, after: int) -> None:
    """The chunk of multi-token prediction stays where the run that saved had it."""
    fields = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    load = distributed(tmp_path, **fields, pipeline_model_parallel_layout=layout, mtp_num_layers=2)
    asked = job(load, SHARDED, "--mtp-num-layers 2 --position-embedding-type rope")

    assert (4, (4, 3, 1, 0), after) == (asked.own.pp, asked.own.layers_per_chunk, asked.own.chunks_after_mtp)
    assert "chunks_after_mtp" in asked.pinned


@pytest.mark.parametrize(
    ("flags", "sharding", "version", "pinned"),
    [
        (SHARDED, "fully_reshardable", "0.16.1", ("use_distributed_optimizer",)),
        (SHARDED, "fully_sharded_model_space", "0.16.1", ("use_distributed_optimizer",)),
        (SHARDED, None, "0.16.1", KEPT),
        ("", None, "0.16.1", ("use_distributed_optimizer",)),
        (f"{SHARDED} --finetune", "dp_reshardable", "0.16.1", ()),
        (f"{SHARDED} --no-load-optim", "dp_reshardable", "0.16.1", ()),
    ],
)
def test_what_reshards_is_left_open(
    tmp_path: Path, flags: str, sharding: str | None, version: str, pinned: tuple[str, ...]
) -> None:
    """Weights always reshard; optimizer state reshards if its saved format allows it."""
    load = distributed(tmp_path, sharding=sharding, use_distributed_optimizer=bool(flags))

    assert job(load, flags, version=version).pinned == pinned


def test_plain_optimizer_state_reshards(tmp_path: Path) -> None:
    """The state of a plain optimizer follows the parameters, in every saved format."""
    asked = job(distributed(tmp_path, use_distributed_optimizer=False), SHARDED)

    assert (("use_distributed_optimizer",), False) == (asked.pinned, asked.own.use_distributed_optimizer)


def test_expert_random_state_pins_dp_in_0_16(tmp_path: Path) -> None:
    """0.16 keeps the random state of experts for each data-parallel rank; --no-load-rng frees dp."""
    load = distributed(tmp_path, sharding="fully_reshardable")
    flags = f"{SHARDED} --num-experts 4 --expert-model-parallel-size 2"

    assert job(load, flags).pinned == ("cp", "dp", "use_distributed_optimizer")
    assert job(load, flags, "--no-load-rng").pinned == ("use_distributed_optimizer",)
    assert job(load, flags, version="0.17.0").pinned == ("use_distributed_optimizer",)


def test_the_plan_beside_speaks_where_the_checkpoint_does_not(tmp_path: Path) -> None:
    """The layout of the plan beside the checkpoint counts; without a readable plan the flags count."""
    load = distributed(tmp_path, common=False)
    record(tmp_path, Layout(tp=4, pp=2, etp=4, use_distributed_optimizer=True))

    asked = job(load, SHARDED)
    assert (4, 2, False) == (asked.own.tp, asked.own.pp, asked.own.overlap_grad_reduce)
    assert any("as in the plan beside it" in note for note in asked.notes)
    (tmp_path / "pipette-plan.json").write_text("{")
    asked = job(load, SHARDED)
    assert (1, 1, True) == (asked.own.tp, asked.own.pp, asked.own.overlap_grad_reduce)
    assert any("was not read" in note for note in asked.notes)


@pytest.mark.parametrize(
    ("folders", "flags", "sizes"),
    [
        (("mp_rank_00", "mp_rank_01"), "", (2, 1, 1)),
        (("mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"), "", (2, 2, 1)),
        (
            ("mp_rank_00_000", "mp_rank_00_001"),
            "--num-experts 4 --expert-model-parallel-size 2",
            (1, 1, 2),
        ),
        (
            ("mp_rank_00_000_000", "mp_rank_00_000_001", "mp_rank_00_001_000", "mp_rank_00_001_001"),
            "--num-experts 4",
            (1, 2, 2),
        ),
    ],
)
def test_legacy_checkpoints_pin_their_files(
    tmp_path: Path, folders: tuple[str, ...], flags: str, sizes: tuple[int, int, int]
) -> None:
    """The format torch has one file for each rank, so TP, PP and EP are counted and every field of the model stays."""
    asked = job(legacy(tmp_path, *folders), flags)

    assert sizes == (asked.own.tp, asked.own.pp, asked.own.ep)
    assert asked.pinned == KEPT
    assert set(job(legacy(tmp_path / "2", *folders), flags, "--finetune").pinned) == {*MODEL, "pp", "tp", "vpp"}


def test_unknown_formats_pin_all_that_cuts_the_model(tmp_path: Path) -> None:
    """A checkpoint of an unknown format pins every field that divides the model."""
    asked = job(legacy(tmp_path, "something"))

    assert asked.pinned == tuple(sorted({*KEPT, "cp"}))
    assert any("unknown format" in note for note in asked.notes)


def test_too_few_ranks_for_the_checkpoint(tmp_path: Path) -> None:
    """A checkpoint that demands 4 ranks cannot be loaded on 2."""
    with pytest.raises(MegatronError, match="needs a multiple of 4 ranks; the job has 2"):
        job(distributed(tmp_path), SHARDED, world_size=2)


def test_a_named_step_and_a_pretrained_checkpoint_are_found(tmp_path: Path) -> None:
    """--ckpt-step overrides the tracker file; pretrained weights come without an optimizer."""
    load = distributed(tmp_path / "a")

    assert job(load, SHARDED, "--ckpt-step 10").pinned == KEPT
    assert job(load, SHARDED, "--ckpt-step 11").pinned == ()
    assert job(f"--pretrained-checkpoint {tmp_path / 'a'}", SHARDED).pinned == ()


def test_sizes_from_the_checkpoint_are_the_users_own(tmp_path: Path) -> None:
    """With --use-mp-args-from-checkpoint-args the checkpoint's sizes are the user's own, and a plan may change them."""
    load = distributed(tmp_path / "a", sharding="fully_reshardable")
    flags = "--use-checkpoint-args --use-mp-args-from-checkpoint-args"

    asked = job(load, SHARDED, flags)
    assert (2, 2, ("use_distributed_optimizer",)) == (asked.own.tp, asked.own.pp, asked.pinned)
    with pytest.raises(MegatronError, match="give them as flags instead"):
        job(distributed(tmp_path / "b", common=False), SHARDED, flags)


def test_sizes_from_the_checkpoint_come_with_its_optimizer(tmp_path: Path) -> None:
    """State in buckets keeps the optimizer that saved it, wherever the sizes come from."""
    load = distributed(tmp_path, sharding="dp_reshardable")
    flags = ("--use-checkpoint-args", "--use-checkpoint-args --use-mp-args-from-checkpoint-args")

    asked = [job(load, each).own for each in flags]
    assert asked[0] == asked[1]
    assert asked[1].use_distributed_optimizer


def test_the_record_lies_beside_the_checkpoints() -> None:
    """The record lies in the folder of --save; without --save there is no record."""
    assert record_path(["--save", "/ckpt", "--mine"]) == Path("/ckpt/pipette-plan.json")
    assert record_path(["--mine"]) is None


@pytest.mark.parametrize(("content", "expected"), [("20\n", "20"), ("release", "release"), (None, "")])
def test_the_newest_iteration_that_was_saved(tmp_path: Path, content: str | None, expected: str) -> None:
    """The iteration comes from Megatron's tracker file; without this file the result is empty."""
    if content is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)

    assert expected == saved_iteration(["--save", str(tmp_path)])
    assert "" == saved_iteration(["--lr", "1"])


SAVES = "--save /ckpt --load /ckpt"
RESHARDS = "--dist-ckpt-optim-fully-reshardable"


@pytest.mark.parametrize(
    ("flags", "version", "kept", "note"),
    [
        ("", "0.16.1", (), "starts over from iteration 0"),
        ("--save /ckpt", "0.16.1", (), "starts over from iteration 0; give --load /ckpt"),
        (
            "--save /ckpt --load /base",
            "0.16.1",
            (),
            "starts over from the checkpoint of --load /base; give --load /ckpt",
        ),
        (SAVES, "0.16.1", ("use_distributed_optimizer",), ""),
        (f"{SAVES} --no-save-optim", "0.16.1", (), ""),
        (
            f"{SAVES} {SHARDED}",
            "0.16.1",
            KEPT,
            f"as dp_reshardable, which fixes .*; {RESHARDS} lets all of them change",
        ),
        (f"{SAVES} {SHARDED} {RESHARDS}", "0.16.1", ("use_distributed_optimizer",), ""),
        (f"{SAVES} {SHARDED} --dist-ckpt-save-pre-mcore-014", "0.16.1", ("use_distributed_optimizer",), ""),
        (
            f"{SAVES} {SHARDED} --dist-ckpt-save-pre-mcore-014 --no-ckpt-fully-parallel-save",
            "0.16.1",
            KEPT,
            "without --no-ckpt-fully-parallel-save",
        ),
        (f"{SAVES} --ckpt-format torch", "0.16.1", KEPT, "--ckpt-format torch_dist lets them change"),
        (f"{SAVES} {SHARDED} --ckpt-format torch", "0.16.1", KEPT, f"torch_dist with {RESHARDS} lets them change"),
    ],
)
def test_what_a_job_saves_says_what_another_layout_keeps(
    flags: str, version: str, kept: tuple[str, ...], note: str
) -> None:
    """The run that saves decides which fields stay; a note names the flag that would free them."""
    words = [*SMALL, "--transformer-impl", "local", *flags.split()]
    read = read_job(words, world_size=4, megatron_version=version, device_kind="cpu")
    found = continuation(words, read, read.own)

    assert tuple(sorted(kept)) == tuple(sorted(found.kept))
    assert re.search(note, found.note) if note else not found.note


def test_more_replicas_make_larger_buckets() -> None:
    """From 41 replicas on, overlapped gradients make larger buckets, and their state fits no other bucket size."""
    words = [*SMALL, "--transformer-impl", "local", *f"{SAVES} {SHARDED}".split()]
    read = read_job(words, world_size=4, megatron_version="0.16.1", device_kind="cpu")
    found = continuation(words, read, read.own)
    few, more, many = (replace(read.own, dp=dp) for dp in (4, 40, 41))

    assert found.can_load(few, more)
    assert not found.can_load(few, many)
    assert not found.can_load(few, replace(few, tp=2))
    assert continuation([*words, "--ddp-bucket-size", "1000"], read, read.own).can_load(few, many)


BATCH = "--global-batch-size 10080"


def saved(root: Path, dp: int, *, sharding: str | None = "dp_reshardable", **changes: Any) -> str:
    """Write a torch_dist checkpoint of TP 2, PP 3 and `replicas` replicas, and return the flag that loads it."""
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
    """Read the job that loads the checkpoint on `replicas` times 6 ranks, with layers that 3 stages divide."""
    asked: Any = {purpose: True} if purpose else {}
    sizes = "--num-layers 6 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3"
    return job(load, SHARDED, BATCH, sizes, flags, world_size=6 * dp, version=version, **asked)


def test_replicas_that_make_other_buckets_are_one_sentence(tmp_path: Path) -> None:
    """48 replicas saved and 40 load (30 hosts of 8): no plan, or a note for a job that needs no plan."""
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
    """Equal buckets, one bucket, state of another format, and no state all load."""
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
    """Other numbers of replicas, from any arguments, and a bucket size of only one run are found."""
    with pytest.raises(MegatronError, match=re.escape(remedy)):
        read(saved(tmp_path, dp, **changes), flags, dp=now)


def test_a_checkpoint_that_is_not_here_is_a_note(tmp_path: Path) -> None:
    """A plan on another machine cannot read the checkpoint, so a note warns; a prediction needs none."""
    note = (
        f"this machine has no checkpoint at --load {tmp_path}, so no checkpoint fixes layout fields here: on other "
        "machines a checkpoint may fix tp, pp and other fields; --pipette-fix keeps them"
    )

    assert note in read(f"--load {tmp_path}", dp=4).notes
    assert note not in read(f"--load {tmp_path}", dp=4, purpose="for_prediction").notes
    assert note not in read(f"--load {tmp_path}", dp=4, purpose="").notes
    assert note not in read(saved(tmp_path, 4), dp=4).notes


@settings(max_examples=40)
@given(st.integers(1, 120), st.integers(1, 120))
def test_a_plan_and_the_rule_for_lost_hosts_agree(before: int, after: int) -> None:
    """A checkpoint is refused exactly if the rule for lost hosts forbids the same change."""
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


def test_the_format_of_older_releases_is_named() -> None:
    """A save in the format of 0.13 without parallel save gathers the state on one rank, so buckets do not matter."""
    words = [
        *SMALL,
        *SHARDED.split(),
        *"--save /c --load /c --dist-ckpt-save-pre-mcore-014 --no-ckpt-fully-parallel-save".split(),
    ]
    layout = read("", dp=48).own
    found = continuation(words, read("", dp=48), layout)

    assert found.can_load(layout, replace(layout, dp=40))
    assert "saves its state as dp_zero_gather_scatter" in found.note
