"""Findings of `pipette doctor` on faked machines and on this one."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from gpu_rules.nvml import GIB, FakeNvml, install

from pipette_launch.cli import machine_checks as checks
from pipette_launch.cli.pipette import main
from pipette_launch.facts import files
from pipette_launch.facts.health import Checkup, Finding
from pipette_launch.report.measured import checkup_screen

ROOT = Path(__file__).parent.parent.parent


def examined(**changes: object) -> dict[str, Finding]:
    """Return the doctor's findings on this machine by their subject."""
    words = {"device": "auto", "gpus_per_node": None, "nodes": 1, "port": free_port(), "json": False}
    return {finding.what: finding for finding in checks.examine(Namespace(**{**words, **changes})).findings}


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def test_json_and_exit_code_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """The document lists all checks; the exit code is 1 only if a job would stop."""
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--device", "cpu", "--port", str(free_port()), "--json"])
    found = files.loads(Checkup, capsys.readouterr().out, "stdout")

    assert (0 if found.is_fit else 1) == caught.value.code
    assert {"Python", "torch", "megatron-core", "devices", "open files", "host name", "cache"} <= {
        finding.what for finding in found.findings
    }


@pytest.mark.parametrize("words", ["--port 99999", "--gpus-per-node 0", "--nodes -3"])
def test_sizes_that_make_no_sense_are_input_errors(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line has the flag and the value, with exit code 2."""
    flag, value = words.split()
    with pytest.raises(SystemExit) as end:
        main(["doctor", flag, value])

    assert 2 == end.value.code
    err = capsys.readouterr().err
    assert f"error: {flag} must be" in err
    assert err.rstrip().endswith(f"got {value}")


def test_what_stops_comes_first_and_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job on GPUs stops on a machine without GPUs."""
    install(monkeypatch, FakeNvml(0))
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--device", "cuda", "--port", str(free_port())])
    shown = " ".join(capsys.readouterr().out.split())

    assert 1 == caught.value.code
    assert shown.index("NVML shows no GPU to this process") < shown.index("Fine")
    assert "a job would stop here" in shown


def test_the_port_in_use_is_found() -> None:
    """Another job's store uses the port."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        number = int(other.getsockname()[1])

        assert "stops" == examined(device="cpu", port=number)[f"port {number}"].severity


def test_gpus_are_judged_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A held device, a narrow slot and a lost NVLink slow a job; persistence mode is counted over all devices."""
    nvml = install(monkeypatch, FakeNvml(3, {0: [SimpleNamespace(pid=os.getppid(), usedGpuMemory=30 * GIB)]}))
    nvml.answers = {("PcieWidth", 1): 4, ("PersistenceMode", 1): 0, ("PersistenceMode", 2): 0}
    nvml.used = GIB // 8
    found = examined(device="cuda")

    assert "3 x Test GPU" == found["devices"].value
    assert "holds 30.00 GiB" in found["device GPU-aaaa-0"].value
    assert "uses 4 of 16 PCIe lanes, its peers use 16" == found["device GPU-bbbb-1"].value
    assert "off on 2 of 3 GPUs" in found["persistence mode"].value
    assert {"slows"} == {
        found[what].severity for what in ("device GPU-aaaa-0", "device GPU-bbbb-1", "persistence mode")
    }
    assert "/dev/shm" in found


def test_a_lost_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other GPUs are examined and count as this machine's devices."""
    install(monkeypatch, FakeNvml(3)).lost = {1}
    found = examined(device="cuda")

    assert "2 x Test GPU" == found["devices"].value
    assert ("slows", "GPU 1 of 3 cannot be used (NVML: GPU is lost); reset it or reboot the node") == (
        found["GPUs"].severity,
        found["GPUs"].value,
    )


def test_too_many_workers_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU can be shared by any number of workers, a GPU cannot."""
    install(monkeypatch, FakeNvml(2))

    assert "4 workers for 2 visible GPUs" in examined(gpus_per_node=4)["devices"].value
    assert "stops" == examined(gpus_per_node=4)["devices"].severity
    assert "fine" == examined(device="cpu", gpus_per_node=3)["devices"].severity


@pytest.mark.parametrize(
    ("versions", "severity"),
    [
        ({"torch": "2.13.0+cpu", "megatron-core": "0.16.1"}, ["fine", "fine"]),
        ({"torch": "2.5.1", "megatron-core": "0.13.1"}, ["stops", "stops"]),
        ({"torch": "3.0.0", "megatron-core": "1.0"}, ["slows", "slows"]),
        ({"torch": "2.14.0a0+git1", "megatron-core": "0.17.0rc1"}, ["fine", "fine"]),
        ({"torch": "nightly", "megatron-core": None}, ["slows", "slows"]),
        ({"torch": None, "megatron-core": None}, ["stops", "slows"]),
    ],
)
def test_versions_are_compared_with_what_is_needed_and_known(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], severity: list[str]
) -> None:
    """Too old releases stop a job, untested ones may slow it; megatron-core may be missing."""
    monkeypatch.setattr(checks, "installed", versions.__getitem__)

    assert severity == [finding.severity for finding in checks.packages()]


def test_needed_versions_are_those_of_the_package() -> None:
    """setup.cfg and the doctor require the same versions."""
    text = (ROOT / "setup.cfg").read_text()

    assert all(f"{name}{needed}" in text for name, needed in checks.NEEDED.items())
    assert "python_requires = >=3.10" in text
    assert all(f"Python :: 3.{minor}" in text for minor in range(10, 14))


def test_an_untested_python_is_said() -> None:
    """A newer Python than all tested ones is a finding; this Python is tested."""
    assert ["slows", "fine"] == [one.severity for version in ("3.14.0", None) for one in checks.python(version)]


@pytest.mark.parametrize(
    ("built", "severity"), [("12.8", "fine"), ("12.2", "fine"), ("13.0", "stops"), (None, "stops")]
)
def test_torch_must_suit_the_driver(monkeypatch: pytest.MonkeyPatch, built: str | None, severity: str) -> None:
    """A driver for CUDA 12.4 runs all of 12, nothing of 13, and nothing at all for a torch without CUDA."""
    nvml = install(monkeypatch, FakeNvml(1))
    nvml.nvmlSystemGetCudaDriverVersion = lambda: 12040  # type: ignore[attr-defined]
    monkeypatch.setattr(checks, "_cuda_of_torch", lambda: built)
    (finding,) = checks.driver_for_torch()

    assert severity == finding.severity
    assert "the driver supports 12.4" in finding.value


def test_torchs_cuda_is_read_without_importing_it() -> None:
    """The file and torch have the same CUDA version."""
    import torch

    assert torch.version.cuda == checks._cuda_of_torch()


@pytest.mark.parametrize(("free", "severity"), [(64 << 20, "stops"), (512 << 20, "slows"), (8 << 30, "fine")])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, free: int, severity: str) -> None:
    """The usual 64 MiB of a container are too small for eight GPUs."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free >> 12, f_frsize=1 << 12))
    (finding,) = checks.shared_memory(8)

    assert severity == finding.severity


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    """A missing folder stops a job."""
    assert ["stops"] == [finding.severity for finding in checks.shared_memory(2, tmp_path / "shm")]


@pytest.mark.parametrize(
    ("files_open", "pinned", "infiniband", "severities"),
    [
        (65536, resource.RLIM_INFINITY, True, ["fine", "fine"]),
        (1024, 64 << 10, True, ["slows", "stops"]),
        (resource.RLIM_INFINITY, 64 << 10, False, ["fine"]),
    ],
)
def test_limits(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    files_open: int,
    pinned: int,
    infiniband: bool,
    severities: list[str],
) -> None:
    """Open files matter for large jobs, pinned memory only with InfiniBand."""
    told = {resource.RLIMIT_NOFILE: files_open, resource.RLIMIT_MEMLOCK: pinned}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (told[which], resource.RLIM_INFINITY))
    monkeypatch.setattr(checks, "INFINIBAND", tmp_path if infiniband else tmp_path / "none")
    (tmp_path / "mlx5_0").touch()

    assert severities == [finding.severity for finding in checks.limits()]


