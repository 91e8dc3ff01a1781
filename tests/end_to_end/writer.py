"""A script that writes as Megatron does where its flags say so, and is slow in plain data parallelism."""

import os
import sys
import time
from pathlib import Path

words = sys.argv[1:]
given = {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("--")}
rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
for flag in ("--save", "--tensorboard-dir"):
    if flag in given:
        folder = Path(given[flag])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{rank}.txt").open("a") as file:
            file.write("written")
is_plain = given["--micro-batch-size"] == "1" and "--use-distributed-optimizer" not in words
is_plain &= all(given.get(f"--{kind}-model-parallel-size", "1") == "1" for kind in ("tensor", "pipeline"))
step_s = 0.06 if is_plain else 0.03
total, interval = int(given["--train-iters"]), int(given.get("--log-interval", 100))
for iteration in range(1, total + 1):
    time.sleep(step_s)
    if rank == str(int(world_size) - 1) and iteration % interval == 0:
        print(
            f" [2026-11-21 10:00:00.000000] iteration {iteration:8d}/{total:8d} | consumed samples:            8 | "
            f"elapsed time per iteration (ms): {step_s * 1e3:.1f} | learning rate: 1.000000E-03 | "
            "lm loss: 5.000000E+00 | loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | "
            "number of nan iterations:   0 |",
            flush=True,
        )
