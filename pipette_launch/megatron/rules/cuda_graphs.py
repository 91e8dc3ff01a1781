"""Rules of CUDA graphs: which recompute they exclude, by release."""

from __future__ import annotations

from collections.abc import Iterator

from pipette_launch.facts import Recompute
from pipette_launch.facts.job import ENGINE, ITERATION, Graphs
from pipette_launch.megatron.rules.broken import Broken, BrokenRule
from pipette_launch.megatron.rules.rules import Rules

FIRST_SCOPES = (0, 16)
"""The first release whose graphs may hold parts of a layer, with recompute inside or outside."""


def graph_faults(rules: Rules, recompute: Recompute) -> Broken:
    """Check recompute against CUDA graphs (TransformerConfig, and validate_args of 0.14 and 0.15)."""
    graphs = rules.options.graphs
    if graphs.impl == "none" or recompute.granularity == "none":
        return
    names = ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules", "recompute", "recompute_modules")
    if recompute.granularity == "full" and (graphs.impl != ITERATION or rules.release < FIRST_SCOPES):
        yield BrokenRule("CUDA graphs exclude full recompute", names, "remove one")
    elif recompute.granularity == "selective":
        modules = {*(recompute.modules or ("core_attn",))}
        excluded = _excluded(rules, graphs) if rules.release >= FIRST_SCOPES else _excluded_before(rules, graphs)
        yield from (
            BrokenRule(f"CUDA graphs exclude recompute of {module}{reason}", names, "remove one")
            for module, reason in excluded
            if module in modules
        )


def _excluded(rules: Rules, graphs: Graphs) -> Iterator[tuple[str, str]]:
    """Modules that may not be recomputed, each with a reason; a graph that recomputes draws no random numbers."""
    model = rules.job.model
    if graphs.impl == ENGINE and "moe_router" in graphs.modules:
        yield "moe", " beside a graph of moe_router"
    is_random = {
        "core_attn": ("attn", model.attention_dropout > 0, "attention dropout"),
        "mlp": ("mlp", model.hidden_dropout > 0, "hidden dropout"),
        "moe": ("moe", model.hidden_dropout > 0, "hidden dropout"),
    }
    for module, (graph, draws, words) in is_random.items():
        if draws and (not graphs.modules or graph in graphs.modules):
            yield module, f" with {words}"
    if rules.options.moe_input_jitter_eps is not None and (not graphs.modules or "moe" in graphs.modules):
        yield "moe", " with jitter"


def _excluded_before(rules: Rules, graphs: Graphs) -> Iterator[tuple[str, str]]:
    """The same before 0.16: all modules, but for graphs of attention (0.15) or Transformer Engine's own (0.14)."""
    every = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
    allowed: set[str] = set()
    if rules.release < (0, 15) and graphs.impl == ENGINE:
        allowed = {*every}
    elif graphs.impl == ENGINE and graphs.modules == {"attn"}:
        allowed = {*every} - {"core_attn", "mla_up_proj"}
    yield from ((module, "") for module in every if module not in allowed)
