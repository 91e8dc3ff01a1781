"""What passes and hops of one pipeline take, and when each action of its step starts and ends."""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.errors import FactError
from pipette_launch.facts.schedule import PassTimes

NANOSECOND_S = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch on each stage of one pipeline, and on the way between neighbours."""

    forward_s: tuple[float, ...]
    """One entry for each stage, as in `backward_s`."""
    backward_s: tuple[float, ...]
    """The whole backward."""
    forward_hop_s: tuple[float, ...]
    """From stage s to s + 1: S - 1 entries. Not asked for where both lie on one rank, as at the turn of a V."""
    backward_hop_s: tuple[float, ...]
    """From stage s + 1 to s: S - 1 entries."""
    first_forward_s: tuple[float, ...] = ()
    """The forward of micro-batch 0, where something makes it longer; empty = as the others."""
    input_s: tuple[float, ...] = ()
    """The input's gradient, for a schedule that splits the backward; empty = not known apart."""
    weight_s: tuple[float, ...] = ()
    """The weights' gradients."""
    recompute_s: tuple[float, ...] = ()
    """What is computed again before each backward, once its gradient has arrived; empty = nothing."""

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        hops = {len(self.forward_hop_s), len(self.backward_hop_s)}
        optional = (self.first_forward_s, self.input_s, self.weight_s, self.recompute_s)
        passes = {len(self.backward_s), *(len(times) or stages for times in optional)}
        if stages == 0 or hops != {stages - 1} or passes != {stages}:
            raise FactError(f"stage times: {stages} stages need as many backwards and {stages - 1} hops each way")
        if bool(self.input_s) != bool(self.weight_s):
            raise FactError("stage times: a split backward needs the times of both its halves")
        everything = (self.forward_s, self.backward_s, self.forward_hop_s, self.backward_hop_s, *optional)
        if not all(0 <= seconds < float("inf") for times in everything for seconds in times):
            raise FactError("stage times: seconds are finite and not negative")

    @property
    def durations_s(self) -> list[float]:
        """Forwards, backwards, first forwards; then input and weight gradients, where they are known."""
        again = self.recompute_s or (0.0,) * len(self.forward_s)
        backward_s = [more + seconds for more, seconds in zip(again, self.backward_s, strict=True)]
        input_s = [more + seconds for more, seconds in zip(again, self.input_s, strict=True)] if self.input_s else []
        return [*self.forward_s, *backward_s, *(self.first_forward_s or self.forward_s), *input_s, *self.weight_s]

    @property
    def expected(self) -> PassTimes:
        """The same in nanoseconds, for schedules that split the backward too."""
        stages = len(self.forward_s)
        durations = [max(1, round(seconds / NANOSECOND_S)) for seconds in self.durations_s]
        forward, backward, _, *halves = (tuple(durations[at : at + stages]) for at in range(0, len(durations), stages))
        input_, weight = halves or (backward, backward)
        hops = (self.forward_hop_s, self.backward_hop_s)
        forward_hop, backward_hop = (tuple(round(seconds / NANOSECOND_S) for seconds in each) for each in hops)
        return PassTimes(
            forward=forward,
            backward=backward,
            input=input_,
            weight=weight,
            forward_hop=forward_hop,
            backward_hop=backward_hop,
        )

    @property
    def hops_s(self) -> list[float]:
        """Forward hops, backward hops, and 0 for no hop."""
        return [*self.forward_hop_s, *self.backward_hop_s, 0.0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One pipeline's step, action by action."""

    start_s: tuple[tuple[float, ...], ...]
    """For each rank, the start of each of its actions."""
    end_s: tuple[tuple[float, ...], ...]

    @property
    def makespan_s(self) -> float:
        """From the first forward to the last backward."""
        return max(ends[-1] for ends in self.end_s)

    @property
    def span_s_P(self) -> tuple[float, ...]:
        """From each rank's own first start to its last end."""
        return tuple(ends[-1] - starts[0] for starts, ends in zip(self.start_s, self.end_s, strict=True))
