"""Folds for cross-validation: rows of one test under several names stay together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


def families(keys_of_rows: Sequence[Iterable[Hashable]]) -> tuple[int, ...]:
    """Number of the family of each row: rows that share any key, directly or through others, are one family.

    A test that was renamed keeps its configuration, and a test whose configuration changed keeps its name; so linking
    rows by both leaves no twin of a row outside its own family.
    """
    parent = list(range(len(keys_of_rows)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    first_with: dict[Hashable, int] = {}
    for place, keys in enumerate(keys_of_rows):
        for key in keys:
            other = root(first_with.setdefault(key, place))
            mine = root(place)
            parent[max(other, mine)] = min(other, mine)
    return tuple(root(place) for place in range(len(keys_of_rows)))


def folds(family_of_row: Sequence[int], num_folds: int) -> tuple[tuple[int, ...], ...]:
    """Cut the rows into at most `num_folds` parts of about equal size, whole families together."""
    sizes: dict[int, list[int]] = {}
    for place, family in enumerate(family_of_row):
        sizes.setdefault(family, []).append(place)
    parts: list[list[int]] = [[] for _ in range(max(1, num_folds))]
    # Largest family first, each to the emptiest part: parts stay even, and the cut depends on nothing random.
    for members in sorted(sizes.values(), key=lambda places: (-len(places), places)):
        min(parts, key=len).extend(members)
    return tuple(tuple(sorted(part)) for part in parts if part)
