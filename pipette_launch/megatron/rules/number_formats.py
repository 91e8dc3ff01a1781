"""Number formats that a GPU's chip cannot compute: Transformer Engine stops at the first step (quantization.py)."""

from __future__ import annotations

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Layout
from pipette_launch.facts.accelerators import chip_capability
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.rules.broken import BrokenRule

FP8_SINCE, FP4_SINCE = (8, 9), (10, 0)
FP8_RECIPES_SINCE = {"blockwise": (9, 0), "mxfp8": (10, 0)}
"""Capabilities that the kinds of `--fp8-recipe` need; other kinds need the capability of FP8."""


def check_formats(arguments: Arguments, own: Layout, *, device_name: str, capability: int | None) -> None:
    """Raise MegatronError where flags demand a format that the GPUs are known not to compute.

    Args:
        arguments: the user's own.
        own: his layout.
        device_name: of the GPUs, as a driver or `--gpu` names them.
        capability: major number of their compute capability; None where it is not known.

    """
    names: tuple[str, ...]
    recipe = str(arguments.get("fp8_recipe"))
    if arguments.get("fp4"):
        kind, since, names = "FP4", FP4_SINCE, ("fp4",)
    elif arguments.get("fp8") and recipe in FP8_RECIPES_SINCE:
        kind, since, names = f"FP8 ({recipe})", FP8_RECIPES_SINCE[recipe], ("fp8", "fp8_recipe")
    elif arguments.get("fp8"):
        kind, since, names = "FP8", FP8_SINCE, ("fp8",)
    else:
        return
    named = chip_capability(device_name)
    # A file describes a device by the major number alone; the name of a known chip has both.
    has = named if named and capability in (None, named[0]) else (capability, 9) if capability else since
    if has < since:
        needed = ".".join(map(str, since))
        reason = f"{device_name or 'the GPU'} does not compute in {kind}, which needs compute capability {needed}"
        remedy = "remove the format or take another GPU"
        raise MegatronError(BrokenRule(reason, names, remedy).sentence(arguments, own))
