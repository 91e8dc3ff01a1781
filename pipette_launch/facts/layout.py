"""Layouts (parallel degrees, virtual stages, micro-batch size, recompute): one object, or many as numpy columns."""

# Array axes: N = layouts, U = groups of equal layouts, S = stages (pipeline ranks) of all layouts, layout by layout.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import LayoutError
from pipette_launch.facts.files import check_numbers


class Cell(NamedTuple):
    """Indices of one rank in each parallel dimension of a layout."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """Activation recompute and offloading of a layout, with the values of Megatron's flags."""

    granularity: Literal["none", "selective", "full"]
    method: Literal["none", "uniform", "block"] = "none"
    num_layers: int = 0
    modules: tuple[str, ...] = ()
    offload_modules: tuple[str, ...] = ()
    """Modules whose activations go to the host, and come back for the backward."""
    offload_share: float = 0.0
    """Share of the modules, in each chunk, whose activations go to the host."""

    def __post_init__(self) -> None:
        if (self.granularity == "full") != (self.method != "none" and self.num_layers > 0):
            given = f"granularity={self.granularity} with method={self.method} and num_layers={self.num_layers}"
            raise LayoutError(f"recompute {given}: full needs a method and a layer count, the others have neither")

    def runs_no_more_than(self, other: Recompute) -> bool:
        """True if `other` recomputes and offloads everything that `self` does, so that `self` is never slower."""
        if self.offload_share > other.offload_share or not {*self.offload_modules} <= {*other.offload_modules}:
            return False
        if self.granularity == "none" or (other.granularity == "full" and other.method == "uniform"):
            return True
        if self.granularity == other.granularity == "full":
            return self.method == other.method == "block" and self.num_layers <= other.num_layers
        return self.granularity == other.granularity == "selective" and set(self.modules) <= set(other.modules)


