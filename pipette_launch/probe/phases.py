"""The phases of a warm-up in one worker process.

1. Alone: each worker times layers and their memory, without peers.
2. Together: all workers time links over one communicator. The adviser names the groups of slots that good plans would
   form, and their collectives are timed. Advice and timing are repeated once, because other plans may be best after the
   first timing.
3. Alone again: the communicator is closed, and whole stages of the good plans run on single devices.
4. Report: rank 0 joins the results of all workers.
"""

# H = hosts, S = slots.

from __future__ import annotations

import datetime as dt
import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pipette_launch.defaults import ADVISER_START_S
from pipette_launch.errors import FileFormatError, ProbeError
from pipette_launch.facts import Cluster, ComputeCase, ComputeTime, Job, LoadingTime, Measurements, files
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.measurements import (
    LAYERS,
    UNSTABLE_SPREAD,
    CollectiveKind,
    Coverage,
    DeviceOverhead,
    layers_digest,
)
from pipette_launch.facts.messages import Advice, Dimension, MeasuringQuestion, StageCase
from pipette_launch.probe.compute.benches import LayerBench, StageBench
from pipette_launch.probe.compute.slot_speeds import Speeds, factors, on_the_wall, speeds
from pipette_launch.probe.health import inventory
from pipette_launch.probe.health.verdicts import device_verdicts, faults_first, link_verdicts
from pipette_launch.probe.links import collectives, pairs
from pipette_launch.probe.links.fits import EarlierLinks, FoundLinks, found_links, group_times
from pipette_launch.probe.links.selection import STALE, Lines, changed_links
from pipette_launch.probe.lockstep import Budget, Lockstep
from pipette_launch.probe.messages import WarmupOrder, WorkerResult, joined
from pipette_launch.probe.progress import ANSWER, QUESTION
from pipette_launch.text import counted, hertz_text, listed, plural, rate_text
from pipette_patches.replacements import megatron_core_version
from pipette_patches.workload import case_words

logger = logging.getLogger(__name__)
LOOK_S = 0.05
COLLECTIVES_LEAST = 0.1
"""Smallest share of the time budget that collectives get, even after a long compute phase."""
ADVICE_SHARE = 0.8
"""The adviser may search until this share of the budget is spent."""
ADVICE_S = (1.0, 5.0)
"""Shortest and longest time of the adviser's search, in seconds."""
ADVICE_PATIENCE_S = ADVICE_S[1] + ADVISER_START_S
PHASES = ("start", "compute", "memory", "links", "search", "collectives", "stages")
MAX_NAMED = 5  # Most slots that a note names; further slots are only counted


