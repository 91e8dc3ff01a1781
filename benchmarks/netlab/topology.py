"""Read a laboratory from a TOML file: hosts, and a rate and latency for every direction. Pure.

rate_mbit = 1000                                   # of every pair that nothing below names
latency_ms = { near = 0.0, far = 2.0 }             # classes; the first is that of every pair
hosts = 8                                          # n0 .. n7, or [[host]] tables
slots = 1                                          # of every host
cores_per_slot = 0.45                              # a fence: no slot computes faster, whatever the others do
[[host]]
name = "n3"
share = 0.5                                        # of the processor time that its peers get
[[island]]
hosts = ["n0", "n1", "n2", "n3"]
rate_mbit = 2000
[[link]]
between = ["n0", "n4"]                             # both ways
rate_mbit = 100
latency = "far"
[[link]]
from = "n4"
to = "n0"
rate_mbit = 50
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

HOST_NAME = re.compile(r"[a-z][a-z0-9-]{0,11}")
"""Twelve characters leave room for the `to-` of a device's name."""
MAX_HOSTS = 100
TOP = {"rate_mbit", "latency_ms", "hosts", "slots", "cores_per_slot", "host", "island", "link"}
KEYS = {
    "host": {"name", "slots", "share"},
    "island": {"hosts", "rate_mbit", "latency"},
    "link": {"between", "from", "to", "rate_mbit", "latency"},
}


class TopologyError(ValueError):
    """A topology makes no sense; the text names the entry and the allowed values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine of the laboratory."""

    name: str
    slots: int = 1
    share: float = 1.0
    """Share of the processor time that a host with the same number of slots gets when all hosts compute."""

    def __post_init__(self) -> None:
        if not HOST_NAME.fullmatch(self.name):
            raise TopologyError(f"host name {self.name!r}: lower-case letters, digits and '-', at most 12")
        if self.slots < 1 or not 0 < self.share <= 1:
            raise TopologyError(f"host {self.name}: slots={self.slots} must be 1 or more, share={self.share} in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """One direction of the wire between two hosts."""

    rate_mbit: float
    latency_ms: float = 0.0
    """Latency in addition to the machine's own 0.05 ms."""

    def __post_init__(self) -> None:
        if not self.rate_mbit > 0 or self.latency_ms < 0:
            raise TopologyError(f"rate_mbit={self.rate_mbit} must be above 0, latency_ms={self.latency_ms} not below")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Hosts, and a path from each to every other."""

    hosts: tuple[Host, ...]
    paths: Mapping[tuple[str, str], Path] = field(default_factory=dict)
    """By (sender, receiver)."""
    cores_per_slot: float | None = None
    """Processors of each slot, no more and no less, even while other hosts idle; None = no fence."""

    def __post_init__(self) -> None:
        if self.cores_per_slot is not None and not self.cores_per_slot > 0:
            raise TopologyError(f"cores_per_slot={self.cores_per_slot} must be above 0; leave it out for no fence")
        names = [host.name for host in self.hosts]
        if not 1 <= len(names) <= MAX_HOSTS or len(set(names)) != len(names):
            raise TopologyError(f"a laboratory needs 1 to {MAX_HOSTS} hosts of different names, got {names}")
        missing = [pair for pair in self.directions() if pair not in self.paths]
        if missing or len(self.paths) != len(names) * (len(names) - 1):
            raise TopologyError(f"paths must join every host with every other, once each way; missing: {missing}")

    def directions(self) -> Iterator[tuple[str, str]]:
        """All (sender, receiver), row by row."""
        return ((a.name, b.name) for a in self.hosts for b in self.hosts if a.name != b.name)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """All pairs of hosts, the earlier first."""
        names = [host.name for host in self.hosts]
        return ((a, b) for index, a in enumerate(names) for b in names[index + 1 :])

    def host(self, name: str) -> Host:
        """The host of this name."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise TopologyError(f"no host {name!r}; there are {', '.join(host.name for host in self.hosts)}")

    def index(self, name: str) -> int:
        """Its place in the list of hosts."""
        return self.hosts.index(self.host(name))


def uniform(num_hosts: int, *, rate_mbit: float, slots: int = 1) -> Topology:
    """Hosts n0, n1, ... that are all equally far from each other."""
    return parse({"hosts": num_hosts, "slots": slots, "rate_mbit": rate_mbit})


def uneven(
    num_hosts: int, rates_mbit: Sequence[float], *, seed: int, symmetric: bool = True, slots: int = 1
) -> Topology:
    """Hosts whose links take the given rates in an order that the seed draws.

    Args:
        num_hosts: how many.
        rates_mbit: one for each pair, or, where links are not symmetric, one for each direction; repeated in turn
            where there are fewer.
        seed: of the shuffle.
        symmetric: whether both directions of a pair are equally fast.
        slots: of every host.

    """
    hosts = tuple(Host(name=f"n{index}", slots=slots) for index in range(num_hosts))
    names = [host.name for host in hosts]
    pairs = [(a, b) for a in names for b in names if (a < b if symmetric else a != b)]
    drawn = [rates_mbit[index % len(rates_mbit)] for index in range(len(pairs))]
    random.Random(seed).shuffle(drawn)
    paths = {pair: Path(rate_mbit=rate) for pair, rate in zip(pairs, drawn, strict=True)}
    if symmetric:
        paths |= {(b, a): path for (a, b), path in paths.items()}
    return Topology(hosts=hosts, paths=paths)


def read(path: FilePath) -> Topology:
    """Read a topology file.

    Raises:
        TopologyError: the file makes no sense, or this Python is older than 3.11 and has no TOML reader.

    """
    if sys.version_info < (3, 11):
        raise TopologyError("topology files are TOML, which Python reads from 3.11 on")
    import tomllib

    try:
        return parse(tomllib.loads(path.read_text()))
    except (OSError, tomllib.TOMLDecodeError, TopologyError) as error:
        raise TopologyError(f"{path}: {error}") from error


def parse(document: Mapping[str, Any]) -> Topology:
    """Make sense of a topology file's content; later tables win over earlier ones, links over islands."""
    _refuse_unknown(document, TOP, "the file")
    for kind, keys in KEYS.items():
        for entry in document.get(kind, ()):
            _refuse_unknown(entry, keys, f"[[{kind}]] {entry}")
    hosts = _hosts(document)
    classes = dict(document.get("latency_ms", {"near": 0.0}))
    if not classes:
        raise TopologyError("latency_ms needs at least one class")
    names = [host.name for host in hosts]
    usual = {"rate_mbit": document.get("rate_mbit", 1000.0), "latency": next(iter(classes))}
    described: dict[tuple[str, str], dict[str, Any]] = {(a, b): dict(usual) for a in names for b in names if a != b}
    for pairs, entry in (*_islands(document), *_links(document)):
        for pair in pairs:
            if pair not in described:
                raise TopologyError(f"{entry}: {' to '.join(pair)} is not a link; hosts are {', '.join(names)}")
            described[pair] |= {key: entry[key] for key in ("rate_mbit", "latency") if key in entry}
    return Topology(
        hosts=hosts,
        paths={pair: _path(what, classes, pair) for pair, what in described.items()},
        cores_per_slot=document.get("cores_per_slot"),
    )


def _refuse_unknown(entry: Mapping[str, Any], keys: set[str], where: str) -> None:
    unknown = sorted(set(entry) - keys)
    if unknown:
        raise TopologyError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(keys))}")


