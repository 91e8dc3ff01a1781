"""The model is read with Megatron's own defaults and derivations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from megatron_lines import SMALL, job

from pipette_launch.errors import MegatronError
from pipette_launch.facts import GatedDelta, LatentAttention, SparseAttention


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("", {"ffn_hidden_size": 256, "kv_channels": 8, "num_query_groups": 8, "params_dtype": "fp32"}),
        ("--swiglu", {"ffn_hidden_size": 128, "gated_linear_unit": True}),
        ("--swiglu --ffn-hidden-size 96", {"ffn_hidden_size": 96}),
        ("--quick-geglu", {"ffn_hidden_size": 256, "gated_linear_unit": True}),
        ("--num-query-groups 2", {"num_query_groups": 8}),
        ("--num-query-groups 2 --group-query-attention", {"num_query_groups": 2}),
        ("--group-query-attention", {"num_query_groups": 1}),
        ("--disable-bias-linear", {"add_bias_linear": False, "add_qkv_bias": False}),
        ("--disable-bias-linear --add-qkv-bias", {"add_bias_linear": False, "add_qkv_bias": True}),
        ("--bf16 --position-embedding-type rope", {"params_dtype": "bf16", "position_embedding_type": "rope"}),
        ("--use-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        ("--num-experts 0", {"num_experts": None, "moe_layer_freq": ()}),
        ("--num-experts 4", {"num_experts": 4, "moe_layer_freq": (1,) * 8, "moe_ffn_hidden_size": 256}),
        ("--num-experts 4 --moe-layer-freq 3", {"moe_layer_freq": (1, 0, 0, 1, 0, 0, 1, 0)}),
        ("--num-experts 4 --moe-layer-freq ([0]+[1]*3)*2", {"moe_layer_freq": (0, 1, 1, 1) * 2}),
        ("--window-size 15,0", {"attention_windows": (16,) * 8}),
        ("--window-size (15,0) --window-attn-skip-freq 2", {"attention_windows": (16, 0) * 4}),
        ("--window-size 15,0 --window-attn-skip-freq [1]*3+[0]*5", {"attention_windows": (16,) * 3 + (0,) * 5}),
        ("--window-size 15,0 --window-attn-skip-freq [1]*3+[0]*9", {"attention_windows": (16,) * 3 + (0,) * 5}),
        ("--window-size 999999999999999999999,0", {"attention_windows": (32,) * 8}),
        ("--window-size=-1,0 --window-attn-skip-freq 2", {"attention_windows": ()}),
        ("--window-attn-skip-freq 2", {"attention_windows": ()}),
        ("--num-experts 4 --moe-shared-expert-intermediate-size 32", {"moe_shared_expert_intermediate_size": 32}),
        ("--hidden-dropout=0.0", {"hidden_dropout": 0.0, "attention_dropout": 0.1}),
        ("--attention-backend flash", {"attention_backend": "flash", "transformer_impl": "transformer_engine"}),
    ],
)
def test_shapes_are_derived(words: str, fields: dict[str, Any]) -> None:
    """Sizes that no flag gives follow Megatron's validate_args."""
    model = job(words).model

    assert fields == {name: getattr(model, name) for name in fields}


def test_cpu_has_only_megatrons_own_layers() -> None:
    """On CPU all layers are Megatron's own, as Transformer Engine needs CUDA."""
    assert job(device_kind="cpu").model.transformer_impl == "local"


def test_yarn_costs_what_rope_costs() -> None:
    """YaRN is read as rope with other angles; releases from 0.18 on have it."""
    assert job("--position-embedding-type yarn", version="0.18.0").model.position_embedding_type == "rope"


