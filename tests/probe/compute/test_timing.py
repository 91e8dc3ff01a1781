"""Tests of how runs become the times of one layer, on a simulated clock that the parts move."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from facts_for_tests import tiny_job
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.facts import ComputeCase, ComputeTime
from pipette_launch.probe.compute import timing
from pipette_launch.probe.compute.timing import (
    HABITS,
    MAX_VALUES,
    GptSamples,
    loads_as_megatron_lm,
    num_values,
    slope,
    time_loading,
    time_part,
)
from pipette_launch.probe.instruments import (
    CHECK_EVERY_S,
    CHECK_REPEATS,
    USUAL_CORE_S,
    CoreSpeed,
    CpuStopwatch,
    CudaStopwatch,
)
from pipette_patches.workload import Part

CASE = ComputeCase(tp=1, cp=1, micro_batch_size=1)
ENTRY_S, FORWARD_S, INPUT_S, WEIGHT_S, AGAIN_S = 0.5, 1.0, 1.25, 0.75, 1.5


class Core:
    """Takes the next of these times for all computations of a check, and waits on request."""

    def __init__(self, *checks_s: float, first_s: float = 0.0) -> None:
        self.times_s = iter(
            [first_s or check_s if not turn else check_s for check_s in checks_s for turn in range(CHECK_REPEATS)]
        )
        self.computed_s = self.now_s = 0.0
        self.speed = CoreSpeed(self.work, clock=lambda: self.now_s, computed=lambda: self.computed_s)

    def work(self) -> None:
        """Compute."""
        self.computed_s += next(self.times_s)


@dataclass
class FakeClock:
    """A clock that the parts move, and a stopwatch."""

    now_s: float = 0.0
    lengths: list[int] = field(default_factory=list)

    def mark(self) -> float:
        """Note a moment."""
        return self.now_s

    def seconds(self, before: float, after: float) -> float:
        """The time between two."""
        return after - before

    def check_speed(self) -> None:
        """It is always equally fast."""

    def keep_share(self) -> None:
        """Nobody takes any."""

    def stretch(self) -> float:
        """Nobody takes time away."""
        return 1.0


class Pass(torch.autograd.Function):
    """Moves the clock in the backward by `seconds`."""

    @staticmethod
    def forward(
        ctx: object, flow: torch.Tensor, weight: torch.Tensor, clock: FakeClock, seconds: float
    ) -> torch.Tensor:
        """Keep the time of the backward."""
        ctx.told = (clock, seconds)  # type: ignore[attr-defined]
        return flow + 0 * weight

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Take that long."""
        clock, seconds = ctx.told  # type: ignore[attr-defined]
        clock.now_s += seconds + (WEIGHT_S if ctx.needs_input_grad[1] else 0.0)  # type: ignore[attr-defined]
        return gradient, torch.zeros(1), None, None


def part_on(clock: FakeClock, *, chains: bool = True, scale: float = 1.0) -> Part:
    """Return a layer with exact times, plus half a second to enter each direction."""
    source, weight = torch.ones(1, requires_grad=True), torch.nn.Parameter(torch.ones(1))

    def chain(length: int, extra_s: float) -> torch.Tensor:
        clock.lengths.append(length)
        clock.now_s += (ENTRY_S + length * FORWARD_S) * scale
        flow = Pass.apply(source, torch.zeros(1), clock, ENTRY_S * scale)
        for _ in range(length):
            flow = Pass.apply(flow, weight, clock, INPUT_S * scale + extra_s)
        return flow  # type: ignore[no-any-return]

    return Part(
        name="layer",
        parameters=(weight,),
        source=source,
        forward=lambda length: chain(length, 0.0),
        chains=chains,
        accumulating=contextlib.nullcontext,
        recomputed=lambda length: chain(length, AGAIN_S),
    )


def timed(part: Part, clock: FakeClock, *, again: bool = True, **changes: float) -> ComputeTime:
    """Time a part with CPU habits and any length of layers."""
    habits = timing.replace(HABITS["cpu"], **{"long_layer_s": 100.0, **changes})  # type: ignore[arg-type]
    return time_part(part, CASE, slot=3, stopwatch=clock, habits=habits, again=again)


