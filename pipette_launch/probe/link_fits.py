"""From timed messages to links: a line for each, one figure for all rails of two hosts, and the matrices. Pure."""

# H = hosts, D = devices of one host (rails), row sends to column.

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import ProbeError
from pipette_launch.facts import CollectiveTime, Links, Samples
from pipette_launch.facts.survey import UNSTABLE_SPREAD, LinkSurvey, RailRates
from pipette_launch.probe.harness import Line, fit_line
from pipette_launch.probe.options import LinkSamples, ProbeOptions
from pipette_launch.units import rate_text

Pair = tuple[int, int]
MAX_SEND_ENTRIES = 4096
"""Above this many pairs only the unstable ones get an entry of their own beside the matrices."""
UNEVEN_RAILS = 0.10
"""Among very many pairs only those whose rails differ by more than this get their rails on file."""


class LinkFit(NamedTuple):
    """One direction of one link."""

    line: Line
    spread: float
    """Of the largest message."""
    sizes_bytes: tuple[int, ...]
    together: Line | None = None
    """Until the last of all rails was through; None where there is one."""

    @property
    def bytes_per_s(self) -> float:
        """How fast a large message goes."""
        return 1 / self.line.seconds_per_byte

    @property
    def hosts(self) -> LinkFit:
        """What this says of the link between the hosts, for each of their devices."""
        return self._replace(line=self.together, together=None) if self.together else self


def fit_link(link: LinkSamples) -> LinkFit:
    """The line through one link's medians, and the spread of its largest message."""
    counted = link.together or link.samples
    return LinkFit(
        _line_through(link.sizes_bytes, link.samples),
        counted[-1].spread,
        link.sizes_bytes,
        _line_through(link.sizes_bytes, link.together) if link.together else None,
    )


def _line_through(sizes_bytes: Sequence[int], samples: Sequence[Samples]) -> Line:
    return fit_line(sizes_bytes, [each.median_s for each in samples])


@dataclass(frozen=True, kw_only=True)
class LinkBook:
    """What is known of every pair of slots that was measured, and of how."""

    first: Mapping[Pair, LinkFit]
    again: Mapping[Pair, LinkFit]
    """Second measurements of what looked slow."""

    @classmethod
    def of(cls, links: Iterable[LinkSamples]) -> LinkBook:
        """Fit all samples; the second of the same direction is a second measurement."""
        first: dict[Pair, LinkFit] = {}
        again: dict[Pair, LinkFit] = {}
        for link in links:
            pair = (link.source, link.target)
            (again if pair in first else first)[pair] = fit_link(link)
        return cls(first=first, again=again)

    def best(self) -> dict[Pair, LinkFit]:
        """The faster of the two measurements of each pair: a disturbance only ever slows a link down."""
        return {
            pair: max(fit, self.again.get(pair, fit), key=lambda one: one.hosts.bytes_per_s)
            for pair, fit in self.first.items()
        }


