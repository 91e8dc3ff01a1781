"""The nanotron sweep: rows become jobs, groups are ranked, and what is left out is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.validation.latency import Machines
from benchmarks.validation.lines import Line
from benchmarks.validation.nanotron import MemoryModel, section
from benchmarks.validation.nanotron_rows import COLUMNS, SHAPES, read, stage_layers
from benchmarks.validation.scores import Errors
from benchmarks.validation.tables import DataError
from pipette_launch.facts import Job
from pipette_launch.facts.known_devices import device_named

OK = {"model_B": "1.34", "nodes": "1", "mbs": "1", "grad_acc": "4", "dp": "8", "pp": "1", "tp": "1", "zero": "1"}
OK |= {"tok_s_gpu": "1000", "gpu_mem_GB": "40", "status": "ok"}
LOST = {"tok_s_gpu": "", "gpu_mem_GB": "", "status": "no_result"}


def file(folder: Path, *rows: dict[str, str]) -> Path:
    """A sweep; each row is OK with changes."""
    lines = [",".join(COLUMNS), *(",".join((OK | row)[name] for name in COLUMNS) for row in rows)]
    (folder / "sweep.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "sweep.csv"


def test_repeated_rows_are_one_configuration(tmp_path: Path) -> None:
    """The median of its measurements counts; a result beside a no_result makes it measured."""
    _, configurations, _ = read(file(tmp_path, {}, {"tok_s_gpu": "3000"}, LOST, {"tok_s_gpu": "2000"}))

    (only,) = configurations
    assert (True, 4, 3.0) == (only.is_measured, len(only.lines), only.spread)
    # 8 x 4 samples of 4096 tokens at 2000 tokens/s on each of 8 GPUs.
    assert 32 * 4096 / 16000 == only.step_s


def test_a_row_becomes_its_job(tmp_path: Path) -> None:
    """Degrees, ZeRO-1 as the distributed optimizer, the padded vocabulary exact, stages cut by nanotron's rule."""
    _, (item,), _ = read(file(tmp_path, {"dp": "1", "pp": "4", "tp": "2"}))
    own, model = item.job.own, item.job.model

    assert (2, 4, 1, True, True) == (own.tp, own.pp, own.dp, own.sequence_parallel, own.use_distributed_optimizer)
    assert ((6, 5, 5, 0), 131072, False) == (
        own.layers_per_chunk,
        model.padded_vocab_size(1),
        model.untie_embeddings_and_output_weights,
    )
    assert "1.34B, 1 node" == item.group


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.billions}B")
@pytest.mark.parametrize("stages", [1, 2, 4, 8, 16])
def test_stages_hold_every_layer_once(shape: object, stages: int) -> None:
    """Whole, never negative, and the head's weight keeps the last stage below the others."""
    counts = stage_layers(shape, stages)  # type: ignore[arg-type]

    assert (stages, shape.layers) == (len(counts), sum(counts))  # type: ignore[attr-defined]
    assert min(counts) == counts[-1] >= 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"model_B": "2.3"}, "the shape of a model of 2.3B is not known"),
        ({"nodes": "2"}, "dp x pp x tp is not 8 x nodes"),
        ({"dp": "1", "pp": "8"}, "nanotron needs grad_acc >= pp - 1"),
        ({"nodes": "8", "tp": "64", "dp": "1"}, "tp 64 does not divide 32 heads"),
    ],
)
def test_what_cannot_be_priced_has_a_reason(tmp_path: Path, row: dict[str, str], reason: str) -> None:
    """With the line."""
    assert ((reason, "line 2"),) == read(file(tmp_path, row))[2]


def test_a_bad_status_is_an_error(tmp_path: Path) -> None:
    """With file, line and column."""
    with pytest.raises(DataError, match=r"sweep.csv, line 2, column status: 'oom' is not one of ok, no_result"):
        read(file(tmp_path, {"status": "oom"}))


def test_a_model_that_knows_the_answer_scores_perfectly(tmp_path: Path) -> None:
    """And one that turns the order around scores its regret; the scale comes from the other group."""
    speeds = {"1": "1000", "2": "2000", "4": "4000"}
    rows = [{"mbs": mbs, "tok_s_gpu": speed} for mbs, speed in speeds.items()]
    more = [{**row, "model_B": "3.57", "gpu_mem_GB": ""} for row in rows]
    path = file(tmp_path, *rows, *more, {"mbs": "512", **LOST})
    device = device_named("H100-SXM")

    def perfect(job: Job, machines: Machines) -> float:
        assert (1, 8) == (machines.num_hosts, machines.devices_per_host)
        return job.batch.global_batch_size / job.own.micro_batch_size * 0.5

    def backwards(job: Job, machines: Machines) -> float:
        return perfect(job, machines) * job.own.micro_batch_size**2

    held = MemoryModel(estimate=lambda job: job.own.micro_batch_size * device.memory_bytes / 5)
    careful = MemoryModel(estimate=held.estimate, share=0.5)
    found = section(path, device, {"good": perfect, "bad": backwards}, {"bytes": held, "half": careful})
    lines = {(line.group, line.method): line for line in found.lines}

    assert [0.0, 1.0] == [lines["all groups", "good"].figures[name] for name in ("regret median", "Spearman median")]
    assert 3.0 == lines["all groups", "bad"].figures["regret median"]
    assert -1.0 == lines["1.34B, 1 node", "bad"].errors.spearman  # type: ignore[union-attr]
    assert lines["1.34B, 1 node", "good"].errors.largest < 1e-12  # type: ignore[union-attr]
    right = {"AUC": 1.0, "measured but predicted not to fit": 0, "no result but predicted to fit": 0}
    assert right == lines["fits or not", "bytes"].figures
    # A batch of 4 takes 80 % of the device: more than half.
    assert right | {"measured but predicted not to fit": 2} == lines["fits or not", "half"].figures
    assert 3 == lines["gpu_mem_GB", "bytes"].scored


def test_lines_have_names_of_their_own() -> None:
    """The ratchet finds a line by its key."""
    line = Line(data="d", group="g", method="m", quantity="q", scored=0)

    assert "d | g | m | q" == line.key
    assert isinstance(line.errors, (Errors, type(None)))
