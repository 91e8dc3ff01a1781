"""Which folder may be a cache, and which paths below it are followed."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TypeVar

from pipette_launch.errors import FileFormatError
from pipette_launch.facts import files

Kept = TypeVar("Kept", bound=files.Document)
logger = logging.getLogger(__name__)

NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
"""Keys are digests, and files have names of ours: no other folder can be meant."""


def distrust(root: Path) -> str:
    """Say why a folder is not believed, in one line; empty where it is, and where it is still to be made."""
    try:
        state = root.stat()
    except OSError:
        return ""
    if state.st_uid not in (os.geteuid(), 0):
        why = f"belongs to user {state.st_uid} and not to you"
    elif state.st_mode & 0o002:
        why = "may be written by everybody"
    else:
        return ""
    return f"the cache {root} {why}, so it is not used; name another folder, or change its owner or mode"


def inside(root: Path, *names: str) -> Path:
    """Return a path below a cache; raises FileFormatError where a name or a symbolic link leads out of it."""
    path = root.joinpath(*names)
    try:
        is_inside = path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):
        is_inside = False
    if not is_inside or not all(map(NAME.fullmatch, names)):
        raise FileFormatError(f"{str(path)!r}: leads out of the cache {root}; delete it")
    return path


def read_kept(kind: type[Kept], root: Path | None, *names: str) -> Kept | None:
    """Return a document of a cache; None where none was kept, and where it cannot be used, which is said."""
    if root is None:
        return None
    try:
        return files.read(inside(root, *names), kind)
    except FileFormatError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            logger.warning("%s", error)
        return None
