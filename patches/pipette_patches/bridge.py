"""Print the configuration of a Megatron-Bridge job as YAML: `python -m pipette_patches.bridge WORLD_SIZE SCRIPT ...`.

The script runs as rank 0 up to its call of Bridge's `pretrain`, and changes no file. Other output goes to stderr.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipette_launch.errors import PipetteError
from pipette_patches import play, without_transformer_engine
from pipette_patches.play import Play, PlayError, Step, Stop
from pipette_patches.replacements import Replacements, in_module, wrapping
from pipette_patches.run import Program, read

PRETRAIN = "megatron.bridge.training.pretrain"
STARTED = "_MB_TRAINING_RECIPE_ENV_BOOTSTRAPPED"
"""Variable with the process id, by which Bridge's runner knows that it needs no new process for its environment."""


def configuration(program: Program, *, world_size: int) -> str:
    """Run a program up to Bridge's `pretrain`, and return the configuration that the program passes.

    Raise PlayError if the program ends before, or trains without `pretrain`.
    """
    found: list[str] = []

    @wrapping
    def take(_original: Callable[..., Any], config: Any, *_args: Any, **_kwargs: Any) -> None:
        if isinstance(getattr(config, "mixed_precision", None), str):
            from megatron.bridge.training.mixed_precision import get_mixed_precision_config

            config.mixed_precision = get_mixed_precision_config(config.mixed_precision)
        path = Path(tempfile.gettempdir()) / "configuration.yaml"
        config.to_yaml(str(path))
        found.append(path.read_text(encoding="utf-8"))
        raise Stop

    def refuse(_play: Play, _step: Step) -> None:
        raise PlayError(f"the script trains without {PRETRAIN}")

    if find_spec("transformer_engine") is None:
        # Bridge imports Transformer Engine. No configuration depends on it.
        without_transformer_engine.install()
    script = partial(play.run_script, program, **{STARTED: str(os.getpid())})
    door = Replacements(in_module(PRETRAIN, {"pretrain": take}))
    with door, play.played(script, rank=0, world_size=world_size, on_step=refuse):
        pass
    return found[0]


def main(argv: Sequence[str]) -> int:
    """Print the configuration on stdout, or the reason of a failure as the last line on stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    try:
        found = configuration(read(("--", *argv[1:])), world_size=int(argv[0]))
    except PipetteError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    with answers:
        answers.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
