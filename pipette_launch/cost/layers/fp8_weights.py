"""Copies of weights in FP8, which layers keep beside the weights in bf16."""

from __future__ import annotations

from pipette_launch.cost.layers.activations import computes_in_fp8
from pipette_launch.cost.layers.experts import router_parameters
from pipette_launch.cost.layers.parameters import chunk_layers, layer_parameters
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.megatron.performance import performance_options

_COPIES_BYTES = 2
"""One byte as it is, and one transposed for the backward."""


def fp8_weight_bytes(job: Job, layout: Layout) -> tuple[int, ...]:
    """Count each pipeline rank's copies: two bytes for every parameter of its layers' matrices.

    TransformerEngine casts a weight with the first micro-batch of a step and keeps the result and its transpose in the
    module (TE v2.8, module/linear.py:242-262, module/base.py get_weight_workspace). With `--fp8-param-gather` the
    weights themselves are in FP8, and with their transpose as large as in bf16. No golden row of the development data
    runs in FP8 without that flag. Biases, which stay as they are, are counted with the matrices.
    """
    model = job.model
    if not computes_in_fp8(job) or performance_options(job).fp8_param_gather:
        return (0,) * layout.pp
    norms = 2 * model.norm_parameters()
    plain = layer_parameters(model, layout, moe=False).count - norms
    moe = layer_parameters(model, layout, moe=True).count - norms - router_parameters(model) if model.num_experts else 0
    chunks = [plain * (layers - experts) + moe * experts for layers, experts in chunk_layers(model, layout)]
    return tuple(_COPIES_BYTES * sum(chunks[rank :: layout.pp]) for rank in range(layout.pp))
