"""A layout: degrees, virtual stages, micro-batch and recompute; its two halves, and how its cells become ranks."""

# N = layouts, U = groups of layouts that agree, S = stages (pipeline ranks) of all layouts, one layout after another.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import LayoutError
from pipette_launch.facts.files import ADDED_LATER, check_numbers


class Cell(NamedTuple):
    """A logical seat in the grid of a layout."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """Activation recompute, in Megatron's words."""

    granularity: Literal["none", "selective", "full"]
    method: Literal["none", "uniform", "block"] = "none"
    num_layers: int = 0
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.granularity == "full") != (self.method != "none" and self.num_layers > 0):
            raise LayoutError(
                f"recompute granularity={self.granularity} with method={self.method} and "
                f"num_layers={self.num_layers}: full needs a method and a layer count, the others have neither"
            )

    def runs_no_more_than(self, other: Recompute) -> bool:
        """Whether whatever this runs again, the other runs again too: it is no slower in any placement."""
        if self.granularity == "none" or (other.granularity == "full" and other.method == "uniform"):
            return True
        if self.granularity == other.granularity == "full":
            return self.method == other.method == "block" and self.num_layers <= other.num_layers
        return self.granularity == other.granularity == "selective" and set(self.modules) <= set(other.modules)


NO_RECOMPUTE = Recompute(granularity="none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The degrees, chunks, micro-batch and recompute of a training job: everything but the placement."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    """Tensor parallel size of the experts; Megatron's default is `tp`."""
    vpp: int = 1
    """Virtual stages (model chunks) of each pipeline rank; 1 = not interleaved."""
    microbatch_group_size: int = 0
    """Micro-batches that run through one chunk before the next (interleaved only); 0 = Megatron's default, `pp`."""
    layers_per_chunk: tuple[int, ...] = ()
    """Layers of every chunk in model order (`pp * vpp` entries, chunk c on pipeline rank c % pp); empty = even."""
    chunks_after_mtp: int = field(default=0, metadata=ADDED_LATER)
    """Chunks behind the one with the depths of multi-token prediction; 0 = the last chunk has them, with the head."""
    micro_batch_size: int = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    use_tp_pp_dp_mapping: bool = False
    """Pipeline ranks vary faster than data-parallel ones."""
    recompute: Recompute = NO_RECOMPUTE

    def __post_init__(self) -> None:
        check_numbers(self, "tp", "pp", "dp", "cp", "ep", "etp", "vpp", "micro_batch_size", error=LayoutError)
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"vpp={self.vpp} needs pp > 1")
        if self.layers_per_chunk and len(self.layers_per_chunk) != self.pp * self.vpp:
            raise LayoutError(
                f"layers_per_chunk has {len(self.layers_per_chunk)} entries, not pp*vpp={self.pp * self.vpp}"
            )
        if not 0 <= self.chunks_after_mtp < self.num_chunks:
            raise LayoutError(
                f"chunks_after_mtp={self.chunks_after_mtp} is not from 0 to pp*vpp-1={self.num_chunks - 1}"
            )
        if self.world_size % (self.etp * self.ep * self.pp):
            raise LayoutError(f"etp*ep*pp={self.etp * self.ep * self.pp} does not divide {self.world_size} ranks")

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_chunks(self) -> int:
        """Model chunks: pipeline ranks times virtual stages."""
        return self.pp * self.vpp

    @property
    def mtp_chunk(self) -> int:
        """The chunk with the depths of multi-token prediction, in model order."""
        return self.num_chunks - 1 - self.chunks_after_mtp

    @property
    def schedule_name(self) -> str:
        """The schedule that Megatron runs for this layout."""
        if self.pp == 1:
            return "no-pipelining"
        return "interleaved-1f1b" if self.vpp > 1 else "1f1b"

    def num_microbatches(self, global_batch_size: int) -> int:
        """Micro-batches of one step on each data-parallel rank; raises LayoutError where they do not divide."""
        per_round = self.micro_batch_size * self.dp
        if global_batch_size % per_round:
            raise LayoutError(
                f"global batch size {global_batch_size} is not divisible by micro_batch_size*dp = "
                f"{self.micro_batch_size}*{self.dp}"
            )
        return global_batch_size // per_round

    def chunk_layers(self, num_layers: int) -> tuple[int, ...]:
        """Transformer layers of each chunk, in model order: chunk c belongs to pipeline rank c % pp."""
        if self.layers_per_chunk:
            if sum(self.layers_per_chunk) != num_layers:
                raise LayoutError(f"layers_per_chunk sums to {sum(self.layers_per_chunk)}, not to {num_layers} layers")
            return self.layers_per_chunk
        if num_layers % self.num_chunks:
            raise LayoutError(f"{num_layers} layers do not divide into pp*vpp = {self.pp}*{self.vpp} chunks")
        return (num_layers // self.num_chunks,) * self.num_chunks

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Transformer layers of each pipeline rank, all its chunks together."""
        chunks = self.chunk_layers(num_layers)
        return tuple(sum(chunks[rank :: self.pp]) for rank in range(self.pp))

    def rank_of(self, cell: Cell) -> int:
        """RANK of a cell (Megatron's parallel_state, order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp)."""
        outer = cell.pp + self.pp * cell.dp if self.use_tp_pp_dp_mapping else cell.dp + self.dp * cell.pp
        return cell.tp + self.tp * (cell.cp + self.cp * outer)

    def cell_of(self, rank: int) -> Cell:
        """Cell of a RANK."""
        outer, inner = divmod(rank, self.tp * self.cp)
        cp, tp = divmod(inner, self.tp)
        if self.use_tp_pp_dp_mapping:
            dp, pp = divmod(outer, self.pp)
        else:
            pp, dp = divmod(outer, self.dp)
        return Cell(pp=pp, dp=dp, cp=cp, tp=tp)

    def words(self) -> str:
        """A layout as people say it: `tp2 pp4 dp1 mbs2 vpp2 dist-opt`."""
        degrees = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        degrees += [f"{name}{size}" for name, size in (("cp", self.cp), ("ep", self.ep), ("vpp", self.vpp)) if size > 1]
        if self.ep > 1 and self.etp != self.tp:
            degrees.append(f"etp{self.etp}")
        degrees.append(f"mbs{self.micro_batch_size}")
        extras = [
            ("seq-par", self.sequence_parallel),
            ("dist-opt", self.use_distributed_optimizer),
            ("overlap", self.overlap_grad_reduce),
            (f"recompute-{self.recompute.granularity}", self.recompute.granularity != "none"),
            ("uneven", bool(self.layers_per_chunk) and len(set(self.layers_per_chunk)) > 1),
            ("mtp-apart", self.chunks_after_mtp > 0),
        ]
        return " ".join(degrees + [word for word, on in extras if on])


class Degrees(NamedTuple):
    """Numbers of ranks on each axis, and the rank order."""

    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    etp: int
    use_tp_pp_dp_mapping: bool = False

    @classmethod
    def of(cls, layout: Layout) -> Degrees:
        """Take the degrees of a layout."""
        return cls(*(getattr(layout, name) for name in cls._fields))

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert shard, where the expert grid divides the ranks."""
        return self.world_size // (self.etp * self.ep * self.pp)


class MemoryOptions(NamedTuple):
    """Choices that save memory or hide communication."""

    sequence_parallel: bool
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    recompute: Recompute

    @classmethod
    def of(cls, layout: Layout) -> MemoryOptions:
        """Take the memory options of a layout."""
        return cls(*(getattr(layout, name) for name in cls._fields))


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
