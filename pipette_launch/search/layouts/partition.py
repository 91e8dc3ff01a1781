"""How many layers each chunk gets, so that no pipeline stage is slower than it must be.

The embedding and the head are not free: a stage that has one of them gets fewer layers. Chunk c, in model order, lies
on pipeline rank c % pp.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from pipette_launch.errors import LayoutError
from pipette_launch.facts import ModelSpec

SLACK = 1e-9
"""Times that differ by less than this part count as equal."""
_HALVINGS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSeconds:
    """What the parts of a model take for one micro-batch, forward and backward; only their ratios matter here."""

    layers_s: tuple[float, ...]
    """Each layer, in model order."""
    first_s: float
    """The embedding, on the first stage."""
    last_s: float
    """Head and loss, and the depths of multi-token prediction, on the last stage."""

    def __post_init__(self) -> None:
        if not self.layers_s or min(*self.layers_s, self.first_s, self.last_s) < 0 or max(self.layers_s) <= 0:
            raise LayoutError("layers need times, none of them negative")


def by_parts(model: ModelSpec, parts_s: Mapping[str, float]) -> LayerSeconds:
    """Put a model together from the measured seconds of its parts: layers by kind, embedding, head, prediction.

    Where a depth of multi-token prediction was not timed, it is its layers and a head more.
    """
    plain_s = sum(parts_s.get(kind, 0.0) for kind in model.prediction_kinds) + parts_s["head"]
    depth_s = parts_s.get("prediction", plain_s)
    return LayerSeconds(
        layers_s=tuple(parts_s.get(kind, 0.0) for kind in model.layer_kinds),
        first_s=parts_s["embedding"],
        last_s=parts_s["head"] + model.mtp_num_layers * depth_s,
    )


def by_flops(model: ModelSpec) -> LayerSeconds:
    """Stand in for times that were not measured: each part's FLOPs (2 for each weight; an embedding has none)."""
    kinds = {*model.layer_kinds, *model.prediction_kinds}
    parts: dict[str, float] = {kind: model.kind_flops_per_token(kind) for kind in kinds}
    return by_parts(model, parts | {"embedding": 0.0, "head": 2.0 * model.hidden_size * model.vocab_size})


def stage_seconds(seconds: LayerSeconds, chunks: Sequence[int], pp: int) -> tuple[float, ...]:
    """Seconds of each pipeline rank for one micro-batch, all its chunks together, with embedding and head."""
    stages_s = [0.0] * pp
    first = 0
    for chunk, size in enumerate(chunks):
        stages_s[chunk % pp] += sum(seconds.layers_s[first : first + size])
        first += size
    stages_s[0] += seconds.first_s
    stages_s[-1] += seconds.last_s
    return tuple(stages_s)


def live_weights(pp: int, vpp: int) -> tuple[int, ...]:
    """Micro-batches that each stage holds at once when there are plenty; chunks of micro-batches with interleaving.

    1F1B's warm-up and one (schedules.py:2093), and the interleaved schedule's (schedules.py:762-786).
    """
    if vpp == 1:
        return tuple(pp - rank for rank in range(pp))
    return tuple(2 * (pp - rank - 1) + (vpp - 1) * pp + 1 for rank in range(pp))


def balanced_chunks(seconds: LayerSeconds, *, pp: int, vpp: int) -> tuple[int, ...]:
    """Cut the layers so that the slowest stage is as quick as can be; of such cuts, one with the fewest live layers.

    Live layers are those of a stage times the micro-batches that it holds at once, of the stage where that is most; so
    the later stages, which hold fewer, take more layers where that costs no time. This is exact without interleaving,
    and the time is so with it where all layers take the same. Mixed layers in interleaved chunks are cut into chunks of
    nearly equal time, which are then improved layer by layer.

    Args:
        seconds: of each layer and of both ends.
        pp: pipeline ranks.
        vpp: chunks of each.

    Returns:
        Layers of each of the `pp * vpp` chunks in model order; some may have none.

    """
    if vpp == 1:
        return _contiguous(seconds, live_weights(pp, vpp))
    if len(set(seconds.layers_s)) == 1:
        return _interleaved(seconds, pp, vpp)
    return _improved(seconds, [*_contiguous(seconds, (1,) * (pp * vpp))], pp)


