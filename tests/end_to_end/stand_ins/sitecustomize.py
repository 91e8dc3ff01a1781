"""On the path of a job's processes, for tests that are not about measuring: the warm-up is written down instead.

Its workers then need no torch, nor do those of a script that is none of Megatron's. On the host SICK somebody holds the
first device, and the host SLOW turns out to be slow.
"""

import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

if "pipette_launch.probe.run" in sys.orig_argv:
    from facts_for_tests import tiny_cluster, tiny_measurements

    from pipette_launch.facts import files
    from pipette_launch.facts.health import Verdict
    from pipette_launch.probe.messages import WarmupOrder

    asked = files.read(Path(sys.orig_argv[sys.orig_argv.index("pipette_launch.probe.run") + 1]), WarmupOrder)
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
    from pipette_launch.facts.health import DeviceCondition, Holder
    from pipette_launch.probe.health import inventory

    inventory.conditions = lambda host: tuple(  # type: ignore[assignment]
        DeviceCondition(
            uuid=device.uuid,
            holders=(Holder(pid=17, name="somebody", used_bytes=device.memory_total_bytes),) if index == 0 else (),
        )
        for index, device in enumerate(host.devices)
    )
