"""Parameters on one rank, by hand."""

from dataclasses import replace

import pytest
from facts_for_tests import changed_job, tiny_job, tiny_model

from pipette_launch.cost.layers.block import Parameters
from pipette_launch.cost.layers.kinds import kind_parameters
from pipette_launch.cost.layers.parameters import (
    Whole,
    buffered_parameters,
    chunk_parameters,
    end_parameters,
    expert_dp,
    gradient_bytes_per_parameter,
    held_gradients,
    optimizer_bytes,
    reduced_gradient_bytes,
    resident_parameters,
    sharding_of,
    stage_parameters,
    state_bytes_per_parameter,
    step_bytes_per_parameter,
    weight_bytes,
    whole_beside_shards,
)
from pipette_launch.facts import Job, Layout

MOE = {"num_experts": 4, "moe_layer_freq": (0, 1, 0, 1), "moe_ffn_hidden_size": 128, "add_bias_linear": False}


def test_a_gpt_layer() -> None:
    """With h 64, f 256: QKV 64*192+192, projection 64*64+64, MLP 64*256+256 and 256*64+64, two norms of 128."""
    assert kind_parameters(tiny_job(), Layout(), "layer") == Parameters(dense=12480 + 4160 + 16640 + 16448 + 256)


def test_tensor_parallel_halves_columns_and_rows_but_not_row_biases_and_norms() -> None:
    """QKV and first matrix halve with their bias; projection and second matrix keep theirs."""
    expected = 6240 + (2048 + 64) + 8320 + (8192 + 64) + 256

    assert kind_parameters(tiny_job(), Layout(tp=2), "layer") == Parameters(dense=expected)


def test_a_llama_layer() -> None:
    """Two query groups of four heads, SwiGLU, RMSNorm, no bias: 64*(64+2*32) + 64*64 + 3*64*256 + 2*64."""
    model = tiny_model(num_query_groups=2, gated_linear_unit=True, normalization="RMSNorm", add_bias_linear=False)

    assert kind_parameters(tiny_job(model=model), Layout(), "layer") == Parameters(dense=8192 + 4096 + 49152 + 128)


def test_ranks_that_share_a_query_group_split_its_weights() -> None:
    """With tp 4 over two groups of 16 channels: the weights of 8 channels of keys and of values on each rank."""
    model = tiny_model(num_query_groups=2, add_bias_linear=False)

    assert kind_parameters(tiny_job(model=model), Layout(tp=4), "layer") == Parameters(
        dense=64 * (16 + 2 * 8 + 16) + 8192 + 256
    )


def test_query_bias_alone() -> None:
    """`--add-qkv-bias` without other biases adds one bias for each QKV column."""
    plain = kind_parameters(tiny_job(model=tiny_model(add_bias_linear=False)), Layout(), "layer")

    assert kind_parameters(
        tiny_job(model=tiny_model(add_bias_linear=False, add_qkv_bias=True)), Layout(), "layer"
    ) == plain + Parameters(dense=192)


def test_an_expert_layer() -> None:
    """Attention, norms and router everywhere; two of four experts of width 128 on each of two ranks, split by etp."""
    dense = 64 * 192 + 64 * 64 + 256 + 64 * 4
    model = tiny_model(**MOE)

    assert kind_parameters(tiny_job(model=model), Layout(dp=2, ep=2), "moe_layer") == Parameters(
        dense=dense, expert=2 * 2 * 64 * 128
    )
    assert (
        kind_parameters(tiny_job(model=model), Layout(tp=2, dp=2, ep=2, etp=2), "moe_layer").expert == 2 * 2 * 64 * 64
    )


def test_a_shared_expert_is_dense() -> None:
    """It is reduced with the rest of the model."""
    plain = kind_parameters(tiny_job(model=tiny_model(**MOE)), Layout(), "moe_layer")
    shared = kind_parameters(
        tiny_job(model=tiny_model(**MOE, moe_shared_expert_intermediate_size=32)), Layout(), "moe_layer"
    )

    assert shared == plain + Parameters(dense=2 * 64 * 32)