@pytest.mark.parametrize(
    ("addresses", "environ", "nodes", "severity"),
    [
        (["10.0.0.7"], {}, 2, "fine"),
        (["127.0.1.1"], {}, 2, "stops"),
        (["127.0.1.1", "::1"], {}, 1, "fine"),
        (["127.0.1.1", "10.0.0.7"], {}, 2, "fine"),
        (["127.0.1.1"], {"GLOO_SOCKET_IFNAME": "eth0"}, 2, "fine"),
        ([], {}, 2, "stops"),
        ([], {}, 1, "slows"),
    ],
)
def test_a_name_that_means_itself_on_every_node(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], environ: dict[str, str], nodes: int, severity: str
) -> None:
    """Gloo would send the loopback address to its peers; only a job of one node may use it."""
    monkeypatch.setattr(checks, "_resolved", lambda _: addresses)
    (finding,) = checks.host_name(environ, nodes)

    assert severity == finding.severity


@pytest.mark.parametrize(
    ("variable", "value", "severity"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "fine"),
        ("GLOO_SOCKET_IFNAME", "eth", "stops"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib9", "stops"),
        ("NCCL_SOCKET_IFNAME", "eth", "fine"),
        ("NCCL_SOCKET_IFNAME", "=eth", "stops"),
        ("NCCL_SOCKET_IFNAME", "ib,eth", "fine"),
        ("NCCL_SOCKET_IFNAME", "^docker", "fine"),
        ("NCCL_SOCKET_IFNAME", "ib", "stops"),
    ],
)
def test_named_interfaces_must_be_there(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, severity: str
) -> None:
    """Gloo takes whole names, NCCL their beginnings, `=` for whole ones and `^` for all others."""
    up = SimpleNamespace(isup=True)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo": up, "eth0": up, "ib9": SimpleNamespace(isup=False)})
    (finding,) = checks.interfaces({variable: value})

    assert severity == finding.severity


