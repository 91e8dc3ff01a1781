"""On the path of a job's processes, for tests that are not about measuring: the warm-up is written down instead.

Its workers then need no torch, nor do those of a script that is none of Megatron's. With HELPERS the search waits for
as many helping processes, which it otherwise never does: a test must not depend on how fast a process starts. On the
host SICK somebody holds the first device, and the host SLOW turns out to be slow.
"""

import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

if "pipette_launch.probe.run" in sys.orig_argv:
    from facts_for_tests import tiny_cluster, tiny_measurements

    from pipette_launch.facts import files
    from pipette_launch.facts.health.verdict import Verdict
    from pipette_launch.probe.options import ProbeOptions

    asked = files.read(Path(sys.orig_argv[-1]), ProbeOptions)
    if os.environ["RANK"] == "0":
        cluster = replace(tiny_cluster(len(asked.hosts), asked.devices_per_host), hosts=asked.hosts)
        measured = tiny_measurements(cluster, asked.cases)
        if slow := os.environ.get("SLOW"):
            found = Verdict(kind="slow-host", host=slow, figure="takes 2 ms for the same layer", peers="take 1 ms")
            measured = replace(measured, verdicts=(found,))
        files.write(Path(asked.output), measured)
    os._exit(0)

if "pipette_patches.run" in sys.orig_argv:
    # A script that is no Megatron's needs none of its patches.
    sys.argv = sys.orig_argv[sys.orig_argv.index("--") + 1 :]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)

if "pipette_launch" in sys.orig_argv and os.environ.get("SICK", "?") == os.environ.get("SLURMD_NODENAME"):
    from pipette_launch.facts.health.condition import DeviceCondition, Holder
    from pipette_launch.probe.health import condition

    condition.conditions = lambda host: tuple(  # type: ignore[assignment]
        DeviceCondition(
            uuid=device.uuid,
            holders=(Holder(pid=17, name="somebody", used_bytes=device.memory_total_bytes),) if index == 0 else (),
        )
        for index, device in enumerate(host.devices)
    )

if "pipette_launch" in sys.orig_argv and "HELPERS" in os.environ:
    from pipette_launch.agent.controller import Helper
    from pipette_launch.launch import planning
    from pipette_launch.launch.search_pool import crew

    crew.HELP_AFTER_S = crew.WORTH_SHARING_S = 0.0
    crew.GRACE_S = float(os.environ.get("GRACE_S", "100"))
    planning.SOLVE_S = 200.0

    class PatientCrew(crew.SharedCrew):
        """Waits for its helpers."""

        def __init__(self, own: object, call: Callable[[], Sequence[Helper]], **more: object) -> None:
            def call_and_wait() -> Sequence[Helper]:
                helpers = call()
                end_s = time.monotonic() + 60
                while (
                    sum(helper.size() for helper in helpers) < int(os.environ["HELPERS"]) and time.monotonic() < end_s
                ):
                    time.sleep(0.05)
                return helpers

            super().__init__(own, call_and_wait, **more)  # type: ignore[arg-type]

    planning.SharedCrew = PatientCrew  # type: ignore[misc]

if "pipette_launch.launch.search_pool.worker" in sys.orig_argv and os.environ.get("HANGS"):
    from pipette_launch.search import tasks

    tasks.perform = lambda *_, **__: time.sleep(600)  # type: ignore[assignment]
