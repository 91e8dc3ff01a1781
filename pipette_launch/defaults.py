"""Defaults of flags, and every deadline of the product."""

from __future__ import annotations

import math

MARGIN = 0.02
"""`--pipette-margin`, `--margin`: share of the step time that a plan must save to replace the user's configuration."""
MEMORY_MARGIN = 0.08
"""`--pipette-memory-margin`, `--memory-margin`: share of the device's memory that a plan leaves free."""
WARMUP_BUDGET_S = 60.0
"""`--pipette-budget`: longest duration of a warm-up's measurements in seconds."""
LINKS_BUDGET_S = 10.0
"""Longest duration in seconds of a warm-up that measures only links, for a job that cannot be planned."""
SEARCH_BUDGET_S = 10.0
"""Longest search for a plan in processor seconds: `--budget` of `pipette plan`, and the launcher's own search."""
TRIALS = 0
"""`--pipette-trials`: number of plans to try before the training, besides the user's own configuration."""
TRIAL_ITERS = 5
"""`--pipette-trial-iters`: number of step times of each trial that enter the comparison."""
TOLERATE = 1
"""`--pipette-tolerate`: number of lost nodes to plan for, if --nnodes MIN:MAX allows the loss of a node."""
SPARES = 0
"""`--pipette-spares`: number of further nodes that are measured and then wait to replace lost nodes."""
WATCH_LIMIT = 0.3
"""`--pipette-watch-limit`: relative slowdown of training steps at which the launcher prints a warning."""
TOP = 10
"""`--top`: number of sets of parallel degrees in a plan's ranked list."""
SEED = 0
"""`--seed` of `pipette plan`, and of the launcher's own search."""


class Deadline(float):
    """Longest wait in seconds of a small job, and its growth with the number of ranks."""

    waits_for: str
    when_passed: str
    ranks_per_s: float
    """Number of ranks for which the wait grows by one second."""

    def __new__(  # noqa: PYI034 - typing.Self needs Python 3.11
        cls, least_s: float, waits_for: str, when_passed: str, *, ranks_per_s: float = math.inf
    ) -> Deadline:
        """Take the wait of a small job, and two phrases for the table in docs/reliability.md."""
        made = super().__new__(cls, least_s)
        made.waits_for, made.when_passed, made.ranks_per_s = waits_for, when_passed, ranks_per_s
        return made

    def of(self, num_ranks: int) -> float:
        """Return the longest wait of a job of this number of ranks."""
        return self + num_ranks / self.ranks_per_s


COLD_RANKS_PER_S = 16.0
"""A cold file system serves ranks one after the other: imports of 4,096 ranks may end 256 s apart."""
REPORTED_RANKS_PER_S = 4096.0
"""Reports of all hosts, or a decision for all hosts, pass through one launcher (`tests/test_defaults.py`)."""

# The rendezvous: torch's own limits are in `agent/rendezvous.py`.
NAME_S = Deadline(5.0, "the name service to find the host of the rendezvous", "the launcher tries again")
CONNECT_S = Deadline(3.0, "one connection to the store of the rendezvous", "the launcher tries again")
SCONTROL_S = Deadline(5.0, "an answer of scontrol", "switches and device lists count as unknown")

# Agents.
HOST_SILENCE_S = Deadline(6.0, "any answer of another launcher", "its host counts as lost")
FIRST_ANSWER_S = Deadline(
    15.0,
    "the store of the rendezvous, or the first answer of another launcher, which may wait for a name service",
    "its host counts as lost",
)
HAND_ON_S = Deadline(2.0, "another launcher to hand on the plan", "the first launcher sends the plan")
PROBE_S = Deadline(0.5, "one connection to a launcher that is missing at a meeting", "the next attempt")
PROOF_S = Deadline(1.5, "an answer of a launcher that others believe lost", "its host counts as lost")
PEER_WAIT_S = Deadline(120.0, "a message of another launcher, which may be ending its workers", "its host is left out")
GOODBYE_S = Deadline(10.0, "the last launchers to leave the first launcher's store", "the first launcher ends")
NEWS_S = Deadline(1.0, "another node's first iteration, after a worker died", "the plan counts as unable to start")
END_S = Deadline(10.0, "the kernel to end killed workers", "a message names the processes")
STOPPED_S = Deadline(30.0, "a stopped worker to go on", "the worker is killed")
SIGNALLED_S = Deadline(5.0, "a console that takes no output, after a signal", "the rest of the output is lost")
MEMORY_FREE_S = Deadline(50.0, "devices to release the memory of ended workers", "a warning, and the job goes on")
RECIPE_S = Deadline(600.0, "a recipe of Megatron-Bridge to make its configuration", "the job is not planned")
FILES_S = Deadline(60.0, "files that a launcher still writes at its end", "a line says that files are missing")

# Warm-up. A wait adds the time that the awaited phase may still take.
START_S = Deadline(
    120.0, "a warm-up worker to start: imports, compilation, first run", "no plan", ranks_per_s=COLD_RANKS_PER_S
)
WORKER_WAIT_S = Deadline(
    60.0,
    "another warm-up worker after the end of its phase",
    "no plan; a message names it",
    ranks_per_s=COLD_RANKS_PER_S,
)
SIGN_S = Deadline(60.0, "the next progress message of a warm-up worker", "a worker without computation counts as hung")
ADVISER_START_S = Deadline(30.0, "the adviser, beside its search", "standard groups are measured")
ALARM_REPORT_S = Deadline(
    5.0, "another launcher's report after a failed warm-up", "its host counts as gone", ranks_per_s=REPORTED_RANKS_PER_S
)
VERDICT_S = Deadline(
    10.0,
    "the first launcher's cause of a failed warm-up",
    "each launcher names a cause itself",
    ranks_per_s=REPORTED_RANKS_PER_S,
)

# Trials and schedules.
FIRST_ITERATION_S = Deadline(
    600.0, "the first iteration of a trial", "the trial counts as failed", ranks_per_s=COLD_RANKS_PER_S
)
HUNG_S = Deadline(120.0, "the next iteration of a trial, or 20 predicted steps", "the trial counts as failed")
TRIAL_REPORT_S = Deadline(75.0, "another launcher to end the workers of a trial", "its host is left out")
NEXT_S = Deadline(
    120.0, "the first launcher's decision after a trial", "the launcher ends", ranks_per_s=REPORTED_RANKS_PER_S
)
PASS_S = Deadline(120.0, "one pass of a schedule that Megatron lacks", "the worker ends with the pass's name")
