"""The check that most facts need: no number is too small."""

from __future__ import annotations

from pipette_launch.errors import FactError


def check_numbers(
    fact: object, *names: str, limit: float = 1, above: bool = False, error: type[FactError] = FactError
) -> None:
    """Raise an error that names the first field below a limit, with its value.

    Args:
        fact: what has the fields.
        names: the fields to look at; one that is None passes.
        limit: the least that they may be, in their own units.
        above: whether they must exceed the limit.
        error: what to raise.

    """
    for name in names:
        value = getattr(fact, name)
        if value is not None and not (value > limit if above else value >= limit):
            raise error(f"{name} must be {'above' if above else 'at least'} {limit:g}, got {value}")
