"""Asks the installed software, without importing it, whether it is what a job needs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pipette_launch.facts.health import Finding, Severity
from pipette_launch.probe.health.nvml import query, session

PYTHON = SpecifierSet(">=3.10,<3.14")
NEEDED = {"torch": SpecifierSet(">=2.6"), "megatron-core": SpecifierSet(">=0.14")}
KNOWN = {"torch": SpecifierSet("<2.16"), "megatron-core": SpecifierSet("<0.21")}
"""Releases that this one was made for; later ones may do."""

VersionOf = Callable[[str], "str | None"]


def installed(package: str) -> str | None:
    """The version of an installed package; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def python(version: str | None = None) -> Iterator[Finding]:
    """Compare this interpreter with those that are tested."""
    here = version or ".".join(map(str, sys.version_info[:3]))
    if Version(here) in PYTHON:
        yield Finding(severity="fine", what="Python", value=here)
    else:
        yield Finding(
            severity="slows", what="Python", value=f"{here}, tested is {PYTHON}", advice="use a tested release"
        )


def packages(version_of: VersionOf = installed) -> Iterator[Finding]:
    """Compare torch and megatron-core with what is needed and what is known."""
    for name, needed in NEEDED.items():
        found = version_of(name)
        if found is None:
            # A checkout beside the script, or on PYTHONPATH, does as well.
            severity: Severity = "stops" if name == "torch" else "slows"
            hint = "" if name == "torch" else ", or keep a checkout of Megatron-LM beside the script"
            advice = f"pip install '{name}{needed}'{hint}"
            yield Finding(severity=severity, what=name, value="not installed", advice=advice)
            continue
        yield _compared(name, found)


def driver_for_torch(cuda_of_torch: Callable[[], str | None] | None = None) -> Iterator[Finding]:
    """Compare the CUDA that torch is built for with what the driver supports."""
    built = (cuda_of_torch or _cuda_of_torch)()
    with session() as nvml:
        supported = query(nvml, "nvmlSystemGetCudaDriverVersion") if nvml is not None else None
    if supported is None:
        return
    at_most = f"{supported // 1000}.{supported % 1000 // 10}"
    if built is None:
        yield Finding(
            severity="stops",
            what="torch and the driver",
            value=f"torch is built without CUDA, the driver supports {at_most}",
            advice="install a torch wheel for CUDA, or use --pipette-device=cpu",
        )
    # Within one major version an older driver runs newer minor ones.
    elif int(built.split(".")[0]) > supported // 1000:
        yield Finding(
            severity="stops",
            what="torch and the driver",
            value=f"torch is built for CUDA {built}, the driver supports {at_most}",
            advice="install a newer driver, or a torch wheel for an older CUDA",
        )
    else:
        value = f"torch is built for CUDA {built}, the driver supports {at_most}"
        yield Finding(severity="fine", what="torch and the driver", value=value)


def _compared(name: str, found: str) -> Finding:
    try:
        version = Version(found)
    except InvalidVersion:
        return Finding(
            severity="slows", what=name, value=f"{found}, which is not a version number", advice="install a release"
        )
    if not NEEDED[name].contains(version, prereleases=True):
        advice = f"pip install '{name}{NEEDED[name]}'"
        return Finding(severity="stops", what=name, value=f"{found}, needed is {NEEDED[name]}", advice=advice)
    if not KNOWN[name].contains(version, prereleases=True):
        value = f"{found}, newer than this release knows ({KNOWN[name]})"
        return Finding(severity="slows", what=name, value=value, advice="plans may be refused; update pipette-launch")
    return Finding(severity="fine", what=name, value=found)


def _cuda_of_torch() -> str | None:
    """What `torch.version.cuda` says, read as text: importing torch takes seconds."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return None
    match = re.search(r"^cuda\b.*?=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None