@dataclass(kw_only=True)
class Phases:
    """Runs the phases of one warm-up worker, and keeps its measurements (on rank 0, of all workers)."""

    options: WarmupOrder
    layers: LayerBench | None
    """Bench of this slot, after its untimed first run. With None, only links are measured."""
    lockstep: Lockstep
    budget: Budget
    workspace_bytes: int = 0
    """Bytes that libraries keep as workspaces in torch's allocator after the untimed first run."""
    _mine: WorkerResult = field(init=False)
    """Measurements since this worker last sent results to rank 0; fields with a single value are kept after sending."""
    _gathered: list[WorkerResult] = field(default_factory=list, init=False)
    """Results of all workers on rank 0; empty on other ranks."""
    _dimensions: tuple[Dimension, ...] = field(default=(), init=False)
    _stages: tuple[StageCase, ...] = field(default=(), init=False)
    _num_questions: int = field(default=0, init=False)
    _earlier: EarlierLinks | None = field(default=None, init=False)
    """Links of an earlier warm-up that are still used, on rank 0; None on other ranks."""

    def __post_init__(self) -> None:
        self.rank, self.progress = self.lockstep.rank, self.lockstep.progress
        self._mine = WorkerResult(slot=self.rank)

    def alone(self) -> None:
        """Measure layers and their memory, without peers, under a fake communicator."""
        layers = self.layers
        if layers is None:
            return
        with self.progress.during("compute"):
            layers.measure(self.lockstep, self.budget)
            self._count(layers)
        # Read the memory overhead before any communicator exists.
        alone_bytes = layers.meter.overhead_bytes()
        self._mine = layers.found.plus(
            timed_flags=layers.script.timed_flags(layers.job),
            overhead=DeviceOverhead(
                alone_bytes=alone_bytes,
                together_bytes=alone_bytes,
                num_communicators=0,
                workspace_bytes=self.workspace_bytes or layers.meter.workspace_bytes(),
            ),
        )

    def _count(self, layers: LayerBench) -> None:
        """Report how many of the wanted cases all slots together have timed."""
        cases, found = self.options.cases, layers.found
        mine = (cases.index(one.case) for one in found.compute), map(cases.index, found.refused)
        texts = self.lockstep.gather("/".join(" ".join(map(str, numbers)) for numbers in mine), self.budget.left_s())
        if texts is not None:
            columns = zip(*(text.split("/") for text in texts), strict=True)
            timed, refused = ({int(number) for numbers in column for number in numbers.split()} for column in columns)
            self.progress.sum_up(Coverage(len(timed), len(cases) - len(refused - timed)).words())

    def together(self) -> None:
        """Measure links and collectives, while the communicator of all ranks is open."""
        self._links()
        if self.layers is None:
            return
        advice = self._advice() if self._has_adviser else Advice()
        self._stages = advice.stages
        num_groups = self._collectives(advice.dimensions or self.options.dimensions())
        # With the new measurements other plans may be best, and the groups of those plans have not been timed yet.
        if self._has_adviser and self.lockstep.agree(lambda: self.budget.allows(collectives.COLLECTIVES_SHARE)):
            advice = self._advice()
            self._stages = advice.stages or self._stages
            more = not_measured(advice.dimensions, self._dimensions, self.options.devices_per_host)
            num_groups += self._collectives(more) if more else 0
        # Read memory while the communicators are open: they take most of the memory outside the allocator.
        assert self._mine.overhead is not None
        self._mine = self._mine.plus(
            overhead=replace(
                self._mine.overhead,
                together_bytes=self.layers.meter.overhead_bytes(),
                # Count one communicator of all ranks, and one of each group.
                num_communicators=1 + num_groups if self.options.num_slots > 1 else 0,
            )
        )

    def _collectives(self, dimensions: tuple[Dimension, ...]) -> int:
        """Time the collectives of more dimensions; returns the number of groups that this slot opened."""
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
        """Run whole stages under a fake communicator, after the communicator of all ranks was closed."""
        if self.layers is None:
            return
        assert self._mine.overhead is not None
        with self.progress.during("stages"):
            bench = StageBench(
                options=self.options,
                slot=self.rank,
                meter=self.layers.meter,
                script=self.layers.script,
                workspace_bytes=self._mine.overhead.workspace_bytes,
            )
            bench.measure(self._stages, self.lockstep, self.budget)
        self._mine = joined(self._mine, bench.found)

    def report(self) -> Measurements | None:
        """Send all results to rank 0, which joins and returns the results; other ranks return None and may exit."""
        self._mine = self._mine.plus(phase_s=self.progress.phase_s)
        self._send()
        return self._measurements() if self.rank == 0 else None

    def _links(self) -> None:
        """Measure all links if hosts are few, else a sample; or check a sample of the links of an earlier warm-up."""
        with self.progress.during("links"):
            self._earlier = _earlier(self.options) if self.rank == 0 else None
            if self.lockstep.agree(lambda: self._earlier is not None and bool(self._earlier.between)):
                checked = pairs.check(self.options, lockstep=self.lockstep, budget=self._for_links())
                self.progress.sum_up(_links_words(checked, len(self.options.hosts)))
                self._mine = joined(self._mine, checked)
                self._send()
                if not self.lockstep.agree(self._is_stale):
                    return
            self._earlier = None
            sample = pairs.sample(self.options)
            linked = pairs.measure(self.options, lockstep=self.lockstep, budget=self._for_links(), between=sample)
            self.progress.sum_up(_links_words(linked, len(self.options.hosts)))
            self._mine = joined(self._mine, linked)
            if sample is None:
                return
            self._send()
            explored = pairs.explore(
                self.options, self._between_hosts, lockstep=self.lockstep, budget=self._for_links()
            )
            self._mine = joined(self._mine, explored)

    def _is_stale(self) -> bool:
        """Return whether all links must be measured again, because checked links have changed; on rank 0 only.

        The links of few hosts are measured quickly, and a slow link shows only by comparison with all other links. So
        with few hosts one changed link is enough.
        """
        assert self._earlier is not None
        measured = self._between_hosts()
        changed = len(changed_links(self._earlier.between, measured))
        are_few = len(self.options.hosts) <= self.options.full_hosts
        is_stale = not measured or changed > (0 if are_few else STALE * len(measured))
        then = "all are measured again" if is_stale else "the others come from the last warm-up"
        words = f"links: {changed} of {counted(len(measured), 'checked link')} changed since the last warm-up; {then}"
        self._mine = self._mine.plus(notes=(words,))
        return is_stale

    def _between_hosts(self) -> Lines:
        """Return the links between hosts that all workers have measured; on rank 0 only."""
        return pairs.lines_of([link for result in self._gathered for link in result.links], self.options)

    @property
    def _has_adviser(self) -> bool:
        return self.options.has_adviser and self.options.num_slots > 1

    def _advice(self) -> Advice:
        """Ask the adviser with all measurements so far, and send the adviser's answer to all ranks."""
        with self.progress.during("search"):
            self._send()
            return self._shared(self._ask() if self.rank == 0 else None)

    def _for_links(self) -> Budget:
        """Return a budget with time for links, even if the compute phase took longer than its share."""
        return self.budget.with_room(pairs.LINKS_SHARE, pairs.LINKS_LEAST)

    def _ask(self) -> Advice:
        least_s, most_s = ADVICE_S
        assert self.layers is not None
        question = MeasuringQuestion(
            job=self.layers.job,
            measurements=self._measurements(),
            budget_s=min(max(self.budget.left_s(ADVICE_SHARE), least_s), most_s),
        )
        self._num_questions += 1
        return ask(Path(self.options.progress_dir), f"{os.getpid()}-{self._num_questions}", question)

    def _shared(self, advice: Advice | None) -> Advice:
        """Send rank 0's advice to all ranks."""
        if advice is not None and advice.words:
            self._mine = self._mine.plus(notes=(f"search: {advice.words}",))
        # A collective has a short deadline, and rank 0 may have waited for the adviser.
        self.lockstep.barrier(ADVICE_PATIENCE_S)
        # Send the advice by a collective, because through the store each of thousands of ranks would read all groups.
        text = files.dumps(advice or Advice()) if self.rank == 0 else ""
        return files.loads(Advice, broadcast_text(text, torch.device(self.options.device_kind)), "rank 0's advice")

    def _send(self) -> None:
        """Send to rank 0 the measurements made since this worker last sent results."""
        texts = self.lockstep.gather(files.dumps(self._mine), left_s=self.budget.left_s())
        lists = [each.name for each in fields(WorkerResult) if isinstance(getattr(self._mine, each.name), tuple)]
        self._mine = replace(self._mine, **dict.fromkeys(lists, ()))  # type: ignore[arg-type]
        if texts is not None:
            new = [files.loads(WorkerResult, text, f"result of rank {rank}") for rank, text in enumerate(texts)]
            self._gathered = list(map(joined, self._gathered, new)) if self._gathered else new

    def _measurements(self) -> Measurements:
        # The measured megatron-core may be a folder beside the script, not an installed package.
        measured = {"megatron-core": megatron_core_version()} if self.layers else {}
        return assemble(
            self.options,
            self._gathered,
            dimensions=self._dimensions,
            earlier=self._earlier,
            versions={**inventory.versions(), **measured},
            taken_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        )


