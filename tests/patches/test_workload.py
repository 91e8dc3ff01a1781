"""The measured parts are Megatron's own, and together they are the whole model."""

from typing import Any

import pytest
from facts_for_tests import fine_grained_model, tiny_job, tiny_model
from patches.findings import findings_of

from pipette_launch.cost.layers.ends import depth_parameters
from pipette_launch.cost.layers.kinds import kind_parameters
from pipette_launch.cost.layers.parameters import word_embedding_parameters
from pipette_launch.facts import Layout


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Results of a separate process, so that this process has no megatron-core and no process groups."""
    return findings_of("workload_worker.py")


def test_a_first_case_imports_nothing(found: dict[str, Any]) -> None:
    """All that a case and its optimizer run is imported before the compute budget begins."""
    assert [] == found["loaded later"]


def test_the_compiler_is_imported_and_keeps_all_shapes(found: dict[str, Any]) -> None:
    """On GPUs the first compiled function imports nothing, and its variants stay below the limit of the compiler."""
    assert [True, 64] == found["compiler"]


def test_layer_and_head_are_the_model(found: dict[str, Any]) -> None:
    """Layer and head run one after the other give the loss of Megatron's own forward."""
    whole, parts = found["losses"]

    assert ["layer", "embedding", "head", "core_attention"] == found["names"]
    assert pytest.approx(whole, rel=1e-6) == parts
    assert 4 < whole < 8


def test_a_frozen_part_has_the_same_input_gradient_and_no_other(found: dict[str, Any]) -> None:
    """The timed gradient of the input has the right value, and no weight gets a gradient."""
    same, all_with_weights, any_without = found["frozen"]

    assert same
    assert all_with_weights
    assert not any_without


def test_gradients_go_to_main_gradients(found: dict[str, Any]) -> None:
    """They add up there, not in `.grad`, and nothing is left behind."""
    assert [True, True, True] == found["accumulated"]


def test_full_recompute_is_megatrons(found: dict[str, Any]) -> None:
    """Same value, same gradients; each of two layers runs once without and once with a graph to go back through."""
    same_output, same_input_gradient, num_same_gradients, runs = found["again"]

    assert same_output
    assert same_input_gradient
    assert 12 == num_same_gradients
    assert [True, True, False, False, True, True] == runs


def test_the_attention_core_is_the_layers_own(found: dict[str, Any]) -> None:
    """Queries, keys, values and output have the layer's shapes; the core chains, with a backward."""
    assert [True, True, True] == found["core"]


def test_the_fused_loss_is_the_other_one(found: dict[str, Any]) -> None:
    """Value and gradient of the head agree for each loss function that flags can select."""
    value, gradient, fused_value, fused_gradient = found["fused losses"]

    assert pytest.approx(value, rel=1e-5) == fused_value
    assert pytest.approx(gradient, rel=1e-4) == fused_gradient
    assert gradient > 0


def test_the_optimizer_clips_and_steps_on_everything(found: dict[str, Any]) -> None:
    """All parameters move, and all are counted."""
    moved, counted, norm, clipped = found["moved"]

    assert moved
    assert found["parameters"] == counted
    assert pytest.approx(counted**0.5, rel=0.1) == norm
    assert pytest.approx(1.0, rel=1e-3) == clipped


