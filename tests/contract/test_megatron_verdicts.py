"""`predict` takes a command line where Megatron's parser and configuration do, over drawn lines of every release.

Megatron's verdicts are in `tests/data/megatron_verdicts.json`, made by `benchmarks/make_verdicts.py` from checkouts.
With MEGATRON_LM_DIR the checkout itself judges lines of other seeds.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from drawn_lines import draw

from pipette_launch.errors import PipetteError
from pipette_launch.megatron import read_job, script_version

DATA = json.loads((Path(__file__).parent.parent / "data" / "megatron_verdicts.json").read_text(encoding="utf-8"))
CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "")
FRESH = 200
"""Lines that a checkout judges anew."""
STRICTER = {
    "experts with tp > 1 need sequence parallelism": "the experts' first forward raises (moe_layer.py)",
    "--use-megatron-fsdp needs pp = 1": "its mesh over all ranks has no pipeline, and its wrapper fails",
    "--use-megatron-fsdp needs the distributed optimizer": "its shards without the optimizer's are not modelled",
    "--num-distributed-optimizer-instances needs the distributed": "the wrapper of the gradients asserts it",
    "--use-precision-aware-optimizer needs the distributed": "its states without shards are not modelled",
    "the distributed optimizer shards only Adam": "the optimizer asserts it when it is built",
    "before 0.17 uniform recompute takes units that divide": "the forward runs past the end of the chunk",
    "uniform recompute with multi-token prediction": "the first forward of a depth fails",
    "before 0.18 hybrid models have no full recompute": "their forward ignores it, which is not modelled",
    "the pattern of a hybrid model says where stages begin": "Megatron ignores the flag, which is not modelled",
    "context parallelism has no attention windows": "Transformer Engine's attention raises in the first forward",
    "unfused attention has no context parallelism": "Transformer Engine finds no backend in the first forward",
    "does not divide ffn_hidden_size": "Transformer Engine's layers assert it; a stand-in has no sizes",
    "contradict each other: --num-query-groups": "query groups that do not divide the heads fail in the first forward",
    "to more experts than the model has": "torch.topk raises in the first forward",
    "a pipeline of one rank has one stage": "Megatron would leave out layers without a word",
    "FP8 needs a width of Mamba's projection": "a middle stage fails, which the judge does not build",
    "not modelled": "nothing is known of such jobs, as the message says",
}
"""Part of our message, and why we refuse what passes Megatron's checks before its first step."""


def is_listed(message: str) -> bool:
    """Whether a refusal is one that is stricter on purpose."""
    return any(part in message for part in STRICTER)


def refusal(line: tuple[int, list[str]], version: str) -> str:
    """Our refusal of a line, as `predict` reads it; empty for a legal one."""
    world_size, words = line
    try:
        read_job(words, world_size=world_size, megatron_version=version, device_kind="cuda", for_prediction=True)
    except PipetteError as error:
        return str(error)
    return ""


def disagreements(
    lines: Sequence[tuple[int, list[str]]], verdicts: Sequence[str], version: str
) -> list[tuple[str, str, str]]:
    """Lines that Megatron and we judge differently, but for those that are listed.

    Args:
        lines: ranks and words.
        verdicts: of Megatron: `+` legal, `-` refused, `?` unknown.
        version: of Megatron.

    """
    found = []
    for line, verdict in zip(lines, verdicts, strict=True):
        message = refusal(line, version)
        if verdict == "?" or (verdict == "+") == (not message) or is_listed(message):
            continue
        found.append((f"Megatron {verdict}", message, f"{line[0]} ranks: {' '.join(line[1])}"))
    return found


@pytest.mark.parametrize("version", DATA["releases"])
def test_lines_are_those_that_megatron_judged(version: str) -> None:
    """The generator draws the same lines as when the verdicts were made."""
    rows = DATA["releases"][version]
    lines = [draw(seed, version) for seed in range(len(rows["verdicts"]))]

    assert rows["sha256"] == hashlib.sha256(json.dumps(lines).encode()).hexdigest(), "run benchmarks/make_verdicts.py"


@pytest.mark.parametrize("version", DATA["releases"])
def test_predict_takes_what_megatron_takes(version: str) -> None:
    """Every line that is legal there is legal here, and no other one, apart from listed kinds."""
    verdicts = DATA["releases"][version]["verdicts"]
    found = disagreements([draw(seed, version) for seed in range(len(verdicts))], verdicts, version)

    assert not found, "\n".join(map(str, found[:20]))


@pytest.mark.parametrize("version", DATA["releases"])
def test_both_directions_count(version: str) -> None:
    """About half of the lines are legal, and nearly all have a verdict."""
    counts = Counter(DATA["releases"][version]["verdicts"])
    total = counts.total()

    assert 0.35 * total < counts["+"] < 0.65 * total
    assert counts["?"] < 0.02 * total


def test_two_releases_have_two_thousand_lines() -> None:
    """They cover both ends of what is used today."""
    large = {version for version, rows in DATA["releases"].items() if len(rows["verdicts"]) >= 2_000}

    assert {"0.16.1", "0.20"} <= large


@pytest.mark.timeout(600)
def test_a_checkout_judges_other_lines_alike() -> None:
    """Lines that no verdict was kept of are judged alike, too."""
    if not CHECKOUT:
        pytest.skip("MEGATRON_LM_DIR names no checkout of Megatron-LM")
    version = script_version(f"{CHECKOUT}/pretrain_gpt.py", {})
    seed = random.randrange(1 << 20, 1 << 30)
    lines = [draw(seed + place, version) for place in range(FRESH)]
    found = disagreements(lines, judged(lines), version)

    assert not found, f"seeds from {seed}:\n" + "\n".join(map(str, found[:20]))


def judged(lines: Sequence[Any]) -> str:
    """Verdicts of the checkout, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("megatron_verdicts.py"))],
        input="\n".join(map(json.dumps, lines)),
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return "".join("+" if not answer else "?" if answer[0] in ("unknown", "died") else "-" for answer in answers)
