"""Reader of the model from a command line, with the defaults and rules of Megatron (`validate_args`, core_v0.16.1)."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipette_launch.errors import FactError, MegatronError
from pipette_launch.facts import GatedDelta, HybridLayers, LatentAttention, ModelSpec, SparseAttention
from pipette_launch.megatron.chunks import hybrid_pattern
from pipette_launch.megatron.flags import Arguments, release_of, why_missing
from pipette_launch.megatron.layout import MOST_LAYERS, known_dest, num_layers_of
from pipette_launch.megatron.tokenizers import Vocabulary

REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "micro_batch_size",
)
POSITIONS = ("learned_absolute", "rope", "yarn", "none")
BACKENDS = ("flash", "fused", "unfused", "local", "auto")
"""Values of `--attention-backend`."""
GATED_DELTA_NETS = ("gated_delta_net", "gdn")
"""Values of `--experimental-attention-variant` for gated delta networks."""
VARIABLES: dict[str, tuple[str, ...]] = {
    "NVTE_FLASH_ATTN": ("flash", "auto"),
    "NVTE_FUSED_ATTN": ("fused", "auto"),
    "NVTE_UNFUSED_ATTN": ("unfused", "auto"),
}
"""TransformerEngine's environment variables, and the backends for which Megatron sets the variable to 1, not 0."""
_NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
_AMPERE, _HOPPER, _BLACKWELL = 8, 9, 10
FIRST_ABSORBED = (0, 19)
"""First release whose sparse attention shares one key among all heads, and has kernels."""


class Required(NamedTuple):
    """Flags that a command line lacks."""

    note: str
    """Names missing flags that Megatron demands, although no figure depends on them. Empty = no such flag."""
    fault: MegatronError | None
    """Names all other missing flags. None = no such flag."""


def required_flags(arguments: Arguments, *, starts_nothing: bool, cause: str = "") -> Required:
    """Return the flags that the command line lacks.

    With `starts_nothing`, only flags that affect time or memory are demanded. `cause` is the reason why flags for the
    model's sizes may be missing. Empty = unknown.
    """
    faulty = arguments.faulty_dests
    missing = [dest for dest in REQUIRED if arguments.get(known_dest(arguments, dest)) is None and dest not in faulty]
    if "num_layers" in missing and hybrid_pattern(arguments):
        missing.remove("num_layers")
    needless = []
    learns_positions = arguments.get("position_embedding_type") == "learned_absolute" and not arguments.get(
        "use_rotary_position_embeddings"
    )
    if "max_position_embeddings" in missing and not learns_positions:
        missing.remove("max_position_embeddings")
        needless.append("--max-position-embeddings")
    if not (arguments.get("train_iters") or arguments.get("train_samples")):
        needless.append("--train-iters (or --train-samples)")
    note = f"Megatron itself needs {' and '.join(needless)} to train; nothing here depends on it" if needless else ""
    if not missing and (starts_nothing or not needless):
        return Required(note, None)
    is_shape = {"num_layers", "hidden_size", "num_attention_heads"} & set(missing)
    flags = [arguments.shown(dest) for dest in missing] + ([] if starts_nothing else needless)
    why = cause if cause and is_shape else why_missing(arguments)
    return Required("", MegatronError(f"the command line lacks {', '.join(flags)}; {why}"))


