"""The functions of `import pipette_launch`, except `predict`."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT
from facts_for_tests import tiny_cluster, tiny_measurements
from megatron_lines import SMALL
from screens import choice, plan

import pipette_launch
from pipette_launch import api
from pipette_launch.errors import FileFormatError, PipetteError, UsageError
from pipette_launch.facts import Layout, files
from pipette_launch.facts.devices import DeviceFile

ONE = plan(tiny_cluster(2, 2), choice(Layout(dp=4), 1.0), choice(Layout(pp=4), 2.0), floor_s=0.8)


def test_the_examples_are_true() -> None:
    """All examples in docstrings are right, and there are some."""
    found = doctest.testmod(api)

    assert 0 == found.failed
    assert found.attempted >= 2


def test_the_examples_of_the_page_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """All examples of docs/api.md are right, run from the repository's root."""
    monkeypatch.chdir(ROOT)
    found = doctest.testfile(str(ROOT / "docs" / "api.md"), module_relative=False)

    assert 0 == found.failed
    assert found.attempted >= 7


def test_the_import_waits_for_nothing() -> None:
    """The import loads neither numpy nor torch nor our own modules before a function is used."""
    code = (
        "import sys, pipette_launch; found = {name for name in sys.modules if name.startswith('pipette_launch.')}; "
        "assert not found | {'numpy', 'torch'} & {*sys.modules}, found; assert pipette_launch.predict; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_there_and_explained() -> None:
    """Each name of `__all__` exists in package and module, with a docstring."""
    names = {*pipette_launch.__all__} - {"__version__"}

    assert names == {*api.__all__}
    assert all(getattr(pipette_launch, name).__doc__ for name in names)
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = pipette_launch.train


def test_files_are_loaded(tmp_path: Path) -> None:
    """Files can be read by path or string, and a wrong kind is refused."""
    measured = tiny_measurements(tiny_cluster())
    files.write(tmp_path / "cluster.json", measured)
    files.write(tmp_path / "a.plan.json", ONE)

    assert measured == pipette_launch.load_measurements(tmp_path / "cluster.json")
    assert ONE == pipette_launch.load_plan(str(tmp_path / "a.plan.json"))
    with pytest.raises(FileFormatError, match="expected"):
        pipette_launch.load_plan(tmp_path / "cluster.json")


def test_a_plan_is_made_for_what_was_measured(tmp_path: Path) -> None:
    """A file and its contents give the same plan, with a rank for each device and the fixed parts kept."""
    measured = tiny_measurements(tiny_cluster(2, 2))
    files.write(tmp_path / "cluster.json", measured)
    made = [
        pipette_launch.plan(SMALL, cluster=cluster, fix=["all"], megatron_version="0.16.1")
        for cluster in (str(tmp_path / "cluster.json"), measured)
    ]

    assert made[0].chosen == made[1].chosen == made[0].own
    assert 4 == len(made[0].chosen.placement)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "gpu and cluster are missing: name a device type or a measured cluster"),
        (
            {"gpu": "h100"},
            "world_size is missing: give this number, or the number of hosts and of devices on each host",
        ),
        ({"gpu": "h100", "nodes": 0}, "nodes must be at least 1"),
        ({"gpu": "h100", "gpus_per_node": 2.5}, "gpus_per_node must be a whole number"),
        (
            {"gpu": "h21", "nodes": 1},
            "unknown device 'h21'; did you mean H20? pipette devices lists",
        ),
        ({"gpu": ["h100"], "nodes": 1}, "gpu must be a name, a path or a DeviceFile, got ['h100']"),
        ({"gpu": "h100", "nodes": 1, "fix": ["tq"]}, "fix tq: no such part of a layout"),
        ({"gpu": "h100", "nodes": 1, "budget_s": -1}, "budget_s must be at least 0 seconds and finite"),
        ({"gpu": "h100", "nodes": 1, "arguments": "--num-layers 4"}, "the arguments must be a sequence of words"),
    ],
)
def test_complaints_about_a_plan_name_arguments(said: dict[str, Any], message: str) -> None:
    """Errors use Python's names for our arguments."""
    with pytest.raises(PipetteError) as caught:
        pipette_launch.plan(**{"arguments": SMALL, "megatron_version": "0.16.1", **said})

    assert str(caught.value).startswith(message)


@pytest.mark.processes
def test_this_host_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device of this host is measured and planned for."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'patches'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = (ROOT / "examples" / "tiny-gpt.flags").read_text().split()
    flags = "--standalone --nproc-per-node 1 --pipette-device cpu --pipette-budget 1"
    found = pipette_launch.measure([*flags.split(), str(ROOT / "examples" / "pretrain_gpt.py"), *words])

    assert 1 == len(found.cluster.hosts)
    assert found.compute
    assert (0,) == pipette_launch.plan(words, cluster=found).chosen.placement


def test_words_that_cannot_be_measured_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's own message is the error's text."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'patches'}")
    with pytest.raises(UsageError, match=r"^unknown flag --pipette-budgat; did you mean --pipette-budget"):
        pipette_launch.measure(["--pipette-budgat", "1", "train.py"])
    with pytest.raises(UsageError, match="the arguments must be a sequence of words"):
        pipette_launch.measure("train.py --lr 1")


def test_a_device_of_a_file_is_planned_and_predicted() -> None:
    """The device file works as a path and as contents."""
    path = ROOT / "examples" / "mi300x.json"
    planned = pipette_launch.plan(SMALL, gpu=path, nodes=1, fix=["tp", "pp"], budget_s=0.5, megatron_version="0.16.1")
    predicted = pipette_launch.predict(SMALL, gpu=files.read(path, DeviceFile), nodes=1, megatron_version="0.16.1")

    assert ("MI300X", "MI300X") == (planned.setting.device_name, predicted.device_name)
    assert [True, True] == [any("Taken from H100-SXM:" in note for note in one.notes) for one in (planned, predicted)]
