"""Readers of foreign input raise nothing but the project's own errors; `scripts/fuzz` tries more, by coverage."""

from __future__ import annotations

import pkgutil
import random
from importlib import import_module
from pathlib import Path

import pytest
from fuzz.mutate import changed
from fuzz.readers import DOCUMENTS, FOUND, READERS, SEEDS, read
from hypothesis import given, settings
from hypothesis import strategies as st

RUNS = 150


@pytest.mark.parametrize("name", READERS)
def test_what_is_well_is_read(name: str) -> None:
    """Else the other tests would try nothing."""
    READERS[name](SEEDS[name][0])


def test_every_kind_of_document_is_tried() -> None:
    """A new one needs an example in `readers.DOCUMENTS`."""
    kinds = set()
    for room in ("facts", "probe", "agent", "launch"):
        package = import_module(f"pipette_launch.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            things = vars(import_module(module.name)).values()
            kinds |= {thing.KIND for thing in things if isinstance(getattr(thing, "KIND", None), str)}

    assert kinds == set(DOCUMENTS)
    assert all(name == type(made).KIND for name, (made, _) in DOCUMENTS.items())


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=RUNS, deadline=None)
@given(rng=st.randoms(use_true_random=True))
def test_changed_documents(name: str, rng: random.Random) -> None:
    """Other values, fields and depths than whoever writes them would choose, and cuts of the text."""
    data = changed(SEEDS[name][0], rng)

    read(name, data)
    read(name, data[: rng.randrange(len(data))])


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=RUNS, deadline=None)
@given(data=st.binary(max_size=300), rng=st.randoms(use_true_random=False))
def test_any_bytes(name: str, data: bytes, rng: random.Random) -> None:
    """Alone, and in place of some bytes of what is well."""
    read(name, data)
    seed = rng.choice(SEEDS[name])
    place = rng.randrange(len(seed))
    read(name, seed[:place] + data + seed[place + rng.randrange(8) :])


FOUND_FILES = [path for path in sorted(FOUND.rglob("*")) if path.is_file()]


@pytest.mark.parametrize("path", FOUND_FILES, ids=[f"{path.parent.name}-{path.name[:20]}" for path in FOUND_FILES])
def test_what_a_fuzzer_found_stays_mended(path: Path) -> None:
    """Each input that a reader once failed on."""
    read(path.parent.name, path.read_bytes())
