"""What a patch says when it cannot be applied."""

from pipette_launch.errors import PipetteError


class PatchError(PipetteError):
    """A patch is unknown, or does not fit the megatron-core that this process would import."""
