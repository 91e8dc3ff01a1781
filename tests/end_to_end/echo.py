"""A script that takes any flags, tells what it was given, and prints one iteration line in Megatron's format."""

import json
import os
import sys

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
refused = os.environ.get("REFUSE", "")
if refused and refused in " ".join(sys.argv):
    sys.exit(f"ValueError: this script refuses {refused}")
seen = {name: os.environ.get(name, "") for name in names}
line = json.dumps({**seen, "argv": " ".join(sys.argv[1:]), "patched": "cpu_backend" in str(sys.orig_argv)})
# One write for the whole line: the workers share a console.
sys.stdout.write(line + "\n")
if seen["RANK"] == str(int(seen["WORLD_SIZE"]) - 1):
    print(
        " [2026-11-21 10:00:00.000000] iteration        1/       1 | consumed samples:            8 | "
        "elapsed time per iteration (ms): 10.0 | learning rate: 1.000000E-03 | global batch size:     8 | "
        "lm loss: 5.000000E+00 | loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    )
