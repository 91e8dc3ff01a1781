"""A whole warm-up and a training on a real device."""

from pathlib import Path

import pytest
from end_to_end.jobs import MODEL, TRAINER, pipette

from pipette_launch.facts import Measurements, files

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
FLAGS = ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm", "--bf16"]


def test_a_warm_up_tells_context_and_workspaces_apart(tmp_path: Path) -> None:
    """One worker on one device measures its layers over NCCL's backend, writes them down, and leaves the device."""
    out = tmp_path / "cluster.json"
    words = ["--nproc-per-node=1", "--pipette-device=cuda", f"--pipette-probe={out}", "--pipette-budget=20"]

    done = pipette(tmp_path, *words, TRAINER, *MODEL, *FLAGS, "--train-iters", "4")

    assert 0 == done.code, done.err
    found = files.read(out, Measurements)
    assert "cuda" == found.cluster.device_kind
    assert {"layer", "embedding", "head"} <= {time.part for time in found.compute}
    assert found.overhead is not None
    assert found.overhead.alone_bytes > 100 << 20
    assert found.optimizer_s_per_parameter is not None
    assert "driver" in found.versions
    assert "still holds" not in done.err


def test_the_example_trains_on_the_device(tmp_path: Path) -> None:
    """From nothing to a trained model; torch's peak is printed, so the device was used."""
    words = ["--nproc-per-node=1", "--pipette-device=cuda", "--pipette-budget=20"]

    done = pipette(tmp_path, *words, TRAINER, *MODEL, *FLAGS, "--train-iters", "4")

    assert 0 == done.code, done.err
    assert 4 == len(done.losses)
    assert "max allocated" in done.out
