"""What a backward may run again: whole layers under full recompute, and the attention core by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Forward = Callable[[int], torch.Tensor]


def recomputed(run: Callable[[torch.Tensor], torch.Tensor], source: torch.Tensor) -> Forward:
    """Chain layers as Megatron's full recompute does with one layer a unit: each keeps its input and nothing else.

    `TransformerBlock._checkpointed_forward` comes down to the same function of megatron-core, for method uniform of
    one layer as for the first layers of method block.
    """
    from megatron.core import tensor_parallel

    def forward(times: int) -> torch.Tensor:
        flow = source
        for _ in range(times):
            flow = tensor_parallel.checkpoint(run, False, flow)
        return flow

    return forward


class Core:
    """The attention core of a layer on the queries, keys and values that the layer itself gives it."""

    def __init__(self, layer: Any, run: Callable[[], object]) -> None:
        """Run the layer once and catch what its core is called with."""
        self.module: Any = layer.self_attention.core_attention
        caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def catch(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append((args, kwargs))

        hook = self.module.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            with torch.no_grad():
                run()
        finally:
            hook.remove()
        (query, key, value, *rest), self._options = caught[0]
        self.query, self._key, self._value = (each.detach().clone().requires_grad_() for each in (query, key, value))
        self._rest = rest
        with torch.no_grad():
            output = self._call(self.query)
        # Under latent attention values are narrower than queries.
        self.chains = bool(output.numel() == self.query.numel())

    def forward(self, times: int) -> torch.Tensor:
        """Give the output back as queries, as often as asked."""
        flow = self._call(self.query)
        for _ in range(times - 1 if self.chains else 0):
            flow = self._call(flow.view_as(self.query))
        return flow

    def _call(self, query: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(query, self._key, self._value, *self._rest, **self._options)
        return output