NO_RECOMPUTE = Recompute(granularity="none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Parallel degrees, micro-batch size and memory options, without the placement of ranks on devices."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    """Expert tensor parallel size. Megatron's default is `tp`."""
    vpp: int = 1
    """Virtual stages (model chunks) of each pipeline rank; 1 = not interleaved."""
    microbatch_group_size: int = 0
    """Micro-batches that run through one chunk before the next chunk starts. 0 = Megatron's default, `pp`."""
    layers_per_chunk: tuple[int, ...] = ()
    """Layers of each of the `pp * vpp` chunks in model order. Chunk c is on pipeline rank c % pp. Empty = equal."""
    chunks_after_mtp: int = 0
    """Number of chunks after the chunk with multi-token prediction. 0 = the last chunk has multi-token prediction."""
    micro_batch_size: int = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    use_tp_pp_dp_mapping: bool = False
    """True if the pipeline index of successive ranks changes before the data-parallel index."""
    recompute: Recompute = NO_RECOMPUTE

    def __post_init__(self) -> None:
        check_numbers(self, "tp", "pp", "dp", "cp", "ep", "etp", "vpp", "micro_batch_size", error=LayoutError)
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"vpp={self.vpp} needs pp > 1")
        if self.layers_per_chunk and len(self.layers_per_chunk) != self.num_chunks:
            raise LayoutError(
                f"layers_per_chunk has {len(self.layers_per_chunk)} entries, not pp*vpp={self.num_chunks}"
            )
        if not 0 <= self.chunks_after_mtp < self.num_chunks:
            raise LayoutError(
                f"chunks_after_mtp={self.chunks_after_mtp} is not from 0 to pp*vpp-1={self.num_chunks - 1}"
            )
        if self.world_size % (self.etp * self.ep * self.pp):
            raise LayoutError(f"etp*ep*pp={self.etp * self.ep * self.pp} does not divide {self.world_size} ranks")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_chunks(self) -> int:
        """Number of model chunks, pp * vpp."""
        return self.pp * self.vpp

    @property
    def mtp_chunk(self) -> int:
        """Index of the chunk with multi-token prediction, in model order."""
        return self.num_chunks - 1 - self.chunks_after_mtp

    @property
    def schedule_name(self) -> str:
        """Name of the pipeline schedule that Megatron runs for this layout."""
        if self.pp == 1:
            return "no-pipelining"
        return "interleaved-1f1b" if self.vpp > 1 else "1f1b"

    def num_microbatches(self, global_batch_size: int) -> int:
        """Return the micro-batches of one step on each data-parallel rank; LayoutError if the batch does not divide."""
        count, rest = divmod(global_batch_size, self.micro_batch_size * self.dp)
        if rest:
            sizes = f"micro_batch_size*dp = {self.micro_batch_size}*{self.dp}"
            raise LayoutError(f"global batch size {global_batch_size} is not divisible by {sizes}")
        return count

    def chunk_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of transformer layers of each chunk, in model order."""
        if self.layers_per_chunk:
            if sum(self.layers_per_chunk) != num_layers:
                raise LayoutError(f"layers_per_chunk sums to {sum(self.layers_per_chunk)}, not to {num_layers} layers")
            return self.layers_per_chunk
        if num_layers % self.num_chunks:
            raise LayoutError(f"{num_layers} layers do not divide into pp*vpp = {self.pp}*{self.vpp} chunks")
        return (num_layers // self.num_chunks,) * self.num_chunks

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of transformer layers of each pipeline rank, summed over the rank's chunks."""
        chunks = self.chunk_layers(num_layers)
        return tuple(sum(chunks[rank :: self.pp]) for rank in range(self.pp))

    def rank_of(self, cell: Cell) -> int:
        """Return the RANK of a cell, in Megatron's rank order tp-cp-ep-dp-pp or tp-cp-ep-pp-dp (parallel_state)."""
        outer = cell.pp + self.pp * cell.dp if self.use_tp_pp_dp_mapping else cell.dp + self.dp * cell.pp
        return cell.tp + self.tp * (cell.cp + self.cp * outer)

    def cell_of(self, rank: int) -> Cell:
        """Return the cell of a RANK: the rank's index in each parallel dimension."""
        outer, inner = divmod(rank, self.tp * self.cp)
        cp, tp = divmod(inner, self.tp)
        if self.use_tp_pp_dp_mapping:
            dp, pp = divmod(outer, self.pp)
        else:
            pp, dp = divmod(outer, self.dp)
        return Cell(pp=pp, dp=dp, cp=cp, tp=tp)

    def words(self) -> str:
        """Return the short form of the layout, such as `tp2 pp4 dp1 mbs2 vpp2 dist-opt`."""
        return " ".join(self.named_words().values())

    def named_words(self) -> dict[str, str]:
        """Return the words of the short form by their names, such as `vpp2` by `vpp`."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        sizes |= {name: size for name, size in (("cp", self.cp), ("ep", self.ep), ("vpp", self.vpp)) if size > 1}
        if self.ep > 1 and self.etp != self.tp:
            sizes["etp"] = self.etp
        sizes["mbs"] = self.micro_batch_size
        extras = [
            ("seq-par", "", self.sequence_parallel),
            ("dist-opt", "", self.use_distributed_optimizer),
            ("overlap", "", self.overlap_grad_reduce),
            ("recompute", f"-{self.recompute.granularity}", self.recompute.granularity != "none"),
            ("offload", f"-{self.recompute.offload_share:.0%}", bool(self.recompute.offload_modules)),
            ("uneven", "", bool(self.layers_per_chunk) and len(set(self.layers_per_chunk)) > 1),
            ("mtp-apart", "", self.chunks_after_mtp > 0),
        ]
        return {
            **{name: f"{name}{size}" for name, size in sizes.items()},
            **{name: f"{name}{value}" for name, value, is_on in extras if is_on},
        }


class Degrees(NamedTuple):
    """Parallel degrees and rank order of a layout."""

    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    etp: int
    use_tp_pp_dp_mapping: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Number of replicas of each expert shard, if ep * etp * pp divides the number of ranks."""
        return self.world_size // (self.etp * self.ep * self.pp)


class MemoryOptions(NamedTuple):
    """Options of a layout that save memory or hide communication."""

    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute: Recompute = NO_RECOMPUTE


SWITCHES = tuple(field.name for field in fields(Layout) if type(field.default) is bool)
"""Names of the layout fields that are switches (on or off)."""
FLAG_WORDS = {
    "sequence_parallel": "sequence parallel (seq-par)",
    "use_distributed_optimizer": "distributed optimizer (dist-opt)",
    "overlap_grad_reduce": "overlapped gradients (overlap)",
    "overlap_param_gather": "overlapped parameter gather",
}
"""Name of each switch of `MemoryOptions`, as reports show it."""
OVERLAPS = tuple(name for name in FLAG_WORDS if name.startswith("overlap_"))

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Field: TypeAlias = str
"""Name of a column, which is the name of a field of `Layout`."""
_FIELDS = tuple(field.name for field in fields(Layout))
NUMBERS: dict[Field, type] = {
    field.name: type(field.default) for field in fields(Layout) if field.name not in ("recompute", "layers_per_chunk")
}
"""Type (`int` or `bool`) of each field whose column holds values. Columns of other fields hold indices into tables."""
_CODE_LIMIT = 1 << 62


