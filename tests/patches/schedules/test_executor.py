"""Training under schedules that Megatron lacks gives the numbers of Megatron's own schedule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipette_launch.cost.pipeline.live_activations import peak_live_bytes
from pipette_launch.cost.pipeline.named_schedules import named_schedule

pytestmark = [pytest.mark.timeout(400), pytest.mark.processes]
ROOT = Path(__file__).parents[3]
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DEEP = {"pp": 4, "microbatches": 8}
FOLDED = {"pp": 4, "vpp": 2, "layers": 8, "microbatches": 8, "named_weights": True}
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {**DEEP, "schedule": {"name": "1f1b"}},
    "eager": {**DEEP, "schedule": {"name": "eager-1f1b"}, "tied": True},
    "zb-h1": {**DEEP, "schedule": {"name": "zb-h1"}, "tied": True},
    "zb-1p": {**DEEP, "schedule": {"name": "zb-1p"}, "config": RECOMPUTE},
    "zb-2p": {**DEEP, "schedule": {"name": "zb-2p"}},
    "interleaved": {**DEEP, "vpp": 2, "layers": 8, "schedule": {"name": "interleaved-1f1b"}},
    "interleaved zb": {**DEEP, "vpp": 2, "layers": 8, "schedule": {"name": "interleaved-zb"}, "tied": True},
    "interleaved zb of 4": {**DEEP, "vpp": 4, "layers": 16, "schedule": {"name": "interleaved-zb"}},
    "gis": {**DEEP, "vpp": 2, "layers": 8, "schedule": {"name": "gis"}, "config": RECOMPUTE},
    "half gis": {**DEEP, "vpp": 2, "layers": 8, "schedule": {"name": "gis", "group_size": 2}},
    "tp": {"pp": 2, "tp": 2, "microbatches": 4, "schedule": {"name": "zb-h1"}, "tied": True},
    "sp": {
        "pp": 2,
        "tp": 2,
        "vpp": 2,
        "microbatches": 4,
        "schedule": {"name": "interleaved-zb"},
        "config": {"sequence_parallel": True},
    },
    "dp": {"pp": 2, "microbatches": 4, "schedule": {"name": "zb-1p"}, "overlap_grad_reduce": True},
    "dist-opt": {
        "pp": 2,
        "vpp": 2,
        "microbatches": 4,
        "schedule": {"name": "gis"},
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
    },
    "v-half": {**FOLDED, "schedule": {"name": "v-half"}},
    "v-zb": {**FOLDED, "schedule": {"name": "v-zb"}, "config": RECOMPUTE},
    "v-min": {**FOLDED, "schedule": {"name": "v-min"}},
    "1f1b-v": {**FOLDED, "schedule": {"name": "1f1b-v"}},
    "v with sp": {
        "pp": 2,
        "tp": 2,
        "vpp": 2,
        "microbatches": 4,
        "named_weights": True,
        "schedule": {"name": "v-half"},
        "config": {"sequence_parallel": True},
    },
    "v with dist-opt": {
        "pp": 2,
        "vpp": 2,
        "microbatches": 4,
        "named_weights": True,
        "schedule": {"name": "v-zb"},
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
    },
    "bf16": {"pp": 2, "microbatches": 4, "schedule": {"name": "zb-h1"}, "bf16": True, "distributed_optimizer": True},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """What each rank saw in each case."""
    folder = tmp_path_factory.mktemp("schedules")
    paths = (ROOT, ROOT / "patches", ROOT / "tests" / "patches")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
            *(ROOT / "tests" / "patches" / "schedules_worker.py", folder, json.dumps(list(CASES.values()))),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "TORCHDYNAMO_DISABLE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=380,
    )
    lines = [json.loads(line)["ranks"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(CASES) == len(lines), done.stderr[-4000:]
    return dict(zip(CASES, lines, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_stock(found: dict[str, list[dict[str, float]]], name: str) -> None:
    """To the last bit over three steps, and the losses of an evaluation after them; on a V within 1e-6.

    There clipping adds up the squares of gradients in another order, as other ranks hold them.
    """
    apart = [rank[figure] for rank in found[name] for figure in ("losses", "gradients")]

    assert max(apart) <= (1e-6 if CASES[name].get("named_weights") else 0.0)


@pytest.mark.parametrize("name", CASES)
def test_as_many_chunks_are_alive_as_simulated(found: dict[str, list[dict[str, float]]], name: str) -> None:
    """At the fullest moment of each rank, forwards that wait for their W included."""
    case = CASES[name]
    schedule = named_schedule(
        pp=case["pp"], vpp=case.get("vpp", 1), num_microbatches=case["microbatches"], **case["schedule"]
    )
    live = peak_live_bytes(schedule, [1] * schedule.num_stages)
    each = len(found[name]) // case["pp"]

    # RANK r is pipeline rank r // (tp * dp): pipelines come last in Megatron's order.
    assert [count for count in live for _ in range(each)] == [rank["live"] for rank in found[name]]


def test_steps_were_really_trained(found: dict[str, list[dict[str, float]]]) -> None:
    """The gradients compared are not all nothing, and the last rank has seen losses."""
    assert all(rank["largest"] > 0 for ranks in found.values() for rank in ranks)
    assert all(ranks[-1]["first_loss"] != ranks[-1]["last_loss"] for ranks in found.values())
