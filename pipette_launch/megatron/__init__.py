"""Conversion between Megatron's command line and the dataclasses of `facts`.

Only this package knows Megatron's flags.
"""

from pipette_launch.megatron.bridge import Dialect, dialect_of, is_bridge
from pipette_launch.megatron.checkpoint import Continuation, continuation
from pipette_launch.megatron.checkpoint_files import record_path, saved_iteration
from pipette_launch.megatron.flags import newest_release
from pipette_launch.megatron.layout import write_arguments
from pipette_launch.megatron.logs import (
    RERUN_EXIT_CODES,
    Iteration,
    MemoryLine,
    exception_in,
    explain_failure,
    failure_of,
    parse_iteration,
    parse_memory,
    why_no_plan_helps,
)
from pipette_launch.megatron.pins import binds_hosts, fixed_fields
from pipette_launch.megatron.read import global_batch_size, read_job
from pipette_launch.megatron.script import (
    TrialWords,
    environment,
    script_version,
    stated_layout,
    trial_arguments,
    version_or_newest,
)

__all__ = ["RERUN_EXIT_CODES", "Continuation", "Dialect", "Iteration", "MemoryLine", "TrialWords"]
__all__ += ["binds_hosts", "continuation", "dialect_of", "environment", "exception_in", "explain_failure"]
__all__ += ["failure_of", "fixed_fields", "global_batch_size", "is_bridge", "newest_release"]
__all__ += ["parse_iteration", "parse_memory", "read_job", "record_path", "saved_iteration", "script_version"]
__all__ += ["stated_layout", "trial_arguments", "version_or_newest", "why_no_plan_helps", "write_arguments"]
