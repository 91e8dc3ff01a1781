"""What megatron-core's own layers save and weigh is what the closed form says."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_job, tiny_model
from newest import CORE, with_gap_since_019
from packaging.version import Version

from pipette_launch.cost.layers.attention import Attention
from pipette_launch.cost.layers.ends import depth_bytes
from pipette_launch.cost.layers.kinds import kind_parameters
from pipette_launch.cost.layers.mlp import Experts
from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.cost.layers.ssm import Delta
from pipette_launch.facts import GatedDelta, Job, LatentAttention, Layout

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("saved_worker.py")
TOKENS, BATCH, HIDDEN, VOCABULARY = 64, 2, 64, 512
LAYOUT = Layout(micro_batch_size=BATCH)
ALLTOALL = "--moe-token-dispatcher-type alltoall"
ALLGATHER = "--moe-token-dispatcher-type allgather"
NORM_STATISTICS = 2 * 2 * TOKENS * BATCH
"""Mean and deviation of each row in bf16, as torch's norm keeps them on CPU; fused ones keep about as much."""


@dataclass(frozen=True)
class Case:
    """The same layer in Megatron's words and in ours."""

    config: dict[str, Any]
    model: dict[str, Any]
    flags: tuple[str, ...] = ()

    @property
    def job(self) -> Job:
        """The job that the closed form reads."""
        base = {"params_dtype": "bf16", "seq_length": TOKENS, "max_position_embeddings": TOKENS}
        base |= {"position_embedding_type": "none", "add_bias_linear": False, "vocab_size": VOCABULARY}
        model = tiny_model(**(base | self.model))
        return tiny_job(model=model, performance_flags=self.flags, megatron_version=str(CORE))

    def question(self, **more: Any) -> dict[str, Any]:
        """What the worker is asked."""
        base = {"hidden_size": HIDDEN, "ffn_hidden_size": 256, "num_attention_heads": 4, "add_bias_linear": False}
        base |= {"normalization": "LayerNorm"}
        return {"tokens": TOKENS, "batch": BATCH, "config": base | self.config, **more}


def moe(config: dict[str, Any], model: dict[str, Any], *flags: str) -> Case:
    """Four experts of width 96, the best two for each token."""
    ours = {"num_experts": 4, "moe_layer_freq": (1,) * 4, "moe_ffn_hidden_size": 96}
    theirs = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96}
    dispatcher = {ALLTOALL: "alltoall", ALLGATHER: "allgather"}[flags[0]]
    return Case(theirs | {"moe_token_dispatcher_type": dispatcher} | config, ours | model, flags)


SINKHORN = {"moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.0,
}
SEQUENCE_LOSS = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4}
EXPERT_CASES = {
    "gelu": moe({}, {}, ALLTOALL),
    "all-gather": moe({}, {}, ALLGATHER),
    "sinkhorn": moe(SINKHORN, {"moe_router_topk": 1}, ALLGATHER, "--moe-router-load-balancing-type sinkhorn"),
    "swiglu": moe({"gated_linear_unit": True}, {"gated_linear_unit": True}, ALLTOALL),
    "shared": moe({"moe_shared_expert_intermediate_size": 32}, {"moe_shared_expert_intermediate_size": 32}, ALLTOALL),
    "shared swiglu": moe(
        {"moe_shared_expert_intermediate_size": 32, "gated_linear_unit": True},
        {"moe_shared_expert_intermediate_size": 32, "gated_linear_unit": True},
        ALLTOALL,
    ),
    "auxiliary loss": moe({"moe_aux_loss_coeff": 1e-2}, {}, ALLTOALL, "--moe-aux-loss-coeff 1e-2"),
    "fp32 router": moe({"moe_router_dtype": "fp32"}, {}, ALLTOALL, "--moe-router-dtype fp32"),
    "fp64 router": moe({"moe_router_dtype": "fp64"}, {}, ALLTOALL, "--moe-router-dtype fp64"),
    "pre-softmax": moe(
        {"moe_router_pre_softmax": True, "moe_router_dtype": "fp32"},
        {},
        ALLTOALL,
        "--moe-router-pre-softmax",
        "--moe-router-dtype fp32",
    ),
    "sigmoid": moe(
        SIGMOID | {"moe_router_dtype": "fp32"},
        {},
        ALLTOALL,
        "--moe-router-score-function sigmoid",
        "--moe-router-dtype fp32",
    ),
    "sigmoid with a loss": moe(
        SIGMOID | SEQUENCE_LOSS | {"moe_router_dtype": "fp32"},
        {},
        ALLTOALL,
        "--moe-router-score-function sigmoid",
        "--moe-router-dtype fp32",
        "--moe-router-load-balancing-type seq_aux_loss",
        "--moe-aux-loss-coeff 1e-4",
    ),
    "z loss": moe({"moe_z_loss_coeff": 1e-3}, {}, ALLTOALL, "--moe-z-loss-coeff 1e-3"),
    "padded capacity": moe(
        {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
        {},
        ALLTOALL,
        "--moe-expert-capacity-factor 1.5",
        "--moe-pad-expert-input-to-capacity",
    ),
}
KEEPS_PLACES = "keeps 8 bytes for each token and expert, in place of the router's probability and 1 byte of a mask"
KEEPS_NO_PLACES = ("all-gather", "sinkhorn", "padded capacity")
GATED = {"gated_linear_unit": True}
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}