def _earlier(options: WarmupOrder) -> EarlierLinks | None:
    """Read the links of an earlier warm-up of these hosts; None if there is no readable file."""
    if not options.known:
        return None
    try:
        return EarlierLinks.of(files.read(Path(options.known), Measurements), options)
    except FileFormatError as error:
        logger.warning("%s; all links are measured again", error)
        return None


def _links_words(linked: WorkerResult, num_hosts: int) -> str:
    """Return a summary such as `8 hosts in 7 rounds, 98.1 to 118 MB/s from the first slot`."""
    rates = sorted(one.sizes_bytes[-1] / one.samples[-1].median_s for one in linked.links)
    spread = f", {rate_text(rates[0])} to {rate_text(rates[-1])} from the first slot" if rates else ""
    if num_hosts == 1:
        return f"between the devices of one host{spread}"
    rounds, rounds_again = sum(linked.link_rounds), sum(linked.link_rounds_again)
    again = f" and {rounds_again} again for suspects" if rounds_again else ""
    return f"{num_hosts} hosts in {rounds} {plural('round', rounds)}{again}{spread}"


def _groups_words(num_collectives: int, num_sets: int) -> str:
    timed = f"{num_collectives} {plural('collective', num_collectives)} timed"
    return f"{timed} in {num_sets} {plural('set', num_sets)} of groups"


