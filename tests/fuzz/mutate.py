"""Changes documents as nobody who writes them would: another value, a field more or less, another depth."""

from __future__ import annotations

import json
import random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 1 << 31, 1 << 63, -(1 << 63), 10**400, 0.0, -0.0, 1e-320, 1e308, -1e308, 0.5,
    float("nan"), float("inf"), float("-inf"), "", "x", "../../etc/passwd", "\x1b[31m", "\u202e", "\ud800", "\x00",
    "9" * 5000, "2B1", "0F0", [], {}, [[]], [None], {"": None}, [[0.0, 1.0], [1.0, 0.0]], [[0.0]], [0, 1, 2, 3], ["a"],
)  # fmt: skip


def changed(data: bytes, rng: random.Random) -> bytes:
    """Change one to four places of a JSON text; what is no JSON stays as it is."""
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError):
        return data
    for _ in range(rng.randint(1, 4)):
        plain = _change(plain, rng)
    return json.dumps(plain).encode()


def _change(value: Any, rng: random.Random) -> Any:
    """Change something in a value, or the value."""
    if isinstance(value, dict) and value and rng.random() < 0.93:
        return _changed_object(value, rng)
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        more = rng.choice(((), (value[place],), *[(_change(value[place], rng),)] * 8))
        return [*value[:place], *more, *value[place + 1 :]]
    if type(value) in (int, float) and abs(value) < 1e300 and rng.random() < 0.3:
        return rng.choice((value + 1, -value, value * 2, value - 1, float(value), value * 1e300))
    return rng.choice(HOSTILE)


def _changed_object(value: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    key, what = rng.choice(list(value)), rng.random()
    if what < 0.03:
        return {name: item for name, item in value.items() if name != key}
    if what < 0.06:
        return {**value, rng.choice(("", "x", key + " ")): rng.choice(HOSTILE)}
    return {**value, key: _change(value[key], rng)}
