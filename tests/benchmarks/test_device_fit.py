"""Fitting a device model: planted parameters come back, and what the steps do not tell stays as it was."""

from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import tiny_job, tiny_model

from benchmarks.validation.case_factors import CaseFactor, shape_of
from benchmarks.validation.device_fit import PARAMETERS, MeasuredStep, adjusted, fit, predicted_s
from pipette_launch.errors import FactError
from pipette_launch.facts import Batch, ComputeCase, Job, Layout
from pipette_launch.facts.devices import KNOWN_DEVICES, DeviceSpec

A100 = KNOWN_DEVICES["A100-80GB"]
LAYOUTS = (
    Layout(dp=4),
    Layout(tp=4),
    Layout(pp=4),
    Layout(tp=2, pp=2),
    Layout(tp=2, dp=2),
    Layout(pp=2, dp=2),
    Layout(dp=4, micro_batch_size=4),
    Layout(tp=4, micro_batch_size=8),
)


def job(hidden_size: int) -> Job:
    """A GPT of 4 layers with 16 samples of 2,048 tokens a step."""
    model = tiny_model(
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        kv_channels=hidden_size // 4,
        seq_length=2048,
        vocab_size=4096,
        params_dtype="bf16",
    )
    return tiny_job(model=model, batch=Batch(global_batch_size=16))


def steps(device: DeviceSpec, *factors: CaseFactor, hidden_sizes: tuple[int, ...] = (256, 8192)) -> list[MeasuredStep]:
    """What the device model itself would measure."""
    unmeasured = [
        MeasuredStep(job=job(hidden), layout=layout, num_hosts=1, devices_per_host=4, step_s=1.0)
        for hidden in hidden_sizes
        for layout in LAYOUTS
    ]
    return [replace(step, step_s=predicted_s(step, device, factors)) for step in unmeasured]


def test_planted_device_is_found() -> None:
    """Small layers tell the launch, large ones the efficiency: both come back, and so do times that were not shown."""
    true_K = np.zeros(len(PARAMETERS))
    true_K[[PARAMETERS.index("matmul_share"), PARAMETERS.index("launch_s")]] = np.log([0.8, 2.0])
    truth = adjusted(A100, true_K)
    shown = steps(truth)

    found = fit(shown, A100, by_case=False)

    assert found.error_before > 0.3
    assert found.error_after < 0.005
    assert found.device.efficiency.launch_s == pytest.approx(2 * A100.efficiency.launch_s, rel=0.02)
    assert found.device.efficiency.matmul_share == pytest.approx(0.8 * A100.efficiency.matmul_share, rel=0.1)
    for step in steps(truth, hidden_sizes=(2048,)):
        assert predicted_s(step, found.device) == pytest.approx(step.step_s, rel=0.02)


def test_a_hung_run_is_no_property_of_the_device() -> None:
    """One step of sixteen took thirty times as long as it should: the others still say what the device is."""
    truth = adjusted(A100, np.where(np.array(PARAMETERS) == "launch_s", np.log(2.0), 0.0))
    shown = steps(truth)
    hung = [replace(shown[0], step_s=30 * shown[0].step_s), *shown[1:]]

    found = fit(hung, A100, by_case=False).device

    for step in shown:
        assert predicted_s(step, found) == pytest.approx(step.step_s, rel=0.05)


def test_what_was_not_exercised_stays() -> None:
    """Steps on one host say nothing of the links between hosts."""
    assert fit(steps(A100)[:4], A100, by_case=False).device.between_hosts == A100.between_hosts


def test_planted_shape_is_found() -> None:
    """One shape whose layers take 1.4 times what the curve has is told apart from the others."""
    odd = CaseFactor(
        model=shape_of(job(8192).model),
        case=ComputeCase(tp=1, cp=1, micro_batch_size=1),
        layer=1.4,
        ends=1.0,
    )
    shown = steps(A100, odd)
    found = fit(shown, A100)
    slowest = max(found.factors, key=lambda factor: factor.layer)

    assert (slowest.model, slowest.case) == (odd.model, odd.case)
    assert slowest.layer > 1.1
    assert found.error_after < 0.01 < found.error_before


def test_a_fit_is_the_same_twice() -> None:
    """Nothing in it is drawn at random."""
    assert fit(steps(A100)[:3], KNOWN_DEVICES["H100-SXM"]) == fit(steps(A100)[:3], KNOWN_DEVICES["H100-SXM"])


def test_device_says_that_it_was_fitted() -> None:
    """Its source goes into the notes of every plan."""
    assert fit(steps(A100)[:2], A100).device.source.endswith("Fitted to 2 measured steps.")


def test_shares_stop_at_1() -> None:
    """No fit makes a device faster than its peak."""
    assert adjusted(A100, np.full(len(PARAMETERS), 5.0)).efficiency.matmul_share == 1.0


def test_impossible_steps_are_refused() -> None:
    """No steps, a step in no time, and a step of other ranks than the hosts have."""
    with pytest.raises(FactError, match="at least one measured step"):
        fit([], A100)
    with pytest.raises(FactError, match="more than 0 s, got 0"):
        MeasuredStep(job=job(256), layout=Layout(), num_hosts=1, devices_per_host=1, step_s=0)
    with pytest.raises(FactError, match="a step of 4 ranks on 1 hosts of 8 devices"):
        MeasuredStep(job=job(256), layout=Layout(dp=4), num_hosts=1, devices_per_host=8, step_s=1)
    with pytest.raises(FactError, match="factors must be above 0"):
        CaseFactor(model=job(256).model, case=ComputeCase(tp=1, cp=1, micro_batch_size=1), layer=0, ends=1)