def host_fits(fits: Mapping[Pair, LinkFit], devices_per_host: int) -> dict[Pair, LinkFit]:
    """One figure for all rails of each pair of hosts that were measured: until the last of them was through.

    It is measured, not chosen: rails that share a wire get uneven parts of it, so their median would be too fast, and
    the slowest by chance too slow. Every transfer between two stages, and every ring that spans hosts, has a part on
    each rail and ends with the last. Rails that were measured together say the same; of others the slowest counts.
    """
    found: dict[Pair, LinkFit] = {}
    for (source, target), fit in fits.items():
        pair = (source // devices_per_host, target // devices_per_host)
        if pair[0] != pair[1]:
            found[pair] = min(found.get(pair, fit.hosts), fit.hosts, key=lambda one: one.bytes_per_s)
    return found


def bandwidth_HH(fits: Mapping[Pair, LinkFit], num_hosts: int) -> NDArray[np.float64]:
    """Bytes/s of pairs of hosts; nan where none was measured, and on the diagonal."""
    rates = np.full((num_hosts, num_hosts), np.nan)
    for (source, target), fit in fits.items():
        rates[source, target] = fit.bytes_per_s
    return rates


@dataclass(frozen=True, kw_only=True)
class FoundLinks:
    """The part of the measurements that is about links."""

    between: Links
    within: tuple[Links, ...]
    survey: LinkSurvey | None
    sends: tuple[CollectiveTime, ...]
    first_HH: NDArray[np.float64]
    """Bytes/s as first measured; nan = not measured."""
    again_HH: NDArray[np.float64]
    """Bytes/s of second measurements; nan = none."""
    notes: tuple[str, ...]


def found_links(options: ProbeOptions, links: Iterable[LinkSamples], *, rounds: int, rounds_again: int) -> FoundLinks:
    """Lay out everything that the workers measured; `links` with first measurements before second ones.

    Raises:
        ProbeError: no link between hosts, or none within a host, was measured.

    """
    book = LinkBook.of(links)
    best, size, num_hosts = book.best(), options.devices_per_host, len(options.hosts)
    hosts = host_fits(best, size)
    between, notes = _matrices(hosts, range(num_hosts), "between hosts")
    filled = [
        _matrices(best, range(index * size, (index + 1) * size), f"within {host.name}")
        for index, host in enumerate(options.hosts)
    ]
    first, again = (host_fits(fits, size) for fits in (book.first, book.again))
    return FoundLinks(
        between=between,
        within=tuple(links for links, _ in filled),
        survey=_survey(best, hosts, again, size=size, num_hosts=num_hosts, rounds=(rounds, rounds_again)),
        sends=_sends(best),
        first_HH=bandwidth_HH(first, num_hosts),
        again_HH=bandwidth_HH(again, num_hosts),
        notes=(*notes, *(note for _, said in filled for note in said), *_unstable(best, options)),
    )


def _survey(
    fits: Mapping[Pair, LinkFit],
    hosts: Mapping[Pair, LinkFit],
    again: Mapping[Pair, LinkFit],
    *,
    size: int,
    num_hosts: int,
    rounds: tuple[int, int],
) -> LinkSurvey | None:
    if num_hosts < 2:
        return None
    spread = np.zeros((num_hosts, num_hosts))
    origin = np.full((num_hosts, num_hosts), "e")
    np.fill_diagonal(origin, "-")
    for (a, b), fit in hosts.items():
        spread[a, b] = fit.spread
        origin[a, b] = "a" if (a, b) in again else "m"
    return LinkSurvey(
        spread_HH=spread,
        origin_HH=tuple("".join(row) for row in origin),
        rails=_rails(fits, hosts, size) if size > 1 else (),
        rounds=rounds[0],
        rounds_again=rounds[1],
    )


def _rails(fits: Mapping[Pair, LinkFit], hosts: Mapping[Pair, LinkFit], size: int) -> tuple[RailRates, ...]:
    """The rails of every pair of hosts; of many pairs only those whose rails are uneven."""
    found = []
    for a, b in sorted(hosts):
        slots = [(a * size + rail, b * size + rail) for rail in range(size)]
        rates = tuple(fits[pair].bytes_per_s if pair in fits else 0.0 for pair in slots)
        if len(hosts) <= MAX_SEND_ENTRIES or min(rates) < (1 - UNEVEN_RAILS) * max(rates):
            found.append(RailRates(source=a, target=b, bytes_per_s=rates))
    return tuple(found)


def _matrices(fits: Mapping[Pair, LinkFit], places: Sequence[int], where: str) -> tuple[Links, tuple[str, ...]]:
    """Lay the fits of these places out as matrices; unmeasured pairs get the medians of their ends."""
    if len(places) == 1:
        return Links(latency_s=((0.0,),), bandwidth_bytes_per_s=((0.0,),)), ()
    at = {place: index for index, place in enumerate(places)}
    known = {(at[a], at[b]): fit.line for (a, b), fit in fits.items() if a in at and b in at}
    if not known:
        raise ProbeError(f"no link {where} was measured; raise --pipette-budget")
    size = range(len(places))
    pairs = [(i, j) for i in size for j in size if i != j]
    ends = _Ends(known)
    lines = {pair: known.get(pair) or ends.assumed(*pair) for pair in pairs}

    def matrix(value: Callable[[Line], float]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(0.0 if i == j else value(lines[i, j]) for j in size) for i in size)

    missing = len(pairs) - len(known)
    return Links(
        latency_s=matrix(lambda line: line.latency_s),
        bandwidth_bytes_per_s=matrix(lambda line: 1 / line.seconds_per_byte),
    ), ((f"links: {missing} of {len(pairs)} pairs {where} were assumed from the others",) if missing else ())


class _Ends:
    """What links of each sender and each receiver usually are."""

    def __init__(self, known: Mapping[Pair, Line]) -> None:
        sent: dict[int, list[Line]] = {}
        received: dict[int, list[Line]] = {}
        for (source, target), line in known.items():
            sent.setdefault(source, []).append(line)
            received.setdefault(target, []).append(line)
        self._sent, self._received = (
            {place: _middle(lines) for place, lines in ends.items()} for ends in (sent, received)
        )
        self._usual = _middle(list(known.values()))

    def assumed(self, source: int, target: int) -> Line:
        """A link that nobody measured is as slow as the slower of its ends usually is."""
        ends = [line for line in (self._sent.get(source), self._received.get(target)) if line] or [self._usual]
        return Line(max(line.latency_s for line in ends), max(line.seconds_per_byte for line in ends))


def _middle(lines: Sequence[Line]) -> Line:
    return Line(
        statistics.median(line.latency_s for line in lines), statistics.median(line.seconds_per_byte for line in lines)
    )


def _sends(fits: Mapping[Pair, LinkFit]) -> tuple[CollectiveTime, ...]:
    """One entry for each measured pair of slots, so that each link's spread is on file."""
    return tuple(
        CollectiveTime(
            kind="send",
            slots=pair,
            latency_s=fit.line.latency_s,
            seconds_per_byte=fit.line.seconds_per_byte,
            spread=fit.spread,
            sizes_bytes=fit.sizes_bytes,
        )
        for pair, fit in sorted(fits.items())
        if len(fits) <= MAX_SEND_ENTRIES or fit.spread > UNSTABLE_SPREAD
    )


def _unstable(fits: Mapping[Pair, LinkFit], options: ProbeOptions) -> tuple[str, ...]:
    unstable = sorted(((fit.spread, pair) for pair, fit in fits.items() if fit.spread > UNSTABLE_SPREAD), reverse=True)
    if not unstable:
        return ()
    spread, (source, target) = unstable[0]
    rate = rate_text(fits[source, target].bytes_per_s)
    worst = f"{options.slot_name(source)} -> {options.slot_name(target)} ({rate} +- {spread:.0%})"
    return (f"links: {len(unstable)} of {len(fits)} scatter by more than {UNSTABLE_SPREAD:.0%}, most of all {worst}",)
