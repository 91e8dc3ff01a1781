"""Fallback plans: plans for fewer hosts, made in advance, so that the job continues at once if hosts are lost."""

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
from pipette_launch.search.candidates import SearchInputs
from pipette_launch.search.choose import choice_of
from pipette_launch.search.layouts import base_layouts, compute_cases
from pipette_launch.search.placement import begin, improve
from pipette_launch.search.slots import IsLate
from pipette_launch.search.solve import SolveOptions, solve
from pipette_launch.text import plural

MOST_S = 5.0
"""Seconds that the search for all fallback plans together may take."""
CLOSE = 0.05
"""A plan that keeps TP and PP, or has all its fallback plans, may be slower than the best plan by this share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackNeeds:
    """Number of lost hosts to plan for, and the rules for plans on the remaining hosts."""

    tolerate: int
    least_hosts: int
    """Smallest number of hosts that may train: MIN of --nnodes."""
    global_batch_size: int
    num_layers: int
    job_of: Callable[[int], Job]
    """Returns the job on a number of hosts, with the same global batch size; raises PipetteError if no job can run."""
    continuation_of: Callable[[Layout], Continuation]
    """Returns the fields that a second layout must copy from the given layout to load its checkpoints."""

    def sizes(self, num_hosts: int) -> range:
        """Return the numbers of hosts that need a fallback plan, largest first."""
        return range(num_hosts - 1, max(num_hosts - self.tolerate, self.least_hosts, 1) - 1, -1)


def rough_step(num_devices: int, *, devices_per_host: int, samples: int, layers: int, least_devices: int) -> float:
    """Estimate the relative step time on `num_devices` devices; infinite if the model has fewer layers than stages.

    The estimate uses only numbers of replicas that divide the batch. If devices and batch have few common factors,
    pipelines are deep. Deep pipelines wait while they fill, and the stage with most layers is their slowest stage. TP
    is taken as the largest common divisor of a host's devices and a replica's devices. A replica needs the memory of at
    least `least_devices` devices.
    """
    most_replicas = math.gcd(num_devices, samples)
    best = math.inf
    for replicas in range(1, most_replicas + 1):
        devices = num_devices // replicas
        depth = devices // math.gcd(devices, devices_per_host)
        if most_replicas % replicas == 0 and devices >= least_devices and depth <= layers:
            fills = 1 + (depth - 1) * replicas / samples
            best = min(best, fills * math.ceil(layers / depth) * depth / layers / num_devices)
    return best


def keeping(job: Job, before: Layout, names: Sequence[str]) -> Job:
    """Pin the fields `names` to the values of the layout `before`; raises LayoutError if the ranks do not allow them.

    Fields that are not pinned keep the user's own values if these values fit.
    """
    if not names:
        return job
    values = {name: getattr(before, name) for name in names}
    if {"tp", "pp"} <= values.keys():
        # The user's own chunks and expert sizes may not fit the TP and PP of `before`.
        fields = (*Split._fields, "microbatch_group_size", "ep", "etp", "sequence_parallel")
        values = {name: getattr(before, name) for name in fields} | values
    world_size = job.own.world_size
    model_size = math.prod(values.get(name, getattr(job.own, name)) for name in ("tp", "pp", "cp"))
    if world_size % model_size:
        raise LayoutError(
            f"tp{before.tp} pp{before.pp} cp{values.get('cp', job.own.cp)} do not divide {world_size} ranks"
        )
    dp = world_size // model_size
    if values.get("dp", dp) != dp:
        raise LayoutError(f"dp{values['dp']} has to stay, and {world_size} ranks make dp{dp}")
    own = replace(job.own, **{**values, "dp": dp})
    return replace(job, own=own, pinned=tuple(sorted({*job.pinned, *names})))


def with_fallback_plans(
    plan: Plan,
    measurements: Measurements,
    needs: FallbackNeeds,
    *,
    options: SolveOptions,
    clock: Callable[[], float],
    corrections: Corrections = NOTHING_LEARNED,
) -> Plan:
    """Add to a plan fallback plans for the loss of one host, two hosts, and so on.

    A fallback plan must be able to load the checkpoints of the plan. If the checkpoint format fixes a layout that does
    not suit fewer hosts, a nearly as fast candidate that suits them is chosen. `options` are the options of the search
    that found the plan. The budget for all fallback plans together is `MOST_S` seconds.
    """
    if not needs.tolerate:
        return plan
    sizes = needs.sizes(len(plan.hosts))
    short: tuple[str, ...] = ()
    if len(sizes) < needs.tolerate:
        wants = f"--nnodes wants {needs.least_hosts} {plural('host', needs.least_hosts)}"
        made = f"{wants}, so plans are made for the loss of {len(sizes)}"
        short = (f"{made}. After more losses the job waits for other hosts.",)
    if not sizes:
        return replace(plan, advice=(*plan.advice, *short))
    # Search only Megatron's own schedules, because a search for other schedules doubles the time.
    maker = _Maker(
        plan=plan,
        measurements=measurements,
        needs=needs,
        options=replace(options, schedules=(), num_ranked=0),
        clock=clock,
        deadline_s=clock() + MOST_S,
        corrections=corrections,
    )
    best = first = maker.covered(plan.chosen)
    if first.gaps and len(needs.continuation_of(plan.chosen.layout).kept) > 1:
        others = (maker.covered(choice) for choice in _nearly_as_fast(plan))
        best = next((one for one in others if not one.gaps), first)
    if best is not first:
        plan = _choosing(plan, best.choice)
    note = needs.continuation_of(best.choice.layout).note
    sentence = (f"{note[0].upper()}{note[1:]}.",) if note else ()
    return replace(plan, templates=fallback_plans(best.plans), advice=(*plan.advice, *short, *best.gaps, *sentence))


def _nearly_as_fast(plan: Plan) -> Iterator[Choice]:
    own = () if plan.own_fault or not plan.own.fits else (plan.own,)
    seen = {plan.chosen.layout}
    for choice in sorted((*plan.alternatives, *own), key=lambda one: one.step_time_s):
        if choice.layout not in seen and choice.step_time_s <= (1 + CLOSE) * plan.chosen.step_time_s:
            seen.add(choice.layout)
            yield choice


def _choosing(plan: Plan, choice: Choice) -> Plan:
    """Return the plan with `choice` as its chosen candidate; the earlier choice becomes the first alternative."""
    rest = tuple(one for one in (plan.chosen, *plan.alternatives) if one is not choice and one is not plan.own)
    slower = choice.step_time_s / plan.chosen.step_time_s - 1
    why = (
        f"{choice.layout.words()} is predicted {slower:.1%} slower than {plan.chosen.layout.words()}, but is chosen "
        f"because its checkpoints can be loaded on fewer hosts."
    )
    return replace(
        plan,
        chosen=choice,
        keeps_own=choice is plan.own,
        alternatives=rest,
        # Plans that are faster than the user's own configuration are still tried before this configuration.
        num_in_line=0 if plan.keeps_own else plan.num_in_line,
        reasons=(why, *plan.reasons),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Covered:
    """The fallback plans of one choice, and a sentence for each number of hosts that has no fallback plan."""

    choice: Choice
    plans: tuple[Plan, ...]
    gaps: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Maker:
    """Searches for fallback plans until the deadline."""

    plan: Plan
    measurements: Measurements
    needs: FallbackNeeds
    options: SolveOptions
    clock: Callable[[], float]
    deadline_s: float
    corrections: Corrections

    def covered(self, choice: Choice) -> _Covered:
        """Make the fallback plans that can load the checkpoints of one choice."""
        tried: dict[int, Plan | str] = {}
        made: dict[int, Plan] = {}
        gaps = []
        for size in self.needs.sizes(len(self.plan.hosts)):
            if not made or size < min(made):
                fastest = self._fastest(size, choice, tried)
                if fastest is not None:
                    made[len(fastest.hosts)] = fastest
            smaller = max((one for one in made if one <= size), default=0)
            if smaller != size:
                found = tried[size] if size in tried else self._fault(size, choice.layout)
                gaps.append(self._gap(size, smaller, found if isinstance(found, str) and found else "fewer are faster"))
        return _Covered(choice=choice, plans=tuple(made.values()), gaps=tuple(gaps))

    def _gap(self, size: int, smaller: int, why: str) -> str:
        """Explain why no plan uses `size` hosts; the next smaller plan is for `smaller` hosts (0 = no plan)."""
        num_hosts = len(self.plan.hosts)
        does = "the job waits for other hosts"
        if smaller:
            does = f"{smaller} train and {size - smaller} {'stands' if size - smaller == 1 else 'stand'} by"
        left = f"{num_hosts - size} of {num_hosts} hosts {'is' if num_hosts - size == 1 else 'are'} lost"
        return f"There is no plan for {size} {plural('host', size)} ({why}): when {left}, {does}."

    def _fastest(self, most: int, choice: Choice, tried: dict[int, Plan | str]) -> Plan | None:
        """Return the fastest plan for at most `most` hosts, or None; `tried` gets the result of each number.

        Fewer hosts may be faster: if the number of hosts and the batch have few common factors, pipelines are deep or
        no layout is legal. Numbers of hosts are tried in the order of a rough estimate until the deadline.
        """
        best: Plan | None = None
        for size in sorted(range(self.needs.least_hosts, most + 1), key=lambda one: (self._rough_step(one), -one)):
            is_late = size not in tried and self.clock() >= self.deadline_s
            # Skip numbers of hosts that lose against `best` even if each host is as fast as in the plan for all hosts.
            if best and (is_late or size * best.chosen.step_time_s <= len(self.plan.hosts) * choice.step_time_s):
                continue
            if size not in tried:
                tried[size] = self._plan_for(size, choice.layout)
            found = tried[size]
            if isinstance(found, Plan) and (best is None or found.chosen.step_time_s < best.chosen.step_time_s):
                best = found
        return best

    def _rough_step(self, size: int) -> float:
        needs, layout, devices = self.needs, self.plan.chosen.layout, self.plan.devices_per_host
        return rough_step(
            size * devices,
            devices_per_host=devices,
            samples=needs.global_batch_size,
            layers=needs.num_layers,
            least_devices=min(layout.tp * layout.pp * layout.cp, size * devices),
        )

    def _plan_for(self, size: int, before: Layout) -> Plan | str:
        """Return the plan for the first `size` hosts, or the reason that no plan exists; use half of the time left.

        The lost hosts are not known in advance. If one of the first `size` hosts is lost, a later host replaces this
        host.
        """
        kept = self.needs.continuation_of(before)
        ends_s = self.clock() + max(self.deadline_s - self.clock(), 0.0) / 2
        try:
            job = self.needs.job_of(size)
            # The search with fixed TP and PP runs first, because it ends early and leaves its time to the other search.
            same = self._with_same_sizes(size, job, before, kept, ends_s)
            found = self._solved(size, keeping(job, before, kept.kept), ends_s - self.clock())
        except PipetteError as error:
            return _reason(error)
        keeps_sizes = (found.chosen.layout.tp, found.chosen.layout.pp) == (before.tp, before.pp)
        most_s = found.chosen.step_time_s if keeps_sizes else (1 + CLOSE) * found.chosen.step_time_s
        if same and same.chosen.step_time_s <= most_s:
            found = replace(same, own=found.own, own_fault=found.own_fault, keeps_own=False)
        if not kept.can_load(before, found.chosen.layout):
            return "its gradient buckets would differ from those of the checkpoint"
        return found

    def _fault(self, size: int, before: Layout) -> str:
        """Return the reason that `size` hosts have no legal layout; empty if a layout is legal or time is up."""
        if self.clock() >= self.deadline_s:
            return ""
        try:
            job = keeping(self.needs.job_of(size), before, self.needs.continuation_of(before).kept)
            with_cases_of(job, without_hosts(self.measurements, self.plan.hosts[size:]))
        except PipetteError as error:
            return _reason(error)
        return ""

    def _with_same_sizes(self, size: int, job: Job, before: Layout, kept: Continuation, ends_s: float) -> Plan | None:
        """Return the best plan that keeps TP and PP, to load checkpoints faster; None if every plan or no plan does."""
        if {"tp", "pp"} <= set(kept.kept):
            return None
        try:
            return self._solved(size, keeping(job, before, (*kept.kept, "tp", "pp")), (ends_s - self.clock()) / 2)
        except PipetteError:
            return None

    def _solved(self, size: int, job: Job, budget_s: float) -> Plan:
        measurements = without_hosts(self.measurements, self.plan.hosts[size:])
        return solve(
            job,
            with_extrapolated_times(job, with_cases_of(job, measurements)),
            options=replace(self.options, budget_s=max(budget_s, 0.0)),
            clock=self.clock,
            provenance=self.plan.provenance,
            corrections=self.corrections,
        )


def with_cases_of(job: Job, measurements: Measurements) -> Measurements:
    """Add extrapolated times for the compute cases (layer sizes) of a job that the warm-up did not measure.

    Fewer hosts use other micro-batch sizes, whose times are extrapolated from measured times. Raises LayoutError if no
    layout of the job is legal on these hosts.
    """
    cluster = measurements.cluster
    domains = Domains.of(cluster)
    found = base_layouts(job, world_size=cluster.num_slots, device_kind=cluster.device_kind, domains=domains)
    if not len(found):
        # Raise the error here, because `solve` would first spend time on remedies.
        raise LayoutError(next(iter(found.dropped), f"no layout is legal on {cluster.num_slots} ranks"))
    known = {*measurements.compute_cases(), *measurements.unmeasured, *measurements.refused}
    missing = tuple(case for case in compute_cases(job.own, found.columns) if case not in known)
    return replace(measurements, unmeasured=(*measurements.unmeasured, *missing))


def placed_anew(inputs: SearchInputs, choice: Choice, *, seed: int, is_late: IsLate) -> Choice:
    """Search again for a placement of a layout's ranks, starting from the current placement, and predict its step.

    If the choice uses a schedule that Megatron lacks, or its layout cannot be priced, the choice stays unchanged.
    """
    layout = choice.layout
    if choice.order is not None or not inputs.predictor.can_price(layout):
        return choice
    problem = inputs.placement_problem(layout, inputs.bound_s(layout))
    if problem.slots.allows(choice.placement):
        placed = problem.best_of([choice.placement])
        placed = placed.or_faster(begin(problem)[0])
    else:
        # A host that replaces a lost host may lie in another NVLink domain, which would split a block of ranks.
        placed, _ = begin(problem)
    if not (problem.meets_bound(placed) or is_late()):
        placed = improve(problem, placed, turn=0, rng=random.Random(seed), is_late=is_late)
    peaks = inputs.predictor.peaks(layout)
    return choice_of(inputs, layout, placed.placement, peaks=peaks, bound_s=problem.bound_s)


def _reason(error: PipetteError) -> str:
    return str(error).partition(". ")[0].rstrip(".")
