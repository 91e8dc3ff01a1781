"""The phases of a warm-up as one worker goes through them: alone, then together, then alone again, then the report.

1. Each worker times layers and their memory, without peers.
2. All workers time links over one communicator. By what is known then, the adviser names the groups that the plans that
   may win would form, and their collectives are timed. This is done twice, as other plans may win after the first time.
3. The communicator is closed, and whole stages of those plans run on single devices.
4. Rank 0 joins all results.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pipette_launch.errors import FileFormatError
from pipette_launch.facts import DeviceOverhead, Links, Measurements, files
from pipette_launch.facts.measurements import Coverage
from pipette_launch.facts.messages import Advice, Dimension, StageCase
from pipette_launch.probe import plan_hints
from pipette_launch.probe.assemble import assemble
from pipette_launch.probe.compute import layers, whole_stages
from pipette_launch.probe.compute.peak_memory import MemoryMeter
from pipette_launch.probe.harness import Budget, Lockstep
from pipette_launch.probe.health import inventory
from pipette_launch.probe.links import collectives, pairs
from pipette_launch.probe.links.adaptive import MOST_ROUNDS, Adapted, Measure, adapt, in_step, lines_of
from pipette_launch.probe.links.fits import EarlierLinks
from pipette_launch.probe.links.meter import LinkMeter
from pipette_launch.probe.links.sampling import Pair, blind_rounds
from pipette_launch.probe.options import ProbeOptions, WorkerResult, joined
from pipette_launch.text import plural, rate_text
from pipette_patches import registry

logger = logging.getLogger(__name__)

LINKS_LEAST, COLLECTIVES_LEAST = 0.25, 0.1
"""Parts of the budget that links and collectives get in any case: without measured links a plan is a guess."""
ADVICE_SHARE = 0.8
"""The adviser may search until this part of the budget is spent."""
ADVICE_S = (1.0, 5.0)
"""The least and the longest time of its search, in seconds."""
ADVICE_PATIENCE_S = ADVICE_S[1] + plan_hints.START_S
"""The longest time that an answer of the adviser takes."""


@dataclass(kw_only=True)
class Phases:
    """One worker: what it has measured, and on rank 0 what all workers have sent so far."""

    options: ProbeOptions
    lockstep: Lockstep
    budget: Budget
    meter: MemoryMeter
    workspace_bytes: int
    """Bytes of libraries' workspaces in the allocator after the first lap."""
    _mine: WorkerResult = field(init=False)
    """What is new since this worker last sent its results, and all single figures."""
    _gathered: list[WorkerResult] = field(default_factory=list, init=False)
    """The results of all workers, on rank 0."""
    _dimensions: tuple[Dimension, ...] = field(default=(), init=False)
    _stages: tuple[StageCase, ...] = field(default=(), init=False)
    _earlier: EarlierLinks | None = field(default=None, init=False)
    """Links of an earlier warm-up that are still believed, on rank 0."""

    def __post_init__(self) -> None:
        self.rank, self.progress = self.lockstep.rank, self.lockstep.progress
        self._mine = WorkerResult(slot=self.rank)

    def alone(self) -> None:
        """Measure what needs no peer, under a fake communicator."""
        with self.progress.during("compute"):
            bench = layers.LayerBench(options=self.options, slot=self.rank, meter=self.meter)
            bench.measure(self.lockstep, self.budget)
            self._count(bench)
        # Before any communicator exists.
        alone_bytes = self.meter.overhead_bytes()
        self._add(
            compute=tuple(bench.times),
            refused=tuple(bench.refused),
            stretch=bench.stretch,
            paces=tuple(bench.paces),
            under_load=bench.under_load,
            memory=tuple(bench.memory),
            overhead=DeviceOverhead(
                alone_bytes=alone_bytes,
                together_bytes=alone_bytes,
                num_communicators=0,
                workspace_bytes=self.workspace_bytes or self.meter.workspace_bytes(),
            ),
            optimizer_s_per_parameter=bench.optimizer_s_per_parameter,
            gradient_s_per_byte=bench.gradient_s_per_byte,
            wake_s=bench.wake_s,
            loading=bench.loading,
            notes=tuple(bench.notes),
        )

    def _count(self, bench: layers.LayerBench) -> None:
        """Report how many of the wanted cases all slots together have timed."""
        cases = self.options.cases
        mine = (cases.index(one.case) for one in bench.times), map(cases.index, bench.refused)
        texts = self.lockstep.gather("/".join(" ".join(map(str, numbers)) for numbers in mine), self.budget.left_s())
        if texts is not None:
            columns = zip(*(text.split("/") for text in texts), strict=True)
            timed, refused = ({int(number) for numbers in column for number in numbers.split()} for column in columns)
            self.progress.sum_up(Coverage(len(timed), len(cases) - len(refused - timed)).words())

    def together(self) -> None:
        """Measure links and collectives; the communicator of all ranks is open."""
        advice = self._links_and_advice()
        self._stages = advice.stages
        num_groups = self._collectives(advice.dimensions or self.options.dimensions())
        # By what was measured other plans may be the best, whose groups have not been timed yet.
        if self._asks and self.lockstep.agree(lambda: self.budget.allows(collectives.COLLECTIVES_SHARE)):
            with self.progress.during("search"):
                advice = self._advice()
            self._stages = advice.stages or self._stages
            more = plan_hints.not_measured(advice.dimensions, self._dimensions, self.options.devices_per_host)
            num_groups += self._collectives(more) if more else 0
        # While the communicators are open: they are most of the device memory outside the allocator.
        assert self._mine.overhead is not None
        self._add(
            overhead=replace(
                self._mine.overhead,
                together_bytes=self.meter.overhead_bytes(),
                # That of all ranks, and one for each of the groups.
                num_communicators=1 + num_groups if self.options.num_slots > 1 else 0,
            )
        )

    def _collectives(self, dimensions: tuple[Dimension, ...]) -> int:
        """Time the collectives of more dimensions; returns the number of groups that this slot opened for that."""
        before, self._dimensions = len(self._dimensions), (*self._dimensions, *dimensions)
        with self.progress.during("collectives"):
            found, num_groups = collectives.measure(
                self.options,
                dimensions,
                first=before,
                lockstep=self.lockstep,
                budget=self.budget.with_room(collectives.COLLECTIVES_SHARE, COLLECTIVES_LEAST),
            )
            self.progress.sum_up(_groups_words(len(found.collectives), len(dimensions)))
        self._mine = joined(self._mine, found)
        return num_groups

    def alone_again(self) -> None:
        """Run whole stages under a fake communicator; that of all ranks is closed."""
        assert self._mine.overhead is not None
        kept_bytes = self._mine.overhead.workspace_bytes
        with self.progress.during("stages"):
            bench = whole_stages.StageBench(
                options=self.options, slot=self.rank, meter=self.meter, workspace_bytes=kept_bytes
            )
            bench.measure(self._stages, self.lockstep, self.budget)
        self._add(stages=tuple(bench.readings), notes=tuple(bench.notes))

    def report(self) -> Measurements | None:
        """Send all results to rank 0, which joins and returns them; the others return None and may exit."""
        self._add(phase_s=self.progress.phase_s)
        self._send()
        return self._measurements() if self.rank == 0 else None

    def _links_and_advice(self) -> Advice:
        """Measure all links where hosts are few; else a sample of them, and then those that plans would use."""
        hosts = self.options.hosts
        earlier = _earlier(self.options) if self.rank == 0 and self._asks else None
        if self._asks and self.lockstep.agree(lambda: earlier is not None and bool(earlier.between)):
            self._earlier = earlier
            with self.progress.during("search"):
                advice, adapted = self._pass(is_cached=True)
            are_few = len(hosts) <= self.options.full_hosts
            if not self.lockstep.agree(lambda: adapted is not None and adapted.is_stale(are_few=are_few)):
                return self._shared(advice)
            self._earlier = None
        sample = None
        if self._asks and len(hosts) > self.options.full_hosts:
            places = [host.place for host in hosts]
            sample = blind_rounds(len(hosts), places, self.options.blind_rounds, np.random.default_rng(0))
        with self.progress.during("links"):
            linked = pairs.measure(self.options, lockstep=self.lockstep, budget=self._for_links(), between=sample)
            self.progress.sum_up(_links_words(linked, len(hosts)))
        self._mine = joined(self._mine, linked)
        if not self._asks:
            return Advice()
        with self.progress.during("search"):
            if sample is not None:
                return self._shared(self._pass(is_cached=False)[0])
            return self._advice()

    @property
    def _asks(self) -> bool:
        """Whether there is an adviser, and more than one slot."""
        return bool(self.options.adviser) and self.options.num_slots > 1

    def _advice(self) -> Advice:
        """Ask the adviser, by all that was measured so far, and bring its answer to all ranks."""
        self._send()
        return self._shared(self._ask(self._measurements()) if self.rank == 0 else None)

    def _pass(self, *, is_cached: bool) -> tuple[Advice | None, Adapted | None]:
        """Measure the links that plans would use, in passes.

        Returns the last advice, and what is known of all links then; None on all ranks but rank 0.
        """
        self._send()
        options, budget = self.options, self._for_links()
        bound_s = pairs.direction_s(budget.left_s(pairs.LINKS_SHARE), MOST_ROUNDS, options.device_kind)
        meter = LinkMeter(options=options, lockstep=self.lockstep, bound_s=bound_s)
        heard: list[Advice] = []

        def decide(measure: Measure) -> Adapted:
            base = self._measurements()
            links = [link for result in self._gathered for link in result.links]

            def advise(between: Links) -> Sequence[Pair]:
                heard.append(self._ask(replace(base, cluster=replace(base.cluster, between_hosts=between))))
                return [(one, other) for one, other in heard[-1].host_pairs]

            return adapt(
                len(options.hosts),
                self._earlier.between if is_cached and self._earlier else lines_of(links, options),
                measure=measure,
                advise=advise,
                most_rounds=MOST_ROUNDS,
                places=[host.place for host in options.hosts],
                is_cached=is_cached,
                # Cached links are checked once, however little time is left.
                allows=lambda: not heard or budget.allows(pairs.LINKS_SHARE),
            )

        sent, adapted = in_step(
            self.lockstep,
            meter.measure,
            lambda links: lines_of(links, options),
            decide,
            patience_s=ADVICE_PATIENCE_S,
        )
        self._add(links=sent)
        if adapted is not None and adapted.passes:
            self._add(link_rounds=(adapted.rounds,), notes=(adapted.words(),))
        return heard[-1] if heard else None, adapted

    def _for_links(self) -> Budget:
        """Links get their part, even if compute took longer than its share."""
        return self.budget.with_room(pairs.LINKS_SHARE, LINKS_LEAST)

    def _ask(self, measurements: Measurements) -> Advice:
        """Ask, on rank 0, what plans would use."""
        least_s, most_s = ADVICE_S
        return plan_hints.ask(
            self.options.adviser,
            self.options.job,
            measurements,
            folder=Path(self.options.output).parent,
            budget_s=min(max(self.budget.left_s(ADVICE_SHARE), least_s), most_s),
        )

    def _shared(self, advice: Advice | None) -> Advice:
        """Bring rank 0's advice to all ranks."""
        if advice is not None and advice.words:
            self._add(notes=(f"search: {advice.words}",))
        # The deadline of a collective is short, and rank 0 may have waited for the adviser.
        self.lockstep.barrier(ADVICE_PATIENCE_S)
        # Not through the store: groups of thousands of ranks times thousands of readers would be its traffic.
        texts = [files.dumps(advice or Advice()) if self.rank == 0 else None]
        dist.broadcast_object_list(texts, src=0, device=torch.device(self.options.device_kind))
        return files.loads(Advice, str(texts[0]), "rank 0's advice")

    def _add(self, **found: object) -> None:
        """Add to the results of this worker."""
        self._mine = joined(self._mine, WorkerResult(slot=self.rank, **found))  # type: ignore[arg-type]

    def _send(self) -> None:
        """Send to rank 0 what was measured since the last time."""
        texts = self.lockstep.gather(files.dumps(self._mine), left_s=self.budget.left_s())
        lists = [each.name for each in fields(WorkerResult) if isinstance(getattr(self._mine, each.name), tuple)]
        self._mine = replace(self._mine, **dict.fromkeys(lists, ()))  # type: ignore[arg-type]
        if texts is not None:
            new = [files.loads(WorkerResult, text, f"result of rank {rank}") for rank, text in enumerate(texts)]
            self._gathered = list(map(joined, self._gathered, new)) if self._gathered else new

    def _measurements(self) -> Measurements:
        return assemble(
            self.options,
            self._gathered,
            dimensions=self._dimensions,
            earlier=self._earlier,
            # The megatron-core that was measured may lie beside the script instead of being installed.
            versions={**inventory.versions(), "megatron-core": registry.megatron_core_version()},
            taken_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        )


