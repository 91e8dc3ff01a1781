"""The flags that we rely on exist, with the meaning that we assume, in every release of the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipette_launch import megatron
from pipette_launch.megatron.checkpoint_files import CHECKPOINT_ARGUMENTS
from pipette_launch.megatron.chunks import SPLIT_DESTS
from pipette_launch.megatron.flags import flag_table, releases
from pipette_launch.megatron.layout import DEGREES
from pipette_launch.megatron.performance import DESTS
from pipette_launch.megatron.pins import HELD_BY, REFUSED, UNPLANNED

ONE, NONE = ("store", None), ("store_true", 0)
WRITTEN = {
    "--tensor-model-parallel-size": ("tensor_model_parallel_size", *ONE, "int"),
    "--pipeline-model-parallel-size": ("pipeline_model_parallel_size", *ONE, "int"),
    "--context-parallel-size": ("context_parallel_size", *ONE, "int"),
    "--expert-model-parallel-size": ("expert_model_parallel_size", *ONE, "int"),
    "--expert-tensor-parallel-size": ("expert_tensor_parallel_size", *ONE, "int"),
    "--micro-batch-size": ("micro_batch_size", *ONE, "int"),
    "--global-batch-size": ("global_batch_size", *ONE, "int"),
    "--num-layers-per-virtual-pipeline-stage": ("num_layers_per_virtual_pipeline_stage", *ONE, "int"),
    "--num-virtual-stages-per-pipeline-rank": ("num_virtual_stages_per_pipeline_rank", *ONE, "int"),
    "--decoder-first-pipeline-num-layers": ("decoder_first_pipeline_num_layers", *ONE, "int"),
    "--decoder-last-pipeline-num-layers": ("decoder_last_pipeline_num_layers", *ONE, "int"),
    "--pipeline-model-parallel-layout": ("pipeline_model_parallel_layout", *ONE, None),
    "--microbatch-group-size-per-virtual-pipeline-stage": ("microbatch_group_size_per_vp_stage", *ONE, "int"),
    "--sequence-parallel": ("sequence_parallel", *NONE, None),
    "--use-distributed-optimizer": ("use_distributed_optimizer", *NONE, None),
    "--overlap-grad-reduce": ("overlap_grad_reduce", *NONE, None),
    "--overlap-param-gather": ("overlap_param_gather", *NONE, None),
    "--use-tp-pp-dp-mapping": ("use_tp_pp_dp_mapping", *NONE, None),
    "--recompute-granularity": ("recompute_granularity", *ONE, None),
    "--recompute-method": ("recompute_method", *ONE, None),
    "--recompute-num-layers": ("recompute_num_layers", *ONE, "int"),
    "--padded-vocab-size": ("padded_vocab_size", *ONE, "int"),
    "--log-interval": ("log_interval", *ONE, "int"),
    "--mock-data": ("mock_data", *NONE, None),
    "--no-check-for-nan-in-loss-and-grad": ("check_for_nan_in_loss_and_grad", "store_false", 0, None),
    "--no-one-logger": ("enable_one_logger", "store_false", 0, None),
}
"""Option string -> dest, action, nargs, type."""
PLAYED = {"--mock-data", "--no-check-for-nan-in-loss-and-grad"}
"""Written only for a script that the warm-up runs as one rank."""
NOT_EVERYWHERE = {
    "activation_offload_fraction": "0.19+",
    "dsa_indexer_topk_freq": "0.19+",
    "enable_gloo_process_groups": "0.16",
    "enable_mhc_connections": "0.17+",
    "fp4_param": "0.16 to 0.17",
    "freeze_all_layers": "0.19+",
    "hybrid_layer_pattern": "0.17+",
    "mtp_hybrid_override_pattern": "0.17+",
    "mtp_use_repeated_layer": "0.17+",
    "pad_vocab_size": "0.18+",
    "step_batch_size_schedule": "0.18+",
    "use_gloo_process_groups": "0.17+",
}
"""Destinations that we read and that some releases lack; there `Arguments.get` gives None, which means off."""


REFUSED_DESTS = [key.partition("=")[0] for key in (*REFUSED, *UNPLANNED)]


def dests(release: str) -> set[str]:
    """Every destination of a release."""
    return {flag.dest for flag in flag_table(release).values()}


@pytest.mark.parametrize("release", releases())
def test_written_flags_are_there(release: str) -> None:
    """What we write has the same destination, action and kind of value in every release."""
    found = {
        option: (flag.dest, flag.action, flag.nargs, flag.kind)
        for option, flag in flag_table(release).items()
        if option in WRITTEN
    }

    assert WRITTEN == found
    assert flag_table(release)["--recompute-modules"].nargs in ("+", "*")


def test_every_written_option_is_in_this_test() -> None:
    """A new flag that we write is first looked up in every release."""
    sources = [path.read_text() for path in Path(megatron.__file__).parent.rglob("*.py")]
    written = {option for text in sources for option in re.findall(r'with_flag\(\s*"(--[a-z-]+)"', text)}

    assert written - {"--recompute-modules"} <= set(WRITTEN)


def test_read_destinations_are_known() -> None:
    """Every destination that we read exists in some release, and in all of them unless listed here."""
    sources = [path.read_text() for path in Path(megatron.__file__).parent.glob("*.py")]
    read = {dest for text in sources for dest in re.findall(r'arguments\.(?:get|size)\(\s*"([a-z_0-9]+)"', text)}
    read |= {dest for text in sources for dest in re.findall(r'given\.(?:get|size)\(\s*"([a-z_0-9]+)"', text)}
    everywhere = set.intersection(*(dests(release) for release in releases()))
    somewhere = set.union(*(dests(release) for release in releases()))

    assert read
    assert read <= somewhere
    assert read - everywhere <= set(NOT_EVERYWHERE)


def test_tables_of_destinations_are_known() -> None:
    """No refusal and no performance flag is misspelt."""
    somewhere = set.union(*(dests(release) for release in releases()))
    named = set(REFUSED_DESTS) | DESTS | set(SPLIT_DESTS)
    named |= {*HELD_BY}

    named |= {row["destination"] for row in CHECKPOINT_ARGUMENTS}

    assert named <= somewhere


def test_arguments_read_in_checkpoints_are_known() -> None:
    """Megatron derives three that have no flag; they are in its namespace and so in its checkpoints."""
    sources = [path.read_text() for path in Path(megatron.__file__).parent.glob("checkpoint*.py")]
    read = {dest for text in sources for dest in re.findall(r'saved(?:\.get\(|, )"(\w+)"', text)} | {*DEGREES.values()}
    somewhere = set.union(*(dests(release) for release in releases()))

    assert {"virtual_pipeline_model_parallel_size", "data_parallel_size", "world_size"} == read - somewhere


@pytest.mark.parametrize("release", releases())
def test_required_flags_have_no_default(release: str) -> None:
    """Only then can a missing flag be told from one that was given."""
    table = flag_table(release)
    required = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size")

    assert [None] * 5 == [table[option].default for option in required]


def test_every_refusal_is_documented() -> None:
    """The pages name each flag that leaves a job unplanned, and each that a plan or a trial writes."""
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "script_flags.md").read_text() + (docs / "reactions.md").read_text()
    options = {flag.dest: option for release in releases() for option, flag in flag_table(release).items()}
    refused = [options[dest] for dest in REFUSED_DESTS]

    assert [option for option in (*refused, *(WRITTEN.keys() - PLAYED)) if f"`{option}" not in text] == []
