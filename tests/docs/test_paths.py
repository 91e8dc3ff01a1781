"""Paths that documents, docstrings and comments name, and the limits that documents repeat."""

from __future__ import annotations

import functools
import io
import posixpath
import re
import subprocess
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import PurePath

import pytest
from doc_pages import ROOT

from pipette_launch.facts import files

PACKAGES = ("agent", "cli", "cost", "facts", "launch", "megatron", "planning", "probe", "report", "search")
"""Packages of the product, which documents name without the folder of the product."""
FOLDERS = ("", "pipette_launch/", "patches/pipette_patches/", "patches/", "benchmarks/", "tests/")
"""Folders in which a named path may start, besides the folder of the text."""
ELSEWHERE = ("megatron/core/", "megatron/training/", "docs/user-guide/")
"""Beginnings of paths in Megatron-LM."""
RECORDS = ("CHANGELOG.md", "benchmarks/results/", "tests/fuzz/corpus/")
"""Texts of a date, which are not corrected when a file moves."""
ENDINGS = "py|md|json|jsonl|csv|sh|toml|html|js|css|cfg"


@functools.cache
def tracked() -> tuple[str, ...]:
    """Return the paths of all files of the repository."""
    ask = ["git", "ls-files"]
    done = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("the files of the repository are only known in a clone")
    return tuple(done.stdout.splitlines())


def prose(path: str) -> Iterator[str]:
    """Yield the text of a document, or the docstrings and comments of a module."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        yield text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.string.lstrip("rbRB").startswith('"""')
        if is_docstring or token.type == tokenize.COMMENT:
            yield token.string


@functools.cache
def named() -> re.Pattern[str]:
    """Return the form of a path that begins with a folder of the repository or with a package of the product."""
    tops = {path.split("/")[0] for path in tracked() if "/" in path}
    begins = "|".join(re.escape(top) for top in sorted({*tops, *PACKAGES}))
    return re.compile(rf"(?<![\w/.<$~-])((?:\.\./)*(?:{begins})/[\w./*-]*\.(?:{ENDINGS}))\b")


def exists(path: str, place: PurePath) -> bool:
    """Return true if the repository has a file with this path or pattern, from one of the folders."""
    wanted = [posixpath.normpath(str(place / path)), *(folder + path for folder in FOLDERS)]
    if "*" in path:
        return any(fnmatch(one, pattern) for one in tracked() for pattern in wanted)
    return not set(wanted).isdisjoint(tracked())


def test_each_named_path_exists() -> None:
    """A reader who follows a path in a document, docstring or comment finds a file."""
    lost = [
        f"{path}: {found}"
        for path in tracked()
        if path.endswith((".md", ".py")) and not path.startswith(RECORDS) and (ROOT / path).exists()
        for text in prose(path)
        for found in named().findall(text)
        if not found.startswith(ELSEWHERE) and not exists(found, PurePath(path).parent)
    ]

    assert [] == lost


def test_the_list_of_benchmarks_links_each_result() -> None:
    """A reader of `benchmarks/README.md` finds all recorded results."""
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    results = [path for path in tracked() if path.startswith("benchmarks/results/")]

    assert [] == [path for path in results if f"({path.removeprefix('benchmarks/')})" not in page]


def test_documents_name_the_limit_of_files() -> None:
    """The table of refused input gives the limit of the code in each row of documents, messages and tokenizers."""
    page = (ROOT / "docs" / "hostile_input.md").read_text(encoding="utf-8")

    assert [f"{files.MOST_BYTES >> 20} MiB"] * 3 == re.findall(r"more than (\d+ MiB)", page)
