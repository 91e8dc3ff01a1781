"""Which attention a job's layers run: Megatron's flag, the environment, and what TransformerEngine chooses between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast, get_args

from pipette_launch.errors import MegatronError
from pipette_launch.facts.machines.known_devices import compute_capability
from pipette_launch.megatron.flags import Arguments

Backend = Literal["flash", "fused", "unfused", "local", "auto"]

BACKENDS: tuple[Backend, ...] = get_args(Backend)
VARIABLES: dict[str, tuple[Backend, ...]] = {
    "NVTE_FLASH_ATTN": ("flash", "auto"),
    "NVTE_FUSED_ATTN": ("fused", "auto"),
    "NVTE_UNFUSED_ATTN": ("unfused", "auto"),
}
"""TransformerEngine's switches, and the flags under which Megatron sets them to 1; to 0 under all others."""
_AMPERE = 8


def read_backend(
    arguments: Arguments, transformer_impl: str, *, environment: Mapping[str, str], device_name: str
) -> Backend:
    """Read the attention backend of a job's layers.

    `auto` is resolved as TransformerEngine does (get_attention_backend of v2.8): fp32 and GPUs before Ampere have only
    the unfused one; Ampere takes flash, Hopper and later cuDNN's fused one, in deterministic runs too. Flash attention
    and cuDNN 9 are taken to be installed. `auto` stays where the GPU is unknown, and for Megatron's own layers.

    Args:
        arguments: the job's flags.
        transformer_impl: `local` for Megatron's own layers, which is all that runs without a GPU.
        environment: of the workers; the variables that Megatron sets by itself must agree with the flag.
        device_name: as the driver or the user gives it; empty for an unknown one.

    Raises:
        MegatronError: the flag is unknown, or Megatron would stop because the environment contradicts it.

    """
    flag = cast("Backend", arguments.choice("attention_backend", BACKENDS))
    if transformer_impl == "local":
        return flag
    # Megatron asserts the same (language_module.py, _set_attention_backend, core_v0.11 to core_v0.19).
    for name, switched_on_by in VARIABLES.items():
        wanted = "1" if flag in switched_on_by else "0"
        if environment.get(name, wanted) != wanted:
            raise MegatronError(
                f"{name}={environment[name]} in the environment contradicts {arguments.shown('attention_backend')}, "
                f"for which Megatron demands {wanted}; unset it and choose by --attention-backend"
            )
    if flag != "auto":
        return flag
    if not (arguments.get("bf16") or arguments.get("fp16")):
        return "unfused"
    capability = compute_capability(device_name)
    if capability is None:
        return "auto"
    if capability < _AMPERE:
        return "unfused"
    return "flash" if capability == _AMPERE else "fused"