class LayoutGroups(NamedTuple):
    """Groups of rows that have equal values in some columns."""

    first_U: Ints
    """Index of the first row in each group of equal rows."""
    group_N: Ints
    """Index of the group of each row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutColumns:
    """N layouts, stored as one column for each field of `Layout`. Flags are 0 or 1.

    The columns `recompute` and `layers_per_chunk` are indices into the tables `recomputes` and `cuts`.
    """

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
    layers_per_chunk: Ints
    recomputes: tuple[Recompute, ...] = (NO_RECOMPUTE,)
    cuts: tuple[tuple[int, ...], ...] = ((),)
    """Splits of the layers: number of layers of each chunk. An empty entry means an even split."""

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
        """Convert layouts to columns."""
        recomputes = {value: i for i, value in enumerate(dict.fromkeys(layout.recompute for layout in layouts))}
        cuts = {value: i for i, value in enumerate(dict.fromkeys(layout.layers_per_chunk for layout in layouts))}
        columns: dict[str, list[int]] = {name: [getattr(layout, name) for layout in layouts] for name in NUMBERS}
        columns["recompute"] = [recomputes[layout.recompute] for layout in layouts]
        columns["layers_per_chunk"] = [cuts[layout.layers_per_chunk] for layout in layouts]
        return cls(
            **{name: np.array(column, dtype=np.int64) for name, column in columns.items()},
            recomputes=tuple(recomputes) or (NO_RECOMPUTE,),
            cuts=tuple(cuts) or ((),),
        )

    def __len__(self) -> int:
        return len(self.tp)

    def layout(self, row: int) -> Layout:
        """Return the layout of one row. Raise LayoutError if the degrees of this row are not legal."""
        return Layout(
            recompute=self.recomputes[self.recompute[row]],
            layers_per_chunk=self.cuts[self.layers_per_chunk[row]],
            **{name: kind(getattr(self, name)[row]) for name, kind in NUMBERS.items()},
        )

    def values(self, rows: Ints, *names: Field) -> list[tuple[object, ...]]:
        """Return some fields of some rows, switches as 0 or 1. Making `Layout` objects would be much slower."""
        columns: list[Sequence[object]] = []
        lists = {"recompute": self.recomputes, "layers_per_chunk": self.cuts}
        for name in names:
            column = getattr(self, name)[rows].tolist()
            columns.append([lists[name][index] for index in column] if name in lists else column)
        return list(zip(*columns, strict=True))

    def rows_of(self, layout: Layout) -> Ints:
        """Return the indices of all rows that are equal to this layout."""
        found = np.ones(len(self), dtype=bool)
        for name in NUMBERS:
            found &= getattr(self, name) == getattr(layout, name)
        for name, values in (("recompute", self.recomputes), ("layers_per_chunk", self.cuts)):
            wanted = getattr(layout, name)
            # If columns were joined, a table may contain a value twice.
            found &= np.isin(getattr(self, name), [place for place, value in enumerate(values) if value == wanted])
        return np.flatnonzero(found)

    def take(self, rows: Ints) -> LayoutColumns:
        """Return the given rows as new columns."""
        if len(rows) == len(self) == 1:
            return self
        return replace(self, **{name: getattr(self, name)[rows] for name in _FIELDS})

    def without_recompute(self) -> LayoutColumns:
        """Return the same layouts with recompute off."""
        return replace(self, recompute=np.zeros(len(self), dtype=np.int64), recomputes=(NO_RECOMPUTE,))

    def groups(self, *fields: Field) -> LayoutGroups:
        """Group rows that have equal values in these fields."""
        if len(self) == 1:
            # Skip np.unique for a single layout, because np.unique would take most of the time.
            only = np.zeros(1, dtype=np.int64)
            return LayoutGroups(only, only)
        return grouped(*(getattr(self, name) for name in fields))


def grouped(*columns: Ints) -> LayoutGroups:
    """Group rows that have equal numbers in every column."""
    _, first, group = np.unique(codes_of(columns), return_index=True, return_inverse=True)
    return LayoutGroups(first.astype(np.int64), group.reshape(-1).astype(np.int64))


def codes_of(columns: Sequence[Ints]) -> Ints:
    """Return one number for each row. Rows that are equal in every column have equal numbers."""
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
