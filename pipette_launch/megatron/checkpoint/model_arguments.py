"""Flags that `--use-checkpoint-args` takes from a checkpoint: load_args_from_checkpoint in checkpointing.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.checkpoint.folders import checkpoint_folder
from pipette_launch.megatron.checkpoint.written import Saved, read_saved
from pipette_launch.megatron.flags import Arguments, Flag, release_of

WHERE_MISSING = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "seq_length",
    "num_attention_heads",
    "kv_channels",
    "max_position_embeddings",
    "moe_token_dispatcher_type",
    "hybrid_layer_pattern",
    "padded_vocab_size",
)
"""Taken where neither the user nor Megatron's parser gives a value."""
ALWAYS = (
    "num_query_groups",
    "group_query_attention",
    "position_embedding_type",
    "add_position_embedding",
    "use_rotary_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "add_bias_linear",
    "add_qkv_bias",
    "squared_relu",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "apply_layernorm_1p",
    "normalization",
    "apply_query_key_layer_scaling",
    "attention_dropout",
    "hidden_dropout",
    "spec",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_grouped_gemm",
    "moe_shared_expert_intermediate_size",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "tiktoken_pattern",
)
"""Taken in the place of the user's own."""
ALWAYS_SINCE = {
    (0, 16): (
        "moe_router_score_function",
        "moe_router_enable_expert_bias",
        "moe_router_topk_scaling_factor",
        "moe_latent_size",
    ),
    (0, 17): ("mtp_hybrid_override_pattern", "mtp_num_layers", "mtp_use_repeated_layer"),
    (0, 18): ("moe_single_grouped_weight", "moe_single_grouped_bias"),
    (0, 20): ("gdp_num_householder",),
}
ALWAYS_BEFORE = {
    (0, 15): ("moe_token_dispatcher_type",),
    (0, 17): ("hybrid_override_pattern", "is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio"),
}
"""The same of releases from one on, or before one."""
TYPES: dict[str | None, tuple[type, ...]] = {"int": (int,), "float": (int, float), None: (str,)}
PATTERNS = ("moe_layer_freq",)
"""Text on the command line that Megatron's parser turns into a number or a list."""


def with_checkpoint_arguments(arguments: Arguments) -> tuple[Arguments, str]:
    """Return the flags, with the checkpoint's values where Megatron takes them, and a note for the user.

    Without `--use-checkpoint-args` they are unchanged.

    Raises:
        MegatronError: the flag is given, and no folder that it could read.

    """
    if not arguments.get("use_checkpoint_args"):
        return arguments, ""
    roots = [arguments.shown(dest) for dest in ("load", "pretrained_checkpoint") if arguments.get(dest)]
    if not roots:
        raise MegatronError("--use-checkpoint-args needs --load or --pretrained-checkpoint; add one")
    found = checkpoint_folder(arguments)
    saved = read_saved(found[0])[0] if found else {}
    if "num_layers" not in saved:
        where = f"can read no arguments in {found[0]}" if found else f"finds no checkpoint at {roots[0]} here"
        return arguments, f"--use-checkpoint-args {where}, so the flags alone describe the model"
    mine = arguments
    for dest, value in _taken(arguments, saved):
        arguments = _with_value(arguments, dest, value)
    overruled = [
        token.words
        for token in mine.tokens
        if token.dest and mine.get(token.dest) != arguments.get(token.dest) and token not in arguments.tokens
    ]
    note = f"--use-checkpoint-args: the model is that of {found[0] if found else ''}"
    in_place_of = ", ".join(dict.fromkeys(" ".join(words) for words in overruled))
    return arguments, note + (f", in place of your {in_place_of}" if overruled else "")


def always_taken(release: tuple[int, int]) -> list[str]:
    """Destinations that this release takes in the place of the user's own."""
    since = (dest for first, dests in ALWAYS_SINCE.items() if release >= first for dest in dests)
    before = (dest for end, dests in ALWAYS_BEFORE.items() if release < end for dest in dests)
    return [*ALWAYS, *since, *before]


def _taken(arguments: Arguments, saved: Saved) -> Iterator[tuple[str, Any]]:
    """Destinations and values that Megatron takes, in its order."""
    release = release_of(arguments.version)
    always = always_taken(release)
    if arguments.get("use_tokenizer_model_from_checkpoint_args"):
        always += ["tokenizer_model", "tokenizer_type"]
    elif release < (0, 15):
        always.append("tokenizer_type")
    older_pattern = saved.get("hybrid_override_pattern") if release >= (0, 17) else None
    values = {**saved, **({"hybrid_layer_pattern": older_pattern, "num_layers": None} if older_pattern else {})}
    if saved.get("num_experts") is None:
        values.pop("moe_ffn_hidden_size", None)
    for dest in (*WHERE_MISSING, *always):
        if values.get(dest) is not None and (dest in always or arguments.get(dest) is None):
            yield dest, values[dest]


def _with_value(arguments: Arguments, dest: str, value: Any) -> Arguments:
    """Store a value as the parser would; what this release does not have, or is of another type, stays."""
    if arguments.get(dest) == value:
        return arguments
    bare = arguments.without(dest)
    if bare.get(dest) == value:
        return bare
    for flag in arguments.table.values():
        if flag.dest == dest and _suits(flag, value):
            items = [] if flag.nargs == 0 else value if flag.nargs else [value]
            words = (str(item).replace(", ", ",") if isinstance(item, list) else str(item) for item in items)
            return bare.with_flag(flag.option, *words)
    return arguments


def _suits(flag: Flag, value: Any) -> bool:
    if flag.nargs == 0:
        return type(value) is bool and flag.constant == value
    if flag.dest in PATTERNS:
        return type(value) in (int, list)
    return type(value) in ((list,) if flag.nargs else TYPES.get(flag.kind, ()))