def test_ends_of_the_model() -> None:
    """Embedding 256*64 and positions 32*64 in front, final norm behind; a tied copy on the last of several stages."""
    layer = kind_parameters(tiny_job(), Layout(), "layer").dense

    assert stage_parameters(tiny_job(), Layout()) == (Parameters(dense=4 * layer + 16384 + 2048 + 128),)
    assert stage_parameters(tiny_job(), Layout(pp=2)) == (
        Parameters(dense=2 * layer + 16384 + 2048),
        Parameters(dense=2 * layer + 128 + 16384),
    )


def test_an_untied_head_has_weights_of_its_own() -> None:
    """On one stage it comes on top of the embedding."""
    tied, untied = (
        stage_parameters(tiny_job(model=tiny_model(untie_embeddings_and_output_weights=value)), Layout())[0]
        for value in (False, True)
    )

    assert untied == tied + Parameters(dense=16384)


def test_the_vocabulary_is_padded_and_split() -> None:
    """250 tokens on two ranks: padded to 256, 128 rows each."""
    model = tiny_model(vocab_size=250, position_embedding_type="rope")
    layer = kind_parameters(tiny_job(model=model), Layout(tp=2), "layer").dense

    assert stage_parameters(tiny_job(model=model), Layout(tp=2))[0] == Parameters(dense=4 * layer + 128 * 64 + 128)


def test_chunks_follow_the_layers() -> None:
    """Uneven chunks have their given layers, and ranks hold every pp-th chunk."""
    model = tiny_model(position_embedding_type="rope", untie_embeddings_and_output_weights=True)
    layer = kind_parameters(tiny_job(model=model), Layout(), "layer").dense
    layout = Layout(pp=2, vpp=2, layers_per_chunk=(0, 1, 2, 1))

    assert [part.dense for part in chunk_parameters(tiny_job(model=model), layout)] == [
        16384,
        layer,
        2 * layer,
        layer + 128 + 16384,
    ]
    assert [part.dense for part in stage_parameters(tiny_job(model=model), layout)] == [
        16384 + 2 * layer,
        2 * layer + 128 + 16384,
    ]


@pytest.mark.parametrize(
    ("layout", "expected"), [(Layout(dp=8, ep=4), 2), (Layout(tp=2, dp=4, ep=2, etp=1), 4), (Layout(pp=2, dp=2), 2)]
)
def test_expert_data_parallel_size(layout: Layout, expected: int) -> None:
    """World over etp * ep * pp."""
    assert expert_dp(layout) == expected


LAYER = 49_984
EMBEDDING = 16_384 + 2_048
SHARDED = Layout(dp=4, use_distributed_optimizer=True)
MEGATRON = "--use-megatron-fsdp"
ALL = "--data-parallel-sharding-strategy optim_grads_params"


def job(*flags: str, **model: object) -> Job:
    """A GPT of four layers in fp32, or in what `model` says."""
    return tiny_job(model=tiny_model(**model), performance_flags=flags)


def test_without_fsdp_nothing_is_sharded() -> None:
    """The distributed optimizer is a matter of the layout."""
    assert sharding_of(job()) is None
    assert Whole() == whole_beside_shards(job(), SHARDED)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("no_shard", (4096, 1000, 1000)),
        ("optim", (4096, 1000, 250)),
        ("optim_grads", (4096, 250, 250)),
        ("optim_grads_params", (1000, 250, 250)),
    ],
)
def test_strategies(strategy: str, expected: tuple[int, ...]) -> None:
    """Bytes of weights, gradients and stepped parameters of 1,000 over four ranks; unsharded ones are padded to 128."""
    this = job(MEGATRON, f"--data-parallel-sharding-strategy {strategy}")
    counts = (held_gradients(this, 1000, 0, SHARDED), resident_parameters(this, 1000, 0, SHARDED))

    assert expected == (int(weight_bytes(this, 1000, 0, 100, SHARDED)), *map(int, counts))


def test_experts_are_sharded_over_their_own_ranks() -> None:
    """With as many expert ranks as replicas there is nobody to share them with."""
    this = job(MEGATRON, ALL, num_experts=4, moe_layer_freq=(1,) * 4)

    assert int(held_gradients(this, 1000, 1000, Layout(dp=4, ep=4))) == 250 + 1000


