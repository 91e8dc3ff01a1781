"""A worker for the tests: builds Megatron's sparse attention with stand-ins for Transformer Engine, and meters it.

Prints, as a line of JSON, the parameters, the bytes that autograd saves, and the bytes of collectives in each pass.
"""

import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

BF16 = torch.bfloat16


class Duplicated(torch.nn.Module):
    """Stands in for Transformer Engine's linear, whole on every tensor rank."""

    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        """Make a small weight."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((outputs, inputs), 0.01, dtype=BF16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """No bias."""
        return functional.linear(x, self.weight), None


class Keeps(torch.autograd.Function):
    """A norm that keeps its input and nothing else, as a fused one does but for one number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """Another tensor of the same values."""
        ctx.save_for_backward(x.contiguous())
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Pass the gradient on."""
        return grad, None


class Norm(torch.nn.Module):
    """Stands in for Transformer Engine's norm."""

    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        """A LayerNorm has a bias too."""
        super().__init__()
        count = 2 if config.normalization == "LayerNorm" else 1
        self.both = torch.nn.Parameter(torch.ones(count * hidden_size, dtype=BF16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the input."""
        out: torch.Tensor = Keeps.apply(x, self.both)
        return out


class Calls(list[tuple[str, int]]):
    """Collectives with their bytes: gathered outputs, reduced inputs."""

    def watch(self, name: str, position: int) -> None:
        """Note each call of a collective whose large tensor has this position."""
        run = getattr(dist, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if args[position].numel() > 1:  # A check of lengths moves one number.
                self.append((name.partition("_tensor")[0].removesuffix("_into"), args[position].nbytes))
            return run(*args, **kwargs)

        setattr(dist, name, noted)
        for module in [module for module in sys.modules.values() if module.__name__.startswith("megatron.core")]:
            for alias in [alias for alias, each in vars(module).items() if each is run]:
                setattr(module, alias, noted)


def on_cpu() -> None:
    """Let the rotary embedding run without a GPU."""
    make = torch.tensor

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        del pin_memory
        return make(*args, **kwargs)

    torch.tensor = unpinned
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda self, *_, **__: self


def main(case: dict[str, Any], tp: int, cp: int) -> dict[str, Any]:
    """Parameters, saved bytes and collectives of one attention block."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    absorbed_mla.TELinear = Duplicated
    local = LocalSpecProvider()
    backend = SimpleNamespace(
        linear=lambda: Duplicated,
        layer_norm=lambda **_: Norm,
        column_parallel_linear=local.column_parallel_linear,
        row_parallel_linear=local.row_parallel_linear,
    )
    config = MLATransformerConfig(
        num_layers=1,
        bf16=True,
        params_dtype=BF16,
        add_bias_linear=False,
        experimental_attention_variant="dsa",
        dsa_indexer_rotate_activation=False,
        use_cpu_initialization=True,
        apply_rope_fusion=False,
        rope_type="rope",
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        context_parallel_size=cp,
        cp_comm_type="allgather",
        **case["config"],
    )
    spec = get_dsa_module_spec_for_backend(config, backend=backend)
    module = build_module(spec, config=config, layer_number=1, cp_comm_type="allgather")
    calls = Calls()
    for name, position in (("all_gather_into_tensor", 0), ("reduce_scatter_tensor", 1), ("all_reduce", 0)):
        calls.watch(name, position)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    tokens = case["tokens"] // tp // cp
    hidden = torch.randn(tokens, case["batch"], config.hidden_size, dtype=BF16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, _ = module(hidden, attention_mask=None)
    num_forward = len(calls)
    output.backward(torch.ones_like(output))
    return {
        "forward": calls[:num_forward],
        "backward": calls[num_forward:],
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "bytes": sum(storage.nbytes() for storage in saved.values()),
    }


if __name__ == "__main__":
    from megatron.core import parallel_state

    degrees = [int(degree) for degree in sys.argv[2:]]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(degrees))
    parallel_state.initialize_model_parallel(
        degrees[0], context_parallel_size=degrees[1], create_gloo_process_groups=False
    )
    on_cpu()
    print(json.dumps([main(case, *degrees) for case in json.loads(sys.argv[1])]))
