"""Prices of trial steps: the best of all links, some of them raised by the argument of a bound."""

# K = trials side by side, P = pipeline ranks, S = stages (model chunks).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipette_launch.cost.step.assemble import totals_s_K
from pipette_launch.cost.step.placed import PlacementCost, best_prices
from pipette_launch.cost.step.work import LayoutWork, Prices
from pipette_launch.search.bounds.links import Floats

_ACTIONS_AT_ONCE = 1 << 22
"""RaisedPrices are simulated in blocks of about so many actions, some tens of MB."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RaisedPrices:
    """Prices of one pipeline in K trials; the arguments raise entries of the arrays in place."""

    slowness_PK: Floats
    exchange_s_IPK: Floats
    forward_s_PK: Floats
    """Hops, as in `Prices`."""
    backward_s_PK: Floats
    reduce_s_SK: Floats
    gather_s_SK: Floats
    embedding_s_K: Floats

    @classmethod
    def best(cls, model: PlacementCost) -> RaisedPrices:
        """Return one trial with the best of all links everywhere, and the fastest slot."""
        shape = (model.work.layout.pp, 1)
        prices = best_prices(model.work, model.fabric, np.full(shape, model.slowness_W.min()))
        return cls(
            slowness_PK=prices.slowness_PD,
            exchange_s_IPK=np.array(prices.exchange_s_PD).reshape(-1, *shape),
            forward_s_PK=prices.forward_hop_s_PD,
            backward_s_PK=prices.backward_hop_s_PD.copy(),
            reduce_s_SK=prices.reduce_s_S,
            gather_s_SK=prices.gather_s_S,
            embedding_s_K=np.array([prices.embedding_s]),
        )

    def times(self, count: int) -> RaisedPrices:
        """Return so many copies of one trial."""
        return RaisedPrices(
            **{name: np.repeat(getattr(self, name), count, axis=-1) for name in self.__dataclass_fields__}
        )

    def steps_s_K(self, work: LayoutWork) -> Floats:
        """Seconds of each step."""
        count = len(self.embedding_s_K)
        at_once = max(1, _ACTIONS_AT_ONCE // (2 * len(work.rank_S) * work.num_microbatches))
        blocks = [slice(first, first + at_once) for first in range(0, count, at_once)]
        return np.concatenate([totals_s_K(work, self._prices(block)) for block in blocks])

    def _prices(self, block: slice) -> Prices:
        return Prices(
            slowness_PD=self.slowness_PK[:, block],
            exchange_s_PD=tuple(seconds_PK[:, block] for seconds_PK in self.exchange_s_IPK),
            forward_hop_s_PD=self.forward_s_PK[:, block],
            backward_hop_s_PD=self.backward_s_PK[:, block],
            reduce_s_S=self.reduce_s_SK[:, block],
            gather_s_S=self.gather_s_SK[:, block],
            embedding_s=self.embedding_s_K[block],
        )


def side_by_side(trials: Sequence[RaisedPrices]) -> RaisedPrices:
    """Join trials into one record."""
    names = RaisedPrices.__dataclass_fields__
    return RaisedPrices(**{name: np.concatenate([getattr(one, name) for one in trials], axis=-1) for name in names})
