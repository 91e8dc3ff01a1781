"""Bad scripts under the launcher: whether the job trains, after how long, and the sentence about the script.

`python -m benchmarks.bench_own_script [--record]` writes a small script for each fault. The script shows the fault only
while the warm-up plays the script, and then trains as the example does. Each job has two slots and two iterations.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "own_script.md"
EXAMPLE = ROOT / "examples" / "pretrain_gpt.py"
TIMEOUT_S = 600
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 256 --transformer-impl local --lr 1e-3 --train-iters 2 --micro-batch-size 1 --global-batch-size 4 "
    "--log-interval 1 --eval-iters 0"
).split()
FAULTS = {
    "has no fault": "",
    "exits": "sys.exit(3)",
    "raises an error": "raise ValueError('no data here')",
    "ends without training": "sys.exit()",
    "reads standard input": "input()",
    "leaves a process behind": "subprocess.Popen(['sleep', '100000'])",
    "handles SIGTERM itself": "signal.signal(signal.SIGTERM, lambda *_: None)",
    "prints 64 MB": "[print('x' * (1 << 20)) for _ in range(64)]",
    "writes into its folder": "open('written', 'w').write('x')",
    "deletes a file of its folder": "os.remove(__file__)",
    "connects to another host": "socket.create_connection(('192.0.2.1', 80), 5)",
    "needs data that are missing": "open('/nowhere/tokens.bin').read()",
    "takes all memory": "resource.setrlimit(resource.RLIMIT_AS, (1 << 32, -1)); kept = bytearray(1 << 34)",
    "ends its process": "os._exit(7)",
    "hangs": "time.sleep(1 << 20)",
}
SCRIPT = """
import os, resource, runpy, signal, socket, subprocess, sys, time
# A played script has this port.
if os.environ["MASTER_PORT"] == "1":
    {fault}
sys.path.insert(0, {folder!r})
runpy.run_path({example!r}, run_name="__main__")
"""
SENTENCES = re.compile(r"the warm-up failed after [\d.]+ s: (.*?); training")


def run(fault: str, folder: Path) -> tuple[str, str, float, str]:
    """Return whether the job trained, the result of the measurement, the seconds, and the sentence of one fault."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(fault=fault or "pass", folder=str(EXAMPLE.parent), example=str(EXAMPLE)))
    command = [sys.executable, "-m", "pipette_launch", "--nproc-per-node=2", "--pipette-verbose", "--pipette-cache=off"]
    began_s = time.monotonic()
    done = subprocess.run(
        [*command, "--pipette-budget=5", str(script), *FLAGS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'patches'}"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    seconds = time.monotonic() - began_s
    trained = "yes" if done.returncode == 0 and "iteration        2/" in done.stdout else f"exit code {done.returncode}"
    measured = "the script" if "Measured" in done.stderr else "nothing"
    found = SENTENCES.search(" ".join(done.stderr.split()))
    sentence = found[1].replace(str(folder), "FOLDER") if found else ""
    left = [path.name for path in folder.iterdir() if path.name not in ("train.py", "__pycache__")]
    if left or not script.exists():
        sentence += f" (the folder has changed: {', '.join(left) or 'the script is gone'})"
    return trained, measured, seconds, re.sub(r"pid \d+|pipette_warmup_\w+", "...", sentence)


def conditions() -> str:
    """Return the machine and the releases of a run."""
    releases = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    machine = f"{psutil.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {releases}"
    return (
        f"`python -m benchmarks.bench_own_script --record`, {time.strftime('%Y-%m-%d')}: {machine}. Two slots, a "
        f"budget of 5 s. Each script shows its fault only while it is measured."
    )


def main() -> None:
    """Run every fault, and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--record", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    args = arguments.parse_args()
    lines = [
        "# Bad scripts while they are measured",
        "",
        conditions(),
        "",
        "| the script | job trains | measured | seconds | sentence on the screen |",
        "|---|---|---|--:|---|",
    ]
    for name, fault in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            trained, measured, seconds, sentence = run(fault, Path(folder))
        lines.append(f"| {name} | {trained} | {measured} | {seconds:.0f} | {sentence} |")
        print(lines[-1], flush=True)
    if args.record:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
