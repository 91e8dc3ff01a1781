"""A layout: degrees, virtual stages, micro-batch and recompute; its two halves, and how its cells become ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipette_launch.errors import LayoutError
from pipette_launch.facts.checks import check_numbers
from pipette_launch.facts.files import ADDED_LATER


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
