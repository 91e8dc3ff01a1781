"""Ways to go on after hosts are lost: each predicts the step time for the hosts that are left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.lost_nodes.jobs import DEVICES_PER_HOST, Case, of_hosts
from benchmarks.lost_nodes.paces import FULL, Paces, Shape
from benchmarks.lost_nodes.shares import depths, shared_step_s
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Layout, Measurements, Plan, Provenance
from pipette_launch.facts.layout import NO_RECOMPUTE, Recompute
from pipette_launch.facts.plan import refit
from pipette_launch.megatron import continuation
from pipette_launch.search.fallback_plans import FallbackNeeds, rough_step, with_fallback_plans
from pipette_launch.search.solve import SolveOptions, solve

Clock = Callable[[], float]
PROVENANCE = Provenance(key="", made_at="", versions={}, source="measured")
SCRIPT = ("--save", "x", "--load", "x", "--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable")
"""The checkpoints let all of a layout change."""
LOOK_S, LOOKS = 1.0, 6
"""Seconds of a short search, which decides if a number of hosts deserves a whole search; and their number."""
TPS = {"6.7B": (1, 2, 4), "175B": (4, 8)}
"""Tensor-parallel sizes of the pipelines that differ in depth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Going:
    """One way for a job to go on."""

    step_s: float
    layout: str
    hosts: int
    """Number of hosts that train."""


class Searches:
    """Plans from scratch for any number of hosts; each is searched for once."""

    def __init__(self, case: Case, measured: Measurements, *, clock: Clock, budget_s: float) -> None:
        self._case = case
        self._measured = measured
        self._clock = clock
        self.options = SolveOptions(budget_s=budget_s)
        self.plan = lru_cache(None)(lambda hosts: self._plan(hosts, self.options))
        self.look = lru_cache(None)(lambda hosts: self._plan(hosts, replace(self.options, budget_s=LOOK_S)))

    def _plan(self, hosts: int, options: SolveOptions) -> Plan | str:
        """The plan for the given number of hosts, or the reason why it is missing."""
        job = self._case.job(hosts)
        try:
            measured = of_hosts(job, self._measured, hosts)
            return solve(job, measured, options=options, clock=self._clock, provenance=PROVENANCE)
        except PipetteError as error:
            return str(error)

    def whole(self) -> Plan:
        """The plan for all hosts."""
        found = self.plan(self._case.hosts)
        assert isinstance(found, Plan), found
        return found

    def best(self, left: int) -> Plan | None:
        """The quickest plan that is found on the hosts that are left, however many of them train.

        Numbers of hosts are looked at in the order of a rough estimate, each for `LOOK_S`; none that could not be
        quicker even if each host did as much a second as in the plan for all. The quickest is searched in full.
        """
        whole_s = self._case.hosts * self.whole().chosen.step_time_s
        quickest: Plan | None = None
        looks = 0
        for size in sorted(range(1, left + 1), key=lambda one: (self._rough_step(one), -one)):
            may_win = quickest is None or size * quickest.chosen.step_time_s > whole_s
            if looks < LOOKS and may_win and size * 2 > left:
                found = self.look(size)
                looks += isinstance(found, Plan)
                if isinstance(found, Plan) and (quickest is None or _step_s(found) < _step_s(quickest)):
                    quickest = found
        return self.in_full(quickest)

    def in_full(self, plan: Plan | None) -> Plan | None:
        """Search on with the whole budget for as many hosts as a plan has."""
        found = self.plan(len(plan.hosts)) if plan else None
        return min((one for one in (plan, found) if isinstance(one, Plan)), key=_step_s, default=None)

    def _rough_step(self, hosts: int) -> float:
        layout = self.whole().chosen.layout
        return rough_step(
            hosts * DEVICES_PER_HOST,
            devices_per_host=DEVICES_PER_HOST,
            samples=self._case.batch,
            layers=self._case.job(hosts).model.num_layers,
            least_devices=layout.tp * layout.pp,
        )


def _step_s(plan: Plan) -> float:
    return plan.chosen.step_time_s


class Templates:
    """Our own: plans made ahead for each loss, and the product's own fitting of them."""

    def __init__(self, case: Case, measured: Measurements, searches: Searches, *, tolerate: int, clock: Clock) -> None:
        whole = searches.whole()
        needs = FallbackNeeds(
            tolerate=tolerate,
            least_hosts=1,
            global_batch_size=case.batch,
            num_layers=case.job(case.hosts).model.num_layers,
            job_of=case.job,
            continuation_of=lambda layout: continuation(SCRIPT, case.job(case.hosts), layout),
        )
        began_s = clock()
        self.plan = with_fallback_plans(whole, measured, needs, options=searches.options, clock=clock)
        self.took_s = clock() - began_s

    def going(self, lost: Sequence[str]) -> Going | None:
        """Layout that the product runs after these losses; None if it has to measure again."""
        there = [host for host in self.plan.hosts if host not in set(lost)]
        fitted = refit(self.plan, there)
        return going(fitted) if fitted else None


def going(plan: Plan) -> Going:
    """A plan in short."""
    return Going(step_s=plan.chosen.step_time_s, layout=plan.chosen.layout.words(), hosts=len(plan.hosts))


