"""Pure functions that fit lines (latency and seconds per byte) to timed messages and collectives, and fill matrices."""

# H = hosts, D = devices of one host (rails), row sends to column.

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, combinations, permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import ProbeError
from pipette_launch.facts import Links, Measurements
from pipette_launch.facts.measurements import UNSTABLE_SPREAD, CollectiveTime, LinkSurvey, RailRates
from pipette_launch.facts.messages import Dimension
from pipette_launch.probe.links.selection import Line, Pair, Place, estimate
from pipette_launch.probe.messages import GroupSamples, LinkSamples, WarmupOrder, WorkerResult
from pipette_launch.text import rate_text

MAX_SEND_ENTRIES = 4096
"""If more pairs were measured, only unstable pairs get their own entry in the results. The matrices of latencies and
bandwidths have all pairs."""
UNEVEN_RAILS = 0.10  # If more pairs were measured, rails are stored only if their rates differ by more than this share


def fit_line(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> Line:
    """Fit a line through (bytes, seconds) that tolerates one disturbed size (the estimator of Theil and Sen).

    The slope is the median over all pairs of sizes, weighted by the distance between the two sizes. The latency is the
    time of the smallest message without the time of its bytes. A least-squares fit of the relative error gave 755
    Mbit/s for a 300 Mbit/s link whose middle size was disturbed. If time does not grow with size, a pessimistic line is
    used. Its latency is the smallest time, and its transfer time is the largest message's whole time.
    """
    # A smaller message takes no longer than a larger one. Times that contradict this rule are corrected first.
    # Otherwise the disturbance would count as latency, and the link would look infinitely fast.
    steady = reversed(list(accumulate(reversed(seconds), min)))
    points = list(zip(sizes_bytes, (max(value, 1e-9) for value in steady), strict=True))
    slopes = sorted(((b_s - a_s) / (b - a), b - a) for (a, a_s), (b, b_s) in combinations(points, 2))
    half = sum(weight for _, weight in slopes) / 2
    reached = accumulate(weight for _, weight in slopes)
    seconds_per_byte = next(slope for (slope, _), total in zip(slopes, reached, strict=True) if total >= half)
    (small, small_s), (large, large_s) = points[0], points[-1]
    if seconds_per_byte <= 0:
        return Line(min(seconds), large_s / large)
    return Line(max(small_s - small * seconds_per_byte, 0.0), seconds_per_byte)


class LinkFit(NamedTuple):
    """Fitted line of one direction of one link."""

    line: Line
    spread: float
    """Relative spread of the times of the largest message."""
    sizes_bytes: tuple[int, ...]
    together: Line | None = None
    """Fitted line of the times until the last rail (pair of devices) had finished; None if there is one rail."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of a large message."""
        return 1 / self.line.seconds_per_byte

    @property
    def hosts(self) -> LinkFit:
        """Return the link between the hosts; with several rails, the line until the last rail had finished."""
        return self._replace(line=self.together, together=None) if self.together else self


def fit_link(link: LinkSamples) -> LinkFit:
    """Fit lines through the medians of all sizes, because large sizes alone give a slope that scatters more."""
    own, together = (
        fit_line(link.sizes_bytes, [each.median_s for each in samples]) if samples else None
        for samples in (link.samples, link.together)
    )
    assert own is not None
    return LinkFit(own, (link.together or link.samples)[-1].spread, link.sizes_bytes, together)


class LinkBook(NamedTuple):
    """Fitted lines of every measured pair of slots."""

    first: Mapping[Pair, LinkFit]
    again: Mapping[Pair, LinkFit]
    """Fitted lines of second measurements, for links that looked slow."""

    @classmethod
    def of(cls, links: Iterable[LinkSamples]) -> LinkBook:
        """Fit all samples. If a link was measured twice before its second measurement, the faster result counts."""
        first: dict[Pair, LinkFit] = {}
        again: dict[Pair, LinkFit] = {}
        for link in links:
            fits, fit, pair = again if link.is_again else first, fit_link(link), (link.source, link.target)
            fits[pair] = max(fits.get(pair, fit), fit, key=_speed)
        return cls(first=first, again=again)

    def best(self) -> dict[Pair, LinkFit]:
        """Return the faster measurement of each pair, because a disturbance only slows a link down."""
        return {pair: max(fit, self.again.get(pair, fit), key=_speed) for pair, fit in self.first.items()}


def _speed(fit: LinkFit) -> float:
    return fit.hosts.bytes_per_s


def host_fits(fits: Mapping[Pair, LinkFit], devices_per_host: int) -> dict[Pair, LinkFit]:
    """Return one line for each measured pair of hosts: the time until the last rail had finished.

    Every transfer between two stages, and every ring that spans hosts, has a part on each rail and ends with the last
    rail. Rails that share a wire get uneven parts of the wire. So the median of the rails' own lines would be too fast,
    and the slowest line would be too slow by chance. Rails that were measured together share one line; otherwise the
    line of the slowest rail counts.
    """
    found: dict[Pair, LinkFit] = {}
    for (source, target), fit in fits.items():
        pair = (source // devices_per_host, target // devices_per_host)
        if pair[0] != pair[1]:
            found[pair] = min(found.get(pair, fit.hosts), fit.hosts, key=lambda one: one.bytes_per_s)
    return found


class EarlierLinks(NamedTuple):
    """Links that an earlier warm-up of the same hosts measured."""

    between: Mapping[Pair, Line]
    """Lines between hosts, by (sending host, receiving host)."""
    within: Mapping[Pair, Line]
    """Lines within hosts, by (sending slot, receiving slot)."""

    @classmethod
    def of(cls, earlier: Measurements, options: WarmupOrder) -> EarlierLinks | None:
        """Find the hosts of this job in earlier measurements, in any order; None if a host is missing."""
        then = {host.name: index for index, host in enumerate(earlier.cluster.hosts)}
        size = options.devices_per_host
        if earlier.cluster.devices_per_host != size or any(host.name not in then for host in options.hosts):
            return None
        at = [then[host.name] for host in options.hosts]
        survey = earlier.survey

        def line(links: Links, way: Pair) -> Line:
            return Line(float(links.latency_s[way]), 1 / float(links.bandwidth_bytes_per_s[way]))

        return cls(
            between={
                (a, b): line(earlier.cluster.between_hosts, (at[a], at[b]))
                for a, b in permutations(range(len(at)), 2)
                if survey is None or survey.origin(at[a], at[b]) != "estimated"
            },
            within={
                (host * size + a, host * size + b): line(earlier.cluster.within_host[then_at], (a, b))
                for host, then_at in enumerate(at)
                for a, b in permutations(range(size), 2)
            },
        )


class FoundLinks(NamedTuple):
    """Results of the warm-up on links."""

    between: Links
    within: tuple[Links, ...]
    survey: LinkSurvey | None
    sends: tuple[CollectiveTime, ...]
    first_HH: NDArray[np.float64]
    """Bytes/s of first measurements; nan = not measured."""
    again_HH: NDArray[np.float64]
    """Bytes/s of second measurements; nan = not measured."""
    notes: tuple[str, ...]


def found_links(
    options: WarmupOrder, results: Sequence[WorkerResult], earlier: EarlierLinks | None = None
) -> FoundLinks:
    """Turn the samples of all workers into matrices of links.

    A link that was not measured in this warm-up is taken from an earlier warm-up, or estimated. Raises ProbeError if no
    link between hosts, or no link within a host, was measured.
    """
    book = LinkBook.of(link for result in results for link in result.links)
    best, size, num_hosts = book.best(), options.devices_per_host, len(options.hosts)
    hosts = host_fits(best, size)
    known = {**(earlier.between if earlier else {}), **{pair: fit.line for pair, fit in hosts.items()}}
    local = {**(earlier.within if earlier else {}), **{pair: fit.line for pair, fit in best.items()}}
    between, notes = _matrices(known, range(num_hosts), "between hosts", [host.place for host in options.hosts])
    filled = []
    for index, host in enumerate(options.hosts):
        slots = range(index * size, (index + 1) * size)
        lines = {**local, **_alike(local, slots)} if host.shares_cores else local
        filled.append(_matrices(lines, slots, f"within {host.name}"))
    first, again = (host_fits(fits, size) for fits in (book.first, book.again))
    survey = None
    if num_hosts > 1:
        # Letters for the origin of each link: estimated, cached, measured, or measured again.
        letters = {**dict.fromkeys(earlier.between if earlier else (), "c"), **dict.fromkeys(hosts, "m")}
        letters |= {**dict.fromkeys(again, "a"), **{(host, host): "-" for host in range(num_hosts)}}
        rows = ([letters.get((a, b), "e") for b in range(num_hosts)] for a in range(num_hosts))
        survey = LinkSurvey(
            spread_HH=_by_pair({pair: fit.spread for pair, fit in hosts.items()}, num_hosts, 0.0),
            origin_HH=tuple(map("".join, rows)),
            rails=_rails(best, hosts, size) if size > 1 else (),
            rounds=sum(results[0].link_rounds),
            rounds_again=sum(results[0].link_rounds_again),
        )
    return FoundLinks(
        between=between,
        within=tuple(links for links, _ in filled),
        survey=survey,
        sends=_sends(best),
        first_HH=_by_pair({pair: fit.bytes_per_s for pair, fit in first.items()}, num_hosts, np.nan),
        again_HH=_by_pair({pair: fit.bytes_per_s for pair, fit in again.items()}, num_hosts, np.nan),
        notes=(*notes, *(note for _, of_host in filled for note in of_host), *_unstable(best, options)),
    )


def _by_pair(values: Mapping[Pair, float], num_hosts: int, missing: float) -> NDArray[np.float64]:
    matrix_HH = np.full((num_hosts, num_hosts), missing)
    for pair, value in values.items():
        matrix_HH[pair] = value
    return matrix_HH


def _rails(fits: Mapping[Pair, LinkFit], hosts: Mapping[Pair, LinkFit], size: int) -> tuple[RailRates, ...]:
    """Return the rates of the rails of every pair of hosts; with many pairs of hosts, only if rails differ."""
    found = []
    for a, b in sorted(hosts):
        slots = [(a * size + rail, b * size + rail) for rail in range(size)]
        rates = tuple(fits[pair].bytes_per_s if pair in fits else 0.0 for pair in slots)
        if len(hosts) <= MAX_SEND_ENTRIES or min(rates) < (1 - UNEVEN_RAILS) * max(rates):
            found.append(RailRates(source=a, target=b, bytes_per_s=rates))
    return tuple(found)


def _matrices(
    lines: Mapping[Pair, Line], members: Sequence[int], where: str, places: Sequence[Place] = ()
) -> tuple[Links, tuple[str, ...]]:
    """Put lines between hosts or slots into matrices; pairs without a line are estimated from other lines."""
    if len(members) == 1:
        return Links(latency_s=((0.0,),), bandwidth_bytes_per_s=((0.0,),)), ()
    at = {member: index for index, member in enumerate(members)}
    known = {(at[a], at[b]): line for (a, b), line in lines.items() if a in at and b in at}
    if not known:
        raise ProbeError(f"no link {where} was measured; raise --pipette-budget")
    pairs = len(members) * (len(members) - 1)
    missing = pairs - len(known)
    note = f"links: {missing} of {pairs} pairs {where} were estimated from the others"
    return estimate(len(members), known, places), (note,) if missing else ()


def _alike(lines: Mapping[Pair, Line], members: Iterable[int]) -> dict[Pair, Line]:
    """Return the median line for all pairs of slots that share the same cores.

    No slot is bound to a core, so no pair is nearer than another. The measured lines differ only because slots had to
    wait for a core. With one line for each pair, a ring that avoids one slow pair was predicted nine times as fast as
    measured.
    """
    pairs = list(permutations(members, 2))
    known = [lines[pair] for pair in pairs if pair in lines]
    usual = Line(*map(statistics.median, zip(*known, strict=True))) if known else None
    return dict.fromkeys(pairs, usual) if usual else {}


def _sends(fits: Mapping[Pair, LinkFit]) -> tuple[CollectiveTime, ...]:
    """Return one entry for each measured pair of slots; with many pairs, only for unstable pairs."""
    return tuple(
        CollectiveTime(kind="send", slots=pair, **fit.line._asdict(), spread=fit.spread, sizes_bytes=fit.sizes_bytes)
        for pair, fit in sorted(fits.items())
        if len(fits) <= MAX_SEND_ENTRIES or fit.spread > UNSTABLE_SPREAD
    )


def _unstable(fits: Mapping[Pair, LinkFit], options: WarmupOrder) -> tuple[str, ...]:
    unstable = sorted(((fit.spread, pair) for pair, fit in fits.items() if fit.spread > UNSTABLE_SPREAD), reverse=True)
    if not unstable:
        return ()
    spread, (source, target) = unstable[0]
    rate = rate_text(fits[source, target].bytes_per_s)
    worst = f"{options.slot_name(source)} -> {options.slot_name(target)} ({rate} +- {spread:.0%})"
    return (f"links: {len(unstable)} of {len(fits)} scatter by more than {UNSTABLE_SPREAD:.0%}, most of all {worst}",)


def group_times(dimensions: Sequence[Dimension], results: Sequence[WorkerResult]) -> tuple[CollectiveTime, ...]:
    """Return one line for each dimension and kind of collective: the line with the median time at the largest size."""
    seen: dict[tuple[str, int], dict[int, GroupSamples]] = {}
    for result in results:
        for samples in result.collectives:
            seen.setdefault((samples.kind, samples.dimension), {})[result.slot] = samples
    return tuple(_group_time(dimensions[index], by_slot) for (_, index), by_slot in seen.items())


def _group_time(dimension: Dimension, by_slot: Mapping[int, GroupSamples]) -> CollectiveTime:
    timed = []
    for group in dimension.groups:
        if all(slot in by_slot for slot in group):
            # A collective ends with its last member, so for each size the largest of the members' medians counts.
            sizes = zip(*([each.median_s for each in by_slot[slot].samples] for slot in group), strict=True)
            timed.append((tuple(map(max, sizes)), group))
    timed.sort(key=lambda entry: (entry[0][-1], entry))
    seconds, slots = timed[(len(timed) - 1) // 2]
    sample = by_slot[slots[0]]
    line = fit_line(sample.sizes_bytes, seconds)
    spread = max(by_slot[slot].samples[-1].spread for slot in slots)
    return CollectiveTime(
        kind=sample.kind, slots=slots, **line._asdict(), spread=spread, sizes_bytes=sample.sizes_bytes
    )
