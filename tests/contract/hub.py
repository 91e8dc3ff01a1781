"""Cache of Hugging Face with the public `config.json` of models, by which recipes of Megatron-Bridge run offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA = {"hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16"}
QWEN3_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "router_aux_loss_coef": 0.001,
}
DEEPSEEK_V3 = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "aux_loss_alpha": 0.001,
    "vocab_size": 129280,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-30B-A3B": ("ad44e777bcd18fa416d9da3bd8f70d33ebb85d39", QWEN3_MOE),
    "deepseek-ai/DeepSeek-V3": ("0" * 40, DEEPSEEK_V3),
}
"""Revision that Bridge's recipe demands, and configuration, by name on the hub."""


def write_hub(folder: Path) -> None:
    """Write the cache as the download of each `config.json` leaves it."""
    for name, (revision, config) in MODELS.items():
        place = folder / f"models--{name.replace('/', '--')}"
        for path, text in (("refs/main", revision), (f"snapshots/{revision}/config.json", json.dumps(config))):
            (place / path).parent.mkdir(parents=True)
            (place / path).write_text(text)
