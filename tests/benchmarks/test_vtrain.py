"""vTrain rows: draws stay within their share, and only rows that were not fitted to are scored."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.validation import vtrain
from benchmarks.validation.latency import Machines
from benchmarks.validation.options import DEFAULT_FILES
from pipette_launch.facts import Job, Layout, Recompute
from pipette_launch.facts.devices import device_named


@pytest.fixture(scope="module")
def samples() -> tuple[vtrain.Sample, ...]:
    """Every fifth row of the development data."""
    return vtrain.read(DEFAULT_FILES["vtrain"], 5)[1]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("fraction", [0.02, 0.1])
def test_draws_stay_within_their_share(samples: tuple[vtrain.Sample, ...], fraction: float, seed: int) -> None:
    """Drawn rows touch every stratum where there are enough; whole strata are whole."""
    drawn = vtrain.drawn_rows(samples, fraction, seed)
    strata = vtrain.whole_strata(samples, fraction, seed)

    assert int(fraction * len(samples)) == len(drawn)
    assert len(strata) <= fraction * len(samples)
    assert not {samples[place].stratum for place in strata} & {
        sample.stratum for place, sample in enumerate(samples) if place not in strata
    }
    if fraction == 0.1:
        assert {sample.stratum for sample in samples} == {samples[place].stratum for place in drawn}
    assert drawn == vtrain.drawn_rows(samples, fraction, seed)


def test_rows_become_jobs(tmp_path: Path) -> None:
    """Full recompute, hosts of 8; what contradicts itself or does not fill a host is left out with the reason."""
    head = "num_gpus,global_batch,micro_batch,hidden_size,attention_heads,num_layers,sequence_length,"
    head += "tensor_parallelism,data_parallelism,pipeline_parallelism,iteration_time_ms\n"
    rows = ["16,32,4,1024,16,24,1024,2,2,4,200", "8,32,4,1024,16,24,1024,2,2,4,200", "12,12,1,1024,16,24,1024,1,12,1,9"]
    (tmp_path / "rows.csv").write_text(head + "\n".join(rows), encoding="utf-8")

    _, (sample,), skipped = vtrain.read(tmp_path / "rows.csv")

    assert (
        Layout(
            tp=2,
            pp=4,
            dp=2,
            etp=2,
            micro_batch_size=4,
            recompute=Recompute(granularity="full", method="uniform", num_layers=1),
        )
        == sample.job.own
    )
    assert ((2, 8), 0.2) == (sample.machines, sample.step.step_s)
    assert ["tp x dp x pp is not the number of GPUs", "GPUs that do not fill hosts of 8"] == [why for why, _ in skipped]


def test_rows_that_were_fitted_to_are_not_scored(tmp_path: Path) -> None:
    """Of 20 rows at 10 %: 18 scored after the draw, all 20 with the built-in figures."""
    lines = DEFAULT_FILES["vtrain"].read_text(encoding="utf-8").splitlines()
    few = tmp_path / "few.csv"
    few.write_text("\n".join(lines[:22]), encoding="utf-8")

    found = vtrain.section(few, device_named("A100-80GB"), fraction=0.1, seed=0)
    scored = {line.method: line.scored for line in found.lines}

    assert 20 == scored["pipette, built-in figures"]
    assert 18 == scored["pipette, fitted to drawn rows"]


def test_nothing_of_the_host_is_added_to_these_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model gets a device that waits for no host between steps, as these times hold no such part."""
    lines = DEFAULT_FILES["vtrain"].read_text(encoding="utf-8").splitlines()
    few = tmp_path / "few.csv"
    few.write_text("\n".join(lines[:22]), encoding="utf-8")
    device = device_named("A100-80GB")
    seen: set[float] = set()

    def spy(job: Job, machines: Machines) -> float:
        seen.add(machines.device.efficiency.step_s)
        return 1.0

    monkeypatch.setattr(vtrain, "pipette", spy)
    vtrain.section(few, device, fraction=0.1, seed=0)

    assert device.efficiency.step_s > 0
    assert {0.0} == seen
