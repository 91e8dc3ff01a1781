"""A job on fewer hosts: what it keeps, and a rough step time that tells which numbers are worth a search."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipette_launch.cost.compute.carried_over import with_extrapolated_times
from pipette_launch.cost.learned import NOTHING_LEARNED, Corrections
from pipette_launch.errors import LayoutError, PipetteError
from pipette_launch.facts import Choice, Job, Layout, Measurements, Plan
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.measurements import without_hosts
from pipette_launch.facts.plan import fallback_plans
from pipette_launch.megatron import Continuation
from pipette_launch.megatron.chunks import Split
from pipette_launch.search.candidates import SearchInputs, placement_problem
from pipette_launch.search.choose import choice_of
from pipette_launch.search.layouts import compute_cases, cuts
from pipette_launch.search.placement import begin, exchange_devices, improve, settled
from pipette_launch.search.slots import IsLate, faster
from pipette_launch.search.solve import SolveOptions, solve
from pipette_launch.text import plural


def rough_step(num_devices: int, *, devices_per_host: int, samples: int, layers: int, least_devices: int) -> float:
    """Estimate the step on so many devices, in units of its own: only ratios between numbers of devices matter.

    Equal replicas share the batch equally, so a number that shares few factors with it needs deep pipelines. They wait
    while they fill, and the stage with the most layers sets their pace. Infinite where no replica has enough layers.

    Args:
        num_devices: all of them train.
        devices_per_host: TP is the largest divisor of a replica's devices that divides them.
        samples: of a step.
        layers: of the model.
        least_devices: of a replica, so that it fits.

    """
    most_replicas = math.gcd(num_devices, samples)
    best = math.inf
    for replicas in range(1, most_replicas + 1):
        devices = num_devices // replicas
        if most_replicas % replicas or devices < least_devices:
            continue
        depth = devices // math.gcd(devices, devices_per_host)
        if depth > layers:
            continue
        fills = 1 + (depth - 1) * replicas / samples
        best = min(best, fills * math.ceil(layers / depth) * depth / layers / num_devices)
    return best


def keeping(job: Job, before: Layout, names: Sequence[str]) -> Job:
    """Pin some fields of a layout at the values that they had; raises LayoutError where these ranks cannot have them.

    What else the user's own layout says stays, as far as it goes with them.
    """
    if not names:
        return job
    values = {name: getattr(before, name) for name in names}
    if {"tp", "pp"} <= values.keys():
        # Chunks and experts that suit other sizes need not suit these.
        fields = (*Split._fields, "microbatch_group_size", "ep", "etp", "sequence_parallel")
        values = {name: getattr(before, name) for name in fields} | values
    world_size = job.own.world_size
    model_size = 1
    for name in ("tp", "pp", "cp"):
        model_size *= values.get(name, getattr(job.own, name))
    if world_size % model_size:
        raise LayoutError(
            f"tp{before.tp} pp{before.pp} cp{values.get('cp', job.own.cp)} do not divide {world_size} ranks"
        )
    dp = world_size // model_size
    if values.get("dp", dp) != dp:
        raise LayoutError(f"dp{values['dp']} has to stay, and {world_size} ranks make dp{dp}")
    own = replace(job.own, **{**values, "dp": dp})
    return replace(job, own=own, pinned=tuple(sorted({*job.pinned, *names})))


MOST_S = 5.0
"""Bound of the time for all templates together; most searches end earlier by themselves."""
CLOSE = 0.05
"""A plan that keeps TP and PP, or that has all its templates, may take this part of the step longer than the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateNeeds:
    """How many hosts may be lost, and what a plan for those that are left has to heed."""

    tolerate: int
    """How many."""
    least_hosts: int
    """How few may train, MIN of --nnodes."""
    global_batch_size: int
    """Samples of a step, however many hosts train."""
    num_layers: int
    job_of: Callable[[int], Job]
    """Reads the job for so many hosts, with the same global batch size; raises PipetteError where it cannot run."""
    continuation_of: Callable[[Layout], Continuation]
    """What another layout must keep to go on from the checkpoints that this one writes."""

    def sizes(self, num_hosts: int) -> range:
        """Numbers of hosts that are to have a template, the most first."""
        return range(num_hosts - 1, max(num_hosts - self.tolerate, self.least_hosts, 1) - 1, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Covered:
    """The templates of one layout, and what there is to say where they leave hosts without one of their size."""

    choice: Choice
    templates: tuple[Plan, ...]
    gaps: tuple[str, ...]


def with_templates(
    plan: Plan,
    measurements: Measurements,
    needs: TemplateNeeds,
    *,
    options: SolveOptions,
    clock: Callable[[], float],
    corrections: Corrections = NOTHING_LEARNED,
) -> Plan:
    """Make plans for the loss of one host, of two, and so on, and put them into a plan.

    A template must be able to load what the plan saves. Where the format of the checkpoints keeps a layout that does
    not suit fewer hosts, another candidate of the plan is chosen whose layout does, if it is nearly as fast.

    Args:
        plan: for all hosts.
        measurements: of these hosts.
        needs: how many hosts may be lost, and what has to stay.
        options: those of the search for the plan; its budget is not this one's.
        clock: seconds that only grow.
        corrections: learned from earlier outcomes.

    """
    if not needs.tolerate:
        return plan
    sizes = needs.sizes(len(plan.hosts))
    short: tuple[str, ...] = ()
    if len(sizes) < needs.tolerate:
        told = (
            f"--nnodes wants {needs.least_hosts} {plural('host', needs.least_hosts)}, so plans are made for the loss of"
        )
        short = (f"{told} {len(sizes)}; after more losses the job waits until others have joined.",)
    if not sizes:
        return replace(plan, notes=(*plan.notes, *short))
    deadline_s = clock() + MOST_S
    maker = _Maker(plan, measurements, needs, options, clock, deadline_s, corrections)
    best = first = maker.covered(plan.chosen)
    if first.gaps and len(needs.continuation_of(plan.chosen.layout).kept) > 1:
        others = (maker.covered(choice) for choice in _nearly_as_fast(plan))
        best = next((one for one in others if not one.gaps), first)
    if best is not first:
        plan = _choosing(plan, best.choice)
    note = _sentence(needs.continuation_of(best.choice.layout).note)
    notes = (*plan.notes, *short, *best.gaps, *((note,) if note else ()))
    return replace(plan, templates=fallback_plans(best.templates), notes=notes)


def _nearly_as_fast(plan: Plan) -> Iterator[Choice]:
    """Other candidates of a plan whose step is nearly as short, the fastest first; each layout once."""
    own = () if plan.own_fault or not plan.own.fits else (plan.own,)
    seen = {plan.chosen.layout}
    for choice in sorted((*plan.alternatives, *own), key=lambda one: one.step_time_s):
        if choice.layout not in seen and choice.step_time_s <= (1 + CLOSE) * plan.chosen.step_time_s:
            seen.add(choice.layout)
            yield choice


def _choosing(plan: Plan, choice: Choice) -> Plan:
    """Put another candidate in the place of the chosen one, which is then tried next."""
    is_own = choice is plan.own
    rest = tuple(one for one in (plan.chosen, *plan.alternatives) if one is not choice and one is not plan.own)
    slower = choice.step_time_s / plan.chosen.step_time_s - 1
    why = (
        f"{choice.layout.words()} is predicted {slower:.1%} slower than {plan.chosen.layout.words()} and is chosen all "
        f"the same: its checkpoints can be loaded on fewer hosts."
    )
    return replace(
        plan,
        chosen=choice,
        keeps_own=is_own,
        alternatives=rest,
        # What was better than the user's own configuration is tried before it, as before.
        num_in_line=0 if plan.keeps_own else plan.num_in_line,
        reasons=(why, *plan.reasons),
    )


class _Maker:
    """Searches for templates until the time is up."""

    def __init__(
        self,
        plan: Plan,
        measurements: Measurements,
        needs: TemplateNeeds,
        options: SolveOptions,
        clock: Callable[[], float],
        deadline_s: float,
        corrections: Corrections,
    ) -> None:
        self._plan = plan
        self._measurements = measurements
        self._needs = needs
        # Templates run Megatron's own schedules: a search for others takes as long again.
        self._options = replace(options, schedules=())
        self._clock = clock
        self._deadline_s = deadline_s
        self._corrections = corrections

    def covered(self, choice: Choice) -> _Covered:
        """Make the templates that can go on from one layout's checkpoints."""
        num_hosts, sizes = len(self._plan.hosts), self._needs.sizes(len(self._plan.hosts))
        tried: dict[int, Plan | str] = {}
        made: dict[int, Plan] = {}
        gaps = []
        for size in sizes:
            if not made or size < min(made):
                quickest = self._quickest(size, choice, tried)
                if quickest is not None:
                    made[len(quickest.hosts)] = quickest
            smaller = max((one for one in made if one <= size), default=0)
            if smaller != size:
                does = (
                    f"{smaller} train and {size - smaller} {'stands' if size - smaller == 1 else 'stand'} by"
                    if smaller
                    else "the job waits until others have joined"
                )
                left = f"{num_hosts - size} of {num_hosts} hosts {'is' if num_hosts - size == 1 else 'are'} lost"
                found = tried[size] if size in tried else self._fault(size, choice.layout)
                why = found if isinstance(found, str) and found else "fewer are quicker"
                gaps.append(f"There is no plan for {size} {plural('host', size)} ({why}): when {left}, {does}.")
        return _Covered(choice=choice, templates=tuple(made.values()), gaps=tuple(gaps))

    def _quickest(self, most: int, choice: Choice, tried: dict[int, Plan | str]) -> Plan | None:
        """Find the plan with the shortest step for so many hosts or fewer; None where there is none.

        A number of hosts that shares few factors with the batch needs deep pipelines, or has no layout at all, and
        fewer hosts may be quicker. They are tried in the order of a rough estimate, while there is time; what is found
        for which number of them is added to `tried`.
        """
        best: Plan | None = None
        for size in sorted(range(self._needs.least_hosts, most + 1), key=lambda one: (self._rough_step(one), -one)):
            is_late = size not in tried and self._clock() >= self._deadline_s
            if best and (is_late or not self._may_be_quicker(size, choice, best)):
                continue
            found = self._tried(size, choice, tried)
            if isinstance(found, Plan) and (best is None or found.chosen.step_time_s < best.chosen.step_time_s):
                best = found
        return best

    def _tried(self, size: int, choice: Choice, tried: dict[int, Plan | str]) -> Plan | str:
        if size not in tried:
            tried[size] = self._template(size, choice.layout)
        return tried[size]

    def _rough_step(self, size: int) -> float:
        needs, layout, devices = self._needs, self._plan.chosen.layout, self._plan.devices_per_host
        least = min(layout.tp * layout.pp * layout.cp, size * devices)
        shape = {"devices_per_host": devices, "samples": needs.global_batch_size, "layers": needs.num_layers}
        return rough_step(size * devices, least_devices=least, **shape)

    def _may_be_quicker(self, size: int, choice: Choice, best: Plan) -> bool:
        """Whether so few hosts are quicker than a plan if each does as much a second as in the plan for all hosts."""
        return size * best.chosen.step_time_s > len(self._plan.hosts) * choice.step_time_s

    def _template(self, size: int, before: Layout) -> Plan | str:
        """Return the plan for so many hosts, or why there is none; it takes half of the time that is left.

        The last hosts are left out. Which ones will be lost nobody knows; those that are there then take the places of
        those that are not.
        """
        kept = self._needs.continuation_of(before)
        ends_s = self._clock() + max(self._deadline_s - self._clock(), 0.0) / 2
        try:
            job = self._needs.job_of(size)
            # The smaller of the two searches first: the other gets the time that it leaves.
            same = self._with_same_sizes(size, job, before, kept, ends_s)
            found = self._solved(size, keeping(job, before, kept.kept), ends_s - self._clock())
        except PipetteError as error:
            return _reason(error)
        if same and same.chosen.step_time_s <= _most_s(before, found.chosen):
            found = replace(same, own=found.own, own_fault=found.own_fault, keeps_own=False)
        if not kept.can_load(before, found.chosen.layout):
            return "its gradient buckets would differ from those of the checkpoint"
        return found

    def _fault(self, size: int, before: Layout) -> str:
        """Say why so many hosts have no legal layout, as far as there is time to look; empty where they have one."""
        if self._clock() >= self._deadline_s:
            return ""
        try:
            job = keeping(self._needs.job_of(size), before, self._needs.continuation_of(before).kept)
            with_cases_of(job, without_hosts(self._measurements, self._plan.hosts[size:]))
        except PipetteError as error:
            return _reason(error)
        return ""

    def _with_same_sizes(self, size: int, job: Job, before: Layout, kept: Continuation, ends_s: float) -> Plan | None:
        """Return the best plan that keeps TP and PP, whose checkpoints load faster; None where all do, or none can."""
        if {"tp", "pp"} <= set(kept.kept):
            return None
        try:
            return self._solved(size, keeping(job, before, (*kept.kept, "tp", "pp")), (ends_s - self._clock()) / 2)
        except PipetteError:
            return None

    def _solved(self, size: int, job: Job, budget_s: float) -> Plan:
        hosts = self._plan.hosts
        measurements = without_hosts(self._measurements, hosts[size:])
        return solve(
            job,
            with_extrapolated_times(job, with_cases_of(job, measurements)),
            options=replace(self._options, budget_s=max(budget_s, 0.0)),
            clock=self._clock,
            provenance=self._plan.provenance,
            corrections=self._corrections,
        )


def _most_s(before: Layout, best: Choice) -> float:
    """How long the step of a plan that keeps TP and PP may be, beside the best one, to be taken."""
    keeps = (best.layout.tp, best.layout.pp) == (before.tp, before.pp)
    return best.step_time_s if keeps else (1 + CLOSE) * best.step_time_s


def with_cases_of(job: Job, measurements: Measurements) -> Measurements:
    """Name the shapes of computation that a job has on these hosts, and that the warm-up was not asked for.

    Fewer hosts have other micro-batches; what they take can be carried over from what was measured.

    Raises:
        LayoutError: no layout of the job is legal on these hosts.

    """
    cluster = measurements.cluster
    found = cuts(
        job,
        world_size=cluster.num_slots,
        devices_per_host=cluster.devices_per_host,
        device_kind=cluster.device_kind,
        rooms=Domains.of(cluster),
    )
    if not len(found):
        # Said at once: a search would look for all that could help.
        raise LayoutError(next(iter(found.dropped), f"no layout is legal on {cluster.num_slots} ranks"))
    known = {*measurements.compute_cases(), *measurements.unmeasured, *measurements.refused}
    missing = tuple(case for case in compute_cases(job.own, found.columns) if case not in known)
    return replace(measurements, unmeasured=(*measurements.unmeasured, *missing))


def placed_anew(inputs: SearchInputs, choice: Choice, *, seed: int, is_late: IsLate) -> Choice:
    """Place the ranks of a layout anew, from where they are; its step is predicted anew in any case.

    A schedule that Megatron lacks keeps its places, as does a layout without a price.

    Args:
        inputs: the job, and what was measured of the hosts that it has now.
        choice: the layout, on these hosts.
        seed: of all chance.
        is_late: whether to stop.

    """
    layout = choice.layout
    if choice.order is not None or not inputs.predictor.can_price(layout):
        return choice
    problem = placement_problem(inputs, layout, inputs.predictor.bound_s(layout))
    if problem.slots.allows(choice.placement):
        placed = settled(problem, choice.placement)
        placed = placed if placed.is_optimal else faster(placed, begin(problem, is_late=is_late)[0])
    else:
        # A host that took the place of another lies in another NVLink domain.
        placed, _ = begin(problem, is_late=is_late)
    if not (placed.is_optimal or is_late()):
        rng = random.Random(seed)
        placed = improve(problem, placed, turn=0, rng=rng, is_late=is_late)
        placed = exchange_devices(problem, placed, rng=rng, is_late=is_late)
    return choice_of(
        inputs,
        layout,
        placed.placement,
        priced=layout,
        peaks=inputs.predictor.peaks(layout),
        bound=(problem.bound_s, ""),
    )


def _reason(error: PipetteError) -> str:
    return str(error).partition(". ")[0].rstrip(".")


def _sentence(words: str) -> str:
    """Write a note as a sentence."""
    return f"{words[0].upper()}{words[1:]}." if words else ""