def test_missing_flags_are_named_at_once() -> None:
    """One error lists all missing flags."""
    with pytest.raises(MegatronError) as error:
        job(base=["--num-layers", "4", "--encoder-seq-length", "8"])

    assert (
        "the command line lacks --hidden-size, --num-attention-heads, --max-position-embeddings, --micro-batch-size, "
        "--train-iters (or --train-samples); add what is missing to the script's arguments"
    ) == str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-attention-heads 3", "--num-attention-heads 3 does not divide --hidden-size 64"),
        ("--max-position-embeddings 16", "--max-position-embeddings 16 is less than --seq-length 32"),
        ("--fp16 --bf16", "--fp16 and --bf16 exclude each other"),
        (
            "--group-query-attention --num-query-groups 3",
            "--num-query-groups 3 does not divide --num-attention-heads 8; change one",
        ),
        ("--window-size 15", "--window-size 15: not two whole numbers"),
        ("--window-size 15,0 --window-attn-skip-freq [1]", "has 1 entries for --num-layers 8"),
        ("--no-rope-freq [0]*3+[1]", "--no-rope-freq [0]*3+[1]: has 4 entries for --num-layers 8"),
        ("--num-experts 4 --moe-layer-freq [1,0]", "has 2 entries for --num-layers 8"),
        ("--num-experts 4 --moe-layer-freq [2]*8", "each must be 0 or 1"),
        ("--num-experts 4 --moe-layer-freq [1]*x", "neither a number nor a list"),
        ("--num-experts 4 --moe-layer-freq __import__('os')", "neither a number nor a list"),
        ("--normalization BatchNorm", "unknown value 'BatchNorm'; known are LayerNorm, RMSNorm"),
        ("--position-embedding-type strange", "unknown value 'strange'"),
        ("--num-layers 0", "--num-layers"),
    ],
)
def test_contradictions_are_named(words: str, message: str) -> None:
    """The error has the flag, its value and the flag that it contradicts."""
    with pytest.raises(MegatronError) as error:
        job(words)

    assert message in str(error.value)


def test_last_value_wins() -> None:
    """The last value of a flag counts, as in argparse."""
    assert job("--num-layers 4", base=SMALL).model.num_layers == 4


def test_latent_attention_and_mtp_are_read() -> None:
    """Megatron's defaults fill sizes that are not given; without the flag there is no latent attention."""
    model = job("--multi-latent-attention --kv-lora-rank 16 --mtp-num-layers 2").model

    expected = LatentAttention(
        q_lora_rank=None, kv_lora_rank=16, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128
    )
    assert (expected, 192, 2) == (model.latent_attention, expected.query_channels, model.mtp_num_layers)
    assert (None, 0) == (job().model.latent_attention, job().model.mtp_num_layers)


def test_gated_delta_networks_are_read() -> None:
    """Every Nth layer has attention, or a list decides; 0.20 has a shorter name, and layers G need no flag."""
    words = "--experimental-attention-variant gated_delta_net --linear-num-key-heads 8 --linear-num-value-heads 16"
    words += " --transformer-impl transformer_engine"
    sizes = GatedDelta(
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
    )
    model = job(f"{words} --linear-attention-freq 4", for_prediction=True).model
    listed = job(f"{words} --linear-attention-freq [1]*5+[0]*3", for_prediction=True).model
    short = job("--experimental-attention-variant gdn --linear-attention-freq 2", for_prediction=True, version="0.20")
    hybrid = job("--hybrid-layer-pattern G-*-G-*-", for_prediction=True, version="0.18").model

    assert (sizes, (1, 1, 1, 0, 1, 1, 1, 0)) == (model.linear_attention, model.linear_layers)
    assert (1, 1, 1, 1, 1, 0, 0, 0) == listed.linear_layers
    assert (1, 0) * 4 == short.model.linear_layers
    assert hybrid.linear_attention is not None
    assert ("delta_layer", ()) == (hybrid.layer_kinds[0], hybrid.linear_layers)
    assert ((), None) == (job("--linear-attention-freq 4").model.linear_layers, job().model.linear_attention)
    with pytest.raises(MegatronError, match="needs --linear-attention-freq"):
        job(words, for_prediction=True)
    with pytest.raises(MegatronError, match="second version of gated delta networks is not modelled"):
        job("--experimental-attention-variant gdn2 --linear-attention-freq 4", version="0.20")


SPARSE_WORDS = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8 --no-rope-fusion"
SPARSE_WORDS += " --disable-bias-linear --transformer-impl transformer_engine"
DSA = f"--experimental-attention-variant dsa --multi-latent-attention {SPARSE_WORDS}"


