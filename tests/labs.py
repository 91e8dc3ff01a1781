"""Which tests need a laboratory of network namespaces, or a SLURM in it, and why they may not have one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import netlab
from benchmarks.netlab.lab import ENTER

REASON = netlab.missing()
needs_lab = pytest.mark.skipif(bool(REASON), reason=f"netlab: {REASON}")
SLURM = [tool for tool in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(tool) is None]
NO_SLURM = REASON or (f"{', '.join(SLURM)} not found: scripts/slurm-lab install" if SLURM else "")
needs_slurm = pytest.mark.skipif(bool(NO_SLURM), reason=f"netlab: {NO_SLURM}")


def remote_shell(lab: netlab.Lab) -> Path:
    """Write a program that runs a command on a host of a laboratory, as `ssh HOST COMMAND` does."""
    enter = [
        f'set -- "$host" {lab.folder}/hosts "{lab._brake.entrance(host)}" "{lab._brake.cores(host)}" sh -c "$*"'
        for host in lab.hosts
    ]
    cases = "\n".join(f"{host}) {words} ;;" for host, words in zip(lab.hosts, enter, strict=True))
    path = lab.folder / "remote-shell"
    path.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        f"host=$1 && shift && export GLOO_SOCKET_IFNAME=own0 TMPDIR={lab.folder}/$host/tmp\n"
        f"case $host in\n{cases}\nesac\n"
        f"exec nsenter --net=/run/netns/{lab.folder.name}$host unshare --uts --mount sh -c '{ENTER}' enter \"$@\"\n"
    )
    path.chmod(0o755)
    return path
