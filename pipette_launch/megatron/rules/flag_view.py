"""A command line's values by Megatron's names, for the tables of rules on flags alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipette_launch.megatron.flags import Arguments, flag_defaults, release_of
from pipette_launch.megatron.layout import read_recompute

OLDEST, NEWEST = (0, 14), (0, 99)


@dataclass(frozen=True, slots=True)
class FlagRule:
    """A contradiction of flags that Megatron refuses."""

    names: str
    """Destinations whose flags the message shows, as given."""
    reason: str
    is_broken: Callable[[Any], object]
    """Test of a `FlagView`."""
    since: tuple[int, int] = OLDEST
    """The first release that has the rule."""
    until: tuple[int, int] = NEWEST
    """The last one."""


class FlagView:
    """Values by destination as attributes; None for a destination that the release does not have."""

    def __init__(self, arguments: Arguments) -> None:
        """Keep the last value of each flag, over the defaults of the release."""
        self._values = dict(flag_defaults(arguments.version))
        self._values.update((token.flag.dest, token.value) for token in arguments.tokens if token.flag)
        self.release = release_of(arguments.version)
        self._arguments = arguments

    def __getattr__(self, dest: str) -> Any:
        """Return what Megatron's parser would store."""
        return self._values.get(dest)

    @property
    def granularity(self) -> str:
        """Kind of recompute, by new flags or old ones."""
        return read_recompute(self._arguments).granularity

    @property
    def modules(self) -> set[str]:
        """Modules that selective recompute names."""
        return set(read_recompute(self._arguments).modules) if self.granularity == "selective" else set()

    @property
    def graphs(self) -> str:
        """Maker of CUDA graphs, by new flags or old ones: `none`, `local`, `transformer_engine`, `full_iteration`."""
        if self.enable_cuda_graph:
            return "local"
        if self.external_cuda_graph:
            return "transformer_engine"
        scope, impl = self.cuda_graph_scope_deprecated or [], self.cuda_graph_impl or "none"
        return "full_iteration" if "full_iteration" in scope and impl != "transformer_engine" else impl

    @property
    def graphed(self) -> set[str]:
        """Parts of a layer that CUDA graphs capture; empty for the whole layer."""
        given = self.cuda_graph_scope or self.cuda_graph_modules or self.cuda_graph_scope_deprecated or []
        return set(given.split(",") if isinstance(given, str) else given) - {"full"}

    @property
    def is_expert_model(self) -> bool:
        """True if a layer has experts."""
        return bool(self.num_experts)

    @property
    def dispatcher(self) -> str:
        """Dispatcher of the experts' tokens."""
        return str(self.moe_token_dispatcher_type)

    @property
    def balancing(self) -> list[str]:
        """Kinds of load balancing of the router."""
        kinds = self.moe_router_load_balancing_type
        return list(kinds) if isinstance(kinds, (list, tuple)) else [kinds]

    @property
    def capacity(self) -> float | None:
        """Capacity factor of the experts; None where tokens are not dropped."""
        factor = self.moe_expert_capacity_factor
        return None if factor is None or factor < 0 else float(factor)

    @property
    def fuses_activation(self) -> bool:
        """True if bias and activation are one kernel (core_transformer_config_from_args)."""
        if self.swiglu:
            return bool(self.bias_swiglu_fusion)
        return bool(self.bias_gelu_fusion and self.add_bias_linear)

    @property
    def activation(self) -> str:
        """Name of the activation (core_transformer_config_from_args)."""
        if self.squared_relu:
            return "squared_relu"
        if self.quick_geglu:
            return "quick_geglu"
        return "swiglu" if self.swiglu else "gelu"

    @property
    def layers(self) -> int:
        """Layers of the model; 0 where a pattern names them."""
        return int(self.num_layers or self.encoder_num_layers or 0)

    @property
    def is_rope(self) -> bool:
        """True if positions are rotated."""
        return bool(self.use_rotary_position_embeddings) or bool(self.position_embedding_type == "rope")

    @property
    def checks_nan(self) -> bool:
        """True if Megatron checks losses and gradients; the dynamic loss scale of fp16 checks them by itself."""
        return bool(self.check_for_nan_in_loss_and_grad) and not (self.fp16 and not self.loss_scale)

    @property
    def decay_steps(self) -> int:
        """Steps or samples after which the learning rate is lowest; 0 where no flag says how long training takes."""
        if self.train_iters:
            return int(self.lr_decay_iters or self.train_iters)
        return int(self.lr_decay_samples or self.train_samples or 0)

    @property
    def warmup_steps(self) -> float:
        """Steps or samples of the learning rate's warm-up."""
        if self.lr_warmup_fraction is not None:
            return float(self.lr_warmup_fraction) * self.decay_steps
        return float(self.lr_warmup_iters if self.train_iters else self.lr_warmup_samples)
