"""Contract with torch's inductor: where it keeps compiled kernels, which a trial must share with the training."""

from __future__ import annotations

import getpass
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

from pipette_launch.agent.trial import COMPILED, TrialRun

TRITON = "TRITON_CACHE_DIR"


def folders(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], tmpdir: Path) -> tuple[str, str]:
    """Return the folders of inductor and Triton in a process with these variables."""
    with monkeypatch.context() as patch:
        patch.setenv(TRITON, "")
        patch.delenv(TRITON)
        # Inductor writes the variable.
        patch.setenv(COMPILED, "")
        patch.delenv(COMPILED)
        patch.setattr(tempfile, "tempdir", variables.get("TMPDIR", str(tmpdir)))
        for name, value in variables.items():
            patch.setenv(name, value)
        return cache_dir(), triton_cache_dir(3)


def trial_variables(monkeypatch: pytest.MonkeyPatch, tmpdir: Path, environ: dict[str, str]) -> dict[str, str]:
    """Return the variables of a trial whose agent has these."""
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmpdir))
        patch.delenv(COMPILED, raising=False)
        for name, value in environ.items():
            patch.setenv(name, value)
        trial = TrialRun(Mock(), Mock(), Mock(), "")
        trial.open_logs()
        variables = trial.variables
        trial.drop_logs()
        return environ | variables


@pytest.mark.parametrize("user", ["me", 'a\\b:c"d', None])
@pytest.mark.parametrize("given", [{}, {COMPILED: "/mine"}, {TRITON: "/triton"}], ids=str)
def test_a_trial_finds_what_was_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: str | None, given: dict[str, str]
) -> None:
    """Its temporary files lie in a folder of its own; compiled kernels lie where those of the training do."""
    monkeypatch.setattr(getpass, "getuser", Mock(return_value=user) if user else Mock(side_effect=OSError))
    given = {name: str(tmp_path) + value for name, value in given.items()}
    variables = trial_variables(monkeypatch, tmp_path, given)

    assert tmp_path == Path(variables["TMPDIR"]).parent
    assert folders(monkeypatch, given, tmp_path) == folders(monkeypatch, variables, tmp_path)
