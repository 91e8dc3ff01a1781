"""Gradient buckets of megatron-core depend on the size that they are given, and not on the number of ranks."""

import json
import subprocess
import sys
from pathlib import Path

from pipette_launch.megatron.checkpoint import EQUAL_BUCKETS_DP, REPLICA_ELEMENTS

SCALE = 1000
"""Weights and buckets are 1000 times smaller than in a job."""


def test_a_size_decides_what_a_bucket_holds() -> None:
    """State of 48 replicas suits 40 or 60 with their size of buckets alone, and state of 8 suits 40 as they are."""
    usual = {dp: max(dp, EQUAL_BUCKETS_DP) * REPLICA_ELEMENTS // SCALE for dp in (8, 40, 48)}
    cases = [(8, usual[8]), (40, usual[40]), (48, usual[48]), (40, usual[48]), (60, usual[48])]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("bucket_worker.py"))],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    of_8, of_40, of_48, of_48_on_40, of_48_on_60 = json.loads(done.stdout.splitlines()[-1])

    assert of_8 == of_40 != of_48
    assert of_48 == of_48_on_40 == of_48_on_60
