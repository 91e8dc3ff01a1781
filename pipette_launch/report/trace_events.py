"""Events of Chrome's trace event format: what lasts, one after the other, and the names of tracks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]

PASSES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def named(kind: str, pid: int, tid: int, name: str) -> Event:
    """Name a process or a thread."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def span(name: str, kind: str, at: tuple[int, int], start_s: float, end_s: float, **about: object) -> Event:
    """Something that lasts, on the track (process, thread); rounded so that neighbours never overlap."""
    start_us, end_us = round(start_s * 1e6, 3), round(end_s * 1e6, 3)
    made: Event = {"name": name, "cat": kind, "ph": "X", "ts": start_us, "dur": round(max(end_us - start_us, 0.0), 3)}
    made |= {"pid": at[0], "tid": at[1]}
    return made | {"args": about} if about else made


def in_line(parts: Iterable[tuple[str, float, dict[str, object]]], kind: str, at: tuple[int, int]) -> Iterator[Event]:
    """One after the other on one track."""
    start_s = 0.0
    for name, seconds, about in parts:
        yield span(name, kind, at, start_s, start_s + seconds, **about)
        start_s += seconds
