"""Every rival behind one signature: `RANKINGS[name](job, measurements, options)` lists its choices, best first."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.rivals import amp, megatron_rules, pipette_planner
from benchmarks.rivals.pick import Ranking
from benchmarks.rivals.placers import PLACERS, ranking_of
from benchmarks.rivals.varuna import ranking_by

RANKINGS: Mapping[str, Ranking] = {
    "amp": amp.ranking,
    "amp-pipette": pipette_planner.amp_ranking,
    "varuna": ranking_by("varuna"),
    "varuna-1f1b": ranking_by("1f1b"),
    "varuna-any-size": ranking_by("1f1b", every_size=True),
    "pipette": pipette_planner.ranking,
    "megatron-rules": megatron_rules.ranking,
    **{name: ranking_of(name) for name in PLACERS},
}
