"""Tests of device names and compute capabilities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.facts.accelerators import compute_capability, words_of


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NVIDIA A100-SXM4-40GB", ("A100", "SXM4", "40GB")),
        ("a100 sxm4 40 GiB", ("A100", "SXM4", "40GB")),
        ("h100sxm5", ("H100", "SXM5")),
        ("RTXPRO6000", ("RTX", "PRO", "6000")),
        ("NVIDIA RTX 6000 Ada Generation", ("RTX", "6000", "ADA")),
        ("", ()),
    ],
)
def test_names_are_taken_apart_into_words(name: str, words: tuple[str, ...]) -> None:
    """Hyphens, spaces and units do not matter."""
    assert words == words_of(name)


@given(st.text(max_size=40))
def test_words_of_words_are_the_same(name: str) -> None:
    """Splitting the words of a name again changes nothing."""
    words = words_of(name)

    assert words == words_of(" ".join(words))


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA H100 80GB HBM3", 9),
        ("NVIDIA H20", 9),
        ("NVIDIA H800 PCIe", 9),
        ("GH200 480GB", 9),
        ("a100-80gb", 8),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 8),
        ("NVIDIA A10G", 8),
        ("NVIDIA A30", 8),
        ("NVIDIA RTX A6000", 8),
        ("NVIDIA RTX A1000", 8),
        ("NVIDIA L4", 8),
        ("NVIDIA L40S", 8),
        ("NVIDIA GeForce RTX 4090", 8),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 8),
        ("NVIDIA RTX 6000 Ada Generation", 8),
        ("Tesla V100-SXM2-32GB", 7),
        ("Tesla T4", 7),
        ("Quadro RTX 6000", 7),
        ("NVIDIA TITAN RTX", 7),
        ("B200", 10),
        ("NVIDIA GB300", 10),
        ("NVIDIA GeForce RTX 5090", 12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 12),
        ("NVIDIA GB10", 12),
        ("NVIDIA Thor", 11),
        ("NVIDIA A1000", None),
        ("H2000", None),
        ("L400", None),
        ("AMD Instinct MI300X", None),
        ("Gaudi 2", None),
        ("", None),
    ],
)
def test_capabilities_are_known_by_the_chip(name: str, capability: int | None) -> None:
    """Names of people and drivers are known. A chip whose name only begins like a known one is unknown."""
    assert capability == compute_capability(name)
