"""Everything of torch and megatron-core that abstract execution replaces or leans on is there, as it is known."""

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import newest
import pytest
import torch
from oracle.gpu_replacements import CORE, OFFLOADING, TORCH
from oracle.meter import POINTWISE
from oracle.transformer_engine import STAND_INS
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

from pipette_patches.replacements import Replacement, owner_of

OFFLOAD = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
# Parameters by qualified name; None: a name that is only assigned.
MODEL_TYPE = ["model_type"] if Version("0.19") > newest.CORE else []
EXPECTED = {
    "megatron.core.transformer.module._FLOAT_TYPES": None,
    "megatron.core.transformer.module._HALF_TYPES": None,
    "megatron.core.transformer.module._BF16_TYPES": None,
    "megatron.core.jit.jit_fuser": None,
    "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__": [
        "cls", "config", "hidden_size", "eps", "persist_layer_norm", "zero_centered_gamma", "normalization",
    ],
    "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork": ["self", "name"],
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": ["device", "clone", "graph_safe"],
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": ["new_state", "device", "graph_safe"],
    "megatron.core.tensor_parallel.random.CheckpointWithoutOutput.__init__": ["self", "fp8"],
    "megatron.core.pipeline_parallel.schedules.backward_step": [
        "input_tensor", "output_tensor", "output_tensor_grad", *MODEL_TYPE, "config",
    ],
    "megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._communicate": [
        "self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape", "wait_on_reqs",
    ],
    "megatron.core.utils.GlobalMemoryBuffer.get_tensor": ["self", "tensor_shape", "dtype", "name", "mem_alloc_context"],
    f"{OFFLOAD}.ChunkOffloadHandler._can_manage_tensor_for_offload": ["tensor"],
    f"{OFFLOAD}.ChunkOffloadHandler.offload": ["self", "src_tensor", "pin_memory", "use_cpu_pool"],
    f"{OFFLOAD}.ChunkOffloadHandler.reload": ["self", "state", "non_blocking"],
    f"{OFFLOAD}.print_offload_summary_table": ["total_offload_bytes"],
}  # fmt: skip
# From 0.18 on Megatron offloads only tensors of a device that it names in a function.
IN_MEGATRON = [
    each
    for each in (*CORE, *OFFLOADING)
    if Version("0.18") <= newest.CORE or not each.path.endswith("_can_manage_tensor_for_offload")
]
SPEC = importlib.util.find_spec("megatron")
PLACES = [Path(place) for place in (SPEC.submodule_search_locations or ())] if SPEC else []
ROOT = next(place.parent for place in PLACES if (place / "core" / "jit.py").is_file())


def body_of(module: str) -> list[ast.stmt]:
    """The statements of a module of megatron-core, which is not imported here."""
    return ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()).body


def parameters(module: str, path: str) -> list[str]:
    """The parameter names of a function or method."""
    body = body_of(module)
    *classes, name = path.split(".")
    for each in classes:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == each)
    function = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
    return [argument.arg for argument in function.args.args + function.args.kwonlyargs]


@pytest.mark.parametrize("replacement", IN_MEGATRON, ids=lambda each: f"{each.module}.{each.path}")
def test_what_is_replaced_in_megatron_is_as_known(replacement: Replacement) -> None:
    """Each function has the parameters that its successor counts on, each name is assigned."""
    if replacement.may_be_absent and not ROOT.joinpath(*replacement.module.split(".")).with_suffix(".py").is_file():
        pytest.skip(f"this megatron-core has no {replacement.module}")
    name = f"{replacement.module}.{replacement.path}"
    expected = EXPECTED[name]
    if expected is not None:
        assert expected == parameters(replacement.module, replacement.path)
    else:
        assigned = [
            target.id
            for node in body_of(replacement.module)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        assert replacement.path in assigned


@pytest.mark.parametrize("replacement", TORCH, ids=lambda each: f"{each.module}.{each.path}")
def test_what_is_replaced_in_torch_is_there(replacement: Replacement) -> None:
    """No successor stands where torch has nothing."""
    owner, name = owner_of(importlib.import_module(replacement.module), replacement.path)

    assert hasattr(owner, name)


def test_torchs_private_names_are_as_known() -> None:
    """The choice of list operations, the switch that keeps the compiler away, and the plain factory."""
    chooser = importlib.import_module("torch.optim.adam")._default_to_fused_or_foreach

    assert ["params", "differentiable", "use_fused"] == list(inspect.signature(chooser).parameters)
    assert isinstance(inspect.getattr_static(TorchDispatchMode, "_should_skip_dynamo"), classmethod)
    assert (3,) == tuple(torch._C._VariableFunctions.empty((3,), device="meta").shape)
    assert all(isinstance(func, torch._ops.OpOverload) for func in POINTWISE)


def test_a_storage_is_known_by_one_object_as_long_as_it_lives() -> None:
    """Counting by weak reference needs torch to keep a storage's Python object with the storage."""
    tensor = torch.empty(4, device="meta")
    first = id(tensor.untyped_storage())

    assert first == id(tensor.view(2, 2).untyped_storage())


def test_every_class_that_megatron_wraps_has_a_stand_in() -> None:
    """Every name of Transformer Engine that megatron-core subclasses is a class here."""
    bases = [
        ast.unparse(base)
        for node in ast.walk(ast.Module(body_of("megatron.core.extensions.transformer_engine"), []))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    ]
    wrapped = [base.removeprefix("te.") for base in bases if base.startswith("te.")]

    assert {"pytorch.Linear", "pytorch.LayerNormLinear", "pytorch.DotProductAttention"} <= set(wrapped)
    for name in wrapped:
        module, _, leaf = f"transformer_engine.{name}".rpartition(".")
        assert isinstance(STAND_INS[module][leaf], type), name


def test_stand_ins_are_parents_first() -> None:
    """A module is made after the package that it lies in."""
    names = list(STAND_INS)

    assert all(names.index(name.rpartition(".")[0]) < names.index(name) for name in names if "." in name)