def _hosts(document: Mapping[str, Any]) -> tuple[Host, ...]:
    tables = {entry.get("name"): entry for entry in document.get("host", ())}
    names = [f"n{index}" for index in range(document["hosts"])] if "hosts" in document else list(tables)
    strangers = sorted(str(name) for name in set(tables) - set(names))
    if strangers:
        raise TopologyError(f"[[host]] {strangers[0]!r} is none of {', '.join(names)}")
    usual = {"slots": document.get("slots", 1)}
    return tuple(Host(**{"name": name, **usual, **tables.get(name, {})}) for name in names)


Entries = Iterator[tuple[list[tuple[str, str]], Mapping[str, Any]]]


def _islands(document: Mapping[str, Any]) -> Entries:
    for entry in document.get("island", ()):
        yield [(a, b) for a in entry["hosts"] for b in entry["hosts"] if a != b], entry


def _links(document: Mapping[str, Any]) -> Entries:
    for entry in document.get("link", ()):
        if ("between" in entry) == ("from" in entry and "to" in entry):
            raise TopologyError(f"{entry}: a link is `between` two hosts, or goes `from` one `to` another")
        if "between" in entry:
            a, b = entry["between"]
            yield [(a, b), (b, a)], entry
        else:
            yield [(entry["from"], entry["to"])], entry


def _path(what: Mapping[str, Any], classes: Mapping[str, float], pair: tuple[str, str]) -> Path:
    name = what["latency"]
    if name not in classes:
        raise TopologyError(f"{' to '.join(pair)}: latency class {name!r} is none of {', '.join(classes)}")
    return Path(rate_mbit=float(what["rate_mbit"]), latency_ms=float(classes[name]))