def test_instances_shard_for_themselves() -> None:
    """Two of them over four ranks: halves, and quarters only of what `outer` shards across them."""
    two = "--num-distributed-optimizer-instances 2"
    outer = "--outer-dp-sharding-strategy optim"

    assert int(resident_parameters(job(MEGATRON, ALL, two), 1000, 0, SHARDED)) == 500
    assert int(resident_parameters(job(MEGATRON, ALL, two, outer), 1000, 0, SHARDED)) == 250
    assert int(held_gradients(job(MEGATRON, ALL, two, outer), 1000, 0, SHARDED)) == 500


def test_layers_in_eight_bits() -> None:
    """A byte of each parameter of a layer, two in MXFP8; embedding and head stay in 16 bits."""
    precise = {"params_dtype": "bf16", "transformer_impl": "transformer_engine"}
    flags = (MEGATRON, ALL, "--fp8-format hybrid", "--fp8-param-gather")

    assert int(weight_bytes(job(*flags, **precise), 900, 0, 100, SHARDED)) == 200 + 50
    assert int(weight_bytes(job(*flags, "--fp8-recipe mxfp8", **precise), 900, 0, 100, SHARDED)) == 400 + 50


def test_small_layers_are_gathered_all_at_once() -> None:
    """A thousand million parameters may wait, which is all: four layers, and the embedding, which is the head too."""
    whole = whole_beside_shards(job(MEGATRON, ALL), SHARDED)

    assert end_parameters(tiny_job(), SHARDED) == (EMBEDDING, 128)
    assert whole == Whole(
        weights=4 * (4 * LAYER + EMBEDDING + 128),
        gradients=4 * (LAYER + EMBEDDING + 128),
        layer_gradients=4 * LAYER,
        layer_weights=4 * LAYER,
        waiting_at_end=3,
    )


def test_a_head_of_its_own_is_reduced_first() -> None:
    """The embedding's gradients come when the backward is over."""
    whole = whole_beside_shards(job(MEGATRON, ALL, untie_embeddings_and_output_weights=True), SHARDED)

    assert whole.gradients == 4 * (LAYER + 16_384 + 128)


def test_a_small_unit_of_communication() -> None:
    """A layer is gathered ahead; with the layer at work one is being reduced, and one more may wait."""
    whole = whole_beside_shards(job(MEGATRON, ALL, f"--suggested-communication-unit-size {LAYER + 128}"), SHARDED)

    assert whole.weights == 4 * (2 * LAYER + EMBEDDING + 128)
    assert (whole.waiting, whole.waiting_at_end) == (2, 0)


def test_two_buffers_stay() -> None:
    """Two buffers of weights and two of gradients; no layer waits."""
    whole = whole_beside_shards(job(MEGATRON, ALL, "--fsdp-double-buffer"), SHARDED)

    assert whole.weights == whole.gradients == 4 * (2 * LAYER + EMBEDDING + 128)
    assert whole.waiting == whole.waiting_at_end == 0


def test_weights_that_are_not_sharded_are_not_gathered() -> None:
    """Their gradients still need whole buffers before they are reduced: one for all."""
    whole = whole_beside_shards(job(MEGATRON, "--data-parallel-sharding-strategy optim_grads"), SHARDED)

    assert whole.weights == 0
    assert whole.gradients == 4 * (4 * LAYER + EMBEDDING + 128)
    assert whole.waiting == 0


def test_reductions_that_overlap_go_by_buckets() -> None:
    """Buckets have forty million parameters; all but the first wait."""
    long = job(MEGATRON, "--data-parallel-sharding-strategy optim_grads", num_layers=1000)
    overlapped = replace(long, own=replace(long.own, overlap_grad_reduce=True))
    whole = whole_beside_shards(overlapped, SHARDED)

    assert whole.gradients == 4 * 40_000_000
    assert whole.waiting == (1000 * LAYER + EMBEDDING + 128 - 40_000_000) // LAYER


def optimizer_job(*flags: str, **changes: object) -> Job:
    """A bf16 GPT."""
    model = {"params_dtype": "bf16", "transformer_impl": "transformer_engine", "attention_backend": "fused"}
    return tiny_job(model=tiny_model(**(model | changes)), performance_flags=flags)


