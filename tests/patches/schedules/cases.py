"""Cases for the executor: a few for every run of the tests, and a grid for a long run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]
"""Options of `schedules_worker.train`; `schedule` names ours, and `dp` is 1 unless it says otherwise."""

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DEEP = {"pp": 4, "microbatches": 8}
FOLDED = {"pp": 4, "vpp": 2, "layers": 8, "microbatches": 8, "named_weights": True}
CASES: dict[str, Case] = {
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
    "dp": {"pp": 2, "dp": 2, "microbatches": 4, "schedule": {"name": "zb-1p"}, "overlap_grad_reduce": True},
    "dist-opt": {
        "pp": 2,
        "dp": 2,
        "vpp": 2,
        "microbatches": 4,
        "schedule": {"name": "gis"},
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
    },
    "v-half": {**FOLDED, "schedule": {"name": "v-half"}},
    "in streams": {**DEEP, "vpp": 2, "layers": 8, "schedule": {"name": "interleaved-zb"}, "in_streams": True},
    "v in streams": {**FOLDED, "schedule": {"name": "v-half"}, "in_streams": True},
    "two ranks in streams": {
        "pp": 2,
        "dp": 2,
        "vpp": 2,
        "microbatches": 4,
        "schedule": {"name": "gis"},
        "in_streams": True,
    },
    "v-zb": {**FOLDED, "schedule": {"name": "v-zb"}, "config": RECOMPUTE},
    "v-min": {**FOLDED, "schedule": {"name": "v-min"}},
    "1f1b-v": {**FOLDED, "schedule": {"name": "1f1b-v"}},
    "v with tied": {**FOLDED, "schedule": {"name": "v-zb"}, "tied": True},
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
        "dp": 2,
        "vpp": 2,
        "microbatches": 4,
        "named_weights": True,
        "schedule": {"name": "v-zb"},
        "tied": True,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
    },
    "first step": {
        **DEEP,
        "schedule": {"name": "zb-h1"},
        "checks_first_step": True,
        "config": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    },
    "first step, broken": {**DEEP, "schedule": {"name": "zb-h1"}, "checks_first_step": True, "is_broken": True},
    "first step with dist-opt": {
        "pp": 2,
        "dp": 2,
        "vpp": 2,
        "microbatches": 4,
        "schedule": {"name": "interleaved-zb"},
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "checks_first_step": True,
    },
    "bf16": {
        "pp": 2,
        "dp": 2,
        "microbatches": 4,
        "schedule": {"name": "zb-h1"},
        "config": {"add_bias_linear": True},
        "bf16": True,
        "distributed_optimizer": True,
    },
}
"""All on four ranks."""

SHAPES = (
    *((name, 1, None) for name in ("1f1b", "eager-1f1b", "zb-h1", "zb-1p", "zb-2p")),
    *((name, vpp, None) for name in ("interleaved-1f1b", "interleaved-zb") for vpp in (2, 4)),
    *(("gis", vpp, groups) for vpp in (2, 4) for groups in (1, 2)),
    *((name, 2, None) for name in ("v-zb", "v-half", "v-min", "1f1b-v")),
)
"""Schedule, chunks on each rank, and where it has groups into how many parts they cut the pipeline."""


def grid() -> Iterator[tuple[str, Case]]:
    """Yield every schedule with 2 pipeline ranks in eight ways, and with 4 in four of them.

    Any two of TP, DP, distributed optimizer, overlapped reduction, tied embeddings and recompute meet in all four
    combinations (an orthogonal array: three columns and their sums); with 4 ranks over any two schedules in a row.
    """
    for (number, (name, vpp, parts)), pp in itertools.product(enumerate(SHAPES), (2, 4)):
        for one, two, three in itertools.product((0, 1), repeat=3):
            if pp == 4 and (one + two + three + number) % 2:
                continue
            tp, dp, distributed, overlap, tied, recompute = one, two, three, one ^ two, one ^ three, two ^ three
            folded = name in ("v-zb", "v-half", "v-min", "1f1b-v")
            schedule = {"name": name} | ({"group_size": pp // parts} if parts else {})
            case = {
                "pp": pp,
                "tp": 1 + tp,
                "dp": 1 + dp,
                "vpp": vpp if vpp > 1 else None,
                "layers": pp * vpp,
                "microbatches": 2 * pp,
                "schedule": schedule,
                "distributed_optimizer": bool(distributed),
                "overlap_grad_reduce": bool(overlap),
                "tied": bool(tied),
                "named_weights": folded,
                "config": RECOMPUTE if recompute else {},
            }
            ways = f"tp{1 + tp} dp{1 + dp}{' dist-opt' * distributed}{' overlap' * overlap}"
            ways += f"{' tied' * case['tied']}{' recompute' * recompute}"
            yield f"{name}{f' of {pp // parts}' if parts else ''} pp{pp} vpp{vpp} {ways}", case
