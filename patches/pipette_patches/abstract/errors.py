"""What abstract execution cannot do, as an error that names it."""

from pipette_launch.errors import PipetteError


class NotModelledError(PipetteError):
    """The job asks for something that abstract execution does not know how to count."""