def broadcast_text(text: str, device: torch.device) -> str:
    """Return rank 0's text on every rank.

    The text travels as bytes. torch's broadcast of objects would load a pickle, which may contain a program.
    """
    size = torch.tensor([len(text.encode())], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    data = torch.frombuffer(bytearray(text.encode()).ljust(int(size)), dtype=torch.uint8).to(device)
    dist.broadcast(data, src=0)
    return data.cpu().numpy().tobytes().decode()


def ask(folder: Path, name: str, question: MeasuringQuestion) -> Advice:
    """Ask this node's launcher, and wait for the answer; if none comes in time, the Advice is empty and has the reason.

    `folder` has this node's progress messages, and `name` is the name of the question, unique in the folder.
    """
    patience_s = question.budget_s + ADVISER_START_S
    answer = folder / ANSWER.format(name)
    files.write(folder / QUESTION.format(name), question)
    ends_s = time.monotonic() + patience_s
    while not answer.exists():
        if time.monotonic() >= ends_s:
            return Advice(words=f"the launcher did not answer within {patience_s:.0f} s")
        time.sleep(LOOK_S)
    return files.read(answer, Advice)


def not_measured(
    advised: Sequence[Dimension], measured: Sequence[Dimension], devices_per_host: int
) -> tuple[Dimension, ...]:
    """Return the advised dimensions, reduced to the kinds of collectives that were not measured yet.

    For one kind of collective, a measured group stands for all groups of equal size on an equal number of hosts.
    """
    covered = {shape for dimension in measured for shape in _shapes(dimension, devices_per_host)}
    found: list[Dimension] = []
    for dimension in advised:
        alone = [replace(dimension, kinds=(kind,)) for kind in dimension.kinds]
        kinds = tuple(one.kinds[0] for one in alone if not _shapes(one, devices_per_host) <= covered)
        if kinds:
            found.append(replace(dimension, kinds=kinds))
            covered |= _shapes(dimension, devices_per_host)
    return tuple(found)


def _shapes(dimension: Dimension, devices_per_host: int) -> set[tuple[CollectiveKind, int, int]]:
    """Return (kind of collective, number of slots, number of hosts) of each group."""
    return {
        (kind, len(group), len({slot // devices_per_host for slot in group}))
        for kind in dimension.kinds
        for group in dimension.groups
    }


def assemble(
    options: WarmupOrder,
    results: Sequence[WorkerResult],
    *,
    dimensions: Sequence[Dimension] = (),
    earlier: EarlierLinks | None = None,
    versions: dict[str, str],
    taken_at: str,
) -> Measurements:
    """Join the results of all workers, in slot order.

    `dimensions` are the groups of slots whose collectives were timed. `earlier` has links that replace unmeasured
    links. `taken_at` is UTC, ISO 8601.
    """
    links = found_links(options, results, earlier)
    phase_s = {phase: max(result.phase_s.get(phase, 0.0) for result in results) for phase in PHASES}
    found = Measurements(
        cluster=Cluster(
            hosts=options.hosts,
            between_hosts=links.between,
            within_host=links.within,
            slot_speed=(1.0,) * options.num_slots,
        ),
        compute=(),
        collectives=links.sends + group_times(dimensions, results),
        memory=(),
        overhead_bytes=0,
        versions=versions,
        taken_at=taken_at,
        phase_s=phase_s if options.job else {phase: phase_s[phase] for phase in ("start", "links")},
        notes=(*dict.fromkeys(note for result in results for note in result.notes), *links.notes),
        survey=links.survey,
    )
    return _with_layers(found, options, options.job, results, links) if options.job else found


def _with_layers(
    found: Measurements, options: WarmupOrder, job: Job, results: Sequence[WorkerResult], links: FoundLinks
) -> Measurements:
    """Add the measurements of layers, memory and stages, and the verdicts, to the measurements of links."""
    if not any(result.compute for result in results):
        # All slots measure the reference case, so one reason stands for the others. An earlier note on this case may
        # report that the script lost its CUDA graphs.
        reference = case_words(options.cases[0])
        reasons = [note for result in results for note in result.notes if reference in note]
        reason = reasons[-1].removeprefix(f"{LayerBench.PHASE}: ") if reasons else "no reason was given"
        raise ProbeError(f"no slot could measure a layer: {reason}")
    speed = speeds(options, [result.paces for result in results])
    of_slots = [*zip(results, factors(options, results, speed), strict=True)]
    compute = tuple(time.times(factor) for result, factor in of_slots for time in result.compute)
    measured = {time.case for time in compute}
    missing = [case for case in options.cases if case not in measured]
    refused = tuple(sorted({case for result in results for case in result.refused}))
    overheads = (result.overhead for result in results if result.overhead)
    overhead = max(overheads, key=lambda one: one.total_bytes, default=None)
    wall = on_the_wall(results, speed)
    return replace(
        found,
        cluster=replace(found.cluster, slot_speed=speed.speed_S),
        compute=compute,
        memory=tuple(reading for result in results for reading in result.memory),
        optimizer_s_per_parameter=_median([one.optimizer_s_per_parameter for one in results], wall),
        gradient_s_per_byte=_median([one.gradient_s_per_byte for one in results], wall) or 0.0,
        loading=_median_loading([result.loading for result in results if result.loading]),
        refused=refused,
        unmeasured=tuple(case for case in missing if case not in refused),
        model_digest=layers_digest(job.model),
        timed_flags=results[0].timed_flags,
        overhead_bytes=overhead.total_bytes if overhead else 0,
        overhead=overhead if options.device_kind == "cuda" else None,
        stages=tuple(reading.times(factor) for result, factor in of_slots for reading in result.stages),
        notes=(*found.notes, *_compute_notes(options, compute, missing), *_load_notes(results), *speed.notes),
        verdicts=_verdicts(options, links, speed),
    )


def _verdicts(options: WarmupOrder, links: FoundLinks, found: Speeds) -> tuple[Verdict, ...]:
    """Return the verdicts on devices, by their speeds, and on links, by two measurements."""
    first_HH = links.first_HH
    if links.survey is not None:
        # An unstable link gets no verdict.
        first_HH = np.where(links.survey.spread_HH > UNSTABLE_SPREAD, np.nan, first_HH)
    return faults_first(
        [
            *link_verdicts([host.name for host in options.hosts], first_HH, links.again_HH),
            *device_verdicts(options.hosts, found.slow),
        ]
    )


def _median(seconds_S: Sequence[float | None], factor: float) -> float | None:
    """Return the time of the median slot, multiplied by a factor; None if no slot measured this time."""
    known = [seconds for seconds in seconds_S if seconds is not None]
    return statistics.median(known) * factor if known else None


def _median_loading(times: Sequence[LoadingTime]) -> LoadingTime | None:
    """Return the loading times of the median slot, which are already wall times."""
    if not times:
        return None
    return LoadingTime(
        batch_s=statistics.median(one.batch_s for one in times),
        sample_s=statistics.median(one.sample_s for one in times),
    )


def _load_notes(results: Sequence[WorkerResult]) -> Iterator[str]:
    """Report clocks and power of GPUs under load, and the reasons that hold clocks down."""
    readings = [result.under_load for result in results if result.under_load]
    clocks_hz = [reading.sm_clock_hz for reading in readings if reading.sm_clock_hz]
    if not clocks_hz:
        return
    most_hz = max(reading.sm_clock_max_hz for reading in readings)
    least_w, most_w = min(reading.power_w for reading in readings), max(reading.power_w for reading in readings)
    counts = Counter(reason for reading in readings for reason in reading.clock_reasons)
    held = "".join(f", {reason} on {count} of {len(readings)}" for reason, count in counts.most_common())
    slowest, fastest, most = map(hertz_text, (min(clocks_hz), max(clocks_hz), most_hz))
    yield (
        f"compute: with all slots at work SM clocks are {slowest} to {fastest} of {most}, power is {least_w:.0f} to "
        f"{most_w:.0f} W{held}"
    )


def _compute_notes(
    options: WarmupOrder, compute: Sequence[ComputeTime], missing: Sequence[ComputeCase]
) -> Iterator[str]:
    """Report which compute times are missing, and which compute times scatter."""
    if missing:
        first = f"tp{missing[0].tp} cp{missing[0].cp} mbs{missing[0].micro_batch_size}"
        yield f"compute: not measured: {len(missing)} of {counted(len(options.cases), 'case')}, such as {first}"
    unstable = [
        time
        for time in compute
        if time.part in LAYERS and max(time.forward.spread, time.input_grad.spread) > UNSTABLE_SPREAD
    ]
    names = list(dict.fromkeys(options.slot_name(time.slot) for time in unstable))
    if names:
        yield (
            f"compute: layer times scatter by more than {UNSTABLE_SPREAD:.0%} on {listed(names, MAX_NAMED)}; "
            f"something else may be running there"
        )