@pytest.mark.parametrize(
    ("changes", "layout", "expected"),
    [
        # bf16 with fp32 gradients: 18 bytes, or 6 + 12/d.
        ({}, Layout(dp=4), (2, 4, 12, 0)),
        ({}, Layout(dp=4, use_distributed_optimizer=True), (2, 4, 3, 0)),
        # dp * cp shards, not dp.
        ({}, Layout(dp=2, cp=2, use_distributed_optimizer=True), (2, 4, 3, 0)),
        # torch's own Adam holds 4 more for each parameter it steps.
        ({"transformer_impl": "local"}, Layout(dp=4), (2, 4, 12, 4)),
        ({"transformer_impl": "local"}, Layout(dp=4, use_distributed_optimizer=True), (2, 4, 3, 1)),
        # fp16 gradients are copied to fp32 for the step: 20 bytes, or 4 + 16/d.
        ({"params_dtype": "fp16"}, Layout(dp=4), (2, 2, 12, 4)),
        ({"params_dtype": "fp32"}, Layout(dp=4), (4, 4, 8, 0)),
        ({"params_dtype": "fp32"}, Layout(dp=4, use_distributed_optimizer=True), (4, 4, 2, 0)),
    ],
)
def test_bytes_of_a_parameter(changes: dict[str, object], layout: Layout, expected: tuple[int, ...]) -> None:
    """Weight, gradient, optimizer, step, by precision."""
    this = optimizer_job(**changes)
    states, step = optimizer_bytes(this, 1000, 0, layout)

    assert (this.model.dtype_bytes, gradient_bytes_per_parameter(this), states / 1000, step / 1000) == expected


def test_gradients_reduced_in_bf16() -> None:
    """2 bytes in the buffer, 4 more for the step."""
    this = replace(optimizer_job(), grad_reduce_in_bf16=True)

    assert gradient_bytes_per_parameter(this) == 2
    assert optimizer_bytes(this, 10, 0, Layout()) == (120, 40)


BF16_GRADIENTS = ("--use-precision-aware-optimizer", "--main-grads-dtype bf16")


@pytest.mark.parametrize(
    ("flags", "reduces_in_bf16", "dtype", "expected"),
    [
        ((), False, "bf16", 4),
        (("--accumulate-allreduce-grads-in-fp32",), True, "bf16", 2),
        (BF16_GRADIENTS, False, "bf16", 2),
        (BF16_GRADIENTS, True, "bf16", 2),
        (("--use-precision-aware-optimizer",), False, "bf16", 4),
        # validate_args reads both flags only for bf16 weights.
        ((), True, "fp32", 4),
        (BF16_GRADIENTS, True, "fp32", 4),
        ((), True, "fp16", 2),
        (("--accumulate-allreduce-grads-in-fp32",), True, "fp16", 4),
    ],
)
def test_type_of_gradients(flags: tuple[str, ...], reduces_in_bf16: bool, dtype: str, expected: int) -> None:
    """Buffers of gradients have the type that Megatron's validate_args chooses, and are reduced in this type."""
    this = replace(optimizer_job(*flags, params_dtype=dtype), grad_reduce_in_bf16=reduces_in_bf16)

    assert (expected, expected) == (gradient_bytes_per_parameter(this), reduced_gradient_bytes(this))


@pytest.mark.parametrize(
    ("version", "flags", "reduces_in_bf16", "expected"),
    [
        ("0.16.1", (), False, (4, 4)),
        ("0.16.1", (), True, (2, 2)),
        ("0.18.0", (), False, (4, 4)),
        # `grad_reduce_in_fp32`, the default for bf16 weights, wins over FSDP's own flags.
        ("0.18.0", ("--megatron-fsdp-main-grads-dtype bf16", "--megatron-fsdp-grad-comm-dtype bf16"), False, (4, 4)),
        ("0.18.0", ("--megatron-fsdp-main-grads-dtype fp32",), True, (4, 2)),
        ("0.18.0", (), True, (2, 2)),
        ("0.20.0", (), False, (2, 2)),
        ("0.20.0", ("--accumulate-allreduce-grads-in-fp32",), False, (2, 2)),
        ("0.20.0", ("--megatron-fsdp-main-grads-dtype fp32",), True, (4, 4)),
        ("0.20.0", ("--megatron-fsdp-main-grads-dtype fp32", "--megatron-fsdp-grad-comm-dtype bf16"), False, (4, 2)),
        ("0.20.0", ("--megatron-fsdp-main-grads-dtype bf16", "--megatron-fsdp-grad-comm-dtype fp32"), False, (2, 4)),
    ],
)
def test_type_of_gradients_of_megatron_fsdp(
    version: str, flags: tuple[str, ...], reduces_in_bf16: bool, expected: tuple[int, int]
) -> None:
    """Until 0.18 `grad_reduce_in_fp32` chooses fp32; later only Megatron-FSDP's own flags choose both types."""
    this = changed_job(optimizer_job(MEGATRON, *flags), megatron_version=version, grad_reduce_in_bf16=reduces_in_bf16)

    assert expected == (gradient_bytes_per_parameter(this), reduced_gradient_bytes(this))


