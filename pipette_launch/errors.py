"""The errors that a user sees, one class for each cause."""


class PipetteError(Exception):
    """An error that a user can act on. The message names the problem, the value and a remedy."""

    exit_code = 1


class UsageError(PipetteError):
    """A flag is unknown, malformed, contradicts another flag, or names a thing that does not exist."""

    exit_code = 2


class FactError(PipetteError, ValueError):
    """A fact is impossible or contradicts another, such as a negative size."""


class LayoutError(FactError):
    """The degrees do not form a legal layout."""


class MegatronError(PipetteError):
    """The script's Megatron flags are missing, contradictory or unknown."""


class ClusterError(PipetteError):
    """The job's machines cannot run the job."""


class ProbeError(PipetteError):
    """A warm-up worker died, hung or returned no measurement."""


class PlanError(PipetteError):
    """No plan exists, or the plan belongs to another job."""


class FileFormatError(PipetteError):
    """A file is damaged, has another version, or was not written by pipette-launch."""