def test_what_entering_costs_is_nobodys() -> None:
    """The times of a layer are exact, although each chain takes half a second more."""
    clock = FakeClock()
    found = timed(part_on(clock), clock)

    assert (FORWARD_S, INPUT_S, WEIGHT_S) == (
        found.forward.median_s,
        found.input_grad.median_s,
        found.weight_grad.median_s,
    )
    assert found.recompute is not None
    assert AGAIN_S == found.recompute.median_s
    assert 3 == found.slot


def test_warmups_are_kept_and_kept_apart() -> None:
    """Warm-ups are a short turn and a turn of both lengths; then at least five values count."""
    clock = FakeClock()
    found = timed(part_on(clock), clock)

    assert (FORWARD_S + ENTRY_S, FORWARD_S) == found.forward.warmup_s
    assert 5 == len(found.forward.values_s) == len(found.weight_grad.values_s)
    assert {1, 3} == set(clock.lengths)


def test_a_long_layer_and_a_part_without_a_chain_are_timed_singly() -> None:
    """A layer of seconds, and a head, run in short chains only."""
    clock = FakeClock()
    long = timed(part_on(clock), clock, long_layer_s=1.0)
    head = timed(part_on(clock, chains=False), clock)

    assert {1} == set(clock.lengths)
    assert FORWARD_S + ENTRY_S == long.forward.median_s == head.forward.median_s


def test_a_part_without_a_chain_runs_forward_and_backward_in_turn() -> None:
    """On a GPU a head runs twice, and a layer with a CUDA graph two and six times: each time is that of one run."""
    clock = FakeClock()
    head = part_on(clock, chains=False)
    found, graphed = (
        time_part(part, CASE, slot=0, stopwatch=clock, habits=timing.replace(HABITS["cuda"], long_layer_s=long_s))
        for part, long_s in ((timing.replace(head, name="head"), 100.0), (head, 100.0))
    )

    assert {1} == set(clock.lengths)
    assert FORWARD_S + ENTRY_S == found.forward.median_s == graphed.forward.median_s
    assert INPUT_S + WEIGHT_S + ENTRY_S == found.input_grad.median_s + found.weight_grad.median_s


def test_recompute_is_timed_where_it_is_asked_for() -> None:
    """Without the request, recompute is None, not 0."""
    clock = FakeClock()

    assert timed(part_on(clock), clock, again=False).recompute is None


def test_less_time_takes_fewer_values_but_three() -> None:
    """Cases other than the reference get a tenth of the time; short runs still have many values."""
    hasty = HABITS["cpu"].hastier(10)

    assert 3 == num_values(1.0, hasty)
    assert 3 == num_values(0.01, hasty)
    assert MAX_VALUES == num_values(1e-6, hasty)


def test_a_gpus_chain_is_long_before_it_counts() -> None:
    """Two layers keep the device busy while the host runs ahead; six show the cost of four more."""
    assert (2, 6) == HABITS["cuda"].chains


def noisy(rng: random.Random, seconds: float, drift: float) -> float:
    """Disturb a run: usually by a tenth, and by much more once in twenty."""
    spike = rng.expovariate(2.0) if rng.random() < 0.05 else 0.0
    return seconds * (1 + drift + 0.1 * rng.gauss(0, 1) / seconds**0.5) * (1 + spike)


def errors(entry_s: float, turns: int) -> tuple[float, float, float]:
    """Return the root mean square errors for a layer of one second: single runs, slope of medians, median of slopes."""
    rng = random.Random(7)
    single, of_medians, median_of = [], [], []
    for _ in range(300):
        drift, short, long, alone = 0.0, [], [], []
        for _ in range(turns):
            drift = 0.9 * drift + 0.044 * rng.gauss(0, 1)
            short.append(noisy(rng, 1 + entry_s, drift))
            long.append(noisy(rng, 3 + entry_s, drift))
            alone += [noisy(rng, 1 + entry_s, drift) for _ in range(round((4 + 2 * entry_s) / (1 + entry_s)))]
        single.append(statistics.median(alone) - 1)
        of_medians.append((statistics.median(long) - statistics.median(short)) / 2 - 1)
        median_of.append(statistics.median(slope((1, 3), pair) for pair in zip(short, long, strict=True)) - 1)
    one, two, three = (statistics.fmean(error**2 for error in each) ** 0.5 for each in (single, of_medians, median_of))
    return one, two, three


