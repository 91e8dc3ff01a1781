"""A job that cannot be planned: the launcher measures only links, and orders the hosts by them."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from subprocess import STDOUT

import pytest
import warm
from end_to_end.jobs import environment
from labs import needs_lab

from benchmarks.netlab import Lab, compare, everywhere, topology

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes, needs_lab]
MEET = Path(__file__).parent / "meet.py"
SLOW = {"between": ["n0", "n1"], "rate_mbit": 40.0}


def test_a_pipeline_avoids_the_slow_link(tmp_path: Path) -> None:
    """Three hosts train a script without Megatron: its stages follow the fast links, and the reason has the gain."""
    launcher = warm.command("pipette_launch", "--pipette-cache=off", "--pipette-device=cpu")
    words = [*launcher, str(MEET), "--parallelism.pipeline_parallel_degree=3"]
    with Lab(topology.parse({"rate_mbit": 400.0, "hosts": 3, "link": [SLOW]})) as lab, ExitStack() as files:
        variables = environment(tmp_path, **compare.environment(), SLURMD_NODENAME="")
        outputs = {host: files.enter_context((tmp_path / host).open("w")) for host in lab.hosts}
        jobs = {host: lab.run(host, words, variables, stdout=file, stderr=STDOUT) for host, file in outputs.items()}
        code, _ = everywhere.finish(jobs, 30)
    output = "".join((tmp_path / host).read_text() for host in outputs)

    assert 0 == code, output
    assert re.search(r'places \[\["n[01]", 0\], \["n2", 0\], \["n[01]", 0\]\]', output), output
    assert "(tp1 pp3 dp1, as your flags say): the slowest link in use has" in output