def read_model(
    arguments: Arguments,
    vocabulary: Vocabulary,
    *,
    device_kind: str,
    environment: Mapping[str, str],
    capability: float | None = None,
) -> ModelSpec:
    """Read the layers and sizes of the model.

    Raise MegatronError if a flag is missing, or if sizes contradict each other. `device_kind` is `cuda` or `cpu`. Some
    variables in `environment` select an attention backend. `capability` is the GPUs' compute capability, such as
    8.9 (None = unknown).
    """
    # TransformerEngine needs CUDA, so on CPU all layers are Megatron's own layers.
    known = ("local", "transformer_engine")
    transformer_impl: Any = "local" if device_kind == "cpu" else arguments.choice("transformer_impl", known)
    if device_kind != "cpu" and hybrid_pattern(arguments):
        # For hybrid models --spec sets the layers, and Megatron ignores --transformer-impl.
        transformer_impl = "transformer_engine"
    normalization: Any = arguments.choice("normalization", ("LayerNorm", "RMSNorm"))
    position_kind: Any = "rope"
    if not arguments.get("use_rotary_position_embeddings"):
        # YaRN has the same cost as RoPE, because only the angles differ.
        position_kind = arguments.choice("position_embedding_type", POSITIONS).replace("yarn", "rope")
    if arguments.get("no_rope_freq"):
        _layer_pattern(arguments, "no_rope_freq")
    has_bias, pattern = bool(arguments.get("add_bias_linear")), hybrid_pattern(arguments)
    try:
        return ModelSpec(
            **_sizes(arguments),
            vocab_size=vocabulary.size,
            make_vocab_size_divisible_by=vocabulary.divisible_by,
            gated_linear_unit=bool(arguments.get("swiglu") or arguments.get("quick_geglu")),
            normalization=normalization,
            add_bias_linear=has_bias,
            add_qkv_bias=has_bias or bool(arguments.get("add_qkv_bias")),
            position_embedding_type=position_kind,
            untie_embeddings_and_output_weights=bool(arguments.get("untie_embeddings_and_output_weights")),
            attention_dropout=arguments.get("attention_dropout"),
            hidden_dropout=arguments.get("hidden_dropout"),
            params_dtype="fp16" if arguments.get("fp16") else "bf16" if arguments.get("bf16") else "fp32",
            transformer_impl=transformer_impl,
            attention_backend=_backend(arguments, transformer_impl, environment, capability),
            latent_attention=_latent_attention(arguments),
            sparse_attention=_sparse_attention(arguments),
            mtp_num_layers=len(pattern.depths) if pattern else arguments.get("mtp_num_layers") or 0,
            hybrid=_hybrid_layers(arguments),
            qk_layernorm=bool(arguments.get("qk_layernorm")),
            attention_windows=_attention_windows(arguments),
            linear_attention=_linear_attention(arguments),
            linear_layers=_linear_layers(arguments),
            attention_output_gate=bool(arguments.get("attention_output_gate")),
            softmax_type=arguments.get("softmax_type") or "vanilla",
            moe_latent_size=arguments.get("moe_latent_size") or 0,
            moe_shared_expert_gate=bool(arguments.get("moe_shared_expert_gate")),
        )
    except FactError as error:
        in_flags = re.sub(r"\b([a-z]+(?:_[a-z]+)+)=\S+", lambda field: arguments.shown(field[1]), str(error))
        raise MegatronError(f"the model's flags contradict each other: {in_flags}; change one of them") from error


