"""Run a training script as it is under a meter of tensors, and print this rank's peak bytes from a step on.

torchrun ... -m pipette_patches.run --patch cpu_backend -- metered_script.py FIRST_STEP SCRIPT [ARGUMENT ...]
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from pipette_patches.play import run_script
from pipette_patches.replacements import Replacements, in_module, wrapping
from pipette_patches.run import Program
from pipette_patches.storage_meter import metered


def main(first_step: int, script: str, *arguments: str) -> None:
    """Run the script, and forget the peaks before a step."""
    num_steps = 0

    @wrapping
    def counted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        function = original(*args, **kwargs)

        def step(**of_step: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == first_step:
                meter.mark()
                meter.stretches.clear()
            return function(**of_step)

        return step

    door = in_module("megatron.core.pipeline_parallel.schedules", {"get_forward_backward_func": counted})
    Replacements(door).apply()
    with metered() as meter:
        run_script(Program(patches=(), name=script, is_module=False, arguments=arguments))
        meter.mark()
    assert num_steps > first_step, f"{num_steps} steps"
    peak = max(stretch.total for stretch in meter.stretches)
    # One write, so that the lines of ranks do not mix.
    os.write(1, (json.dumps({"rank": int(os.environ["RANK"]), "peak": peak}) + "\n").encode())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), *sys.argv[2:])