def test_whole_gradients_of_fsdp_have_the_type_of_the_reduction() -> None:
    """Buffers of whole gradients have 2 bytes a parameter if Megatron-FSDP reduces in bf16, whatever it accumulates."""
    types = ("--megatron-fsdp-main-grads-dtype fp32", "--megatron-fsdp-grad-comm-dtype bf16")
    this = changed_job(optimizer_job(MEGATRON, ALL, *types), megatron_version="0.20.0")

    assert 2 == whole_beside_shards(this, SHARDED).layer_gradients / LAYER


def test_sgd_keeps_one_momentum() -> None:
    """4 bytes and the fp32 copy, no temporaries."""
    assert optimizer_bytes(replace(optimizer_job(), optimizer="sgd"), 10, 0, Layout()) == (80, 0)


FLAT = Layout(dp=16, use_distributed_optimizer=True)


@pytest.mark.parametrize(
    ("flags", "layout", "largest_share", "buffer"),
    [
        # The mean of 4 layers, 12288, in multiples of the largest matrix.
        ((), FLAT, 16384, 16 * 16384),
        # Buckets of whole matrices are 10 % larger than the parameters, and 16 shares are larger still.
        ((), replace(FLAT, overlap_grad_reduce=True), 16384, 16 * 16384),
        ((), replace(FLAT, dp=4, overlap_grad_reduce=True), 49152, 216320),
        (("--no-use-layer-wise-param-layout",), FLAT, 16384, 196608),
        ((), Layout(dp=16), 196608, 196608),
    ],
)
def test_muon_shards_whole_matrices(flags: tuple[str, ...], layout: Layout, largest_share: int, buffer: int) -> None:
    """Matrices of 12288, 4096, 16384 and 16384 parameters: one moment and the fp32 copy, 8 bytes."""
    this = changed_job(optimizer_job(*flags), megatron_version="0.19.0", optimizer="muon")

    assert optimizer_bytes(this, 196608, 0, layout) == (8 * largest_share, 0)
    assert buffered_parameters(this, 196608, 0, layout) == buffer


def test_adam_updates_parameters_outside_layers_under_muon() -> None:
    """12 bytes for each of 16000: a shard of an ordinary distributed optimizer, or all on one rank."""
    new = changed_job(optimizer_job(), megatron_version="0.19.0", optimizer="dist_muon")
    old = changed_job(new, performance_flags=("--no-use-layer-wise-param-layout",))

    assert optimizer_bytes(new, 212608, 0, FLAT, ends=16000)[0] == 8 * 16384 + 12 * 1000
    assert optimizer_bytes(old, 212608, 0, FLAT, ends=16000)[0] == 8 * 16384 + 12 * 16000


