"""Performance flags are read as options."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from facts_for_tests import tiny_job
from graph_spellings import SPELLINGS, flags_of
from megatron_lines import SMALL

from pipette_launch.errors import MegatronError
from pipette_launch.facts.job import PerformanceOptions, flag_of
from pipette_launch.megatron import read_job
from pipette_launch.megatron.flags import flag_table, releases
from pipette_launch.megatron.performance import (
    allocator_config,
    allocator_options,
    given_options,
    options_of_flags,
    plannable_offload,
)

NAMES = [option.name for option in fields(PerformanceOptions)]


def test_options_are_read_from_a_jobs_flags() -> None:
    """Switches, single values and lists have the types of their fields."""
    flags = (
        "--fp8-format hybrid",
        "--moe-aux-loss-coeff 0 1e-2",
        "--moe-grouped-gemm",
        "--no-rope-fusion",
        "--num-distributed-optimizer-instances 2",
        "--rampup-batch-size 2 2 100",
    )

    assert tiny_job(performance_flags=flags).options == PerformanceOptions(
        fp8="hybrid",
        moe_aux_loss_coeff=(0.0, 0.01),
        moe_grouped_gemm=True,
        apply_rope_fusion=False,
        num_distributed_optimizer_instances=2,
        rampup_batch_size=(2, 2, 100),
    )


@pytest.mark.parametrize(
    ("version", "defaults"),
    [
        ("0.16.1", PerformanceOptions()),
        (
            f"{releases()[-1]}.0",
            PerformanceOptions(data_parallel_sharding_strategy="optim_grads_params"),
        ),
    ],
)
def test_defaults_are_megatrons(version: str, defaults: PerformanceOptions) -> None:
    """A job without performance flags has the defaults of its release."""
    assert tiny_job(megatron_version=version).options == defaults


def test_a_value_with_a_minus_leaves_the_release_as_it_is() -> None:
    """A value such as `-1,0` is read with `=`, because argparse takes a word that begins with a minus for a flag."""
    flags = ("--data-parallel-sharding-strategy optim_grads", "--window-size -1,0")

    assert given_options(tiny_job(megatron_version="0.18.0", performance_flags=flags)) == {
        "data_parallel_sharding_strategy": "optim_grads",
        "window_size": "-1,0",
    }


def test_a_list_may_have_been_one_value() -> None:
    """Some releases read one word or text where others read several values."""
    flags = ("--cuda-graph-scope full_iteration", "--rampup-batch-size 2 2 9")
    options = options_of_flags(flags, "0.16.1")

    assert (options.cuda_graph_scope, options.rampup_batch_size) == (("full_iteration",), (2, 2, 9))


DENSE, EXPERTS = ("attn", "mlp"), ("attn", "moe_router", "moe_preprocess", "moe")
HELD = {
    "nothing": ((), ()),
    "whole layers": (DENSE, EXPERTS),
    "attention and MLP": (DENSE, ("attn",)),
    "attention": (("attn",), ("attn",)),
    "router": ((), ("moe_router", "moe_preprocess")),
    "the whole iteration": (DENSE, EXPERTS),
}
"""Parts of a layer with an MLP and of a layer with experts that graphs hold."""


@pytest.mark.parametrize(
    ("meaning", "version", "words"),
    [(meaning, *each) for meaning, spellings in SPELLINGS.items() for each in spellings],
)
def test_each_spelling_of_graphs_has_one_meaning(meaning: str, version: str, words: str) -> None:
    """Flags of graphs name the same parts of a layer in each release."""
    job = tiny_job(megatron_version=version, performance_flags=flags_of(words))
    graphs = job.options.graphs

    dense, experts = map(frozenset, HELD[meaning])
    assert dense == graphs.captured(DENSE)
    if "mlp" not in graphs.modules and "attn" not in graphs.modules:
        assert experts == graphs.captured(EXPERTS)
    assert (meaning == "the whole iteration") == (graphs.impl == "full_iteration")


def test_graphs_of_patterns_hold_layers_by_name() -> None:
    """A layer of a hybrid model has one block, so a local graph of attention holds no MLP, and Mamba has its name."""
    flags = ("--cuda-graph-impl local", "--cuda-graph-modules attn mamba")
    graphs = tiny_job(megatron_version="0.20.0", performance_flags=flags).options.graphs

    assert [{"attn"}, set(), {"mamba"}, set()] == [
        graphs.captured(parts) for parts in (("attn",), ("mlp",), ("mamba",), EXPERTS[1:])
    ]


def test_a_graph_of_experts_holds_their_router() -> None:
    """The part `moe` is the whole block of experts."""
    flags = ("--cuda-graph-impl transformer_engine", "--cuda-graph-modules moe")
    graphs = tiny_job(megatron_version="0.20.0", performance_flags=flags).options.graphs

    assert {*EXPERTS[1:]} == graphs.captured(EXPERTS)


@pytest.mark.parametrize(
    ("version", "impl", "graphs"),
    [
        ("0.16.1", "local", ("full_iteration", frozenset())),
        ("0.16.1", "none", ("none", {"full_iteration"})),
        ("0.18.0", "none", ("full_iteration", frozenset())),
        ("0.18.0", "local", ("full_iteration", frozenset())),
        ("0.18.0", "transformer_engine", ("transformer_engine", {"full_iteration"})),
    ],
)
def test_the_old_scope_selects_the_implementation_from_0_18_on(version: str, impl: str, graphs: object) -> None:
    """`--cuda-graph-scope full_iteration` graphs the whole iteration, except with Transformer Engine's graphs."""
    flags = (f"--cuda-graph-impl {impl}", "--cuda-graph-scope full_iteration")

    assert tiny_job(megatron_version=version, performance_flags=flags).options.graphs == graphs


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_a_flag_of_some_release(name: str) -> None:
    """The flag that a sentence names sets this option in some release."""
    tables = (flag_table(version) for version in releases())

    assert any(flag_of(name) in table and table[flag_of(name)].dest == name for table in tables)


