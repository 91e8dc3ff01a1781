"""Exchanges inside the passes that leave a host, as flows: tensor, context and expert groups over several hosts."""

# S = stages (model chunks), P = pipeline ranks, I = collectives over one kind of group, H = hosts, L = links.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipette_launch.cost.communication.exchanges import Exchange
from pipette_launch.search.assignment.problem import Floats, ProblemBuilder
from pipette_launch.search.step_model.host_view import LinksBetweenHosts, View
from pipette_launch.search.step_model.subgradients import Tangents


@dataclass(frozen=True, kw_only=True, eq=False)
class Crossing:
    """The exchanges of one kind of group that lies on several hosts."""

    links: LinksBetweenHosts
    forward_IS: Floats
    """How many of each collective the forward of each stage runs."""
    backward_IS: Floats
    exposed_s_IHH: Floats
    """Seconds of one of them that nothing hides, if a link between two hosts is its slowest."""

    @property
    def longer_s(self) -> float:
        """By how much the passes of a stage could be longer over the slowest link than over a typical one."""
        spread_I = self.exposed_s_IHH.max(axis=(1, 2)) - np.median(self.exposed_s_IHH, axis=(1, 2))
        return float((spread_I @ (self.forward_IS + self.backward_IS)).max())

    def add(self, builder: ProblemBuilder, view: View, cuts: Tangents) -> None:
        """Add one family: a group for each link, as if it were the slowest and its pipeline rank the slowest stage.

        The slowest stage decides the time of a pipeline, so one of these links counts: as often as the passes of its
        stage lie on the critical path then.
        """
        work = view.model.work
        stages, pp = len(work.rank_S), work.layout.pp
        forward_S = cuts.most_B[:stages] + cuts.most_B[2 * stages :]
        weight_IS = forward_S * self.forward_IS + cuts.most_B[stages : 2 * stages] * self.backward_IS
        weight_IP = np.stack([weight_IS[:, rank::pp].sum(axis=1) for rank in range(pp)], axis=1)
        # Pipeline ranks differ in how much they exchange, hardly in what: one matrix serves all.
        most = int(weight_IP.sum(axis=0).argmax())
        typical_I = np.median(self.exposed_s_IHH, axis=(1, 2)) + np.finfo(float).tiny
        share_P = typical_I @ weight_IP / (typical_I @ weight_IP[:, most])
        kind = builder.add_type(np.tensordot(weight_IP[:, most], self.exposed_s_IHH, axes=1))
        group_L = builder.add_family(np.zeros(len(self.links)))
        builder.add_flows(kind, self.links.sender_L, self.links.receiver_L, share_P[self.links.stage_L], group_L)


def crossings_of(view: View) -> list[Crossing]:
    """The exchanges that leave a host, by kind of group and by the way that its rings go."""
    work, fabric = view.model.work, view.model.fabric
    alike: dict[tuple[str, int], list[Exchange]] = {}
    for item in sorted(work.exchanges, key=lambda item: item.group):
        if view.crosses(item.group):
            alike.setdefault((item.group, fabric.ring_shift(item.kind)), []).append(item)
    found = []
    for (name, _), items in alike.items():
        kinds = [item.kind for item in items]
        widest = "all_to_all" if "all_to_all" in kinds else kinds[0]
        links = view.links(widest, getattr(view.model.groups, name))
        exposed = [view.seconds_HH(item.kind, links.spread, item.size_bytes) - item.hidden_s for item in items]
        exposed_s_IHH = np.maximum(np.stack(exposed), 0.0)
        exposed_s_IHH[:, np.arange(view.num_hosts), np.arange(view.num_hosts)] = 0.0
        found.append(
            Crossing(
                links=links,
                forward_IS=np.array([item.forward for item in items], dtype=np.float64),
                backward_IS=np.array([item.backward for item in items], dtype=np.float64),
                exposed_s_IHH=exposed_s_IHH,
            )
        )
    return found