@lru_cache(maxsize=1 << 12)
def _contiguous(seconds: LayerSeconds, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Cut into runs of layers: the least bound on time, then on weighted layers, for which filling succeeds."""
    layers = len(seconds.layers_s)
    sums_s = (0.0, *accumulate(seconds.layers_s))
    limit_s = _least_limit_s(seconds, len(weights)) * (1 + SLACK)
    few, many = 0, max(weights) * layers
    while many - few > 1:
        middle = (few + many) // 2
        if _filled(sums_s, seconds, [middle // weight for weight in weights], limit_s):
            many = middle
        else:
            few = middle
    return _filled(sums_s, seconds, [many // weight for weight in weights], limit_s)


@lru_cache(maxsize=1 << 12)
def _least_limit_s(seconds: LayerSeconds, num_runs: int) -> float:
    """Seconds of the slowest of so many runs, where that is as quick as can be."""
    sums_s = (0.0, *accumulate(seconds.layers_s))
    low_s = (sums_s[-1] + seconds.first_s + seconds.last_s) / num_runs
    # Filled up to the mean, or to an end's own time, with one layer more, the runs hold all layers.
    high_s = max(low_s, seconds.first_s, seconds.last_s) + max(seconds.layers_s) + seconds.first_s + seconds.last_s
    most = [len(seconds.layers_s)] * num_runs
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        if _filled(sums_s, seconds, most, middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


def _filled(sums_s: Sequence[float], seconds: LayerSeconds, most: Sequence[int], limit_s: float) -> tuple[int, ...]:
    """Give each run, from the last, as many layers as the limits allow; () where the first cannot take the rest."""
    end = len(sums_s) - 1
    sizes = []
    for stage in range(len(most) - 1, 0, -1):
        room_s = limit_s - (seconds.last_s if stage == len(most) - 1 else 0.0)
        if room_s < 0:
            return ()
        start = min(end, max(end - most[stage], bisect_left(sums_s, sums_s[end] - room_s)))
        sizes.append(end - start)
        end = start
    ends_s = seconds.first_s + (seconds.last_s if len(most) == 1 else 0.0)
    if end > most[0] or sums_s[end] + ends_s > limit_s:
        return ()
    return (end, *reversed(sizes))


def _interleaved(seconds: LayerSeconds, pp: int, vpp: int) -> tuple[int, ...]:
    """Cut equal layers: as many for each rank as without interleaving, spread evenly over its chunks."""
    chunks = [0] * (pp * vpp)
    for rank, layers in enumerate(_contiguous(seconds, live_weights(pp, vpp))):
        for turn in range(vpp):
            # The larger chunks come first, except on the first rank, whose first chunk has the embedding.
            place = vpp - 1 - turn if rank == 0 else turn
            chunks[place * pp + rank] = (layers + vpp - 1 - turn) // vpp
    return tuple(chunks)


def _improved(seconds: LayerSeconds, chunks: list[int], pp: int) -> tuple[int, ...]:
    """Move single layers between neighbouring chunks while that makes the slower of the two stages quicker."""
    stages_s = [*stage_seconds(seconds, chunks, pp)]
    # The first layer of each chunk.
    starts = [0, *accumulate(chunks)][:-1]
    moved = True
    while moved:
        moved = False
        for right in range(1, len(chunks)):
            for step in (-1, 1):
                sender, receiver = (right - 1, right) if step < 0 else (right, right - 1)
                if not chunks[sender]:
                    continue
                layer_s = seconds.layers_s[starts[right] - (step < 0)]
                behind_s, ahead_s = stages_s[sender % pp], stages_s[receiver % pp]
                if ahead_s + layer_s >= behind_s * (1 - SLACK):
                    continue
                stages_s[sender % pp], stages_s[receiver % pp] = behind_s - layer_s, ahead_s + layer_s
                chunks[sender] -= 1
                chunks[receiver] += 1
                starts[right] += step
                moved = True
    return tuple(chunks)
