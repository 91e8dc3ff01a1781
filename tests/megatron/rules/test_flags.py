"""Flags that exclude or need each other are refused in the same releases as in Megatron, in the user's words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from megatron_lines import job

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.flags import Arguments, known_dests
from pipette_launch.megatron.rules import flags
from pipette_launch.megatron.rules.flags import FlagView

EXPERTS = "--num-experts 4 --disable-bias-linear"
OFFLOADING = "--fine-grained-activation-offloading --offload-modules core_attn"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--fp4-format e2m1 --fp8-format hybrid",
            "--fp4-format e2m1 and --fp8-format hybrid: FP4 and FP8 exclude each other",
        ),
        ("--fp8-param-gather", "--fp8-param-gather: needs --fp8-format; change or remove it"),
        ("--ddp-num-buckets 2 --ddp-bucket-size 100", "--ddp-num-buckets 2 and --ddp-bucket-size 100: exclude"),
        ("--exp-avg-dtype fp16", "--exp-avg-dtype fp16: other types than fp32 need --use-precision-aware-optimizer"),
        ("--ckpt-format torch_dcp", "--ckpt-format torch_dcp: torch_dcp needs --use-torch-fsdp2"),
        ("--use-torch-fsdp2", "--use-torch-fsdp2: needs --no-gradient-accumulation-fusion"),
        ("--save x", "--save x: needs --save-interval"),
        (
            "--lr-warmup-iters 10",
            "10 and --train-iters 10: the warm-up of the learning rate must end before",
        ),
        ("--lr 1e-4 --min-lr 1e-3", "--lr 1e-4 and --min-lr 1e-3: --min-lr is larger than the learning rate"),
        ("--lr-decay-samples 100", "--train-iters 10 and --lr-decay-samples 100: training counts iterations"),
        ("--start-weight-decay 0.1", "--start-weight-decay 0.1: a constant weight decay"),
        (
            "--multi-latent-attention --group-query-attention",
            "--multi-latent-attention and --group-query-attention: exclude each other; change one of them",
        ),
        ("--rope-type yarn", "--rope-type yarn: needs --multi-latent-attention"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1: multi-token prediction needs --position-embedding-type rope"),
        ("--squared-relu", "--squared-relu: has no kernel with its bias; add --no-bias-gelu-fusion"),
        (
            "--num-experts 4 --moe-router-topk 6 --disable-bias-linear",
            "--moe-router-topk 6 and --num-experts 4: the router sends a token to more experts than the model has",
        ),
        ("--squared-relu --swiglu", "--squared-relu and --swiglu: exclude each other"),
        ("--cp-comm-type a2a+p2p", "--cp-comm-type a2a+p2p: a2a+p2p needs --hierarchical-context-parallel-sizes"),
        (
            "--fine-grained-activation-offloading --offload-modules attn_proj",
            "--offload-modules attn_proj: attn_proj needs core_attn beside it",
        ),
        ("--delay-wgrad-compute", "--delay-wgrad-compute: needs --overlap-moe-expert-parallel-comm"),
        (f"{EXPERTS} --moe-router-topk 1", "--moe-router-topk 1: needs --moe-router-pre-softmax"),
        ("--moe-ffn-hidden-size 64", "--moe-ffn-hidden-size 64: needs --num-experts"),
        (
            f"{EXPERTS} --moe-router-group-topk 1 --moe-router-num-groups 3",
            "needs --moe-router-num-groups, which must divide the experts",
        ),
        ("--enable-cuda-graph --cuda-graph-impl local", "old and new flags of CUDA graphs exclude each other"),
    ],
)
def test_contradictions_are_refused(words: str, message: str) -> None:
    """The error has the flags as given, then the reason and a remedy."""
    with pytest.raises(MegatronError) as error:
        job(words, for_prediction=True)

    assert message in str(error.value)
    assert str(error.value).endswith(("change one of them", "change or remove it"))


OFFLOAD = "--transformer-impl transformer_engine --fine-grained-activation-offloading --offload-modules core_attn"
OVERLAP = f"{EXPERTS} --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --bf16"
PRECISE = "--use-precision-aware-optimizer --use-distributed-optimizer"


@pytest.mark.parametrize(
    ("words", "version", "reason"),
    [
        (f"--bf16 --accumulate-allreduce-grads-in-fp32 --main-grads-dtype bf16 {PRECISE}", "0.16.1", "summed in fp32"),
        (f"{PRECISE} --optimizer sgd", "0.16.1", "needs Adam"),
        # Only Adam's states can be offloaded, so no formula counts offloaded states of Muon.
        (f"{PRECISE} --optimizer muon --optimizer-cpu-offload", "0.20", "needs Adam"),
        ("--optimizer muon --optimizer-cpu-offload", "0.20", "needs --use-precision-aware-optimizer"),
        ("--experimental-attention-variant dsa --no-rope-fusion", "0.19", "needs --multi-latent-attention"),
        ("--experimental-attention-variant dsa --multi-latent-attention", "0.19", "needs --no-rope-fusion"),
        ("--hybrid-layer-pattern D-D- --no-rope-fusion", "0.19", "sparse attention needs --disable-bias-linear"),
        (
            f"--optimizer-cpu-offload {PRECISE} --fp8-param-gather --fp8-format hybrid --fp8-recipe tensorwise",
            "0.16.1",
            "both need --fp8-recipe delayed",
        ),
        (
            (
                "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params "
                "--check-weight-hash-across-dp-replicas-interval 5"
            ),
            "0.20",
            "no replica has all weights",
        ),
        ("--save x --save-interval 4 --save-retain-interval 6", "0.16.1", "not a multiple of --save-interval"),
        ("--save x --save-interval 4 --save-retain-interval 0", "0.16.1", "-interval 0: must be at least 1"),
        ("--save x --save-interval 4 --save-retain-interval -4", "0.20", "must be at least 1"),
        ("--log-memory-interval 3 --log-interval 0", "0.16.1", "--log-interval 0: not a multiple of --log-interval"),
        ("--num-distributed-optimizer-instances 0", "0.16.1", "must be at least 1"),
        ("--swiglu --activation-func-clamp-value 7", "0.20", "needs --num-experts with --swiglu"),
        (f"--swiglu {EXPERTS} --activation-func-clamp-value 0", "0.20", "and a finite value above 0"),
        (f"--swiglu {EXPERTS} --activation-func-clamp-value inf", "0.20", "and a finite value above 0"),
        (
            f"--swiglu {EXPERTS} --activation-func-clamp-value 7 --glu-linear-offset 1 --no-bias-swiglu-fusion",
            "0.20",
            "exclude each other with --swiglu",
        ),
        ("--fine-grained-activation-offloading --offload-modules fused_group_mlp", "0.18.0", "known modules are"),
        ("--fine-grained-activation-offloading --offload-modules fused_group_mlp", "0.19.0", "fused_group_mlp needs"),
        (f"{OFFLOADING} --activation-offload-fraction 1.5", "0.19.0", "needs a fraction from 0 to 1"),
        (f"{OFFLOADING} --delta-offload-bytes-across-pp-ranks -1", "0.20", "and bytes from 0 on"),
        (
            "--hybrid-layer-pattern G-G- --recompute-granularity selective --recompute-modules gdn_norm_out",
            "0.19.0",
            "needs --experimental-attention-variant gated_delta_net or gdn or gdn2",
        ),
        ("--log-memory-interval 3 --log-interval 2", "0.16.1", "not a multiple of --log-interval"),
        ("--data-path a --data-args-path b", "0.16.1", "exclude each other"),
        ("--mock-data --data-path a", "0.16.1", "exclude each other"),
        ("--warmup 3", "0.16.1", "no longer valid"),
        ("--seed 0", "0.16.1", "must be at least 1"),
        ("--deterministic-mode --tp-comm-overlap", "0.19.0", "exclude each other from 0.19 on"),
        ("--encoder-num-layers 8", "0.16.1", "exclude each other"),
        ("--encoder-seq-length 32", "0.16.1", "exclude each other"),
        ("--qk-clip --qk-clip-alpha 2.0", "0.16.1", "needs an alpha between 0 and 1"),
        (f"{EXPERTS} --overlap-moe-expert-parallel-comm --moe-shared-expert-overlap", "0.16.1", "alltoall or flex"),
        (f"{OVERLAP} --overlap-moe-expert-parallel-comm --moe-shared-expert-overlap", "0.16.1", "exclude each other"),
        ("--num-experts 4 --moe-shared-expert-intermediate-size 64", "0.16.1", "needs --disable-bias-linear"),
        ("--num-experts -2", "0.16.1", "must not be below 0"),
        ("--cuda-graph-impl local --cuda-graph-scope attn --cuda-graph-modules attn", "0.20", "old and new flags"),
        ("--cuda-graph-impl local --cuda-graph-scope full attn", "0.16.1", "full excludes other scopes"),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-scope full_iteration",
            "0.20",
            "the whole iteration needs --cuda-graph-impl local",
        ),
        ("--step-batch-size-schedule 0:8", "0.20", "exclude each other"),
        ("--optimizer lion", "0.17.1", "does not run in 0.17"),
        (
            "--bf16 --fp8-format hybrid --fp8-param-gather --optimizer dist_muon",
            "0.20",
            "needs --use-distributed-optimizer",
        ),
        (
            f"{OFFLOAD} --cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad",
            "0.20",
            "needs --fine-grained-offloading-max-inflight-offloads",
        ),
        (
            "--cuda-graph-impl full_iteration --cuda-graph-modules attn --no-check-for-nan-in-loss-and-grad",
            "0.20",
            "a graph of the whole iteration excludes graphs of modules",
        ),
    ],
)
def test_contradictions_that_no_drawn_line_has_are_refused(words: str, version: str, reason: str) -> None:
    """Megatron itself refused each line, too (`tests/contract/megatron_verdicts.py`)."""
    with pytest.raises(MegatronError, match=reason):
        job(words, for_prediction=True, version=version)


@pytest.mark.parametrize(
    ("words", "version", "reason"),
    [
        (
            "--global-batch-size 12 --decrease-batch-size-if-needed",
            "0.16.1",
            "micro_batch_size*dp does not divide global_batch_size=12, and a decreased batch is not modelled",
        ),
    ],
)
def test_what_is_legal_and_not_modelled_is_refused_as_such(words: str, version: str, reason: str) -> None:
    """Megatron accepts both lines, so the message says that they are not modelled."""
    with pytest.raises(MegatronError, match=re.escape(reason)):
        job(words, for_prediction=True, version=version)


@pytest.mark.parametrize("words", ["--save x", "--use-megatron-fsdp --use-distributed-optimizer"])
def test_a_script_that_is_launched_refuses_by_itself(words: str) -> None:
    """A launched script may accept more than NVIDIA's, so only commands that start nothing apply these rules."""
    assert job(words)


