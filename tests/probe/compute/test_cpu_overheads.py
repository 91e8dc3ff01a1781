"""What waking and loading cost, on a clock that layer, loader and pauses move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from facts_for_tests import tiny_job
from probe.compute.test_timing import FakeClock

from pipette_launch.probe.compute import cpu_overheads
from pipette_launch.probe.compute.cpu_overheads import GptSamples, loads_as_megatron_lm, time_loading, time_wake

LAYER_S = 3.0
FORWARD_S, BACKWARD_S = 1.0, 2.0


class Stage:
    """A layer beside a loader whose processes make the layer slower while they compute, if they share its core."""

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
    """What is found."""
    return time_loading(stage, stage.load, ahead=4, clock=lambda: stage.clock.now_s, sleep=stage.sleep)  # type: ignore[arg-type]


def test_what_the_stage_waits_counts_once_nothing_lies_ready() -> None:
    """Batches of a queue that filled during a pause are no measure of what one takes."""
    assert pytest.approx(0.5) == found_s(Stage(FakeClock(), wait_s=0.5))


def test_what_the_loader_takes_from_the_layer_counts() -> None:
    """Where the queue is always full, the loader's processes cost the layer and not the call."""
    assert pytest.approx(0.25) == found_s(Stage(FakeClock(), wait_s=0.0, steals_s=0.25))


def test_a_loader_on_cores_of_its_own_costs_nothing() -> None:
    """It neither makes the stage wait nor the layer slower."""
    assert 0.0 == found_s(Stage(FakeClock(), wait_s=0.0))


def test_samples_are_those_of_megatrons_gpt_dataset() -> None:
    """Labels are the next tokens, and the mask says what a token may not see."""
    sample = GptSamples(num_samples=2, seq_length=3, has_mask=True)[1]

    assert [1, 2, 3] == sample["tokens"].tolist()
    assert [2, 3, 4] == sample["labels"].tolist()
    assert [[[False, True, True], [False, False, True], [False, False, False]]] == sample["attention_mask"].tolist()
    assert (3,) == sample["loss_mask"].shape
    assert torch.int64 == sample["position_ids"].dtype
    assert "attention_mask" not in GptSamples(num_samples=2, seq_length=3, has_mask=False)[0]


def test_only_the_loader_of_megatron_lms_own_trainer_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout beside the script has `megatron.training`, megatron-core alone has not; `external` is the user's."""
    found = {"megatron.training": object()}
    monkeypatch.setattr(cpu_overheads.importlib.util, "find_spec", found.get)
    external = tiny_job(performance_flags=("--dataloader-type external",))

    assert loads_as_megatron_lm(tiny_job())
    assert not loads_as_megatron_lm(external)
    found.clear()
    assert not loads_as_megatron_lm(tiny_job())


@dataclass
class Layer:
    """Takes exact times, each direction `cold_s` more after a wait, and `entry_s` to enter a row of layers."""

    clock: FakeClock
    cold_s: float
    entry_s: float = 0.0
    has_slept: bool = False

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.clock.now_s += seconds
        self.has_slept = True

    def forward(self, times: int) -> int:
        """Run a row of layers."""
        self._take(times * FORWARD_S + self.entry_s)
        return times

    def backward(self, times: int) -> None:
        """Run it backward."""
        self._take(times * BACKWARD_S)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add up no gradients."""
        yield

    def _take(self, seconds: float) -> None:
        self.clock.now_s += seconds + (self.cold_s if self.has_slept else 0.0)
        self.has_slept = False


def wake_s(cold_s: float, entry_s: float = 0.0) -> float:
    """What is found."""
    layer = Layer(FakeClock(), cold_s, entry_s)
    return time_wake(layer, layer.clock, layer.sleep)  # type: ignore[arg-type]


def test_both_directions_wake_and_sleep_does_not_count() -> None:
    """Beside a layer behind another, so that what entering costs is in it too."""
    assert pytest.approx(0.25) == wake_s(0.125)
    assert pytest.approx(0.5) == wake_s(0.125, entry_s=0.25)


def test_noise_does_not_make_it_negative() -> None:
    """A layer that is faster after waits costs nothing for them."""
    assert 0.0 == wake_s(-0.5)
