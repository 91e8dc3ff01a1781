"""`pipette devices` lists the devices known to --gpu, and writes files for --gpu."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipette_launch.cli.pipette import main
from pipette_launch.facts import files
from pipette_launch.facts.devices import KNOWN_DEVICES, DeviceFile, DeviceFiles


def answer(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str, str]:
    """Return exit code, stdout and stderr of `pipette WORDS`."""
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    return caught.value.code, *capsys.readouterr()


def test_all_known_devices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """There is one line for each device; `--json` has the same devices."""
    code, out, err = answer("devices", capsys)
    heading, *lines = out.splitlines()

    assert (0, "") == (code, err)
    assert heading.startswith("device ")
    assert [name.lower() for name in KNOWN_DEVICES] == [line.split()[0] for line in lines]
    assert "h20                            95.00 GiB    148 TFLOP/s       360 GB/s        47 GB/s   8" in lines

    listed = files.loads(DeviceFiles, answer("devices --json", capsys)[1], "stdout").devices
    assert [*KNOWN_DEVICES] == [one.name for one in listed]


def test_one_device_shows_its_peaks_and_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    """Every name of the device finds it."""
    code, out, err = answer("devices NVIDIA-L40S", capsys)

    assert (0, "") == (code, err)
    assert "\nl40s " in out
    assert "fp32 91.6, fp16 362, bf16 362, fp8 733 TFLOP/s without sparsity" in out
    assert "NVIDIA's data sheet (L40S, without sparsity)" in out


def test_a_device_is_written_as_a_file_that_gpu_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`pipette predict --gpu FILE` reads a file of `pipette devices NAME --json`."""
    path = tmp_path / "mine.json"
    path.write_text(answer("devices h100-nvl --json", capsys)[1])

    assert "H100-NVL" == files.read(path, DeviceFile).spec().name
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    batch = "--vocab-size 1000 --tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 8"
    code, out, _ = answer(f"predict --gpu {path} --nodes 1 p.py {sizes} {batch} --train-iters 9 --bf16", capsys)
    assert 0 == code
    assert "8 ranks on 1 host x 8 H100-NVL" in out


def test_an_unknown_device_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the nearest devices, with exit code 2."""
    code, out, err = answer("devices hh200", capsys)

    assert (2, "") == (code, out)
    assert "pipette devices: error: unknown device 'hh200'; did you mean H200, GH200-96GB, H20, H100-SXM?" in err
