"""Stages that the tests run with real tensors, and count by hand and abstractly."""

from dataclasses import dataclass, field

from facts_for_tests import tiny_job, tiny_model

from pipette_launch.facts import Batch, Job, Layout

DISTRIBUTED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LLAMA = {
    "gated_linear_unit": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
FLAGS = ("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion")
"""Things that a CPU lacks, in the words of a user."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One stage."""

    layout: Layout
    pp_rank: int = 0
    changes: dict[str, object] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


CASES = {
    "first of four": Case(layout=Layout(pp=4)),
    "third of four": Case(layout=Layout(pp=4), pp_rank=2),
    "last, 1024 ranks": Case(
        layout=Layout(tp=2, pp=4, dp=128, sequence_parallel=True, **DISTRIBUTED),  # type: ignore[arg-type]
        pp_rank=3,
    ),
    "interleaved": Case(layout=Layout(pp=2, vpp=2)),
    "llama": Case(layout=Layout(pp=2), changes=LLAMA),
    "fp16": Case(layout=Layout(), changes={"params_dtype": "fp16", "num_layers": 2}),
    "experts": Case(
        layout=Layout(dp=2, ep=2),
        changes={"num_experts": 4, "moe_layer_freq": (1,) * 2, "num_layers": 2, "add_bias_linear": False},
    ),
}


TIMED = ("first of four", "third of four", "interleaved", "experts")
"""Stages whose steps are timed, too."""
_FOUR = Layout(dp=4, **DISTRIBUTED)  # type: ignore[arg-type]
_WIDE = {"hidden_size": 256, "kv_channels": 64, "ffn_hidden_size": 1024, "seq_length": 32}
_FSDP = "--use-megatron-fsdp"
_ALL = (_FSDP, "--data-parallel-sharding-strategy optim_grads_params")
_OVER_WHOLE_LAYERS = {
    "optim": (_FSDP, "--data-parallel-sharding-strategy optim"),
    "optim_grads": (_FSDP, "--data-parallel-sharding-strategy optim_grads"),
    "optim_grads_params": _ALL,
    "two buffers": (*_ALL, "--fsdp-double-buffer"),
    "two layers wait": (*_ALL, "--suggested-communication-unit-size 400000"),
}
SHARDED = {
    "not sharded": Case(layout=_FOUR),
    **{name: Case(layout=_FOUR, flags=flags) for name, flags in _OVER_WHOLE_LAYERS.items()},
    "wide": Case(layout=_FOUR, changes=_WIDE, flags=_ALL),
    "wide, two buffers": Case(layout=_FOUR, changes=_WIDE, flags=(*_ALL, "--fsdp-double-buffer")),
}
"""Stages under Megatron-FSDP over four ranks, and one without; gradients of wide layers are larger than activations."""


def job_of(changes: dict[str, object], layout: Layout, flags: tuple[str, ...] = ()) -> Job:
    """A job of eight layers and as many micro-batches as two steps of a pipeline have stages."""
    model = tiny_model(
        **{
            "params_dtype": "bf16",
            "num_layers": 8,
            "hidden_size": 128,
            "ffn_hidden_size": 352,
            "kv_channels": 32,
            "seq_length": 128,
            "max_position_embeddings": 128,
            **changes,
        }
    )
    batch = Batch(global_batch_size=2 * layout.pp * layout.dp)
    return tiny_job(layout.world_size, model=model, own=layout, batch=batch, performance_flags=(*FLAGS, *flags))
