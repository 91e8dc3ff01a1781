"""What a layer of experts asks of a device for one micro-batch, routing balanced."""

from __future__ import annotations

from pipette_launch.cost.compute.loads import Load, PassLoads, activation, is_captured, matrix, mlp
from pipette_launch.cost.layers import attention
from pipette_launch.facts.job import Job, PerformanceOptions
from pipette_launch.facts.layout import Layout
from pipette_launch.megatron.performance import performance_options

# Fitted with the share of a domain's links that dispatchers reach (`communication.exchanges`) to 59 published layouts
# of MoE models (docs/validation.md), together and not one by one.
GROUPED_RATE = 0.67
"""Of products of many experts, each of its own tokens, against one of them all."""
ROUTED_KERNELS = 92.0
"""Of the router and the dispatcher in a forward, four fifths as many backward: 72 of the router alone where nothing is
fused (Megatron-LM's guide to DeepSeek-V3 on GB200)."""
BIASED_TOUCHES = 18.0
"""Times that experts with biases read or write what their two matrices give, in a forward; half as many more backward:
biases, limits, gates and probabilities are kernels of their own."""


def expert_loads(job: Job, layout: Layout) -> PassLoads:
    """Count the router, topk * T / t tokens' worth of whole experts, whatever ep and etp are, and the shared expert."""
    model, options = job.model, performance_options(job)
    local = attention.local_tokens(model, layout)
    routed = model.moe_router_topk * local * layout.etp
    width = model.moe_ffn_hidden_size // layout.etp
    gates = 2 if model.gated_linear_unit else 1
    num_experts = model.num_experts or 1
    mine = max(1, num_experts // layout.ep)
    loads = matrix(local, num_experts, model.hidden_size, is_linear=False)
    loads += matrix(routed / mine, gates * width, model.hidden_size, count=mine, rate=GROUPED_RATE)
    loads += matrix(routed / mine, model.hidden_size, width, count=mine, rate=GROUPED_RATE)
    loads += activation(routed * width * model.dtype_bytes, gates)
    moved = touches(options) * model.moe_router_topk * local * model.hidden_size * model.dtype_bytes
    if model.add_bias_linear and not is_captured(options, "full_iteration"):
        biased = BIASED_TOUCHES * routed * (gates * width + model.hidden_size) * model.dtype_bytes
    else:
        biased = 0.0
    routing = PassLoads(
        forward=Load(moved_bytes=moved + biased, kernels=ROUTED_KERNELS),
        input_grad=Load(moved_bytes=moved + 1.5 * biased, kernels=0.8 * ROUTED_KERNELS),
    )
    loads += routing
    if model.moe_shared_expert_intermediate_size:
        loads += mlp(model, layout, model.moe_shared_expert_intermediate_size)
    # The router and what prepares the dispatch are about half of the launches.
    return loads.without_launches(0.5 if is_captured(options, "moe_router") else 0.0)


def touches(options: PerformanceOptions) -> float:
    """Times that the dispatcher reads or writes each copy of a token in a pass, the exchange apart.

    `alltoall` permutes before the exchange and sorts by expert after it, and both once more on the way back. Backends
    of `flex` permute once each way; where a CUDA graph captures the whole step, experts take the permuted tokens as
    they are.
    """
    dispatcher = options.moe_token_dispatcher_type
    if dispatcher != "flex":
        return 8.0
    return 2.0 if is_captured(options, "full_iteration") else 6.0
