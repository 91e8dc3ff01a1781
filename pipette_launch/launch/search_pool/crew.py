"""Shares a search with whoever helps: each batch is dealt out, and what does not come back is done here."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from pipette_launch.agent.controller import Helper
from pipette_launch.errors import FileFormatError
from pipette_launch.facts import files
from pipette_launch.launch.search_pool.messages import Batch, Done
from pipette_launch.search.tasks import Clock, Task, TaskRunner, Tried

logger = logging.getLogger(__name__)

HELP_AFTER_S = 0.5
"""A search that ends sooner calls nobody: a process takes as long to start."""
WORTH_SHARING_S = 0.05
"""A batch of less work goes out to nobody: words take their time."""
GRACE_S = 2.0
"""How long helpers may take beyond what their share took here, before it is done here too."""
LATE_S = 0.5
"""How long after the end of the budget answers are still waited for: helpers stop at that moment, not before it."""
FIRST_POLL_S = 0.002
LAST_POLL_S = 0.05

THIS_NODE = "this node"


def deal(num_items: int, num_shares: int) -> list[range]:
    """Cut the indices of a batch into shares: item i is in share i modulo their number."""
    return [range(share, num_items, num_shares) for share in range(num_shares)]


class SharedCrew:
    """A `TaskRunner` of this process and of helpers, who take part from when they are ready.

    What comes of a task depends on the task alone, so it does not matter who does it: helpers that come late, fail or
    hang cost time and nothing else.
    """

    def __init__(
        self,
        own: TaskRunner,
        call: Callable[[], Sequence[Helper]],
        *,
        clock: Clock,
        deadline_s: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Begin alone.

        Args:
            own: does tasks in this process.
            call: calls for help, once; a helper whose `size` is 0 is not ready yet.
            clock: seconds that only grow.
            deadline_s: when the search must end, by that clock.
            sleep: waits.

        """
        self._own = own
        self._call = call
        self._clock = clock
        self._deadline_s = deadline_s
        self._sleep = sleep
        self._help_at_s = clock() + HELP_AFTER_S
        self._helpers: list[Helper] | None = None
        self._task_s: dict[str, float] = {}
        self._sizes: dict[Helper, int] = {}
        self._took_part: dict[Helper, int] = {}
        self.troubles: tuple[str, ...] = ()
        """Who failed and why, one sentence each."""

    @property
    def words(self) -> str:
        """Who did the work, where it was not this process alone."""
        if not self._took_part:
            return ""
        counts = Counter({THIS_NODE: 1})
        for helper, size in self._took_part.items():
            counts[helper.name] += size
        where = ", ".join(f"{count} on {name}" for name, count in counts.items())
        return f"the search was shared by {counts.total()} processes: {where}"

    def __call__(self, tasks: Sequence[Task]) -> list[Tried | None]:
        """Do a batch; results come in the order of the tasks, None where the time was up."""
        self._sizes = {helper: helper.size() for helper in self._helpers_for(tasks)}
        seats = [None, *(helper for helper, size in self._sizes.items() for _ in range(size))]
        found: list[Tried | None] = [None] * len(tasks)
        shares: dict[Helper | None, list[int]] = {}
        for seat, part in zip(seats, deal(len(tasks), len(seats)), strict=True):
            shares.setdefault(seat, []).extend(part)
        given = {helper: share for helper, share in shares.items() if helper is not None and share}
        for helper, share in given.items():
            left_s = self._deadline_s - self._clock()
            helper.give(files.dumps(Batch.of([tasks[index] for index in share], left_s=left_s)))
        began_s = self._clock()
        self._do(tasks, shares[None], found)
        self._collect(given, found, patience_s=GRACE_S + self._clock() - began_s)
        self._do(tasks, [index for index, tried in enumerate(found) if tried is None], found)
        return found

    def _helpers_for(self, tasks: Sequence[Task]) -> list[Helper]:
        """Those who may help, for a batch that is worth the words."""
        if self._helpers is None and self._clock() >= self._help_at_s:
            self._helpers = list(self._call())
        known = all(task.stage in self._task_s for task in tasks)
        if not self._helpers or not known or len(tasks) < 2 or self._clock() >= self._deadline_s:
            return []
        if sum(self._task_s[task.stage] for task in tasks) < WORTH_SHARING_S:
            return []
        return self._helpers

    def _do(self, tasks: Sequence[Task], share: Sequence[int], found: list[Tried | None]) -> None:
        """Do a share here, and remember how long a task takes."""
        if not share:
            return
        began_s = self._clock()
        for index, tried in zip(share, self._own([tasks[index] for index in share]), strict=True):
            found[index] = tried
        each_s = (self._clock() - began_s) / len(share)
        for stage in {tasks[index].stage for index in share}:
            self._task_s[stage] = each_s

    def _collect(self, given: dict[Helper, list[int]], found: list[Tried | None], *, patience_s: float) -> None:
        """Wait for the helpers' shares; whoever does not answer in time is asked no more."""
        waiting = dict(given)
        end_s = min(self._clock() + patience_s, self._deadline_s + LATE_S)
        poll_s = FIRST_POLL_S
        while waiting:
            for helper in list(waiting):
                text = helper.answer()
                if text is not None:
                    self._take(helper, text, waiting.pop(helper), found)
            if not waiting or self._clock() >= end_s:
                break
            self._sleep(poll_s)
            poll_s = min(1.5 * poll_s, LAST_POLL_S)
        for helper in waiting:
            self._drop(helper, "it did not answer in time")

    def _take(self, helper: Helper, text: str, share: list[int], found: list[Tried | None]) -> None:
        """Put a helper's results where they belong."""
        try:
            done = files.loads(Done, text, f"what {helper.name} found")
        except FileFormatError as error:
            done = Done(tried=(), trouble=str(error) if text else "it gave up")
        if len(done.tried) == len(share):
            for index, tried in zip(share, done.read(), strict=True):
                found[index] = tried
            self._took_part[helper] = max(self._took_part.get(helper, 0), self._sizes[helper])
        if done.trouble or len(done.tried) != len(share):
            self._drop(helper, done.trouble or f"it answered {len(done.tried)} of {len(share)} tasks")

    def _drop(self, helper: Helper, why: str) -> None:
        """Ask a helper no more."""
        assert self._helpers is not None
        self._helpers.remove(helper)
        self.troubles += (f"{helper.name} no longer helps with the search: {why}",)
        logger.warning("%s", self.troubles[-1])
