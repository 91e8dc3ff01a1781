"""One base error, with a child for each reader."""


class PipetteError(Exception):
    """Something a user can act on: the message says what, which value, and what to do."""

    exit_code = 1


class UsageError(PipetteError):
    """A flag is unknown, malformed, contradicts another, or asks for what is not there."""

    exit_code = 2


class FactError(PipetteError, ValueError):
    """A fact contradicts itself: a negative size, a degree that divides nothing."""


class LayoutError(FactError):
    """No legal layout has these degrees."""


class MegatronError(PipetteError):
    """The script's Megatron flags are missing, contradictory or not understood."""


class ClusterError(PipetteError):
    """The machines of the job cannot do what is asked of them."""


class ProbeError(PipetteError):
    """A warm-up worker died, hung or measured nothing."""


class PlanError(PipetteError):
    """There is no plan, or the plan does not belong to this job."""


class FileFormatError(PipetteError):
    """A file of ours is damaged, of another version, or not a file of ours."""
