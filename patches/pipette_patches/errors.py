"""What this package refuses, as errors that name it."""

from pipette_launch.errors import PipetteError


class PatchError(PipetteError):
    """A patch is unknown, or does not fit the megatron-core that this process would import."""


class NotModelledError(PipetteError):
    """The job asks for something that abstract execution does not know how to count."""
