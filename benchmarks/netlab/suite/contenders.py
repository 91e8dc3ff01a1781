"""The picks of other planners for the cluster that our warm-up measured, as commands that can be started."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from benchmarks.netlab.compare import train
from benchmarks.netlab.lab import PORT, Lab
from benchmarks.netlab.system import LabError
from benchmarks.rivals.pick import Clock, Placement, PlannerOptions, torchrun_order
from benchmarks.rivals.planners import RANKINGS
from pipette_launch import megatron
from pipette_launch.cost.compute.carried_over import with_extrapolated_times
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Choice, Job, Layout, Measurements, Plan, files

OWN = "torchrun"
"""The user's own words in torchrun's order."""
RIVALS = {"rules": "megatron-rules", "AMP": "amp", "Varuna": "varuna", "Pipette": "pipette"}
"""Column of the table -> planner."""
ANNEALING_S = 0.5
"""For each of Pipette's candidates; four hosts have 24 orders."""
EVENTS = {"PET_EVENT_LOG_HANDLER": "console"}
"""torchrun, and pipette-launch too, then print which RANK each worker had."""
LANDED = re.compile(r'"torchelastic\.worker\.status\.SUCCEEDED", "source": "WORKER",.*?"global_rank": (\d+),')


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Something to run."""

    names: tuple[str, ...]
    """Names of all planners with this pick."""
    layout: Layout
    placement: Placement
    words: tuple[str, ...]
    """The script and its arguments."""
    predicted_s: float | None
    """By our own Predictor; None where it has no compute times for this layout."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job on one measured cluster."""

    words: tuple[str, ...]
    """The script and the arguments that the user gave."""
    job: Job
    measurements: Measurements

    @classmethod
    def of(cls, words: Sequence[str], measurements: Measurements, *, fix: Sequence[str] = ()) -> Case:
        """Read the words for as many ranks as there are slots; `fix` as in `--pipette-fix`."""
        cluster = measurements.cluster
        job = megatron.read_job(
            words[1:],
            world_size=cluster.num_slots,
            megatron_version=megatron.script_version(words[0], os.environ),
            device_kind=cluster.device_kind,
            fix=fix,
            environment=os.environ,
            device_name=cluster.hosts[0].devices[0].name,
        )
        return cls(words=tuple(words), job=job, measurements=with_extrapolated_times(job, measurements))

    @cached_property
    def predictor(self) -> Predictor:
        """Prices layouts of the job."""
        return Predictor(self.job, self.measurements)

    def contender(self, name: str, layout: Layout, placement: Sequence[int]) -> Contender:
        """Make a layout and a placement runnable, in the words that a plan of ours would be written in."""
        words = megatron.write_arguments(self.words[1:], job=self.job, layout=layout)
        predictor = self.predictor
        return Contender(
            names=(name,),
            layout=layout,
            placement=tuple(placement),
            words=(self.words[0], *words),
            predicted_s=predictor.step_time(layout, placement).total_s if predictor.can_price(layout) else None,
        )


def rivals(case: Case, clock: Clock) -> tuple[tuple[Contender, ...], dict[str, str]]:
    """Return the commands of the user's own flags and of each rival, and the reason if a rival has no pick."""
    options = PlannerOptions(
        capacity_bytes=case.measurements.cluster.memory_bytes, clock=clock, budget_s=ANNEALING_S, seed=0
    )
    found = [case.contender(OWN, case.job.own, torchrun_order(case.job.own.world_size))]
    refused = {}
    for name, planner in RIVALS.items():
        # Varuna always recomputes, also if the user does not.
        pinned = [pin for pin in case.job.pinned if planner != "varuna" or pin != "recompute"]
        try:
            pick = RANKINGS[planner](replace(case.job, pinned=tuple(pinned)), case.measurements, options)[0]
            found.append(case.contender(name, pick.layout, pick.placement))
        except PipetteError as error:
            refused[name] = str(error)
    return merged(found), refused


def merged(found: Sequence[Contender]) -> tuple[Contender, ...]:
    """Make one of those that would run the same words in the same places."""
    together: dict[tuple[tuple[str, ...], Placement], Contender] = {}
    for one in found:
        same = together.get((one.words, one.placement))
        together[one.words, one.placement] = one if same is None else replace(same, names=(*same.names, *one.names))
    return tuple(together.values())


def ours(plan: Plan) -> Choice:
    """Return the configuration that a plan runs."""
    return plan.own if plan.keeps_own else plan.chosen


def new_plan(cache: Path, before: Collection[Path] = ()) -> Path:
    """Return the folder of the one plan that pipette-launch has left in its cache since there were these.

    Raises:
        LabError: there is no such plan, or more than one.

    """
    made = sorted(set(cache.glob("*/plan.json")) - set(before))
    if len(made) != 1:
        raise LabError(f"pipette-launch left {len(made)} new plans in {cache}, not one")
    return made[0].parent


def first_plan(
    lab: Lab, start: Sequence[str], words: Sequence[str], *, cache: Path, python: str
) -> tuple[Plan, Measurements]:
    """Start pipette-launch where it has no plan of a job, and read the plan and the measurements that it leaves.

    Args:
        lab: where.
        start: pipette-launch and its flags.
        words: the script and its arguments; one iteration is enough, as their number is no part of a plan's key.
        cache: the folder of pipette-launch's plans, of other jobs too.
        python: the interpreter of launchers and workers.

    Raises:
        LabError: it failed, or left no plan.

    """
    before = [*cache.glob("*/plan.json")]
    train(lab, [*start, *words], python=python)
    folder = new_plan(cache, before)
    return files.read(folder / "plan.json", Plan), files.read(folder / "cluster.json", Measurements)


def in_order(lab: Lab, placement: Sequence[int]) -> Callable[[str], Mapping[str, str]]:
    """Return torchrun's flags, as variables of each host, by which hosts of one slot get these RANKs."""
    ranks = dict(zip(lab.hosts, placement, strict=True))
    first = min(ranks, key=lambda host: ranks[host])
    return lambda host: {
        **EVENTS,
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ENDPOINT": f"{lab.address(first)}:{PORT}",
        "PET_NODE_RANK": str(ranks[host]),
    }


def landed(output: str) -> int | None:
    """RANK of a host's only worker, from what launchers print with EVENTS; None if they said nothing."""
    said = LANDED.findall(output)
    return int(said[-1]) if said else None
