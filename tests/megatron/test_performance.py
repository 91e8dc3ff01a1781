"""Performance flags, read as options."""

from dataclasses import fields

import pytest
from facts_for_tests import tiny_job

from pipette_launch.facts.job import PerformanceOptions, flag_of
from pipette_launch.megatron.flags import flag_table, releases
from pipette_launch.megatron.performance import performance_options

NAMES = [option.name for option in fields(PerformanceOptions)]


def test_options_are_read_from_a_jobs_flags() -> None:
    """Switches, single values and lists come in the types of their fields."""
    flags = (
        "--fp8-format hybrid",
        "--moe-aux-loss-coeff 0 1e-2",
        "--moe-grouped-gemm",
        "--no-rope-fusion",
        "--num-distributed-optimizer-instances 2",
        "--rampup-batch-size 2 2 100",
    )

    assert performance_options(tiny_job(performance_flags=flags)) == PerformanceOptions(
        fp8="hybrid",
        moe_aux_loss_coeff=(0.0, 0.01),
        moe_grouped_gemm=True,
        apply_rope_fusion=False,
        num_distributed_optimizer_instances=2,
        rampup_batch_size=(2, 2, 100),
    )


@pytest.mark.parametrize(
    ("version", "sharded"), [("0.16.1", "no_shard"), (f"{releases()[-1]}.0", "optim_grads_params")]
)
def test_defaults_are_megatrons(version: str, sharded: str) -> None:
    """A job without such flags has the record's own defaults, which are those of the releases, but for one."""
    assert performance_options(tiny_job(megatron_version=version)) == PerformanceOptions(
        data_parallel_sharding_strategy=sharded
    )


def test_a_list_may_have_been_one_value() -> None:
    """Before 0.16 `--cuda-graph-scope` took one word, and `--rampup-batch-size` took text."""
    options = performance_options(
        tiny_job(
            megatron_version="0.14.0",
            performance_flags=("--cuda-graph-scope full_iteration", "--rampup-batch-size 2 2 9"),
        )
    )

    assert (options.cuda_graph_scope, options.rampup_batch_size) == (("full_iteration",), (2, 2, 9))


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_a_flag_of_some_release(name: str) -> None:
    """The flag that sentences name is one that sets this option."""
    tables = (flag_table(version) for version in releases())

    assert any(flag_of(name) in table and table[flag_of(name)].dest == name for table in tables)