CUDA, ANY = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ""),
        ({CUDA: EXPANDABLE}, EXPANDABLE),
        ({ANY: EXPANDABLE}, EXPANDABLE),
        ({"PYTORCH_HIP_ALLOC_CONF": EXPANDABLE}, EXPANDABLE),
        ({CUDA: "", ANY: EXPANDABLE}, ""),
        ({CUDA: "expandable_segments:False", ANY: EXPANDABLE}, "expandable_segments:False"),
        ({CUDA: " expandable_segments : True , max_split_size_mb:128"}, f"{EXPANDABLE},max_split_size_mb:128"),
    ],
)
def test_the_variable_in_effect(environment: dict[str, str], expected: str) -> None:
    """The older variable counts first, and white space is ignored."""
    assert expected == allocator_config(environment)


def test_options_and_their_values() -> None:
    """Commas inside a list do not separate options, and the last of several equal names counts."""
    config = f"roundup_power2_divisions:[256:1,>:2],expandable_segments:False,{EXPANDABLE},"

    assert {"roundup_power2_divisions": "[256:1,>:2]", "expandable_segments": "True"} == allocator_options(config)


REFUSED = ("expandable_segments:true", "expandable_segments:1", "expandable_segments:", "expandable_segments:yes")


@pytest.mark.parametrize("config", REFUSED)
def test_a_value_that_torch_refuses_is_refused_with_the_right_one(config: str) -> None:
    """Torch would refuse the value at its import; on CPU, which has no such allocator, the variable is not read."""
    words = {"world_size": 1, "megatron_version": "0.16.1", "environment": {CUDA: config}}
    with pytest.raises(MegatronError, match=r"torch refuses expandable_segments:\w*; write expandable_segments:True"):
        read_job(SMALL, device_kind="cuda", **words)  # type: ignore[arg-type]
    job = read_job(SMALL, device_kind="cpu", **words)  # type: ignore[arg-type]

    assert job.allocator_config == ""


MISSPELT = (
    "expandable_segments=True",
    "max_split_size_mb:64,expandable_segments=False",
    "max_split_size_mb=64",
)


@pytest.mark.parametrize("config", MISSPELT)
def test_a_misspelt_option_is_refused_with_the_form_that_torch_takes(config: str) -> None:
    """Torch would refuse the form at its import, so the error shows the right form."""
    wrong = config.rpartition(",")[2].partition(":")[0]
    with pytest.raises(MegatronError, match=f"torch refuses {wrong}; write NAME:VALUE, as expandable_segments:True"):
        allocator_config({CUDA: config})


TAKEN = (EXPANDABLE, " expandable_segments : False ", f"max_split_size_mb:64,{EXPANDABLE}")


@pytest.mark.parametrize("config", [*REFUSED, *MISSPELT, *TAKEN])
def test_torch_refuses_the_same_values(config: str) -> None:
    """The installed torch refuses the same values; its parser needs no GPU."""
    settings = torch._C._accelerator_setAllocatorSettings
    try:
        settings(config)
        is_taken = True
    except (ValueError, RuntimeError):
        is_taken = False
    finally:
        settings("")

    try:
        allocator_config({CUDA: config})
        assert is_taken
    except MegatronError:
        assert not is_taken


def test_flags_without_a_price_get_one_note() -> None:
    """Flags with another value than Megatron's default are named together; a launched job measures them instead."""
    flags = "--flash-attention-version 2 --moe-hybridep-num-sms 24 --distributed-backend nccl --log-params-norm"
    words, found = [*SMALL, *flags.split()], []
    for is_launched in (False, True):
        job = read_job(
            words,
            world_size=8,
            megatron_version="0.19.0",
            device_kind="cuda",
            for_prediction=True,
            is_launched=is_launched,
        )
        found.append([note for note in job.notes if note.startswith("not priced")])

    net = "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --deterministic-mode"
    job = read_job(
        [*SMALL, *net.split()], world_size=8, megatron_version="0.19.0", device_kind="cuda", for_prediction=True
    )
    assert any(note.endswith("without these flags: --deterministic-mode (except for memory)") for note in job.notes)
    named = "--flash-attention-version 2, --moe-hybridep-num-sms 24"
    assert found == [[f"not priced, so time and memory are predicted as without these flags: {named}"], []]


@pytest.mark.parametrize(
    ("flags", "version", "sets"),
    [
        ("", "0.19.0", [("qkv_linear", "core_attn", "attn_proj")]),
        ("", "0.18.0", []),
        ("--cuda-graph-impl local", "0.19.0", []),
        ("--fine-grained-activation-offloading --offload-modules core_attn", "0.19.0", []),
        ("--attention-backend unfused", "0.19.0", []),
        ("--num-experts 4 --moe-grouped-gemm --attention-backend unfused", "0.19.0", [("expert_fc1", "moe_act")]),
    ],
)
def test_a_plan_offloads_only_if_no_flag_decides(flags: str, version: str, sets: list[tuple[str, ...]]) -> None:
    """The user's own modules, graphs and older releases leave no choice."""
    words = [*SMALL, "--transformer-impl", "transformer_engine", "--bf16", *flags.split()]
    job = read_job(words, world_size=8, megatron_version=version, device_kind="cuda")

    assert plannable_offload(job) == sets
