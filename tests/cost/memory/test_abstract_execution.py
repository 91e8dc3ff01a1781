"""Requests and answers of abstract execution are JSON; the worker here is a fake."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.memory import abstract_execution
from pipette_launch.errors import PlanError
from pipette_launch.facts import HybridLayers, Layout
from pipette_launch.facts.files import to_plain
from pipette_launch.facts.messages import ExecutedMemory, ExecutedParts

LAYOUT = Layout(pp=2, dp=2)
FAKE = """
import json, sys
for line in sys.stdin:
    with open({log!r}, "a") as log:
        log.write(line)
    request = json.loads(line)
    answer = {answer}
    print(json.dumps(answer), flush=True)
"""


def memory(pp_rank: int) -> ExecutedMemory:
    """Rank r peaks at 100 + r bytes."""
    return ExecutedMemory(
        pp_rank=pp_rank,
        weights=10,
        gradients=20,
        optimizer=30,
        allocated_after_step=60,
        first_peak=70,
        peak=100 + pp_rank,
        parts=ExecutedParts(weights=10, gradients=20, optimizer=30, activations=40 + pp_rank),
        notes=(),
    )


GOOD = f"{{'ranks': [{[to_plain(memory(0)), to_plain(memory(1))]}[r] for r in request['pp_ranks']], 'error': None}}"
Log = Callable[[], list[dict[str, object]]]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Log]:
    """Replace megatron-core by a worker that gives one answer; returns the file of its requests."""

    def put(answer: str) -> Log:
        log, script = tmp_path / "log", tmp_path / "worker.py"
        script.write_text(FAKE.format(log=str(log), answer=answer))
        monkeypatch.setattr(abstract_execution, "WORKER", (str(script),))
        return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    return put


def test_answers_come_in_the_order_asked(fake: Callable[[str], Log]) -> None:
    """One request names several ranks, and the parts add up to the peak."""
    log = fake(GOOD)
    both = abstract_execution.execute(tiny_job(own=LAYOUT), LAYOUT, (1, 0))

    assert (memory(1), memory(0)) == both
    assert [[1, 0]] == [request["pp_ranks"] for request in log()]
    assert all(each.peak == sum(asdict(each.parts).values()) for each in both)


def test_the_cache_answers_without_a_worker(fake: Callable[[str], Log], tmp_path: Path) -> None:
    """A second question is not asked again; what cannot be read is."""
    log, cache = fake(GOOD), tmp_path / "cache"
    job = tiny_job(own=LAYOUT)
    for _ in range(2):
        assert (memory(0),) == abstract_execution.execute(job, LAYOUT, (0,), cache=cache)
    assert 1 == len(log())

    next(cache.iterdir()).write_text("{")
    assert (memory(0), memory(1)) == abstract_execution.execute(job, LAYOUT, (0, 1), cache=cache)
    assert [[0], [0, 1]] == [request["pp_ranks"] for request in log()]


def test_a_refusal_is_an_error_with_its_reason(fake: Callable[[str], Log]) -> None:
    """The error has the worker's own reason."""
    fake("{'ranks': [], 'error': 'FP4 is not modelled'}")
    with pytest.raises(PlanError, match=r"tp1 pp2 dp2 mbs1: FP4 is not modelled"):
        abstract_execution.execute(tiny_job(own=LAYOUT), LAYOUT, (0,))


def test_hybrid_models_are_refused() -> None:
    """Another model would be built in their place."""
    hybrid = HybridLayers(pattern="MM*-", mamba_state_dim=16, mamba_head_dim=8, mamba_num_groups=2, mamba_num_heads=16)
    job = tiny_job(model=tiny_model(hybrid=hybrid))

    with pytest.raises(PlanError, match="--method closed"):
        abstract_execution.execute(job, Layout(), (0,))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("sys.exit('no megatron-core here')", "no megatron-core here"),
        ("{'ranks': [], 'error': None}", "other pipeline ranks"),
        ("{'ranks': 3, 'error': None}", "ranks: expected"),
        ("{'rank': [], 'error': None}", "unknown field 'rank'"),
    ],
)
def test_a_broken_worker_is_an_error(fake: Callable[[str], Log], answer: str, reason: str) -> None:
    """A worker that dies or answers nonsense is named, not trusted."""
    fake(answer)

    with pytest.raises(PlanError, match=reason):
        abstract_execution.execute(tiny_job(own=LAYOUT), LAYOUT, (0,))


def test_an_answer_that_never_comes_is_an_error(fake: Callable[[str], Log], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that runs past its limit is ended."""
    fake("__import__('time').sleep(600)")
    monkeypatch.setattr(abstract_execution, "ABSTRACT_S", 0.5)

    with pytest.raises(PlanError, match=r"no answer within 0\.5 s; use the closed"):
        abstract_execution.execute(tiny_job(own=LAYOUT), LAYOUT, (0,))


def test_shards_are_refused_at_once(fake: Callable[[str], Log]) -> None:
    """A worker would run the job without them."""
    log = fake(GOOD)
    sharded = tiny_job(performance_flags=("--use-megatron-fsdp",))
    with pytest.raises(PlanError, match="no FSDP"):
        abstract_execution.execute(sharded, LAYOUT, (0,))

    assert log() == []


def test_bad_questions_are_refused_at_once(fake: Callable[[str], Log], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline rank that does not exist and an interpreter that is not there are errors; nothing is started."""
    log = fake(GOOD)

    with pytest.raises(PlanError, match="no pipeline rank 2 of 2"):
        abstract_execution.execute(tiny_job(own=LAYOUT), LAYOUT, (2,))
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(PlanError, match="cannot start /nowhere"):
        abstract_execution.execute(tiny_job(own=LAYOUT), LAYOUT, (0,))
    assert [] == log()


def test_only_what_matters_is_in_the_key(fake: Callable[[str], Log], tmp_path: Path) -> None:
    """Another log interval is the same memory; another optimizer is not."""
    log = fake(GOOD)
    for changes in ({}, {"log_interval": 7}, {"optimizer": "sgd"}):
        abstract_execution.execute(tiny_job(own=LAYOUT, **changes), LAYOUT, (0,), cache=tmp_path / "cache")

    assert ["adam", "sgd"] == [request["job"]["optimizer"] for request in log()]  # type: ignore[index]


def test_the_worker_sees_this_interpreters_path() -> None:
    """The worker finds the same packages."""
    assert str(Path(__file__).parents[2]) in abstract_execution.environment()["PYTHONPATH"].split(":")