def test_the_median_of_slopes_is_no_worse_than_the_slope_of_medians() -> None:
    """With drift and disturbed runs; and better than single runs if entering costs a tenth."""
    single, of_medians, median_of = errors(entry_s=0.1, turns=11)

    assert median_of < 1.05 * of_medians
    assert median_of < single
    # Without a cost of entering, slopes scatter more than single runs.
    single, _, median_of = errors(entry_s=0.0, turns=11)
    assert single < median_of < 2 * single


def test_preemption_is_counted_on_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs compute for 1 s in 1 s and in 3 s: both count 1 s, and all times stretch by 2."""
    walls, threads = deque([0.0, 1.0, 5.0, 8.0]), deque([0.0, 1.0, 1.0, 2.0])
    monkeypatch.setattr(timing.time, "perf_counter", walls.popleft)
    monkeypatch.setattr(timing.time, "thread_time", threads.popleft)
    stopwatch = CpuStopwatch()
    marks = [stopwatch.mark() for _ in range(4)]
    monkeypatch.undo()

    assert 1.0 == stopwatch.seconds(marks[0], marks[1])
    assert 1.0 == stopwatch.seconds(marks[2], marks[3])
    assert 2.0 == stopwatch.stretch()


def test_others_share_counts_while_all_work() -> None:
    """The share of a core counts while both slots work, not after one of them is done."""
    stopwatch = CpuStopwatch()
    stopwatch.seconds((0.0, 0.0), (6.0, 3.0))
    stopwatch.keep_share()

    assert 3.0 == stopwatch.seconds((6.0, 3.0), (9.0, 6.0))
    assert 2.0 == stopwatch.stretch()


def test_times_are_those_of_a_usual_core() -> None:
    """A core at half speed makes no run longer; its usual speed is in the stretch."""
    core = Core(USUAL_CORE_S, 2 * USUAL_CORE_S, 2 * USUAL_CORE_S)
    stopwatch = CpuStopwatch(core.speed)
    found = []
    for _ in range(3):
        core.now_s += CHECK_EVERY_S
        stopwatch.check_speed()
        found.append(stopwatch.seconds((0.0, 0.0), (6.0, 3.0)))

    assert pytest.approx([3.0, 1.5, 1.5]) == found
    assert pytest.approx(2 * 2.0) == stopwatch.stretch()


class FakeEvent:
    """A CUDA event of a device at the time of the simulated clock."""

    clock = FakeClock()

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Note the time."""
        self.at_s = FakeEvent.clock.now_s

    def synchronize(self) -> None:
        """All work is done."""

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds, as CUDA has them."""
        return (end.at_s - self.at_s) * 1e3


def test_events_tell_seconds_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same layer has exact times from events, in chains of two and six."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.clock = clock = FakeClock()
    habits = timing.replace(HABITS["cuda"], long_layer_s=100.0)
    found = time_part(part_on(clock), CASE, slot=0, stopwatch=CudaStopwatch(), habits=habits)

    assert pytest.approx([FORWARD_S, INPUT_S, WEIGHT_S]) == [
        samples.median_s for samples in (found.forward, found.input_grad, found.weight_grad)
    ]
    assert {2, 6} == set(clock.lengths)
    assert 1 + 5 + 1 == 1 + len(found.forward.warmup_s)


@given(seconds=st.floats(0, 100))
def test_the_number_of_values_is_bounded(seconds: float) -> None:
    """Long runs have at least a few values, short runs at most MAX_VALUES."""
    assert HABITS["cpu"].min_values <= num_values(seconds, HABITS["cpu"]) <= MAX_VALUES


@given(lengths=st.sampled_from([(1, 3), (2, 6)]), entry_s=st.floats(0, 10), layer_s=st.floats(0, 10))
def test_the_slope_is_the_layer(lengths: tuple[int, int], entry_s: float, layer_s: float) -> None:
    """The cost of entering does not matter."""
    assert pytest.approx(layer_s, abs=1e-9) == slope(lengths, [entry_s + length * layer_s for length in lengths])


def test_noise_makes_no_layer_negative() -> None:
    """A longer chain that took less time gives 0."""
    assert 0.0 == slope((1, 3), (2.0, 1.0))


def test_a_check_is_the_median_of_a_few() -> None:
    """The first repeat has cold caches."""
    core = Core(2 * USUAL_CORE_S, first_s=9.0)
    assert 1.0 == core.speed.now == core.speed.usual
    core.speed.check()

    assert pytest.approx(2.0) == core.speed.now


def test_a_check_holds_for_a_while() -> None:
    """A recent check counts, because a check costs time; the usual pace is the median of all checks."""
    core = Core(USUAL_CORE_S, 3 * USUAL_CORE_S, 2 * USUAL_CORE_S)
    for now_s in (0.0, CHECK_EVERY_S / 2, CHECK_EVERY_S, 1.5 * CHECK_EVERY_S):
        core.now_s = now_s
        core.speed.check()
    assert pytest.approx(3.0) == core.speed.now
    core.now_s = 2 * CHECK_EVERY_S
    core.speed.check()

    assert pytest.approx(2.0) == core.speed.now
    assert pytest.approx(2.0) == core.speed.usual


def test_a_real_core_takes_some_milliseconds() -> None:
    """A check takes more than nothing and less than a tenth of a second."""
    speed = CoreSpeed()
    speed.check()

    assert 0.05 < speed.now < 60


LAYER_S = 3.0
STAGE_FORWARD_S, BACKWARD_S = 1.0, 2.0


class Stage:
    """A layer beside a loader whose processes may slow it down while they compute."""

    def __init__(self, clock: FakeClock, *, wait_s: float, steals_s: float = 0.0) -> None:
        self.clock = clock
        self.wait_s = wait_s
        self.steals_s = steals_s
        self.ready = 4
        self.is_loading = False

    def load(self) -> None:
        """Take a batch: what lies ready costs nothing."""
        self.clock.now_s += 0.0 if self.ready else self.wait_s
        self.ready = max(self.ready - 1, 0)
        self.is_loading = True

    def sleep(self, seconds: float) -> None:
        """Pause; the loader fills its queue."""
        self.clock.now_s += seconds
        self.ready, self.is_loading = 4, False

    def forward(self, times: int) -> int:
        """Run the layer."""
        self.clock.now_s += LAYER_S * times + (self.steals_s if self.is_loading else 0.0)
        return times

    def backward(self, _output: int) -> None:
        """Run it backward, in no time."""

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add up no gradients."""
        yield


