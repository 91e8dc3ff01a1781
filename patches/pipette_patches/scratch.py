"""Copies of files, so that a script may write while it is played and the user's files stay as they are.

A file that the script writes, makes, renames or removes has a copy below a scratch folder. Later calls of the script
see the copy. A way to change a file that this module does not know ends at the audit hook of `play`, which refuses it.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import io
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
"""Flags of `os.open` that change a file."""
MOST_BYTES = 64 << 20
"""Largest size of a file that is copied."""
_OPEN, _OS_OPEN, _SCANDIR = io.open, os.open, os.scandir
_READ = ("access", "chdir", "lstat", "readlink", "stat")
_CHANGE = ("chmod", "truncate", "utime")


class Scratch:
    """The copies below one folder. `is_free` returns True for paths that the script may change in place."""

    def __init__(self, folder: str, is_free: Callable[[str], bool]) -> None:
        self._root, self._is_free = os.path.join(folder, "copies"), is_free
        self._removed: set[str] = set()

    def seen(self, path: Any) -> Any:
        """Return the path of the copy if there is one or if the script removed the file, else the path itself."""
        whole = self._whole(path)
        if whole is None:
            return path
        copy = self._root + whole
        return copy if self._is_hidden(whole) or os.path.lexists(copy) else path

    def writable(self, path: Any, *, keeps: bool) -> Any:
        """Return the path of a copy that the script may write, with the file's content if the copy `keeps` it.

        Folders and files above MOST_BYTES get no such copy, so the audit hook refuses to change them.
        """
        whole = self._whole(path)
        if whole is None:
            return path
        copy = self._root + whole
        if not os.path.lexists(copy) and os.path.isdir(os.path.dirname(whole)):
            has_content = keeps and os.path.lexists(whole)
            if has_content and not (os.path.isfile(whole) and os.path.getsize(whole) <= MOST_BYTES):
                return path
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            if has_content:
                shutil.copy2(whole, copy)
        return copy

    def entries(self, path: Any) -> list[os.DirEntry[str]]:
        """Return the entries of a folder: its copies, and its files that have no copy and were not removed."""
        whole = self._whole(path)
        if whole is None:
            return list(_SCANDIR(path))
        copies = self._root + whole
        has_copies = os.path.isdir(copies)
        found: list[os.DirEntry[str]] = list(_SCANDIR(copies)) if has_copies or self._is_hidden(whole) else []
        if self._is_hidden(whole):
            return found
        shadowed = {entry.name for entry in found}
        with contextlib.suppress(FileNotFoundError) if has_copies else contextlib.nullcontext():
            own = (one for one in _SCANDIR(whole) if os.path.join(whole, one.name) not in self._removed)
            found += [entry for entry in own if entry.name not in shadowed]
        return found

    def remove(self, original: Callable[..., None], path: Any, *, dir_fd: int | None = None) -> None:
        """Remove the copy of a file or folder, and hide the file or folder itself."""
        whole = self._whole(path)
        if whole is None or dir_fd is not None:
            original(path, dir_fd=dir_fd)
            return
        place = self.seen(path)
        if place != path:
            original(place)
        elif not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._removed.add(whole)

    def remove_tree(self, original: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
        """Remove the copies below a folder, and hide the folder itself."""
        whole = self._whole(path)
        if whole is None or not os.path.isdir(path):
            original(path, *args, **kwargs)
            return
        self._removed.add(whole)
        if os.path.isdir(self._root + whole):
            original(self._root + whole, *args, **kwargs)

    def rename(self, original: Callable[..., None], source: Any, target: Any) -> None:
        """Rename a copy, which is made first if the script has not written the file yet."""
        place = self.writable(source, keeps=True)
        original(place, self.writable(target, keeps=False))
        whole = self._whole(source)
        if whole is not None:
            self._removed.add(whole)

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as `open` does."""
        writes = bool(set(mode) & set("wax+"))
        place = self.writable(file, keeps="w" not in mode) if writes else self.seen(file)
        return _OPEN(place, mode, *args, **kwargs)

    def open_descriptor(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Open a file as `os.open` does."""
        if dir_fd is None:
            path = self.writable(path, keeps=not flags & os.O_TRUNC) if flags & WRITES else self.seen(path)
        return _OS_OPEN(path, flags, mode, dir_fd=dir_fd)

    def make_folder(self, original: Callable[..., None], path: Any, mode: int = 0o777, **options: Any) -> None:
        """Make a folder as `os.mkdir` does."""
        if options.get("dir_fd") is None:
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            path = self.writable(path, keeps=False)
        original(path, mode, **options)

    def link(self, original: Callable[..., None], source: Any, target: Any, **options: Any) -> None:
        """Make a symbolic link as `os.symlink` does."""
        original(source, self.writable(target, keeps=False), **options)

    def save(self, original: Callable[..., None], thing: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """Save as `torch.save` does, which opens a path past Python's functions."""
        if not isinstance(file, (str, os.PathLike)):
            original(thing, file, *args, **kwargs)
            return
        with self.open(file, "wb") as target:
            original(thing, target, *args, **kwargs)

    def replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield the module, the name and the successor of each function that the script calls for files."""
        yield builtins, "open", self.open
        yield io, "open", self.open
        yield os, "open", self.open_descriptor
        yield os, "scandir", lambda path=".": _Entries(self.entries(path))
        yield os, "listdir", lambda path=".": [entry.name for entry in self.entries(path)]
        yield shutil, "rmtree", functools.partial(self.remove_tree, shutil.rmtree)
        yield torch, "save", functools.partial(self.save, torch.save)
        functions: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
            (self.make_folder, ("mkdir",)),
            (self.link, ("symlink",)),
            (self.remove, ("remove", "rmdir", "unlink")),
            (self.rename, ("rename", "replace")),
        )
        for function, names in functions:
            for name in names:
                yield os, name, functools.partial(function, getattr(os, name))
        for translate, names in ((self.seen, _READ), (functools.partial(self.writable, keeps=True), _CHANGE)):
            for name in names:
                yield os, name, _with_first(translate, getattr(os, name))

    def _is_hidden(self, whole: str) -> bool:
        """Return True if the script removed the file or a folder above it."""
        return any(f"{whole}/".startswith(f"{each}/") for each in self._removed)

    def _whole(self, path: Any) -> str | None:
        """Return the absolute path; None for a descriptor, and for a file that the script may change in place."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        whole = os.path.abspath(os.fsdecode(path))
        return None if self._is_free(whole) else whole


class _Entries:
    """Entries of a folder, as `os.scandir` returns them."""

    def __init__(self, entries: list[os.DirEntry[str]]) -> None:
        self._left = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(self._left)

    def __enter__(self) -> _Entries:  # noqa: PYI034 typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._left = iter(())


def _with_first(translate: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(translate(path) if kwargs.get("dir_fd") is None else path, *args, **kwargs)

    return call


@contextlib.contextmanager
def writing_copies(scratch: Scratch) -> Iterator[None]:
    """Let Python's functions for files, and `torch.save`, read and write copies during the block."""
    with contextlib.ExitStack() as stack:
        for module, name, successor in [*scratch.replacements()]:
            stack.enter_context(mock.patch.object(module, name, successor))
        yield