def test_without_variables_no_interface_is_asked_for() -> None:
    """The system reports the interfaces that are up."""
    assert [] == list(checks.interfaces({}))
    assert ["fine"] == [finding.severity for finding in checks.interfaces({"GLOO_SOCKET_IFNAME": "lo"})]


def test_folders_are_tried_and_left_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check does not create a missing cache; a read-only cache is a finding."""
    cache = tmp_path / "deep" / "cache"

    assert ["fine", "fine"] == [finding.severity for finding in checks.folders(cache)]
    assert ["slows", "fine"] == [finding.severity for finding in checks.folders(None)]
    assert [] == list(tmp_path.iterdir())

    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    assert ["slows", "stops"] == [finding.severity for finding in checks.folders(cache)]


def test_the_screen_says_what_was_not_looked_at() -> None:
    """The screen has three kinds of findings, the answer, and the checks that one machine cannot make."""
    findings = tuple(Finding(severity=one, what=one, value="1 B", advice="do it") for one in ("stops", "slows", "fine"))
    screen = checkup_screen(Checkup(host="n1", taken_at="now", findings=findings))

    assert ["Stops", "Slows", "Fine", "Answer"] == [
        line.split()[0] for line in screen.splitlines() if line[:1].isupper()
    ]
    assert "clocks that differ" in screen
    assert "• stops: 1 B; do it" in screen


@pytest.mark.parametrize(("modules", "named"), [("psutil", "psutil"), ("psutil,torch", "psutil torch")])
def test_missing_requirements_are_named(modules: str, named: str) -> None:
    """One line names all of them, with exit code 1."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({modules.split(',')}))\n"
        "from pipette_launch.cli.pipette import main\nmain(['doctor'])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)

    assert (1, "") == (done.returncode, done.stdout)
    assert f"; pip install {named}" in done.stderr
    assert 1 == len(done.stderr.splitlines())


@pytest.mark.parametrize(("devices", "said"), [(None, "is not set"), ("7", "is '7'")])
def test_no_gpu_is_told_with_what_hides_it(monkeypatch: pytest.MonkeyPatch, devices: str | None, said: str) -> None:
    """The finding shows CUDA_VISIBLE_DEVICES, also if it is not set."""
    install(monkeypatch, FakeNvml(1 if devices else 0), devices)

    assert f"(CUDA_VISIBLE_DEVICES {said})" in examined(device="cuda")["devices"].value


def test_a_missing_torch_is_not_called_one_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only finding about torch is that it is not installed."""
    install(monkeypatch, FakeNvml(1))
    monkeypatch.setattr(checks, "installed", lambda _: None)
    monkeypatch.setattr(checks, "driver_for_torch", lambda: pytest.fail("asked"))

    assert "torch and the driver" not in examined(device="cuda")


def test_the_doctor_needs_no_torch() -> None:
    """The doctor does not import torch, which may be missing."""
    code = (
        "import sys\nfrom pipette_launch.cli.pipette import main\n"
        "try:\n    main(['doctor', '--device', 'cpu', '--port', '0'])\n"
        "except SystemExit:\n    sys.exit(3 if 'torch' in sys.modules else 0)"
    )

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True).returncode
