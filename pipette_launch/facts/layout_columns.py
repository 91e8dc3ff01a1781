"""Many layouts as numpy columns, and the grouping of those that agree in some of their fields."""

# N = layouts, U = groups of layouts that agree, S = stages (pipeline ranks) of all layouts, one layout after another.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import LayoutError
from pipette_launch.facts.layout import NO_RECOMPUTE, Layout, Recompute

Ints = NDArray[np.int64]
Field: TypeAlias = str
"""The name of a column: that of a field of `Layout`."""
_FIELDS = tuple(field.name for field in fields(Layout))
NUMBERS: dict[Field, type] = {
    field.name: type(field.default) for field in fields(Layout) if field.name not in ("recompute", "layers_per_chunk")
}
"""Fields whose columns hold the values themselves, not indices, with their types: `int` or `bool`."""
_CODE_LIMIT = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutGroups:
    """Rows that agree in some columns."""

    first_U: Ints
    """A row of each group."""
    group_N: Ints
    """The group of each row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutColumns:
    """N layouts, field by field. Names are those of `Layout`; flags are 0 or 1."""

    tp: Ints
    pp: Ints
    dp: Ints
    cp: Ints
    ep: Ints
    etp: Ints
    vpp: Ints
    microbatch_group_size: Ints
    chunks_after_mtp: Ints
    micro_batch_size: Ints
    sequence_parallel: Ints
    use_distributed_optimizer: Ints
    overlap_grad_reduce: Ints
    overlap_param_gather: Ints
    use_tp_pp_dp_mapping: Ints
    recompute: Ints
    """Index into `recomputes`."""
    layers_per_chunk: Ints
    """Index into `cuts`."""
    recomputes: tuple[Recompute, ...] = (NO_RECOMPUTE,)
    cuts: tuple[tuple[int, ...], ...] = ((),)
    """Layers of every chunk; empty = even."""

    def __post_init__(self) -> None:
        for name in _FIELDS:
            column = getattr(self, name)
            if column.shape != self.tp.shape or column.dtype != np.int64:
                raise LayoutError(f"column {name} is {column.dtype}{column.shape}, not int64{self.tp.shape}")
        for name, limit in (("recompute", len(self.recomputes)), ("layers_per_chunk", len(self.cuts))):
            column = getattr(self, name)
            if len(column) and not 0 <= column.min() <= column.max() < limit:
                raise LayoutError(f"column {name} has indices {column.min()} to {column.max()} into {limit} entries")

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> LayoutColumns:
        """Turn layouts into columns."""
        recomputes = {value: i for i, value in enumerate(dict.fromkeys(layout.recompute for layout in layouts))}
        cuts = {value: i for i, value in enumerate(dict.fromkeys(layout.layers_per_chunk for layout in layouts))}
        numbers = {
            name: np.array([getattr(layout, name) for layout in layouts], dtype=np.int64).reshape(len(layouts))
            for name in NUMBERS
        }
        return cls(
            **numbers,
            recompute=np.array([recomputes[layout.recompute] for layout in layouts], dtype=np.int64),
            layers_per_chunk=np.array([cuts[layout.layers_per_chunk] for layout in layouts], dtype=np.int64),
            recomputes=tuple(recomputes) or (NO_RECOMPUTE,),
            cuts=tuple(cuts) or ((),),
        )

    def __len__(self) -> int:
        """N."""
        return len(self.tp)

    def layout(self, row: int) -> Layout:
        """One row as a layout; raises LayoutError where its degrees contradict each other."""
        return Layout(
            recompute=self.recomputes[self.recompute[row]],
            layers_per_chunk=self.cuts[self.layers_per_chunk[row]],
            **{name: kind(getattr(self, name)[row]) for name, kind in NUMBERS.items()},
        )

    def values(self, rows: Ints, *names: Field) -> list[tuple[object, ...]]:
        """What some rows hold in some fields, flags as 0 or 1; much cheaper than their layouts."""
        columns: list[Sequence[object]] = []
        for name in names:
            column = getattr(self, name)[rows].tolist()
            lists = {"recompute": self.recomputes, "layers_per_chunk": self.cuts}
            columns.append([lists[name][index] for index in column] if name in lists else column)
        return list(zip(*columns, strict=True))

    def rows_of(self, layout: Layout) -> Ints:
        """The rows that hold a layout."""
        found = np.ones(len(self), dtype=bool)
        for name in NUMBERS:
            found &= getattr(self, name) == getattr(layout, name)
        for name, values in (("recompute", self.recomputes), ("layers_per_chunk", self.cuts)):
            wanted = getattr(layout, name)
            # A value may stand in the list twice, where columns were joined.
            found &= np.isin(getattr(self, name), [place for place, value in enumerate(values) if value == wanted])
        return np.flatnonzero(found)

    def take(self, rows: Ints) -> LayoutColumns:
        """Some of the rows."""
        if len(rows) == len(self) == 1:
            return self
        return replace(self, **{name: getattr(self, name)[rows] for name in _FIELDS})

    def without_recompute(self) -> LayoutColumns:
        """The same layouts, which run nothing again."""
        return replace(self, recompute=np.zeros(len(self), dtype=np.int64), recomputes=(NO_RECOMPUTE,))

    def groups(self, *fields: Field) -> LayoutGroups:
        """Group rows that agree in these fields."""
        if len(self) == 1:
            # np.unique takes most of the time that one layout takes alone.
            only = np.zeros(1, dtype=np.int64)
            return LayoutGroups(first_U=only, group_N=only)
        codes = codes_of([getattr(self, name) for name in fields])
        _, first, group = np.unique(codes, return_index=True, return_inverse=True)
        return LayoutGroups(first_U=first.astype(np.int64), group_N=group.reshape(-1).astype(np.int64))


def codes_of(columns: Sequence[Ints]) -> Ints:
    """Give rows the same number where they agree in every column, and different ones elsewhere."""
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    size = 1
    for column in columns:
        width = int(column.max(initial=0)) + 1
        if size * width >= _CODE_LIMIT:
            codes = np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64)
            size = len(codes)
        codes = codes * width + column
        size *= width
    return codes
