"""Train stock megatron-core, and NVIDIA's own training scripts, on CPUs over gloo: a smoke test that CI can afford.

Without CUDA kernels the numbers are those of the unfused functions; speed means nothing here. Not possible on a CPU,
and refused by Megatron itself: context parallelism, fp8 and fp4, CUDA graphs, anything of Transformer Engine.
"""

from packaging.specifiers import SpecifierSet

from pipette_patches.cpu.core_replacements import CORE, RANDOM_LOGGER, hide_rng_warning
from pipette_patches.cpu.torch_replacements import TORCH
from pipette_patches.cpu.training_programs import TRAINING
from pipette_patches.registry import megatron_core_version
from pipette_patches.replacements import Replacements


class CpuBackend:
    """What names a CUDA device means the CPU, and what needs a CUDA kernel is off."""

    name = "cpu_backend"
    supports = SpecifierSet(">=0.14,<0.20")

    def __init__(self) -> None:
        self._replacements = Replacements(())

    def apply(self) -> None:
        """Replace torch's CUDA calls now, and Megatron's own as its modules are imported."""
        version = megatron_core_version()
        self._replacements = Replacements([r for r in (*TORCH, *CORE, *TRAINING) if r.fits(version)])
        self._replacements.apply()
        RANDOM_LOGGER.addFilter(hide_rng_warning)

    def revert(self) -> None:
        """Put every original object back."""
        self._replacements.revert()
        RANDOM_LOGGER.removeFilter(hide_rng_warning)


PATCH = CpuBackend()
