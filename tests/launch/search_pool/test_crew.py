"""A search is the same whoever does the work, and a helper that fails costs time and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.facts import Layout, files
from pipette_launch.launch.search_pool.crew import HELP_AFTER_S, SharedCrew, deal
from pipette_launch.launch.search_pool.messages import Batch, Done
from pipette_launch.search.tasks import Task, Tried

TASK_S = 0.1


@dataclass
class World:
    """A clock that moves when someone works or waits, and what was done in this process."""

    now_s: float = 0.0
    here: list[int] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def own(self, tasks: Sequence[Task]) -> list[Tried]:
        """Do tasks here."""
        self.now_s += TASK_S * len(tasks)
        self.here += [task.round for task in tasks]
        return [result(task) for task in tasks]


def result(task: Task) -> Tried:
    """What comes of a task, as a function of it alone."""
    return Tried(bound_s=task.round / 7, placement=(task.round,), cost_s=float("inf") if task.round % 3 else 1 / 3)


@dataclass(eq=False)
class Hired:
    """A helper that answers at once, at its `patience`-th question, or in a way of its own."""

    name: str = "node 1"
    lends: int = 1
    patience: int = 0
    say: Callable[[Batch], str] = lambda batch: files.dumps(Done.of([result(task) for task in batch.read()]))
    given: list[Batch] = field(default_factory=list)
    asked: int = 0

    def size(self) -> int:
        return self.lends

    def give(self, batch: str) -> None:
        self.given.append(files.loads(Batch, batch, "batch"))
        self.asked = 0

    def answer(self) -> str | None:
        self.asked += 1
        return self.say(self.given[-1]) if self.asked > self.patience else None

    def close(self) -> None: ...


def tasks(count: int, first: int = 0) -> list[Task]:
    """Tasks that differ in their round alone."""
    return [Task(stage="improve", layout=Layout(dp=4), round=first + index) for index in range(count)]


def crew(world: World, *helpers: Hired, deadline_s: float = 1e9) -> SharedCrew:
    """A crew that knows how long a task takes and has called for help."""
    made = SharedCrew(world.own, lambda: helpers, clock=lambda: world.now_s, deadline_s=deadline_s, sleep=world.sleep)
    made(tasks(round(2 * HELP_AFTER_S / TASK_S)))
    world.here.clear()
    return made


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_every_nth(count: int, shares: int) -> None:
    """Each item is in one share, and no share is larger than another by more than one."""
    dealt = deal(count, shares)

    assert list(range(count)) == sorted(item for share in dealt for item in share)
    assert [tuple(range(count))[share::shares] for share in range(shares)] == [tuple(share) for share in dealt]
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 30))
def test_any_number_of_helpers_gives_the_same(sizes: list[int], count: int) -> None:
    """One to thirteen processes find the same in the same order; each does its share, and those not ready do none."""
    world, helpers = World(), [Hired(lends=size) for size in sizes]
    shared = crew(world, *helpers)

    assert [result(task) for task in tasks(count)] == shared(tasks(count))
    done = [sum(len(batch.tasks) for batch in helper.given) for helper in helpers]
    assert count == len(world.here) + sum(done)
    if count >= 2 and sum(sizes):
        assert len(world.here) == len(deal(count, 1 + sum(sizes))[0])
    assert all(lent or not did for lent, did in zip(sizes, done, strict=True))


def test_who_did_the_work_is_said() -> None:
    """Processes are counted by node; alone there is nothing to say."""
    world = World()
    shared = crew(world, Hired(name="this node", lends=3), Hired(lends=4), Hired(name="node 2", lends=0))
    assert "" == shared.words

    shared(tasks(40))

    assert "the search was shared by 8 processes: 4 on this node, 4 on node 1" == shared.words
    assert () == shared.troubles


@pytest.mark.parametrize(
    ("helper", "why"),
    [
        (Hired(patience=10**9), "it did not answer in time"),
        (Hired(say=lambda batch: ""), "it gave up"),
        (Hired(say=lambda batch: "{"), "not JSON"),
        (Hired(say=lambda batch: files.dumps(Done(tried=()))), "it answered 0 of 10 tasks"),
        (Hired(say=lambda batch: files.dumps(Done.of([None] * 10, trouble="it died"))), "it died"),
    ],
    ids=["hangs", "gives up", "babbles", "is short", "dies"],
)
def test_a_helper_that_fails_is_asked_no_more(helper: Hired, why: str) -> None:
    """Its share is done here, the reason is kept, and the next batch is dealt to the others."""
    world, other = World(), Hired(name="node 2")
    shared = crew(world, helper, other)

    assert [result(task) for task in tasks(30)] == shared(tasks(30))
    assert [result(task) for task in tasks(30, 30)] == shared(tasks(30, 30))
    assert (1, 2) == (len(helper.given), len(other.given))
    (trouble,) = shared.troubles
    assert trouble.startswith("node 1 no longer helps with the search: ")
    assert why in trouble
    # Ten of the thirty were its share; of the second thirty every other one is done here.
    assert 10 + 10 + 15 == len(world.here)
    assert world.now_s < 20


def test_what_a_helper_had_no_time_for_is_done_here() -> None:
    """Clocks differ: as long as there is time here, nothing stays undone."""
    world = World()
    half = Hired(say=lambda batch: files.dumps(Done.of([None, *(result(task) for task in batch.read()[1:])])))

    assert [result(task) for task in tasks(6)] == crew(world, half)(tasks(6))


def test_the_end_of_the_budget_is_the_end() -> None:
    """Helpers are told how long they have, and no answer is waited for long after that."""
    world = World()
    slow = Hired(patience=10**9)
    shared = crew(world, slow, deadline_s=1.6)

    shared(tasks(10))

    assert 0.6 == pytest.approx(slow.given[0].left_s)
    assert world.now_s < 1.6 + 0.5 + 0.1 + 5 * TASK_S


def test_a_short_search_calls_nobody() -> None:
    """A process takes as long to start; nor does a batch of little work go out."""
    world, helper = World(), Hired()
    called: list[str] = []

    def call() -> list[Hired]:
        called.append("help")
        return [helper]

    shared = SharedCrew(world.own, call, clock=lambda: world.now_s, deadline_s=9.0, sleep=world.sleep)
    shared(tasks(3))
    assert [] == called

    world.now_s = 1.0
    shared(tasks(1))
    assert (["help"], []) == (called, helper.given)


def test_tasks_and_results_come_back_as_they_were() -> None:
    """JSON knows no infinity; the words for it do."""
    batch = [
        Task(stage="price", layout=Layout(pp=2, dp=2), beat_s=0.1 + 0.2),
        Task(stage="improve", layout=Layout(dp=4), placement=(1, 0, 3, 2), cost_s=1 / 3, bound_s=0.25, round=2),
    ]
    found = [Tried(bound_s=0.5), None, Tried(bound_s=0.1, host_order_s=0.3, placement=(1, 0), cost_s=0.2)]

    assert batch == files.loads(Batch, files.dumps(Batch.of(batch, left_s=1.0)), "batch").read()
    assert found == files.loads(Done, files.dumps(Done.of(found)), "done").read()