def found_s(stage: Stage) -> float:
    """Return the measured seconds."""
    return time_loading(stage, stage.load, ahead=4, clock=lambda: stage.clock.now_s, sleep=stage.sleep)  # type: ignore[arg-type]


def test_what_the_stage_waits_counts_once_nothing_lies_ready() -> None:
    """Batches that were ready after a pause do not count."""
    assert pytest.approx(0.5) == found_s(Stage(FakeClock(), wait_s=0.5))


def test_what_the_loader_takes_from_the_layer_counts() -> None:
    """If the queue is always full, the loader slows the layer, not the call."""
    assert pytest.approx(0.25) == found_s(Stage(FakeClock(), wait_s=0.0, steals_s=0.25))


def test_a_loader_on_cores_of_its_own_costs_nothing() -> None:
    """Such a loader neither delays the stage nor slows the layer."""
    assert 0.0 == found_s(Stage(FakeClock(), wait_s=0.0))


def test_samples_are_those_of_megatrons_gpt_dataset() -> None:
    """Labels are the next tokens, and the mask hides later tokens."""
    sample = GptSamples(num_samples=2, seq_length=3, has_mask=True)[1]

    assert [1, 2, 3] == sample["tokens"].tolist()
    assert [2, 3, 4] == sample["labels"].tolist()
    assert [[[False, True, True], [False, False, True], [False, False, False]]] == sample["attention_mask"].tolist()
    assert (3,) == sample["loss_mask"].shape
    assert torch.int64 == sample["position_ids"].dtype
    assert "attention_mask" not in GptSamples(num_samples=2, seq_length=3, has_mask=False)[0]


def test_only_the_loader_of_megatron_lms_own_trainer_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Megatron-LM has a script beside `megatron.training`; `external` is the user's own loader."""
    found = {"megatron.training": SimpleNamespace(origin=str(tmp_path / "megatron" / "training" / "__init__.py"))}
    monkeypatch.setattr(timing.importlib.util, "find_spec", found.get)
    external = tiny_job(performance_flags=("--dataloader-type external",))

    assert not loads_as_megatron_lm(tiny_job())
    (tmp_path / "pretrain_gpt.py").touch()
    assert loads_as_megatron_lm(tiny_job())
    assert not loads_as_megatron_lm(external)
    found.clear()
    assert not loads_as_megatron_lm(tiny_job())
