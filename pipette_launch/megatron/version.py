"""Which release of Megatron a job runs: the one that its script would import, or the one that the user names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.flags import newest_release


def version_or_newest(given: str | None, script: str, environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the Megatron whose flags are read, and a note where it had to be guessed.

    Args:
        given: as the user wrote it, `0.16.1` or the name of a tag, `core_v0.16.1`; None = that of the script.
        script: the training script; it need not exist.
        environ: of the job's workers.

    """
    if given is not None:
        return given.removeprefix("core_").removeprefix("v"), ()
    try:
        return script_version(script, environ), ()
    except MegatronError:
        newest = f"{newest_release()}.0"
        return newest, (
            f"No Megatron is here: flags and defaults of {newest} are assumed; --megatron-version names another.",
        )


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
