"""What the patch `schedules` borrows from megatron-core is there, under the names and with the meaning it relies on."""

from __future__ import annotations

import inspect

import pytest

schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules", reason="needs megatron-core")
layers = pytest.importorskip("megatron.core.tensor_parallel.layers", reason="needs megatron-core")

FUNCTION = "LinearWithGradAccumulationAndAsyncCommunication"
PIPELINED = ("forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving")

GIVEN = {
    "forward_step": {
        "cp_group_size",
        "collect_non_loss_data",
        "is_first_microbatch",
        "current_microbatch",
        "vp_stage",
        "is_last_stage",
    },
    "check_first_val_step": {"first_val_step", "forward_only", "cond"},
    "clear_embedding_activation_buffer": {"config", "model", "is_last_stage"},
    "finish_embedding_wgrad_compute": {"config", "embedding_module", "is_last_stage", "tp_group"},
    "deallocate_output_tensor": {"out", "deallocate_pipeline_outputs"},
    "backward_step": {"input_tensor", "output_tensor", "output_tensor_grad", "config"},
}


@pytest.mark.parametrize("name", GIVEN)
def test_functions_take_what_the_executor_gives(name: str) -> None:
    """More parameters may be there, as the kind of model is in some releases."""
    assert GIVEN[name] <= inspect.signature(getattr(schedules, name)).parameters.keys()


@pytest.mark.parametrize("name", PIPELINED)
def test_pipelined_functions_are_called_by_names(name: str) -> None:
    """By keyword alone, and looked up in their module at each call, so that a successor is found."""
    given = inspect.signature(getattr(schedules, name)).parameters

    assert {each.kind for each in given.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert {"first_val_step", "collect_non_loss_data"} <= given.keys()
    assert given.keys() & {"pg_collection", "grad_finalize_pgs"}
    assert f"forward_backward_func = {name}" in inspect.getsource(schedules.get_forward_backward_func)


def test_what_finalizes_gradients_takes_what_pipelined_functions_give_it() -> None:
    """Under the same names, which differ between releases; and it reads groups by their attributes alone."""
    finalize = pytest.importorskip("megatron.core.distributed.finalize_model_grads", reason="needs megatron-core")
    given = inspect.signature(getattr(schedules, PIPELINED[0])).parameters.keys()
    taken = inspect.signature(finalize.finalize_model_grads).parameters.keys()

    names = {"pg_collection", "grad_finalize_pgs", "force_all_reduce"}
    assert given & names == taken & names


def test_the_number_of_tokens_is_read_on_the_last_rank() -> None:
    """A folded pipeline brings it there alone."""
    finalize = pytest.importorskip("megatron.core.distributed.finalize_model_grads", reason="needs megatron-core")
    source = inspect.getsource(finalize.finalize_model_grads)

    assert "last_rank = get_pp_last_rank(pp_group)" in source
    assert "broadcast(num_tokens, src=last_rank, group=pp_group)" in source


def test_the_head_is_marked() -> None:
    """Its weights' gradient is not put off."""
    module = pytest.importorskip("megatron.core.models.common.language_module.language_module", reason="needs megatron")

    assert "self.output_layer.weight.is_embedding_or_output_parameter = True" in inspect.getsource(module)


def test_states_of_random_numbers_can_be_put_back() -> None:
    """The first step is run twice from the same."""
    random = pytest.importorskip("megatron.core.tensor_parallel.random", reason="needs megatron-core")

    assert callable(random._get_all_rng_states)
    assert len(inspect.signature(random._set_all_rng_states).parameters) == 3


def test_the_linear_function_can_leave_out_the_weights_gradient() -> None:
    """With a buffer and limit 0 it keeps the output's gradient and makes no product; these are the fields it reads."""
    source = inspect.getsource(getattr(layers, FUNCTION))

    assert "if wgrad_deferral_limit == 0 or len(grad_output_buffer) < wgrad_deferral_limit:" in source
    assert "grad_output_buffer.append(grad_output)" in source
    assert "ctx.save_for_backward(input, weight)" in source
    for field in ("gradient_accumulation_fusion", "main_grad", "sequence_parallel", "tp_group"):
        assert f"ctx.{field} = " in source


def test_embedding_ranks_can_be_given() -> None:
    """As a function of a pipeline's ranks; scripts name the first and the last."""
    source = inspect.getsource(schedules.parallel_state.initialize_model_parallel)

    assert "embedding_ranks = get_embedding_ranks(ranks" in source
