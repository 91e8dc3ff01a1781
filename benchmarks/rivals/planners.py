"""Every rival behind one signature: `RANKINGS[name](job, measurements, options)` lists its choices, best first."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.rivals import amp, megatron_rules, pipette_planner, varuna
from benchmarks.rivals.pick import Ranking

RANKINGS: Mapping[str, Ranking] = {
    "amp": amp.ranking,
    "varuna": varuna.ranking,
    "pipette": pipette_planner.ranking,
    "megatron-rules": megatron_rules.ranking,
}