def destinations_in_rules() -> dict[str, set[str]]:
    """Return the names that rules on flags use: attributes of their argument, and words of the refused flags."""
    tree = ast.parse(Path(flags.__file__).read_text(encoding="utf-8"))
    nodes = [*ast.walk(tree)]
    read = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("f", "self")
    }
    first = [node.value.elts[0] for node in nodes if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple)]
    named = [
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "names"
    ]
    texts = [node.value for node in (*first, *named) if isinstance(node, ast.Constant)]
    refused = {word for text in (*texts, *(rule.names for rule in flags.TABLE)) for word in str(text).split()}
    own = {*vars(FlagView), *vars(FlagView(Arguments.parse((), "0.20.0")))}
    return {"read": read - own, "refused": refused}


def test_every_name_in_a_rule_is_a_flag_of_some_release() -> None:
    """A misspelt destination would count as off for ever."""
    found = destinations_in_rules()

    assert len(found["read"]) > 100
    assert set() == found["read"] - known_dests()
    assert set() == found["refused"] - known_dests()


def test_a_misspelt_destination_is_an_error() -> None:
    """A destination of another release is None, and a name that no release has raises an error."""
    arguments = Arguments.parse((), "0.16.1")

    assert FlagView(arguments).moe_paged_stash is None
    with pytest.raises(AttributeError, match="no release of Megatron has a flag for moe_page_stash"):
        _ = FlagView(arguments).moe_page_stash
    with pytest.raises(AssertionError, match="no release of Megatron has a flag for moe_page_stash"):
        arguments.get("moe_page_stash")
