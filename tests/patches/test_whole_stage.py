"""A whole stage with real tensors holds the bytes of a count by hand and of abstract execution."""

from typing import Any

import pytest
from newest import with_gap_since_019
from oracle.executor import Executor
from patches.findings import findings_of
from patches.stage_cases import CASES, SHARDED, TIMED, job_of

from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.cost.memory.peak import MemoryParts, peak_memory_bytes

HALF_GRADIENTS = "Megatron-FSDP keeps gradients in the type of the weights, in bf16 half as large as in the formula"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Results of a separate process, so that this process has no megatron-core and no process groups."""
    return findings_of("stage_worker.py", timeout_s=300, TORCHDYNAMO_DISABLE="1")


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("experts", "fp16")])
def test_states_are_those_of_the_parameters(found: dict[str, Any], name: str) -> None:
    """2 bytes of weight, 4 of gradient, 12 of optimizer, cut as the job is; each tensor's bytes are rounded up."""
    layout, parts = CASES[name].layout, found[name]["parts"]
    count = stage_parameters(job_of(CASES[name].changes, layout), layout)[CASES[name].pp_rank].count
    shards = layout.dp if layout.use_distributed_optimizer else 1

    assert pytest.approx(2 * count, rel=0.02) == parts["weights"]
    assert pytest.approx(4 * count, rel=0.02) == parts["gradients"]
    assert pytest.approx(12 * count / shards, rel=0.02, abs=4096) == parts["optimizer"]


def test_more_micro_batches_are_in_flight_on_earlier_stages(found: dict[str, Any]) -> None:
    """With four stages of two layers the first stage keeps four micro-batches, the third keeps two."""
    first, third = (found[name]["parts"]["activations"] for name in ("first of four", "third of four"))

    # One layer at work comes on top on both.
    assert 1.6 < first / third < 2


def test_fp16_steps_whatever_its_gradients_are(found: dict[str, Any]) -> None:
    """A step that found infinities would make no states; here they are, 12 bytes a parameter."""
    layout = CASES["fp16"].layout
    count = stage_parameters(job_of(CASES["fp16"].changes, layout), layout)[0].count

    assert pytest.approx(12 * count, rel=0.04) == found["fp16"]["parts"]["optimizer"]


@pytest.mark.parametrize(("name", "num_microbatches"), [("first of four", 5), ("third of four", 3), ("experts", 2)])
def test_a_step_is_timed_without_the_meter(found: dict[str, Any], name: str, num_microbatches: int) -> None:
    """The median step has seconds of a schedule and of an optimizer; three steps, as fast, are not all of the run."""
    times = found[name]["times"]

    assert num_microbatches == times["num_microbatches"]
    assert 0 < min(times["update_s"], times["schedule_s"])
    assert 2 * (times["update_s"] + times["schedule_s"]) < found[name]["whole_s"]


def test_without_a_stopwatch_nothing_is_timed(found: dict[str, Any]) -> None:
    """The other stages run two steps only."""
    assert {name for name in (CASES | SHARDED) if found[name]["times"]} == set(TIMED)


def predicted(name: str) -> MemoryParts:
    """Return the formula's bytes of a stage under Megatron-FSDP."""
    case = SHARDED[name]
    (parts,) = peak_memory_bytes(job_of(case.changes, case.layout, case.flags), case.layout)
    return parts


@pytest.mark.parametrize("name", with_gap_since_019(SHARDED, HALF_GRADIENTS, but=("not sharded",)))
def test_shards_are_those_that_the_formula_says(found: dict[str, Any], name: str) -> None:
    """Weights, gradients and states, by strategy; each buffer is rounded up."""
    formula, parts = predicted(name), found[name]["parts"]

    for kind in ("weights", "gradients", "optimizer"):
        assert pytest.approx(getattr(formula, kind), rel=0.01) == parts[kind]


@pytest.mark.parametrize(
    "name",
    with_gap_since_019([name for name in SHARDED if not name.startswith("wide")], HALF_GRADIENTS, but=("not sharded",)),
)
def test_what_sharding_saves_is_what_the_formula_says(found: dict[str, Any], name: str) -> None:
    """Beside the same stage without FSDP, whose layer at work holds the same; within 0.3 % of its peak."""
    saved = found["not sharded"]["peak"] - found[name]["peak"]

    assert pytest.approx(predicted("not sharded").total - predicted(name).total, abs=52_000) == saved


@pytest.mark.parametrize(
    "name", with_gap_since_019([name for name in SHARDED if name.startswith("wide")], HALF_GRADIENTS)
)
def test_gradients_wait_while_gathered_weights_go(found: dict[str, Any], name: str) -> None:
    """If gradients of a layer are larger than its activations, the peak comes late in the backward."""
    assert pytest.approx(predicted(name).total, rel=0.01) == found[name]["peak"]


def test_abstract_execution_sees_the_same(found: dict[str, Any]) -> None:
    """Two more micro-batches in flight keep the same bytes within 3 %, and peaks agree within 8 %.

    Between forward and backward a CPU's kernels make more tensors than a GPU's: the working set of one layer is larger.
    """
    abstract = {}
    with Executor() as executor:
        for name in ("first of four", "third of four", "interleaved", "last, 1024 ranks"):
            case = CASES[name]
            (rank,) = executor.execute(job_of(case.changes, case.layout), case.layout, (case.pp_rank,))
            abstract[name] = rank.peak
    real = {name: found[name]["peak"] for name in abstract}

    assert pytest.approx(abstract, rel=0.08) == real
    assert (
        pytest.approx(abstract["first of four"] - abstract["third of four"], rel=0.03)
        == real["first of four"] - real["third of four"]
    )


def test_a_share_of_the_experts_is_run(found: dict[str, Any]) -> None:
    """Half of four experts in each of two layers, with a router that really chooses."""
    layout = CASES["experts"].layout
    count = stage_parameters(job_of(CASES["experts"].changes, layout), layout)[0].count

    assert pytest.approx(2 * count, rel=0.02) == found["experts"]["parts"]["weights"]


def test_what_megatron_refuses_is_said_in_its_words(found: dict[str, Any]) -> None:
    """Four heads cannot be cut in three."""
    assert "the script refuses stage 0 of tp3 pp1 dp1 mbs1" in found["refusal"]


def test_nothing_is_left_behind(found: dict[str, Any]) -> None:
    """The fake process group is gone, and megatron-core is as it was."""
    assert not found["group left"]
    assert found["original back"]
