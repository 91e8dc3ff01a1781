"""Which Megatron a script would import, and the environment that a layout needs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Layout

NO_CONNECTION_LIMIT = re.compile(r"\b(G?B[123]00|RTX PRO \d+ Blackwell|RTX 50\d0|Thor)\b")
"""Names of GPUs of capability 10 and later, where Megatron no longer asks for a single connection."""


def script_version(script: str, environ: Mapping[str, str]) -> str:
    """The Megatron that `script` (or a module of that name) would import, as `0.16.1`; nothing is imported.

    Looked for as Python does: beside the script (in the working directory for a module), on PYTHONPATH, then among the
    installed packages; at last in the folders above the script, which some of NVIDIA's examples add themselves.
    """
    path = Path(script)
    # Python puts the real folder of a linked script on its path.
    first = path.resolve().parent if path.is_file() else Path.cwd()
    # An empty entry is the working directory.
    entries = [Path(entry).absolute() for entry in environ.get("PYTHONPATH", "").split(os.pathsep)]
    for folder in (first, *entries):
        found = _checkout_version(folder)
        if found:
            return found
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        pass
    for folder in path.absolute().parents:
        found = _checkout_version(folder)
        if found:
            return found
    raise MegatronError(
        f"no Megatron is beside {script}, on PYTHONPATH, or installed; install megatron-core or set PYTHONPATH to a "
        f"checkout of Megatron-LM"
    )


def _checkout_version(folder: Path) -> str | None:
    """Version in the sources of megatron-core that lie in a folder, read as text."""
    try:
        text = (folder / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    except OSError:
        return None
    parts = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part) if all(parts) else None


def environment(layout: Layout, *, device_kind: str, device_name: str) -> dict[str, str]:
    """Variables that a worker of this layout must have, beyond those of torchrun.

    Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor or context parallelism before Blackwell, and on CPU too,
    where the CPU backend shows it a device without a capability of its own.
    """
    if layout.tp == 1 and layout.cp == 1:
        return {}
    if device_kind == "cuda" and NO_CONNECTION_LIMIT.search(device_name):
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
