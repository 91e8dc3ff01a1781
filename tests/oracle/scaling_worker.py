"""Execute a few ranks abstractly, scaled and whole, and print the bytes as JSON."""

import json
import warnings
from dataclasses import asdict
from typing import Any
from unittest import mock

from facts_for_tests import tiny_job, tiny_model
from oracle import execution
from oracle.meter import AbstractMeter

from pipette_launch.facts import Batch, Job, Layout, Recompute

UNIFORM = Recompute(granularity="full", method="uniform", num_layers=2)
BLOCK = Recompute(granularity="full", method="block", num_layers=2)
SELECTIVE = Recompute(granularity="selective", modules=("core_attn",))
DISTRIBUTED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LLAMA = {
    "gated_linear_unit": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
CASES: dict[str, tuple[dict[str, Any], Layout, int, int]] = {
    "plain": ({"num_layers": 6, "hidden_dropout": 0.1}, Layout(), 4, 0),
    "first stage": ({"num_layers": 12, "vocab_size": 9000}, Layout(pp=2, tp=2, sequence_parallel=True), 5, 0),
    "last stage": ({"num_layers": 12, **LLAMA}, Layout(pp=2, dp=2, **DISTRIBUTED), 5, 1),
    "interleaved": ({"num_layers": 24, **LLAMA}, Layout(pp=2, vpp=2, dp=2, **DISTRIBUTED), 8, 0),
    "fp16 selective": (
        {"num_layers": 12, "params_dtype": "fp16", "attention_backend": "unfused", "attention_dropout": 0.1},
        Layout(pp=2, recompute=SELECTIVE),
        4,
        1,
    ),
    "uniform": ({"num_layers": 12}, Layout(recompute=UNIFORM), 4, 0),
    "block": ({"num_layers": 10, "transformer_impl": "local"}, Layout(recompute=BLOCK), 4, 0),
    "uneven": ({"num_layers": 8}, Layout(pp=2, layers_per_chunk=(2, 6)), 4, 1),
    "ring": ({"num_layers": 6, "attention_backend": "flash"}, Layout(cp=2, micro_batch_size=2), 4, 0),
    "experts": (
        {"num_layers": 6, "num_experts": 4, "moe_layer_freq": (1,) * 6, "add_bias_linear": False},
        Layout(dp=2, ep=2),
        4,
        0,
    ),
}


def whole_run(job: Job, layout: Layout, _pp_rank: int, run: execution.Run) -> execution.Trace:
    """Run all layers and micro-batches."""
    return run(layout.chunk_layers(job.model.num_layers), layout.num_microbatches(job.batch.global_batch_size))


def main() -> None:
    """Count each case in both ways, and the operations that it took."""
    warnings.simplefilter("ignore")
    execution.load()
    execution._FEW_PASSES = 0
    operations = [0]
    original = AbstractMeter.__torch_dispatch__

    def counting(*args: Any, **kwargs: Any) -> Any:
        operations[0] += 1
        return original(*args, **kwargs)

    AbstractMeter.__torch_dispatch__ = counting  # type: ignore[method-assign]
    found = {}
    for name, (changes, layout, microbatches, pp_rank) in CASES.items():
        model = tiny_model(
            **{"params_dtype": "bf16", "transformer_impl": "transformer_engine", "attention_backend": "fused"} | changes
        )
        batch = Batch(global_batch_size=microbatches * layout.dp * layout.micro_batch_size)
        job = tiny_job(layout.world_size, model=model, own=layout, batch=batch)
        found[name] = []
        for whole in (False, True):
            operations[0] = 0
            with mock.patch.object(execution, "scaled", whole_run if whole else execution.scaled):
                counted = asdict(execution.run_rank(job, layout, pp_rank))
            found[name].append({**counted, "operations": operations[0]})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
