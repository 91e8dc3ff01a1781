"""The example's flags are Megatron's, and what they leave open is worked out as Megatron does it."""

import argparse

import arguments
import flags
import pytest
from megatron_lines import job

from pipette_launch.megatron.flags import flag_table

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --transformer-impl local"
)
OWN_DEFAULTS = {"--vocab-size": 256, "--dataloader-type": "single"}
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-layer-freq 2"
ACTIONS = {"_StoreAction": "store", "_StoreTrueAction": "store_true", "_StoreFalseAction": "store_false"}


def parse(text: str = "", *, world_size: int = 1) -> argparse.Namespace:
    """Parse a small model's flags and more."""
    return arguments.parse([*MODEL.split(), *text.split()], {"WORLD_SIZE": str(world_size)})


@pytest.mark.parametrize("action", flags.parser()._actions[1:], ids=lambda action: action.option_strings[0])
def test_a_flag_is_megatrons(action: argparse.Action) -> None:
    """Every flag has the destination, action, number of values and default that Megatron 0.16 gives it."""
    (option,) = action.option_strings
    flag = flag_table("0.16.1")[option]
    default = flag.default
    if ACTIONS[type(action).__name__] == "store_true":
        default = bool(default)

    assert (flag.dest, flag.action) == (action.dest, ACTIONS[type(action).__name__])
    assert flag.nargs == (0 if action.nargs == 0 else action.nargs)
    assert action.default == OWN_DEFAULTS.get(option, default)


@pytest.mark.parametrize("words", ["--no-such-flag", "--num-layer 4", "stray"])
def test_unknown_words_end_with_2(words: str) -> None:
    """Neither unknown flags nor abbreviations nor stray words pass, as with Megatron."""
    with pytest.raises(SystemExit) as caught:
        parse(words)

    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("text", "world_size", "name", "value"),
    [
        ("", 1, "global_batch_size", 2),
        ("", 4, "global_batch_size", 8),
        ("--tensor-model-parallel-size 2 --global-batch-size 8", 4, "num_microbatches", 2),
        ("--pipeline-model-parallel-size 2", 4, "data_parallel_size", 2),
        ("", 1, "ffn_hidden_size", 256),
        ("--swiglu --hidden-size 96", 1, "ffn_hidden_size", 256),
        ("", 1, "num_query_groups", 4),
        ("--group-query-attention --num-query-groups 2", 1, "num_query_groups", 2),
        ("--tensor-model-parallel-size 4", 4, "padded_vocab_size", 512),
        ("--sequence-parallel", 1, "sequence_parallel", False),
        ("--recompute-activations", 1, "recompute_granularity", "selective"),
        ("--bf16", 1, "accumulate_allreduce_grads_in_fp32", True),
        ("--bf16 --grad-reduce-in-bf16", 1, "accumulate_allreduce_grads_in_fp32", False),
        ("", 1, "overlap_p2p_comm", False),
        ("--num-experts 4 --moe-aux-loss-coeff 0.01", 1, "moe_aux_loss_coeff", 0.01),
        ("--num-experts 4 --moe-layer-freq ([0]*1+[1]*1)*2", 1, "moe_layer_freq", [0, 1, 0, 1]),
        ("--num-experts 4 --moe-layer-freq 2", 1, "moe_layer_freq", 2),
    ],
)
def test_what_is_left_open(text: str, world_size: int, name: str, value: object) -> None:
    """Derived values are Megatron's."""
    assert value == getattr(parse(text, world_size=world_size), name)


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("", None),
        ("--num-layers-per-virtual-pipeline-stage 1", 2),
        ("--num-layers-per-virtual-pipeline-stage 2", None),
        ("--num-virtual-stages-per-pipeline-rank 2", 2),
        ("--pipeline-model-parallel-layout Et*3|t|L|", 2),
        ("--pipeline-model-parallel-layout E|(t|)*4L", 3),
        ("--decoder-first-pipeline-num-layers 1", None),
    ],
)
def test_virtual_stages(text: str, num: int | None) -> None:
    """The three ways to ask for virtual stages agree, and one stage is none."""
    made = parse(f"--pipeline-model-parallel-size 2 {text}", world_size=2)

    assert num == made.virtual_pipeline_model_parallel_size


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ("--tensor-model-parallel-size 2", 3, "3 processes are not a multiple"),
        ("--tensor-model-parallel-size 2", 1, "1 processes are not a multiple"),
        ("--pipeline-model-parallel-size 3", 3, "4 layers do not divide"),
        ("--global-batch-size 3", 1, "global batch size 3 is not divisible"),
        ("--global-batch-size 1", 1, "global batch size 1 is not divisible"),
        ("--num-virtual-stages-per-pipeline-rank 2", 1, "virtual stages need more than 1 pipeline ranks"),
        ("--bf16 --fp16", 1, "exclude each other"),
        ("--seq-length 64", 1, "max-position-embeddings 32 is below"),
        ("--vocab-size 100", 1, "at least 256"),
        ("--save somewhere", 1, "--save needs --save-interval"),
        ("--overlap-param-gather", 1, "needs --use-distributed-optimizer"),
        ("--expert-model-parallel-size 2", 2, "needs --num-experts"),
        ("--expert-model-parallel-size 2 --num-experts 3", 2, "3 experts do not divide"),
        ("--data-path one two", 1, "takes one file"),
        ("--min-lr 1", 1, "is above --lr"),
        ("--transformer-impl transformer_engine", 1, "pass --transformer-impl local"),
    ],
)
def test_contradictions(text: str, world_size: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one says which value is wrong."""
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(arguments.ArgumentsError, match=message):
        parse(text, world_size=world_size)


@pytest.mark.parametrize(
    "words", ["--moe-layer-freq often", "--moe-layer-freq __import__('os')", "--moe-layer-freq [[1]]"]
)
def test_a_layer_frequency_is_no_program(words: str) -> None:
    """Only integers, lists, sums and products of them are understood."""
    with pytest.raises(SystemExit):
        parse(words)


def test_the_first_missing_flag_is_named() -> None:
    """What a model cannot do without is asked for by its flag."""
    with pytest.raises(arguments.ArgumentsError, match="--num-layers is missing"):
        arguments.parse([], {})


def test_dump() -> None:
    """Arguments are printed sorted, in Megatron's columns, between its rules."""
    lines = arguments.dump(argparse.Namespace(seed=1234, hidden_size=64)).splitlines()

    assert [
        "------------------------ arguments ------------------------",
        "  hidden_size ..................................... 64",
        "  seed ............................................ 1234",
        "-------------------- end of arguments ---------------------",
    ] == lines


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--tensor-model-parallel-size 4",
        "--group-query-attention --num-query-groups 2 --kv-channels 16",
        "--swiglu --disable-bias-linear --ffn-hidden-size 176",
        EXPERTS,
        f"{EXPERTS} --swiglu --moe-shared-expert-intermediate-size 128",
    ],
    ids=["dense", "tp", "GQA", "SwiGLU", "MoE", "shared expert"],
)
def test_flops_are_those_of_the_launcher(flags: str) -> None:
    """The throughput of --log-throughput and the launcher's rest on one number of FLOPs, counted twice."""
    words = f"{MODEL} --vocab-size 1000 --global-batch-size 16 {flags}".split()
    ours = job("--tokenizer-type NullTokenizer", base=words)

    assert ours.model.step_flops(16, tp=ours.own.tp) == arguments.step_flops(
        arguments.parse(words, {"WORLD_SIZE": "8"})
    )