class SameShape:
    """A user of torchrun: the plan's own layout with fewer replicas, from a checkpoint."""

    def __init__(self, case: Case, measured: Measurements, layout: Layout) -> None:
        self._case = case
        self._measured = measured
        self._layout = layout
        self.going = lru_cache(None)(self._going)

    def _going(self, left: int) -> Going | None:
        each = self._layout.world_size // self._layout.dp
        for dp in range(left * DEVICES_PER_HOST // each, 0, -1):
            found = None if dp * each % DEVICES_PER_HOST else self._with_replicas(dp, dp * each // DEVICES_PER_HOST)
            if found:
                return found
        return None

    def _with_replicas(self, dp: int, hosts: int) -> Going | None:
        """The layout with `dp` replicas and its quickest micro-batch size; None if the batch does not divide."""
        job, best = self._case.job(hosts), None
        for size in range(1, self._layout.micro_batch_size + 1):
            if self._case.batch % (dp * size):
                continue
            layout = replace(self._layout, dp=dp, micro_batch_size=size)
            try:
                step = Predictor(job, of_hosts(job, self._measured, hosts)).step_time(layout, range(layout.world_size))
            except PipetteError:
                continue
            if best is None or step.total_s < best.step_s:
                best = Going(step_s=step.total_s, layout=layout.words(), hosts=hosts)
        return best


class Pipelined:
    """Pipelines over the devices that are left, as other systems make them, priced by our model."""

    def __init__(self, case: Case, paces: Paces) -> None:
        self._case = case
        self._paces = paces
        self.uneven = lru_cache(None)(self._uneven)
        self.varuna = lru_cache(None)(self._varuna)
        self.bamboo = lru_cache(None)(self._bamboo)

    def _uneven(self, left: int, *, covers: bool) -> Going | None:
        """Oobleck: pipelines that share the micro-batches by their speed.

        Args:
            left: hosts.
            covers: whether depths may differ by one, so that all devices train; else all are equally deep.

        """
        best = None
        for shape in self._paces.shapes(tps=TPS[self._case.model], recomputes=(NO_RECOMPUTE, FULL), interleaved=True):
            stages = left * DEVICES_PER_HOST // shape.tp
            for depth in range(1, min(self._paces.most_stages - 1, stages) + 1):
                sizes = depths(stages, stages // depth) if covers else ((depth, stages // depth),)
                step_s = self._shared_s(shape, sizes)
                if step_s and (best is None or step_s < best.step_s):
                    words = " + ".join(f"{count} x pp{size}" for size, count in sizes)
                    best = Going(step_s=step_s, layout=f"tp{shape.tp} {words} {_kind(shape)}", hosts=left)
        return best

    def _shared_s(self, shape: Shape, sizes: Sequence[tuple[int, int]]) -> float | None:
        replicas = sum(count for _, count in sizes)
        if max(size for size, _ in sizes) > self._paces.most_stages:
            return None
        if replicas * shape.micro_batch_size > self._case.batch or self._case.batch % shape.micro_batch_size:
            return None
        # A layout that fits without recompute is quicker without it.
        plain = replace(shape, recompute=NO_RECOMPUTE)
        if shape != plain and all(self._paces.fits(plain, size, replicas) for size, _ in sizes):
            return None
        if not all(self._paces.fits(shape, size, replicas) for size, _ in sizes):
            return None
        pipelines = [self._paces.of(shape, size).pipelines(count) for size, count in sizes]
        return shared_step_s(pipelines, self._case.batch // shape.micro_batch_size)

    def _varuna(self, left: int) -> Going | None:
        """Varuna: pp x dp of equal pipelines without TP, all recomputed; devices that are left over stand by."""
        return self._equal(left, copies=1, recomputes=(FULL,), redundant=False)

    def _bamboo(self, left: int) -> Going | None:
        """Bamboo: pp x dp without TP; each rank also keeps and runs forward the stage after its own."""
        return self._equal(left, copies=2, recomputes=(NO_RECOMPUTE, FULL), redundant=True)

    def _equal(self, left: int, *, copies: int, recomputes: tuple[Recompute, ...], redundant: bool) -> Going | None:
        best = None
        for shape in self._paces.shapes(tps=(1,), recomputes=recomputes, interleaved=False):
            for depth in (*range(1 + redundant, self._paces.most_stages + 1), *self._paces.long):
                replicas = left * DEVICES_PER_HOST // depth
                count = min(replicas, self._case.batch // shape.micro_batch_size)
                if not count or not self._paces.fits(shape, depth, count, copies=copies):
                    continue
                pace = self._paces.of(shape, depth)
                share = math.ceil(self._case.batch / shape.micro_batch_size / count)
                step_s = pace.fixed_s + share * pace.each_s
                if redundant:
                    step_s = max(step_s, share * (pace.each_s + pace.forward_s) + pace.after_s)
                if best is None or step_s < best.step_s:
                    words = f"{count} x pp{depth} {_kind(shape)}"
                    best = Going(step_s=step_s, layout=words, hosts=left)
        return best


def _kind(shape: Shape) -> str:
    again = " recompute-full" if shape.recompute == FULL else ""
    return f"mbs{shape.micro_batch_size}{' interleaved' if shape.interleaved else ''}{again}"