def _links_words(linked: WorkerResult, num_hosts: int) -> str:
    """Describe the links of one rank: `8 hosts in 7 rounds, 98.1 to 118 MB/s from the first slot`."""
    rates = sorted(one.sizes_bytes[-1] / one.samples[-1].median_s for one in linked.links)
    spread = f", {rate_text(rates[0])} to {rate_text(rates[-1])} from the first slot" if rates else ""
    if num_hosts == 1:
        return f"between the devices of one host{spread}"
    rounds, rounds_again = sum(linked.link_rounds), sum(linked.link_rounds_again)
    again = f" and {rounds_again} again for suspects" if rounds_again else ""
    return f"{num_hosts} hosts in {rounds} {plural('round', rounds)}{again}{spread}"


def _groups_words(num_collectives: int, num_sets: int) -> str:
    """Describe what one rank timed: `3 collectives timed in 1 set of groups`."""
    timed = f"{num_collectives} {plural('collective', num_collectives)} timed"
    return f"{timed} in {num_sets} {plural('set', num_sets)} of groups"


def _earlier(options: ProbeOptions) -> EarlierLinks | None:
    """The links of an earlier warm-up of these hosts, if there is a file that can be read."""
    if not options.known:
        return None
    try:
        return EarlierLinks.of(files.read(Path(options.known), Measurements), options)
    except FileFormatError as error:
        logger.warning("%s; all links are measured anew", error)
        return None
