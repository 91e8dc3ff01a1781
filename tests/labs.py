"""Which tests need a laboratory of network namespaces, or a SLURM in it, and why they may not have one."""

from __future__ import annotations

import shutil

import pytest

from benchmarks import netlab

REASON = netlab.missing()
needs_lab = pytest.mark.skipif(bool(REASON), reason=f"netlab: {REASON}")
SLURM = [tool for tool in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(tool) is None]
NO_SLURM = REASON or (f"{', '.join(SLURM)} not found: scripts/slurm-lab install" if SLURM else "")
needs_slurm = pytest.mark.skipif(bool(NO_SLURM), reason=f"netlab: {NO_SLURM}")
