"""Every rival behind one signature: `PLANNERS[name](job, measurements, options)` gives its pick.

`RANKINGS` has all that a rival considers, best first, for the question what it would have run where its pick does not
fit; `placers.PLACERS` has the orders of RANKs alone, for any layout.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipette_launch.baselines import amp, megatron_rules, pipette_planner
from pipette_launch.baselines.pick import Pick, Planner, PlannerOptions, Ranking, first_of
from pipette_launch.baselines.placers import PLACERS, ranking_of
from pipette_launch.baselines.varuna import ranking_by

__all__ = ["PLANNERS", "RANKINGS", "Pick", "Planner", "PlannerOptions", "Ranking"]

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
PLANNERS: Mapping[str, Planner] = {name: first_of(ranking) for name, ranking in RANKINGS.items()}