def test_soap_keeps_two_square_matrices_for_each_side() -> None:
    """8 bytes for each of 64*64 + 192*192 and three other pairs, for 49152 parameters: 31.4 a parameter, rounded up."""
    squares = 64**2 + 192**2 + 64**2 + 64**2 + 2 * (64**2 + 256**2)

    assert state_bytes_per_parameter(replace(optimizer_job(), optimizer="soap")) == 12 + -(-8 * squares // 49152)


def test_experts_shard_over_their_own_group() -> None:
    """With dp 4, ep 2: dense states over four ranks, experts over two; a rest is rounded up."""
    layout = Layout(dp=4, ep=2, use_distributed_optimizer=True)

    assert optimizer_bytes(optimizer_job(), 10, 10, layout)[0] == 12 * (3 + 5)


def test_fp16_gradients_in_fp32_when_asked() -> None:
    """`--accumulate-allreduce-grads-in-fp32` doubles the buffer and spares the copy."""
    this = optimizer_job("--accumulate-allreduce-grads-in-fp32", params_dtype="fp16")

    assert gradient_bytes_per_parameter(this) == 4
    assert optimizer_bytes(this, 10, 0, Layout()) == (120, 0)


def test_instances_of_the_distributed_optimizer_shard_by_themselves() -> None:
    """Two instances on four ranks: two shards each."""
    this = optimizer_job("--num-distributed-optimizer-instances 2")

    assert resident_parameters(this, 1000, 0, SHARDED) == 500
    assert resident_parameters(optimizer_job(), 1000, 0, SHARDED) == 250


@pytest.mark.parametrize(
    ("flags", "dtype", "expected"),
    [
        # Two fp32 moments, and two bytes that complete the bf16 weight to fp32.
        ((), "bf16", 10),
        (("--exp-avg-dtype bf16", "--exp-avg-sq-dtype fp8"), "bf16", 5),
        (("--main-params-dtype fp16",), "bf16", 10),
        ((), "fp16", 12),
    ],
)
def test_precision_aware_optimizer(flags: tuple[str, ...], dtype: str, expected: int) -> None:
    """Bytes of its states for one parameter."""
    assert (
        state_bytes_per_parameter(optimizer_job("--use-precision-aware-optimizer", *flags, params_dtype=dtype))
        == expected
    )


@pytest.mark.parametrize(
    ("flags", "changes", "expected"),
    [
        # The gradient twice, three states and back, the weight written.
        ((), {}, 8 + 24 + 2),
        # The weight is its own fp32 copy.
        ((), {"params_dtype": "fp32"}, 8 + 16 + 8),
        # The fp32 copy of the gradient is read.
        ((), {"params_dtype": "fp16"}, 8 + 24 + 2),
        # The weight is the upper half of its fp32 copy, and is read too.
        (("--use-precision-aware-optimizer",), {}, 8 + 16 + 4 + 4),
        # One moment is copied to fp32 and back.
        (("--use-precision-aware-optimizer", "--exp-avg-dtype bf16"), {}, 8 + 16 + 4 + 4 + 2 * (2 + 4)),
    ],
)
def test_bytes_that_a_step_moves(flags: tuple[str, ...], changes: dict[str, object], expected: int) -> None:
    """Read and written for one parameter, by the types of gradients and states."""
    assert step_bytes_per_parameter(optimizer_job(*flags, **changes)) == expected


def test_narrow_states_are_copied_for_the_step() -> None:
    """To fp32, dense and expert parameters one after the other; what completes a weight is not copied."""
    flags = ("--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype fp8")

    assert optimizer_bytes(optimizer_job(*flags), 10, 30, Layout()) == (40 * 5, 30 * 8)
    assert optimizer_bytes(optimizer_job("--use-precision-aware-optimizer"), 10, 0, Layout()) == (100, 0)


def test_states_on_the_host() -> None:
    """All of them, or a part."""
    assert optimizer_bytes(optimizer_job("--optimizer-cpu-offload"), 10, 0, Layout())[0] == 0
    part = optimizer_job("--optimizer-cpu-offload", "--optimizer-offload-fraction 0.25")
    assert optimizer_bytes(part, 10, 0, Layout())[0] == 90


@pytest.mark.parametrize(
    ("flags", "layout", "expected"),
    [
        ((), Layout(dp=4), 1000),
        # A multiple of lcm(4, 128), of lcm(12, 128) = 384, of 2^16.
        ((), SHARDED, 1024),
        ((), Layout(dp=6, cp=2, use_distributed_optimizer=True), 1152),
        (("--ddp-pad-buckets-for-high-nccl-busbw",), SHARDED, 65536),
    ],
)
def test_buckets_are_padded_for_equal_shards(flags: tuple[str, ...], layout: Layout, expected: int) -> None:
    """Only the distributed optimizer cuts them."""
    assert buffered_parameters(optimizer_job(*flags), 1000, 0, layout) == expected