def latent_case(q_lora_rank: int | None, *, normed: bool) -> Case:
    """Latent attention of four heads."""
    sizes = {name: LATENT[name] for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")}
    return Case(
        {**LATENT, "q_lora_rank": q_lora_rank, "qk_layernorm": normed},
        {"latent_attention": LatentAttention(q_lora_rank=q_lora_rank, **sizes), "qk_layernorm": normed},
    )


LATENT_CASES = {
    "normed": latent_case(48, normed=True),
    "plain": latent_case(48, normed=False),
    "whole query": latent_case(None, normed=False),
}
NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHARED_GATE = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}
NEWER = pytest.mark.skipif(Version("0.16") > CORE, reason="megatron-core has these parts from 0.16 on")
NEWER_CASES = {
    "delta": Case(
        {**NET, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4, **GATED},
        {"linear_attention": GatedDelta(**NET), "linear_layers": (1, 1, 1, 0)},
    ),
    "gate": Case({"attention_output_gate": True}, {"attention_output_gate": True}),
    "sinks": Case({"softmax_type": "learnable"}, {"softmax_type": "learnable"}),
    "shared gate": moe(SHARED_GATE, SHARED_GATE, ALLTOALL),
    "latents": moe({"moe_latent_size": 16}, {"moe_latent_size": 16}, ALLTOALL),
}
ONE, TWO = (Case({"num_layers": layers}, {"num_layers": layers}) for layers in (1, 2))
PREDICTS = Case({"num_layers": 1, "mtp_num_layers": 1}, {"num_layers": 1, "mtp_num_layers": 1})
MODELS = {
    "one layer": ONE.question(vocab=VOCABULARY, tied=False),
    "two layers": TWO.question(vocab=VOCABULARY, tied=False),
    "predicts": PREDICTS.question(vocab=VOCABULARY, tied=False),
    "predicts, tied": PREDICTS.question(vocab=VOCABULARY, tied=True),
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, int]]:
    """What a process of its own found out: megatron-core and its process groups stay out of this one."""
    cases = {**EXPERT_CASES, **LATENT_CASES, **(NEWER_CASES if Version("0.16") <= CORE else {})}
    questions = {**{name: case.question() for name, case in cases.items()}, **MODELS}
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "patches", "tests"))
    worker = subprocess.run(
        [sys.executable, str(WORKER)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        input=json.dumps(list(questions.values())),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert 0 == worker.returncode, worker.stderr
    return dict(zip(questions, json.loads(worker.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", with_gap_since_019(EXPERT_CASES, KEEPS_PLACES, but=KEEPS_NO_PLACES))
def test_experts_save_what_the_closed_form_says(name: str, found: dict[str, dict[str, int]]) -> None:
    """To a few bytes for each expert and sequence: the losses' own counts and results."""
    job = EXPERT_CASES[name].job

    assert pytest.approx(sum(Experts(job, LAYOUT).kept()), abs=32 * 4) == found[name]["saved"]


@pytest.mark.parametrize("name", EXPERT_CASES)
def test_experts_weigh_what_the_closed_form_says(name: str, found: dict[str, dict[str, int]]) -> None:
    """Every parameter of the layer, router and shared expert included."""
    assert kind_parameters(EXPERT_CASES[name].job, LAYOUT, "moe_layer").count == found[name]["parameters"]


@pytest.mark.parametrize("name", LATENT_CASES)
def test_latent_attention_is_what_the_closed_form_says(name: str, found: dict[str, dict[str, int]]) -> None:
    """Every parameter, and every byte but the statistics of the latents' norms."""
    job = LATENT_CASES[name].job
    model = job.model
    assert model.latent_attention is not None
    kept = Attention(tiny_job(model=model), LAYOUT).latent_bytes(model.latent_attention)
    statistics = 2 * NORM_STATISTICS if model.qk_layernorm else 0

    assert kind_parameters(tiny_job(model=model), LAYOUT, "layer").count == found[name]["parameters"]
    assert sum(kept) + statistics == found[name]["saved"]


@NEWER
@pytest.mark.parametrize(
    ("name", "kind"), [("gate", "layer"), ("sinks", "layer"), ("shared gate", "moe_layer"), ("latents", "moe_layer")]
)
def test_newer_parts_weigh_what_the_closed_form_says(name: str, kind: Any, found: dict[str, dict[str, int]]) -> None:
    """Every parameter of a layer with gates, sinks, or experts on latents."""
    assert kind_parameters(NEWER_CASES[name].job, LAYOUT, kind).count == found[name]["parameters"]


@NEWER
def test_a_gated_delta_network_is_what_the_closed_form_says(found: dict[str, dict[str, int]]) -> None:
    """Every parameter and, to 1 %, the saved bytes.

    Without torch.compile the gate is kept in fp32 before and after its activation, in place of 2 bytes.
    """
    job = NEWER_CASES["delta"].job
    net = Delta(job, LAYOUT)
    kept = net.activations()
    eager = (4 + 4 - 2) * TOKENS * BATCH * net.values

    assert net.parameters().dense == found["delta"]["parameters"]
    assert pytest.approx(kept.attention + kept.delta_norm + eager, rel=0.01) == found["delta"]["saved"]


@NEWER
def test_an_output_gate_keeps_what_the_closed_form_says(found: dict[str, dict[str, int]]) -> None:
    """Without torch.compile the gate is kept in the matrix's output and as a sigmoid in fp32, in place of 2 bytes."""
    job = NEWER_CASES["gate"].job
    block = Attention(job, LAYOUT)

    assert block.projected_bytes() + (2 + 4 - 2) * TOKENS * BATCH * block.gate == found["gate"]["saved"]


@NEWER
@pytest.mark.parametrize("name", with_gap_since_019(["latents"], KEEPS_PLACES))
def test_experts_on_latents_keep_what_the_closed_form_says(name: str, found: dict[str, dict[str, int]]) -> None:
    """Latents are the input of the projection back."""
    job = NEWER_CASES[name].job
    latents = 2 * TOKENS * BATCH * 16

    assert pytest.approx(sum(Experts(job, LAYOUT).kept()) + latents, abs=32 * 4) == found[name]["saved"]


def test_multi_token_prediction_weighs_what_the_closed_form_says(found: dict[str, dict[str, int]]) -> None:
    """A whole model on one rank, with a head of its own and without."""
    for name, is_untied in (("predicts", True), ("predicts, tied", False)):
        model = tiny_model(**{**vars_of(PREDICTS.job), "untie_embeddings_and_output_weights": is_untied})
        assert stage_parameters(tiny_job(model=model), LAYOUT)[0].count == found[name]["parameters"]


def test_multi_token_prediction_saves_what_the_closed_form_says(found: dict[str, dict[str, int]]) -> None:
    """Beside a layer and a head, which the difference of two plain models and the logits' fp32 copy give."""
    layer = found["two layers"]["saved"] - found["one layer"]["saved"]
    head = 4 * TOKENS * BATCH * VOCABULARY
    ids = 8 * TOKENS * BATCH
    own = found["predicts"]["saved"] - found["one layer"]["saved"] - layer - head

    expected = depth_bytes(PREDICTS.job, LAYOUT) + ids + 3 * NORM_STATISTICS
    assert pytest.approx(expected, rel=0.03) == own


def vars_of(job: Job) -> dict[str, Any]:
    """The fields of a job's model."""
    return {name: getattr(job.model, name) for name in job.model.__slots__}