def test_tensor_parallelism_halves_the_matrices(found: dict[str, Any]) -> None:
    """Under a fake group of two, a rank holds half of each matrix, and the norms and row biases whole."""
    model = tiny_model()
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    whole = 2 * 2 * hidden + 2 * hidden
    cut = 3 * hidden * hidden + 3 * hidden + hidden * hidden + 2 * hidden * ffn + ffn

    assert [whole + cut, whole + cut // 2] == found["layer parameters"]


def test_all_parameters_of_a_layer_are_timed(found: dict[str, Any]) -> None:
    """Norms of queries and keys are four more, and the head runs with the fused loss."""
    assert [True, True] == found["flags"]
    assert 12 + 4 == found["norms"]


def test_nothing_is_left_behind(found: dict[str, Any]) -> None:
    """The fake process group is gone afterwards."""
    assert not found["group left"]


def test_a_name_that_megatron_core_misses_is_a_refusal(found: dict[str, Any]) -> None:
    """Without Transformer Engine 0.16 uses a name that it did not import: the case ends, but not the warm-up."""
    assert "the script refuses tp1 cp1 mbs2: name 'te_general_gemm' is not defined" == found["without its engine"]


def test_sequence_parallelism_is_timed_where_norms_know_it(found: dict[str, Any]) -> None:
    """With Transformer Engine tensor-parallel layers split the sequence; torch's own norms would refuse to."""
    assert [True, False] == found["splits sequence"]


def test_a_hybrid_model_has_one_layer_of_each_letter(found: dict[str, Any]) -> None:
    """Letters and layers of experts stay in step when a pattern repeats its letters."""
    assert ["*E", [0, 1]] == found["hybrid of each"]


def test_a_model_has_one_layer_of_each_mixer(found: dict[str, Any]) -> None:
    """The layer with attention comes last, because it decides the layers of multi-token prediction."""
    assert [1, 0] == found["mixers of each"]


def test_latent_attention_is_built_of_megatrons_own_layers(found: dict[str, Any]) -> None:
    """Values narrower than keys: the local core's output is attention, as wide as they are; it does not chain."""
    shape, far, chains, has_gradient = found["fine-grained"]["core"]

    assert [32, 2, 4 * 12] == shape
    assert far < 1e-5
    assert not chains
    assert has_gradient


def test_a_depth_of_prediction_is_megatrons_own(found: dict[str, Any]) -> None:
    """The head reads the same part as in the whole model, and its loss reaches every weight and the input.

    Two experts of four a token may leave one without tokens: then its four parameters have no gradient.
    """
    same, dimensions, has_gradient, num_reached, num_parameters = found["fine-grained"]["predicted"]

    assert same
    assert 0 == dimensions
    assert has_gradient
    assert num_parameters - 4 <= num_reached <= num_parameters


@pytest.mark.parametrize("tp", [1, 2])
def test_parts_of_fine_grained_models_weigh_what_is_predicted(found: dict[str, Any], tp: int) -> None:
    """Both kinds of layers, shared experts too, and one depth with the words and the head that it shares."""
    weighs = found["fine-grained"]["parameters"][str(tp)]
    model, layout = fine_grained_model(), Layout(tp=tp)
    dense, moe = (kind_parameters(tiny_job(model=model), layout, each) for each in ("layer", "moe_layer"))
    table = word_embedding_parameters(model, layout.tp)

    assert ["layer", "moe_layer", "embedding", "head", "core_attention", "prediction"] == [*weighs]
    assert dense.count == weighs["layer"]
    assert moe.count == weighs["moe_layer"]
    assert moe.count + depth_parameters(model, layout) + 2 * table == weighs["prediction"]


def test_a_layer_runs_again_in_the_precision_of_the_job(found: dict[str, Any]) -> None:
    """Megatron's blocks switch FP8 on around their layers, so each of two layers that run alone enters FP8 again."""
    assert [[True, "the job's recipe"]] * 2 == found["low precision"]


def test_the_parts_of_an_encoder_are_the_model(found: dict[str, Any]) -> None:
    """Embedding, layer and head run one after the other give the outputs of Megatron's own forward."""
    names, whole, parts, reached, _ = found["encoder"]

    assert ["layer", "embedding", "head", "core_attention"] == names
    assert pytest.approx(whole, rel=1e-5) == parts
    assert reached


def test_no_model_is_taken_for_another(found: dict[str, Any]) -> None:
    """An encoder is refused if the flags were read as those of a decoder."""
    *_, as_decoder = found["encoder"]

    assert "the script builds a BertModel, which its flags do not describe" == as_decoder


def test_each_attention_window_is_a_layer_of_its_own(found: dict[str, Any]) -> None:
    """Layers of one kind with and without a window are both timed, and have the shares of the model's four layers."""
    parts, sizes = found["windows"]

    assert [["layer", 0.25], ["layer", 0.75], ["core_attention", 0.25], ["core_attention", 0.75]] == parts
    assert [None, [3, 0]] == sizes


@pytest.fixture(scope="module")
def graphs() -> dict[str, Any]:
    """Results of a process with Megatron's own CUDA graphs on a simulated device."""
    return findings_of("graphs_worker.py")


@pytest.mark.parametrize("play", ["layers", "again"])
def test_a_layer_with_a_cuda_graph_is_timed_by_replays(graphs: dict[str, Any], play: str) -> None:
    """Megatron captures both passes of the layer, and each timed pass replays a graph, in a first and a second play."""
    found = graphs[play]

    # Two rounds of both passes in each of five warm-ups, with and without weights; then also six rounds in each turn.
    turns = 1 + found["values"]
    assert 2 * (5 * (2 + 2) + turns * (2 + 6 + 2)) == found["replays"]
    assert 2 * (1 + (play == "again")) == found["captured"]
    assert [False, False, False, True] == found["chains"]
    assert found["recompute"] is None
    assert 0 == found["others"]


def test_a_play_leaves_no_graph(graphs: dict[str, Any]) -> None:
    """Megatron has neither graphs nor their buffers nor a memory pool after a play."""
    assert [False, 0, 0, None] == graphs["left"]


def test_a_script_whose_layers_get_no_graph_is_refused(graphs: dict[str, Any]) -> None:
    """Layers are never timed without the graphs that the measurements name."""
    assert graphs["none"].endswith("no layer has a CUDA graph after the first training step")


def test_graphs_of_transformer_engine_replay_with_converted_weights(graphs: dict[str, Any]) -> None:
    """If graphs appear between the first two steps, a timed layer replays its graph as a later micro-batch does."""
    assert [[False], False] == graphs["engine"]


def test_a_stage_replays_the_graphs_of_all_micro_batches(graphs: dict[str, Any]) -> None:
    """In a pipeline two layers have graphs for each of four micro-batches, and the second step replays all of them."""
    assert [2 * 4 * 2, 2 * 4 * 2] == graphs["stage"]
