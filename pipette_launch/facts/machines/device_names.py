"""Names of accelerators as people and drivers write them, taken apart into words."""

from __future__ import annotations

import re

Words = tuple[str, ...]

_NOISE = set("NVIDIA TESLA GEFORCE GPU TENSOR CORE GENERATION VOLTA TURING AMPERE GRACE HOPPER SUPERCHIP".split())
"""Words that change nothing."""
_ONE_WORD = (
    # RTX4090, RTXPRO6000, H100SXM5: several words.
    (re.compile(r"\b([GR]TX)(?=[A\dP])"), r"\1 "),
    (re.compile(r"(?<=\d)(?=SXM|PCIE|NVL\b|ADA\b)|(?<=\bPRO)(?=\d)"), " "),
    # 80 GB, 80G and 80GiB: one word.
    (re.compile(r"\b(\d+) ?(?:GB?|GIB)\b"), r"\1GB"),
)
_CAPABILITIES = {
    (12, 0): r"RTX 50[5-9]0|RTX PRO \d{4}|GB10",
    (11, 0): r"THOR",
    (10, 0): r"G?B[123]00",
    (9, 0): r"GH200|H20|H100|H200|H800",
    (8, 9): r"L2|L4|L20|L40|L40S|(RTX )?40[5-9]0|RTX \d{4} ADA",
    (8, 0): r"A2|A10|A10G|A16|A30|A40|A100|A800|RTX A\d{3,4}|A[456][05]00|(RTX )?30[5-9]0|ORIN",
    (7, 0): r"V100S?|T4G?|TITAN (RTX|V)|GV100|RTX 20[678]0|RTX [3-8]000",
}
"""Least capabilities by the words of the chip: the first that fits counts. Minor numbers matter for FP8 alone."""
_CHIP = {capability: re.compile(rf"(?<!\S)({chips})(?!\S)") for capability, chips in _CAPABILITIES.items()}


def words_of(name: str) -> Words:
    """Take a name apart: `NVIDIA A100-SXM4-40GB` and `a100_sxm4_40g` are A100, SXM4, 40GB."""
    plain = re.sub(r"[^A-Z0-9]+", " ", name.upper().replace("PCI-E", "PCIE"))
    for pattern, replacement in _ONE_WORD:
        plain = pattern.sub(replacement, plain)
    return tuple(word for word in plain.split() if word not in _NOISE)


def compute_capability(name: str) -> int | None:
    """Return the major number of a GPU's capability by its chip's name; None for a chip that is not known.

    Parts of a device (MIG), laptops and sizes of memory have the capability of their chip.
    """
    capability = chip_capability(name)
    return capability and capability[0]


def chip_capability(name: str) -> tuple[int, int] | None:
    """Return major and least minor number of a GPU's capability by its chip's name; None for an unknown chip."""
    plain = " ".join(words_of(name))
    return next((capability for capability, chip in _CHIP.items() if chip.search(plain)), None)