def _sizes(arguments: Arguments) -> dict[str, Any]:
    """Return layers, widths, heads, lengths and experts, as fields of ModelSpec."""
    if arguments.get("fp16") and arguments.get("bf16"):
        raise MegatronError("--fp16 and --bf16 exclude each other; remove one")
    hidden, heads = arguments.size("hidden_size"), arguments.size("num_attention_heads")
    if arguments.get("kv_channels") is None and hidden % heads:
        raise MegatronError(
            f"--num-attention-heads {heads} does not divide --hidden-size {hidden}; change one, or give --kv-channels"
        )
    seq_length = arguments.size(known_dest(arguments, "seq_length"))
    positions = arguments.size("max_position_embeddings", default=seq_length)
    if positions < seq_length:
        raise MegatronError(f"--max-position-embeddings {positions} is less than --seq-length {seq_length}")
    # With SwiGLU, the default width is two thirds of the usual width, rounded down to a multiple of 64.
    usual_ffn = int((4 * hidden * 2 / 3) / 64) * 64 if arguments.get("swiglu") else 4 * hidden
    ffn = arguments.size("ffn_hidden_size", default=usual_ffn)
    num_experts = arguments.get("num_experts") or None
    return {
        "num_layers": num_layers_of(arguments),
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": arguments.size("num_query_groups") if arguments.get("group_query_attention") else heads,
        "kv_channels": arguments.size("kv_channels", default=hidden // heads),
        "seq_length": seq_length,
        "max_position_embeddings": positions,
        "num_experts": num_experts,
        "moe_layer_freq": _expert_layers(arguments) if num_experts else (),
        "moe_router_topk": arguments.size("moe_router_topk", default=2),
        "moe_ffn_hidden_size": arguments.size("moe_ffn_hidden_size", default=ffn),
        "moe_shared_expert_intermediate_size": arguments.get("moe_shared_expert_intermediate_size") or 0,
    }


def _backend(
    arguments: Arguments, transformer_impl: str, environment: Mapping[str, str], capability: float | None
) -> Any:
    """Return the attention backend of a job's layers. Raise MegatronError if the environment contradicts the flag.

    `auto` becomes the backend that TransformerEngine selects (get_attention_backend of v2.8): unfused for fp32 and for
    GPUs before Ampere, flash on Ampere, cuDNN's fused attention on Hopper and later. On Blackwell, deterministic runs
    with dropout use flash attention (TE v2.12 on, fused_attn.cpp). Flash attention and cuDNN 9 are assumed to be
    installed. For an unknown GPU and for Megatron's own layers, the result is `auto`.
    """
    flag = arguments.choice("attention_backend", BACKENDS)
    if transformer_impl == "local":
        return flag
    # Megatron has the same assertion (language_module.py, _set_attention_backend, core_v0.11 to core_v0.19).
    for name, switched_on_by in VARIABLES.items():
        wanted = "1" if flag in switched_on_by else "0"
        if environment.get(name, wanted) != wanted:
            raise MegatronError(
                f"{name}={environment[name]} in the environment contradicts {arguments.shown('attention_backend')}, "
                f"for which Megatron demands {wanted}; unset it and choose by --attention-backend"
            )
    if flag != "auto":
        return flag
    if not (arguments.get("bf16") or arguments.get("fp16")):
        return "unfused"
    if capability is None:
        return "auto"
    if capability < _AMPERE:
        return "unfused"
    is_deterministic = arguments.get("deterministic_mode") or environment.get(_NONDETERMINISTIC) == "0"
    cannot_fuse = capability >= _BLACKWELL and is_deterministic and arguments.get("attention_dropout") > 0
    # Flash attention has no sinks (TE, get_attention_backend).
    is_flash = capability < _HOPPER and arguments.get("softmax_type") in (None, "vanilla")
    return "flash" if is_flash or cannot_fuse else "fused"


def _latent_attention(arguments: Arguments) -> LatentAttention | None:
    pattern = hybrid_pattern(arguments)
    # From 0.18 on, the letters of these layers imply the flag (arguments.py, validate_args).
    if not arguments.get("multi_latent_attention") and not (pattern and {"D", "+"} & pattern.letters):
        return None
    sizes = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return LatentAttention(q_lora_rank=arguments.get("q_lora_rank"), **{dest: arguments.size(dest) for dest in sizes})


def _linear_attention(arguments: Arguments) -> GatedDelta | None:
    pattern = hybrid_pattern(arguments)
    if "G" not in pattern.letters if pattern else not _linear_layers(arguments):
        return None
    heads = ("linear_num_key_heads", "linear_num_value_heads")
    channels = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim")
    return GatedDelta(**{dest: arguments.size(dest) for dest in (*heads, *channels)})


def _linear_layers(arguments: Arguments) -> tuple[int, ...]:
    """Return 1 for each layer with linear attention. `--linear-attention-freq N` gives attention to every Nth layer."""
    if hybrid_pattern(arguments) or arguments.get("experimental_attention_variant") not in GATED_DELTA_NETS:
        return ()
    if not arguments.get("linear_attention_freq"):
        raise arguments.refusal("needs --linear-attention-freq", "experimental_attention_variant")
    pattern = _layer_pattern(arguments, "linear_attention_freq")
    if isinstance(pattern, int):
        return tuple(int(layer % pattern != 0) for layer in range(1, num_layers_of(arguments) + 1))
    return pattern


def _sparse_attention(arguments: Arguments) -> SparseAttention | None:
    """Return the selection of keys by sparse attention; None for releases whose sparse attention has no formula."""
    pattern, variant = hybrid_pattern(arguments), arguments.get("experimental_attention_variant")
    is_sparse = "D" in pattern.letters if pattern else variant == "dsa"
    if not is_sparse or release_of(arguments.version) < FIRST_ABSORBED:
        return None
    sizes = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
    options = "dsa_indexer_loss_coeff dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_indexer_use_sparse_loss"
    values = {name: arguments.get(name) for name in (*options.split(), "dsa_kernel_backend", "sft")}
    values |= {name: arguments.size(name) for name in sizes}
    if arguments.get("attention_backend") == "unfused":
        values["dsa_kernel_backend"] = "none"
    return SparseAttention(**{name: value for name, value in values.items() if value is not None})


def _hybrid_layers(arguments: Arguments) -> HybridLayers | None:
    """Return the layers of a hybrid model, with the sizes of its Mamba layers (mamba_mixer.py of core_v0.17)."""
    pattern = hybrid_pattern(arguments)
    if pattern is None:
        return None
    head_dim = arguments.size("mamba_head_dim")
    # With the default number of heads, all heads together have twice the hidden size.
    usual_heads = 2 * arguments.size("hidden_size") // head_dim
    return HybridLayers(
        pattern=pattern.layers,
        mamba_state_dim=arguments.size("mamba_state_dim"),
        mamba_head_dim=head_dim,
        mamba_num_groups=arguments.size("mamba_num_groups"),
        mamba_num_heads=arguments.size("mamba_num_heads", default=max(usual_heads, 1)),
        mtp_pattern=pattern.depths[0] if pattern.depths else "",
        mtp_use_repeated_layer=bool(arguments.get("mtp_use_repeated_layer")),
    )


def _expert_layers(arguments: Arguments) -> tuple[int, ...]:
    """Return 1 for each layer with experts, from `--moe-layer-freq N` or `--moe-layer-freq ([0]*1+[1]*23)`."""
    hybrid = hybrid_pattern(arguments)
    if hybrid:
        return tuple(int(letter == "E") for letter in hybrid.layers)
    pattern = _layer_pattern(arguments, "moe_layer_freq")
    if isinstance(pattern, int):
        return tuple(int(layer % max(pattern, 1) == 0) for layer in range(num_layers_of(arguments)))
    return pattern


def _attention_windows(arguments: Arguments) -> tuple[int, ...]:
    """Return the window of each layer from `--window-size LEFT,RIGHT`. RIGHT has no effect, because masks are causal.

    `--window-attn-skip-freq N` leaves every Nth layer without a window. A list has 1 for each layer with a window
    (is_layer_window_attention of core_v0.16).
    """
    size, num_layers = arguments.get("window_size"), num_layers_of(arguments)
    if not size:
        return ()
    sides = str(size).strip("()").split(",")
    try:
        before, _ = (int(side) for side in sides)
    except ValueError:
        raise arguments.refusal("not two whole numbers such as 127,0", "window_size") from None
    if before < 0:
        return ()
    window = min(before + 1, arguments.size(known_dest(arguments, "seq_length")))
    if arguments.get("window_attn_skip_freq") is None:
        return (window,) * num_layers
    pattern = _layer_pattern(arguments, "window_attn_skip_freq", may_be_longer=True)
    if isinstance(pattern, int):
        pattern = tuple(int(layer % max(pattern, 1) != 0) for layer in range(1, num_layers + 1))
    return tuple(window * has_window for has_window in pattern)


def _layer_pattern(arguments: Arguments, dest: str, *, may_be_longer: bool = False) -> int | tuple[int, ...]:
    """Read a number of layers, or a list with 0 or 1 for each layer. Entries after the last layer have no effect."""
    num_layers, text = num_layers_of(arguments), str(arguments.get(dest))
    if " " in text:
        raise arguments.refusal("Megatron allows no spaces in a list; remove them", dest)
    try:
        pattern = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise arguments.refusal("neither a number nor a list such as ([0]*1+[1]*23)", dest) from None
    if isinstance(pattern, int):
        return pattern
    pattern = pattern[:num_layers] if may_be_longer else pattern
    if len(pattern) != num_layers or set(pattern) - {0, 1}:
        reason = f"has {len(pattern)} entries for --num-layers {num_layers}; each must be 0 or 1"
        raise arguments.refusal(reason, dest)
    return tuple(pattern)


def _evaluated(node: ast.expr) -> Any:
    """Evaluate numbers, lists, + and *. Raise ValueError for any other expression."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluated(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and {type(left), type(right)} == {list, int}:
            items, count = (left, right) if isinstance(left, list) else (right, left)
            if len(items) * count <= MOST_LAYERS:
                return items * count
    raise ValueError(ast.dump(node))
