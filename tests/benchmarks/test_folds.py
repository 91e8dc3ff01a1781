"""No twin of a row lies outside its family, and no family is torn apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from megatron_lines import job

from benchmarks.validation.folds import families, folds
from benchmarks.validation.workspace import Residual, fitted_bytes, stated_bytes
from pipette_launch.text import MIB

KEYS = st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=3), max_size=12)


@given(keys=KEYS)
def test_families_are_the_connected_parts(keys: list[set[int]]) -> None:
    """Brute force: spread the smallest number over shared keys until nothing changes."""
    expected = list(range(len(keys)))
    for _ in keys:
        for one, mine in enumerate(keys):
            for other, theirs in enumerate(keys):
                if mine & theirs:
                    expected[one] = expected[other] = min(expected[one], expected[other])

    assert tuple(expected) == families(keys)


@given(keys=KEYS, count=st.integers(1, 5))
def test_folds_hold_every_row_once_and_families_whole(keys: list[set[int]], count: int) -> None:
    """A partition, of at most so many parts, in which rows that share a key are in one part."""
    parts = folds(families(keys), count)

    assert list(range(len(keys))) == sorted(place for part in parts for place in part)
    assert len(parts) <= count
    part_of = {place: number for number, part in enumerate(parts) for place in part}
    assert all(part_of[one] == part_of[other] for one in part_of for other in part_of if keys[one] & keys[other])


def residual(family: int, gpu: str, size: float) -> Residual:
    """Of the usual implementation."""
    return Residual(family=family, implementation="transformer_engine", gpu=gpu, bytes=size)


def test_a_constant_never_comes_from_the_own_family() -> None:
    """The family's own residuals, however many, change nothing; each other family counts once."""
    others = [residual(1, "A100", 10), residual(1, "A100", 10), residual(2, "A100", 30), residual(3, "A100", 20)]
    own = [residual(0, "A100", 1e9)] * 50
    wanted = {"family": 0, "implementation": "transformer_engine", "gpu": "A100"}

    assert 20 == fitted_bytes(others, **wanted) == fitted_bytes(others + own, **wanted)


def test_an_unknown_gpu_takes_any_gpu_and_an_unknown_implementation_nothing() -> None:
    """Fewer than two families of the same GPU say too little."""
    known = [residual(1, "A100", 10), residual(2, "A100", 20), residual(3, "H100", 90)]

    assert 20 == fitted_bytes(known, family=0, implementation="transformer_engine", gpu="B200")
    assert 0 == fitted_bytes(known, family=0, implementation="local", gpu="A100")


def test_workspaces_follow_gpu_and_environment() -> None:
    """As the libraries' constants have them: cuBLAS as the environment says, TransformerEngine's by the GPU."""
    te = job("--transformer-impl transformer_engine")
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    assert [68 * MIB, 96 * MIB] == [stated_bytes(te, gpu, variables) for gpu in ("A100-80GB", "NVIDIA H100 80GB HBM3")]
    assert stated_bytes(te, "unknown", {}) == stated_bytes(te, "H100", {})