def test_sparse_attention_is_read() -> None:
    """From 0.19 on, from the variant or the letter D; unfused attention has no kernels."""
    words = f"{DSA} --dsa-kernel-backend cudnn --dsa-indexer-loss-coeff 0.1 --dsa-indexer-topk-freq 2"
    model = job(words, for_prediction=True, version="0.19").model
    unfused = job(f"{words} --attention-backend unfused", for_prediction=True, version="0.20").model
    hybrid = job(f"--hybrid-layer-pattern D-D-D-D- {SPARSE_WORDS}", for_prediction=True, version="0.19").model

    sizes = {"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 8, "dsa_indexer_topk_freq": 2}
    expected = SparseAttention(**sizes, dsa_indexer_loss_coeff=0.1, dsa_kernel_backend="cudnn")
    assert expected == model.sparse_attention
    assert replace(expected, dsa_kernel_backend="none") == unfused.sparse_attention
    assert "sparse_layer" == hybrid.layer_kinds[0]
    for version in ("0.16", "0.18"):
        with pytest.raises(MegatronError, match=r"sparse attention before 0\.19 is not modelled"):
            job(DSA, for_prediction=True, version=version)
    assert job(DSA, version="0.18").model.sparse_attention is None
    with pytest.raises(MegatronError, match="--dsa-indexer-topk-freq 2: the warm-up times single layers"):
        job(words, version="0.19")


def test_gates_sinks_and_latents_are_read() -> None:
    """Each is a field of the model; a hybrid's letter + has latent attention."""
    words = "--attention-output-gate --softmax-type learnable --moe-shared-expert-gate --moe-latent-size 32"
    words += " --disable-bias-linear"
    model = job(f"{words} --num-experts 4 --moe-shared-expert-intermediate-size 32", for_prediction=True).model
    latent = job("--hybrid-layer-pattern +-+-+-+-", for_prediction=True, version="0.19").model

    assert (True, "learnable", True, 32) == (
        model.attention_output_gate,
        model.softmax_type,
        model.moe_shared_expert_gate,
        model.moe_latent_size,
    )
    assert latent.latent_attention is not None
    assert "latent_layer" == latent.layer_kinds[0]


def test_hybrid_models_are_read() -> None:
    """The pattern gives the number of layers, the layers with experts and the prediction depths."""
    words = "--hybrid-layer-pattern M-M*|ME/*E/*E --num-experts 4 --mtp-use-repeated-layer --mamba-head-dim 8"
    words += " --pipeline-model-parallel-size 2"
    model = job(words, for_prediction=True, version="0.17.1").model

    assert model.hybrid is not None
    assert (6, 2, (0, 0, 0, 0, 0, 1)) == (model.num_layers, model.mtp_num_layers, model.moe_layer_freq)
    assert ("M-M*ME", "*E", True) == (
        model.hybrid.pattern,
        model.hybrid.mtp_pattern,
        model.hybrid.mtp_use_repeated_layer,
    )
    # As many heads of 8 as twice the hidden size of 64 takes.
    given = "--hybrid-override-pattern MMMM*-*- --mamba-head-dim 8 --mamba-state-dim 16 --mamba-num-groups 2"
    older = job(given, for_prediction=True).model.hybrid
    assert older is not None
    assert (16, 8, 16, 2) == (
        older.mamba_num_heads,
        older.mamba_head_dim,
        older.mamba_state_dim,
        older.mamba_num_groups,
    )


def test_a_bad_rank_is_named() -> None:
    """The latents need at least one channel."""
    with pytest.raises(MegatronError, match="--kv-lora-rank 0: must be at least 1"):
        job("--multi-latent-attention --kv-lora-rank 0")
    with pytest.raises(MegatronError, match="q_lora_rank must be at least 1, got 0"):
        job("--multi-latent-attention --q-lora-rank 0")
    with pytest.raises(MegatronError, match="mtp_num_layers must be at least 0, got -1"):
        job("--mtp-num-layers -1")


def test_layers_of_hybrid_models_come_from_their_spec() -> None:
    """Megatron ignores `--transformer-impl` in hybrid models, so its rules on torch's norms do not apply."""
    words = "--hybrid-layer-pattern M-M*M-M* --mamba-head-dim 8 --normalization RMSNorm --transformer-impl local"

    assert "transformer_engine" == job(words, for_prediction=True, version="0.20").model.transformer_impl
    with pytest.raises(MegatronError, match="torch's RMSNorm needs --no-persist-layer-norm"):
        job("--normalization RMSNorm --transformer-impl local", for_prediction=True, version="0.20")


def test_layers_for_inference_are_not_modelled() -> None:
    """The message names the flag and does not say that Megatron refuses it."""
    with pytest.raises(MegatronError, match="inference_optimized: layers that only infer are not modelled"):
        job("--transformer-impl inference_optimized", for_prediction=True)


@pytest.mark.parametrize(
    "words",
    [
        ("--num-experts", "4", "--moe-layer-freq", "[0] * 1 + [1] * 7"),
        ("--num-experts", "4", "--moe-layer-freq", "[1, 1, 1, 1, 0, 0, 0, 0]"),
        ("--window-size", "15,0", "--window-attn-skip-freq", "[1] *8"),
    ],
)
def test_a_list_of_layers_has_no_spaces(words: tuple[str, ...]) -> None:
    """Megatron's parser refuses spaces in a list (_eval_pattern of arguments.py)."""
    with pytest.raises(MegatronError, match=r"\[.*\]( \*8|.*): Megatron allows no spaces in a list; remove them"):
        job(base=[*SMALL, *words])


A100, H100, V100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB"


def backend(*flags: str, device_name: str = "", **environment: str) -> str:
    """Return the backend of the small job."""
    return job(*flags, environment=environment, device_name=device_name).model.attention_backend


@pytest.mark.parametrize(
    ("flags", "device_name", "expected"),
    [
        ("--bf16", A100, "flash"),
        ("--bf16 --deterministic-mode", A100, "flash"),
        ("--bf16", H100, "fused"),
        ("--bf16", "NVIDIA B200", "fused"),
        ("--bf16 --deterministic-mode", H100, "fused"),
        ("--bf16 --deterministic-mode", "NVIDIA B200", "flash"),
        ("--bf16 --deterministic-mode --attention-dropout 0", "NVIDIA B200", "fused"),
        ("--fp16", V100, "unfused"),
        ("", H100, "unfused"),
        ("--bf16", "", "auto"),
        ("--bf16 --attention-backend flash", H100, "flash"),
        ("--bf16 --attention-backend fused", A100, "fused"),
        ("--bf16 --transformer-impl local", A100, "auto"),
    ],
)
def test_auto_is_what_transformer_engine_chooses(flags: str, device_name: str, expected: str) -> None:
    """`auto` depends on number type and GPU; a named backend stays, and so does `auto` for an unknown GPU."""
    assert expected == backend(flags, device_name=device_name)


@pytest.mark.parametrize(("capability", "expected"), [(7, "unfused"), (8, "flash"), (9, "fused"), (12, "fused")])
def test_a_described_device_has_the_attention_of_its_capability(capability: int, expected: str) -> None:
    """The name of a described device does not decide; its capability does."""
    assert expected == job("--bf16", device_name="Gaudi 9", capability=capability).model.attention_backend


def test_blackwell_has_no_deterministic_fused_dropout() -> None:
    """TransformerEngine's own variable also asks for deterministic attention."""
    assert "flash" == backend("--bf16", device_name="NVIDIA B200", NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")


def test_a_switch_that_agrees_changes_nothing() -> None:
    """A variable with the value that Megatron would set changes nothing."""
    assert backend("--bf16", device_name=H100, NVTE_FUSED_ATTN="1") == "fused"
    assert backend("--bf16 --attention-backend flash", NVTE_FUSED_ATTN="0", NVTE_FLASH_ATTN="1") == "flash"


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ("--bf16", {"NVTE_FLASH_ATTN": "0"}, r"NVTE_FLASH_ATTN=0 .*for which Megatron demands 1"),
        ("--bf16 --attention-backend fused", {"NVTE_FLASH_ATTN": "1"}, r"NVTE_FLASH_ATTN=1 .*demands 0"),
    ],
)
def test_an_environment_that_megatron_refuses(flags: str, environment: dict[str, str], message: str) -> None:
    """Megatron would stop with an assertion; the error names the variable and the remedy."""
    with pytest.raises(MegatronError, match=message):
        backend(flags, **environment)


def test_an_unknown_backend() -> None:
    """The error lists the choices."""
    with pytest.raises(MegatronError, match=r"'xformers'; known are flash, fused, unfused, local, auto"):
        backend("--bf16 --attention-backend xformers")
