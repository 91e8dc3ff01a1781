"""Vocabularies of public models, by their names.

Megatron counts `len(tokenizer)`, special tokens included, and pads the number itself; the `vocab_size` of a model's own
config.json is already padded, by another rule. Sources: QwenLM/Qwen3 issues 29 and 885 (Qwen1.5 to 2.5),
QwenLM/Qwen3-VL issue 350 (Qwen2-VL), b4rtaz/distributed-llama pull request 282 (Qwen3), deepseek-ai/DeepSeek-MoE issue
14, ggml-org/llama.cpp pull request 3633 (DeepSeek-Coder), vllm-project/vllm pull request 51727 (DeepSeek-V4),
mosaicml/llm-foundry issue 590 (MPT), facebookresearch/metaseq issue 469 (OPT), recipes of NVIDIA/NeMo (Llama, Mixtral,
Nemotron). Figures of other models follow their published configurations and may differ by some special tokens.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

LLAMA_1_OR_2, LLAMA_3 = 32000, 128256
MODELS: tuple[tuple[str, int], ...] = (
    # The first pattern that matches counts, so models distilled from two families stand before both.
    (r"deepseek-r1-distill-llama", LLAMA_3),
    (r"deepseek-r1-distill-qwen", 151665),
    (r"deepseek-r1-0528-qwen3", 151669),
    (r"deepseek-v4", 129280),
    (r"deepseek-?(v3|r1|prover-v2-671b)", 128815),
    (r"deepseek-?(v2|coder-v2|prover-v1)", 100002),
    (r"deepseek-coder", 32022),
    (r"deepseek-(llm|moe|math)", 100015),
    (r"code-?llama", 32016),
    (r"(meta-)?llama-?(7|13|30|33|65)b", LLAMA_1_OR_2),
    (r"(meta-)?llama-?(8|405)b", LLAMA_3),
    (r"(meta-)?llama-?4(?!\d*b)", 201135),
    (r"(meta-)?llama-?3(?!\d*b)", LLAMA_3),
    (r"(meta-)?llama-?[12](?!\d*b)(?!\d)", LLAMA_1_OR_2),
    (r"tinyllama|vicuna|open-?llama", LLAMA_1_OR_2),
    (r"mistral-nemo|mistral-small-(24b|3|4)|ministral|magistral|devstral|pixtral|mistral-large-3", 131072),
    (r"mistral-(large|small)|codestral|mathstral", 32768),
    (r"mistral-7b-(instruct-)?v0-?3", 32768),
    (r"mistral-7b|mistral-v0-?[12]", 32000),
    (r"mixtral-8x22b-(instruct|v0-?3)", 32768),
    (r"mixtral", 32000),
    (r"qwen-?3-?[5-9](?!\d*b)", 248077),
    (r"qwen-?3", 151669),
    (r"qwen-?2-?5(?!\d*b)", 151665),
    (r"qwen-?2-vl", 151657),
    (r"qwen-?(1-?5|2)(?!\d)", 151646),
    (r"(qwq|qvq)-", 151665),
    (r"qwen-(1-8b|7b|14b|72b)", 151851),
    (r"gemma-?[34]n?(?![\db])", 262145),
    (r"(code|recurrent)?gemma", 256000),
    (r"(distil)?gpt-?2|falcon-rw|gpt-neo-(125m|1-3b|2-7b)|dialogpt", 50257),
    (r"gpt-j", 50400),
    (r"gpt-neox|pythia|mamba2?-(130m|370m|780m|790m|1-3b|1-4b|2-7b|2-8b)|mpt-|redpajama-incite|dolly-v2", 50277),
    (r"gpt-oss", 200019),
    (r"phi-(1|1-5|2)$", 50295),
    (r"phi-4-(mini|multimodal)", 200029),
    (r"phi-4", 100352),
    (r"phi-3-small", 100352),
    (r"phi-3(-5)?-", 32011),
    (r"(nvidia-)?nemotron-?(4|3-8b|3-22b|15b|340b)", 256000),
    (r"(nvidia-)?nemotron-(h|nano|3|5)", 131072),
    (r"minitron", 256000),
    (r"kimi-(k2|vl|linear)|moonlight", 163840),
    (r"glm-?5", 154880),
    (r"glm-?4-?[5-9](?!\d*b)", 151365),
    (r"glm-?4", 151343),
    (r"chatglm3", 64798),
    (r"falcon3", 131072),
    (r"falcon-(7b|11b|40b|180b|2)", 65024),
    (r"bloomz?(-|$)", 250680),
    (r"granite-.*code|starcoder|smollm2?(-|$)", 49152),
    (r"granite-4", 100352),
    (r"granite-3", 49155),
    (r"smollm3", LLAMA_3),
    (r"olmo-?(2|3)", 100278),
    (r"olmo", 50280),
    (r"yi-(1-5-)?(6b|9b|34b)", 64000),
    (r"baichuan-?2", 125696),
    (r"baichuan", 64000),
    (r"internlm2", 92544),
    (r"opt-(iml-)?(125m|350m|1-3b|2-7b|6-7b|13b|30b|66b|175b)", 50265),
    (r"(c4ai-)?command-[ar]|aya-(23|expanse)", 255029),
    (r"stablelm-2", 100289),
    (r"dbrx", 100277),
    (r"ernie-4-5", 103424),
    (r"exaone-(3|4|deep)", 102400),
    (r"seed-oss", 155136),
    (r"jamba", 65536),
    (r"minimax", 200064),
    (r"(ling|ring)-(mini|flash|1t)", 157184),
    (r"(ling|ring)-(lite|plus)", 126464),
    (r"mimo-(7b|v2)", 151680),
    (r"longcat", 131072),
    (r"hunyuan-a13b", 128167),
    (r"zephyr-7b", 32000),
    (r"(nemotron|mt-nlg-plus).*256k.*model$", 256000),
    (r"grok-1|apertus", 131072),
)
"""Beginnings of a model's name, in lower case with dashes for all signs, and the tokens of its tokenizer."""


def known_tokens(named: str) -> tuple[str, int] | None:
    """Return the part of a hub name or path that names a public model, and the tokens of its tokenizer.

    Parts that begin with a model's name come before parts that contain it, and later parts before earlier ones.

    Args:
        named: `meta-llama/Llama-3.1-8B`, or `/lustre/models/my-Llama-3.1-8B/tokenizer.model` on a machine elsewhere.

    """
    parts = PurePosixPath(named).parts[::-1]
    # The hub's own cache joins organisation and name by two dashes; names of Megatron-Bridge have 2p5 for 2.5.
    names = [re.sub(r"[^a-z0-9]+|(?<=\d)p(?=\d)", "-", part.rpartition("--")[2].lower()).strip("-") for part in parts]
    for start in ("", r".*?(?<![a-z0-9])"):
        for part, name in zip(parts, names, strict=True):
            for pattern, tokens in MODELS:
                found = re.match(f"{start}({pattern})", name)
                if found:
                    return found[1] if start else part, tokens
    return None
