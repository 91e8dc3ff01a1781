"""FP8 copies of weights, on layers of known size: see test_parameters."""

from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.fp8_weights import fp8_weight_bytes
from pipette_launch.cost.layers.parameters import layer_parameters
from pipette_launch.facts import Job, Layout

MATRICES = 12480 + 4160 + 16640 + 16448
"""A GPT layer of h 64 without its two norms."""


def job(*flags: str, **changes: object) -> Job:
    """A GPT of four layers."""
    model = {"params_dtype": "bf16", "transformer_impl": "transformer_engine"}
    return tiny_job(model=tiny_model(**(model | changes)), performance_flags=flags)


def test_two_bytes_for_each_parameter_of_the_layers() -> None:
    """On each rank its own layers; embeddings, norms and the head stay as they are."""
    fp8 = job("--fp8-format hybrid")

    assert fp8_weight_bytes(fp8, Layout()) == (8 * MATRICES,)
    assert fp8_weight_bytes(fp8, Layout(pp=2, layers_per_chunk=(3, 1))) == (6 * MATRICES, 2 * MATRICES)
    assert fp8_weight_bytes(fp8, Layout(pp=2, vpp=2)) == (4 * MATRICES, 4 * MATRICES)


def test_experts_are_copied_and_the_router_is_not() -> None:
    """Two dense layers and two with experts, of which a rank has two."""
    moe = {"num_experts": 4, "moe_layer_freq": (0, 1, 0, 1), "moe_ffn_hidden_size": 128, "add_bias_linear": False}
    fp8 = job("--fp8-format e4m3", **moe)
    plain, experts = (layer_parameters(fp8.model, Layout(dp=2, ep=2), moe=kind).count for kind in (False, True))

    expected = 2 * (2 * (plain - 256) + 2 * (experts - 256 - 4 * 64))
    assert fp8_weight_bytes(fp8, Layout(dp=2, ep=2)) == (expected,)


def test_no_copies() -> None:
    """Without FP8, with weights that are FP8 themselves, and in Megatron's own layers."""
    for plain in (
        job(),
        job("--fp8-format hybrid", "--fp8-param-gather"),
        job("--fp8-format hybrid", transformer_impl="local"),
    ):
        assert fp8_weight_bytes(plain, Layout(pp=2)) == (0, 0)
