"""Spellings of CUDA graphs in each release of Megatron, grouped by what the graphs hold."""

from __future__ import annotations

TE, LOCAL = "--cuda-graph-impl transformer_engine", "--cuda-graph-impl local"
ROUTER = "moe_router moe_preprocess"
SPELLINGS: dict[str, list[tuple[str, str]]] = {
    "nothing": [
        *[(version, "") for version in ("0.16.1", "0.18.0", "0.20.0")],
        ("0.17.0", "--cuda-graph-scope attn mlp"),
        ("0.17.0", f"{LOCAL} --cuda-graph-scope full_iteration_inference"),
        ("0.20.0", "--cuda-graph-modules attn mlp"),
        ("0.20.0", f"{LOCAL} --inference-cuda-graph-scope block"),
        ("0.20.0", f"{LOCAL} --cuda-graph-modules full_iteration_inference"),
    ],
    "whole layers": [
        ("0.16.1", LOCAL),
        ("0.16.1", f"{TE} --cuda-graph-scope full"),
        ("0.18.0", "--external-cuda-graph"),
        ("0.20.0", "--enable-cuda-graph"),
        ("0.20.0", LOCAL),
        ("0.20.0", TE),
        ("0.20.0", f"{LOCAL} --inference-cuda-graph-scope layer"),
    ],
    "attention and MLP": [
        ("0.16.1", f"{LOCAL} --cuda-graph-scope attn mlp"),
        ("0.16.1", f"{LOCAL} --cuda-graph-scope mlp"),
        ("0.17.0", f"{TE} --cuda-graph-scope attn mlp"),
        ("0.18.0", f"{LOCAL} --cuda-graph-scope attn mlp"),
        ("0.20.0", f"{LOCAL} --cuda-graph-modules attn mlp"),
        ("0.20.0", f"{LOCAL} --cuda-graph-modules attn"),
        ("0.20.0", f"{TE} --cuda-graph-modules mlp attn"),
    ],
    "attention": [
        ("0.16.1", f"{TE} --cuda-graph-scope attn"),
        ("0.18.0", f"{TE} --cuda-graph-scope attn"),
        ("0.20.0", f"{TE} --cuda-graph-modules attn"),
    ],
    "router": [
        ("0.16.1", f"{TE} --cuda-graph-scope {ROUTER}"),
        ("0.16.1", f"{LOCAL} --cuda-graph-scope moe_router"),
        ("0.18.0", f"{TE} --cuda-graph-scope {ROUTER}"),
        ("0.20.0", f"{TE} --cuda-graph-modules {ROUTER}"),
        ("0.20.0", f"{LOCAL} --cuda-graph-modules moe_preprocess"),
    ],
    "the whole iteration": [
        ("0.16.1", f"{LOCAL} --cuda-graph-scope full_iteration"),
        ("0.18.0", "--cuda-graph-scope full_iteration"),
        ("0.19.0", "--cuda-graph-modules full_iteration"),
        ("0.20.0", f"{LOCAL} --cuda-graph-modules full_iteration"),
        ("0.20.0", "--cuda-graph-impl full_iteration"),
    ],
}
"""Pairs of release and flags. All pairs of a group mean the same for a model of attention with MLPs or experts."""


def flags_of(words: str) -> tuple[str, ...]:
    """Return the texts of flags with their values, as a job has them."""
    return tuple(f"--{part.strip()}" for part in words.split("--") if part.strip())
