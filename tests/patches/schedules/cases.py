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
    "zb-1p with tied": {**DEEP, "schedule": {"name": "zb-1p"}, "tied": True},
    "zb-1p": {**DEEP, "schedule": {"name": "zb-1p"}, "config": RECOMPUTE},
    "tp": {"pp": 2, "tp": 2, "microbatches": 4, "schedule": {"name": "zb-1p"}, "tied": True},
    "sp": {
        "pp": 2,
        "tp": 2,
        "microbatches": 4,
        "schedule": {"name": "zb-1p"},
        "config": {"sequence_parallel": True},
    },
    "dp": {"pp": 2, "dp": 2, "microbatches": 4, "schedule": {"name": "zb-1p"}, "overlap_grad_reduce": True},
    "dist-opt": {
        "pp": 2,
        "dp": 2,
        "microbatches": 4,
        "schedule": {"name": "zb-1p"},
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
    },
    "v-half": {**FOLDED, "schedule": {"name": "v-half"}},
    "in streams": {**DEEP, "schedule": {"name": "zb-1p"}, "in_streams": True},
    "v in streams": {**FOLDED, "schedule": {"name": "v-half"}, "in_streams": True},
    "two ranks in streams": {
        "pp": 2,
        "dp": 2,
        "microbatches": 4,
        "schedule": {"name": "zb-1p"},
        "in_streams": True,
    },
    "v-zb": {**FOLDED, "schedule": {"name": "v-zb"}, "config": RECOMPUTE},
    "v-min": {**FOLDED, "schedule": {"name": "v-min"}},
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
        "schedule": {"name": "zb-1p"},
        "checks_first_step": True,
        "config": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    },
    "first step, broken": {**DEEP, "schedule": {"name": "zb-1p"}, "checks_first_step": True, "is_broken": True},
    "first step with dist-opt": {
        "pp": 2,
        "dp": 2,
        "microbatches": 4,
        "schedule": {"name": "zb-1p"},
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "checks_first_step": True,
    },
    "bf16": {
        "pp": 2,
        "dp": 2,
        "microbatches": 4,
        "schedule": {"name": "zb-1p"},
        "config": {"add_bias_linear": True},
        "bf16": True,
        "distributed_optimizer": True,
    },
}
"""All on four ranks."""

NAMES = ("zb-1p", "v-zb", "v-half", "v-min")


def grid() -> Iterator[tuple[str, Case]]:
    """Yield every schedule with 2 pipeline ranks in eight ways, and with 4 in four of them.

    Any two of TP, DP, distributed optimizer, overlapped reduction, tied embeddings and recompute meet in all four
    combinations (an orthogonal array: three columns and their sums); with 4 ranks over any two schedules in a row.
    """
    for (number, name), pp in itertools.product(enumerate(NAMES), (2, 4)):
        vpp = 1 if name == "zb-1p" else 2
        for one, two, three in itertools.product((0, 1), repeat=3):
            if pp == 4 and (one + two + three + number) % 2:
                continue
            tp, dp, distributed, overlap, tied, recompute = one, two, three, one ^ two, one ^ three, two ^ three
            case = {
                "pp": pp,
                "tp": 1 + tp,
                "dp": 1 + dp,
                "vpp": vpp if vpp > 1 else None,
                "layers": pp * vpp,
                "microbatches": 2 * pp,
                "schedule": {"name": name},
                "distributed_optimizer": bool(distributed),
                "overlap_grad_reduce": bool(overlap),
                "tied": bool(tied),
                "named_weights": vpp == 2,
                "config": RECOMPUTE if recompute else {},
            }
            ways = f"tp{1 + tp} dp{1 + dp}{' dist-opt' * distributed}{' overlap' * overlap}"
            ways += f"{' tied' * case['tied']}{' recompute' * recompute}"
            yield f"{name} pp{pp} {ways}", case
