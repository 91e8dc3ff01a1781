"""Many real launchers on this machine: starts, injections, recoveries and ends.

`python -m benchmarks.bench_launchers [--sizes 64] [--runs 52] [--log FILE.jsonl] [--record]` starts N launchers of one
slot each, every launcher in a network namespace of its own behind one router, forked from one warm interpreter. Each
run is one start, one injection, the recovery, and the end. Each result is a line of FILE.jsonl, and a run that is there
already is not repeated. Real: launchers, torch's rendezvous, messages, plans, processes, and the network. Stand-ins:
the training, which prints an iteration line twice a second, and the measuring workers, whose links are drawn.

Rules, fixed before the first run: a recovery or an end that takes longer than the sum of the deadlines
(`pipette_launch/defaults.py`) of the waits that follow each other is late, on a busy machine too. A healthy host that a
line names as lost, or whose launcher does not end with 0, was taken for lost. A process on any host after the end is
left.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.bench_scale import look_up_names_in_files
from benchmarks.launchers.faults import CASES, ENDS_S, Case, inject, stop
from benchmarks.launchers.job import Job
from benchmarks.launchers.network import Network
from benchmarks.telling import processor
from pipette_launch.facts import files
from pipette_launch.probe.progress import Sign

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STEP_S = 0.5
FIRST_STEP_S = 10 * STEP_S
"""Longest time from the last new worker to the first iteration of the stand-in."""
STARTS_S = 240.0
"""Longest start, from the command line to the first iteration; a start that takes longer counts as late."""
LEAVES_S = 60.0
"""Seconds after which launchers that should have ended are ended by force."""
MODEL = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --vocab-size 50257 --tokenizer-type NullTokenizer --mock-data --transformer-impl local "
    "--lr 1e-4 --train-iters 100000 --log-interval 1 --eval-iters 0"
).split()
ENDS = {
    "ends_s": "last iteration to the end of all launchers",
    "cpu_s": "processor time of all launchers and workers",
    "first_cpu_s": "processor time of the first launcher",
}
WRONG = ("late", "false", "hung", "left", "trouble", "split")
"""Figures of a run that are empty or false unless something went wrong."""
MEMORY = ("MiB alone, in training", "MiB with its share of common pages", "open files")
LOST, TROUBLE = re.compile(r"(h\d{3}) is lost"), re.compile(r"Traceback|error of pipette-launch itself|in vain")
PHASES = {
    "met_s": "command line to the first worker",
    "measured_s": "measuring (stand-in)",
    "planned_s": "end of measuring to the first training worker",
    "spawned_s": "first to last training worker",
    "start_s": "command line to the first iteration",
}


REMARKS = """Real: launchers, torch's rendezvous, messages, plans, processes, and the network between namespaces. All
launchers are forked from one interpreter with all imports done. Stand-ins: the training, which needs no imports and
prints an iteration line twice a second, and the measuring workers, whose links are drawn (`plan_machines`). A silent
host drops all packets. A cut drops all packets between two parts of the network; a firewall also answers each TCP
packet with RST. A slow disk delays each opening for writing, renaming and deleting by 0.2 s. Cells are medians, with
the largest value in brackets.

A run is late if a recovery or an end takes longer than the deadlines of the waits that follow each other, on a busy
machine too. A healthy host was taken for lost if a line says so, or if its launcher does not end with 0."""


# -- one run ------------------------------------------------------------------------------------------------------


def run(network: Network, case: Case, number: int, *, cache: Path, flags: Sequence[str], keep: Path) -> dict[str, Any]:
    """Start launchers on all hosts of a network, inject a fault, and let the job end."""
    size, folder = len(network.addresses), Path(tempfile.mkdtemp(prefix="many-"))
    draw = random.Random(number)
    hosts, later = case.hosts(size, draw), []
    before, load = psutil.cpu_times(), os.getloadavg()[0]
    job = Job(network, folder)
    found: dict[str, Any] = {"size": size, "number": number, "case": case.name, "load": load, "hit": hosts}
    try:
        start(job, case, cache, flags)
        reaches = await_phase(job, case, STARTS_S)
        found |= start_figures(job) if case.phase in ("training", "end") else {}
        at_s = time.monotonic()
        inject(job, case, hosts)
        if case.again_s:
            job.pump(lambda: False, case.again_s)
            later = draw.sample([host for host in range(1, size) if host not in hosts], len(hosts))
            at_s = time.monotonic()
            inject(job, case, later)
        hit = {*hosts, *later}
        found |= follow(job, case, hit, at_s) | {"hit": sorted(hit), "reached": reaches}
        found["left"] = left_of(job)
    finally:
        job.close()
        network.mend()
        after = psutil.cpu_times()
        used_s = sum(job.cpu_s.values())
        busy_s = sum(after) - sum(before) - (after.idle - before.idle) - (after.iowait - before.iowait)
        found |= {
            "took_s": time.monotonic() - job.began_s,
            "cpu_s": used_s,
            "first_cpu_s": job.cpu_s.get(0, 0.0),
            "others_cores": max(busy_s - used_s, 0.0) / (time.monotonic() - job.began_s),
            "late": late(case, found),
        }
        if keep:
            job.write(
                keep / f"{size}-{number:03}-{case.name.replace(' ', '_').replace('%', 'pc').replace(',', '')}.log"
            )
        shutil.rmtree(folder, ignore_errors=True)
    return found


def start(job: Job, case: Case, cache: Path, flags: Sequence[str]) -> None:
    """Write the stand-ins, and start a launcher on every host."""
    size, folder = len(job.network.addresses), job.folder
    python = folder / "python"
    python.write_text(f"#!{sys.executable} -IS\n{(ROOT / 'benchmarks/launchers/worker.py').read_text()}")
    python.chmod(0o755)
    (folder / "sign").write_text(files.dumps(Sign(phase="start", at_s=12345.5, limit_s=60.0)))
    (folder / "pretrain_gpt.py").write_text("from megatron.training import pretrain\n")
    if not case.is_cold:
        shutil.copytree(cache, folder / "cache", dirs_exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": str(python),
        "MANY_FOLDER": str(folder),
        "MANY_STEP_S": str(STEP_S),
        "MANY_PYTHON": sys.executable,
        "MANY_ROOT": str(ROOT),
    }
    words = [
        f"--nnodes={max(size // 2, 1)}:{size}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={job.network.addresses[0]}:29400", "--rdzv-id=many", f"--pipette-cache={folder / 'cache'}",
        *flags, str(folder / "pretrain_gpt.py"), *MODEL, f"--global-batch-size={60 * size}",
    ]  # fmt: skip
    slow = dict.fromkeys(range(size if case.share == 1 else 1), case.slow_disks) if case.slow_disks else {}
    job.start(words, environment, slow_disks=slow)


def await_phase(job: Job, case: Case, patience_s: float) -> bool:
    """Wait for the moment of an injection; return false if it did not come."""
    name = {"measure": "measure", "plan": "measured", "spawn": "train"}.get(case.phase, "iteration")
    reaches = case.phase == "rendezvous" or job.pump(lambda: job.times(name), patience_s)
    job.pump(lambda: False, case.after_s or (3 * STEP_S if name == "iteration" else 0.0))
    if case.phase == "end":
        (job.folder / "end").touch()
        reaches = reaches and job.pump(lambda: job.times("done"), patience_s)
    return reaches


def follow(job: Job, case: Case, hit: set[int], at_s: float) -> dict[str, Any]:
    """Wait for the recovery and the end after an injection."""
    healthy = {host for host in range(len(job.network.addresses)) if host not in hit} or set(hit)
    recovers = case.goes_on is not False and case.phase != "end" and case.how != "nothing"
    if recovers:
        job.pump(lambda: job.times("iteration", at_s) or not healthy & set(job.running), STARTS_S)
    again = job.times("iteration", at_s)
    starts = [one for one in job.times("train", at_s) if again and one <= again[0]]
    if case.how == "stopped":
        stop(job, [*hit], signal.SIGCONT)
    job.pump(lambda: False, 2 * STEP_S if again else 0.0)
    ended_s = time.monotonic() if again or case.how == "nothing" else at_s
    (job.folder / "end").touch()
    job.pump(lambda: not healthy & set(job.running), LEAVES_S if again else STARTS_S)
    ends_s = time.monotonic() - ended_s
    # Launchers that were hit and still run have a deadline too.
    job.pump(lambda: not job.running, STARTS_S)
    told = [line for line in job.lines if line.text.startswith("pipette-launch: ") and line.at_s >= at_s]
    names = {int(name[1:]) for line in told if line.host in healthy for name in LOST.findall(line.text)}
    failed = {host for host in healthy if job.codes.get(host) != 0} if case.goes_on else set()
    is_cut = case.how in ("cut", "rejected")
    lines = (line.text[:200] for line in job.lines if line.host in healthy and TROUBLE.search(line.text))
    return {
        "recovered_s": again[0] - at_s if again else None,
        "first_worker_s": starts[0] - at_s if starts else None,
        "last_worker_s": starts[-1] - at_s if starts else None,
        "world": next((one.world for one in job.events if one.name == "iteration" and one.at_s >= at_s), None),
        "ends_s": ends_s,
        "hit_ends_s": time.monotonic() - at_s,
        "false": sorted((names | failed) - hit),
        "hung": sorted(job.running),
        "split": is_cut and sum(one.name == "train" and one.rank == 0 and one.at_s >= at_s for one in job.events) > 1,
        "words": next((line.text[16:] for line in told if "lost" in line.text or "error" in line.text), "")[:300],
        "trouble": sorted(set(lines))[:3] if case.goes_on else [],
    }


def start_figures(job: Job) -> dict[str, Any]:
    """Return seconds of the phases of a start, and memory and files of launchers that train."""
    measure, measured, train = (job.times(name) for name in ("measure", "measured", "train"))
    first = job.times("iteration")
    if not first:
        return {}
    sizes = {host: size for host, pid in job.running.items() if (size := memory_of(pid))}
    others = sorted(size for host, size in sizes.items() if host)
    phases = {
        "met_s": (measure or train)[0] - job.began_s,
        "measured_s": measured[0] - measure[0] if measured else None,
        "planned_s": train[0] - measured[-1] if measured else None,
        "spawned_s": train[-1] - train[0],
        "start_s": first[0] - job.began_s,
    }
    return phases | {"first_memory": sizes.get(0), "memory": others[len(others) // 2] if others else None}


def memory_of(pid: int) -> tuple[float, float, int] | None:
    """Return MiB of a process alone, MiB with its share of common pages, and open files; None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        num_files = len([*Path(f"/proc/{pid}/fd").iterdir()])
    except (ProcessLookupError, FileNotFoundError):
        return None
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    alone = kib["Private_Dirty"] + kib["Private_Clean"]
    return alone / 1024, kib["Pss"] / 1024, num_files


def left_of(job: Job) -> list[str]:
    """Return command lines of processes that are left on hosts."""
    found = []
    for pid, host in job.network.processes().items():
        if pid not in job.running.values():
            found.append(f"h{host:03} {' '.join(psutil.Process(pid).cmdline())[:120]}")
    return found


def late(case: Case, found: dict[str, Any]) -> bool:
    """Return true if a recovery or an end took longer than its deadlines allow."""
    if "ends_s" not in found or not found["reached"]:
        return True
    if found["recovered_s"] is None:
        recovers_late = bool(case.goes_on) and case.how != "nothing" and case.phase != "end"
        return recovers_late or bool(found["ends_s"] > case.limit_s())
    steps_s = found["recovered_s"] - found["last_worker_s"]
    recovers_late = found["last_worker_s"] > case.limit_s() or steps_s > FIRST_STEP_S
    hit_late = case.how in ("cut", "rejected") and found["hit_ends_s"] > case.hit_limit_s(found["size"])
    return bool(recovers_late or hit_late or found["ends_s"] > ENDS_S)


def is_well(found: dict[str, Any]) -> bool:
    """Return true if a run kept its deadlines, left no process, took no healthy host for lost, and trained once."""
    return not any(found.get(name, True) for name in WRONG)


# -- all runs -----------------------------------------------------------------------------------------------------


def runs(args: argparse.Namespace, size: int, done: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Run what the log lacks: one start without a cache, whose plan the later starts use, and the dealt cases."""
    known = {(one["size"], one["number"]) for one in done}
    cases = [case for case in CASES if not args.cases or any(word in case.name for word in args.cases)]
    wanted = [number for number in range(args.runs) if (size, number) not in known]
    # A TemporaryDirectory would also end with each forked launcher.
    cache = Path(tempfile.mkdtemp(prefix="many-cache-"))
    try:
        with Network(size) as network:
            if wanted:
                cold = Case(name="normal end", how="nothing", is_cold=True)
                flags = [*args.flag, f"--pipette-cache={cache}"]
                first = run(network, cold, -1, cache=cache, flags=flags, keep=args.keep)
                if (size, -1) not in known:
                    yield first
            for number in wanted:
                case = cases[number % len(cases)]
                yield run(network, case, number, cache=cache, flags=args.flag, keep=args.keep)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def line_of(found: dict[str, Any]) -> str:
    """Return one line about a run."""
    names = ("start_s", "last_worker_s", "recovered_s", "ends_s", "hit_ends_s", "took_s")
    seconds = ", ".join(f"{name} {found[name]:.1f}" for name in names if found.get(name) is not None)
    wrong = {name: found.get(name) for name in (*WRONG, "reached")}
    head = f"{found['size']} #{found['number']} {found['case']}: {seconds}, load {found['load']:.1f}"
    return f"{head}{'' if is_well(found) else f' BAD {wrong}'}; {found.get('words', '')}"


# -- the report ---------------------------------------------------------------------------------------------------


def report(done: Sequence[dict[str, Any]], flags: Sequence[str]) -> Iterator[str]:
    """Lines of markdown about all runs."""
    ask = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
    well = sum(map(is_well, done))
    loads = sorted(one["load"] for one in done)
    others = statistics.median(one["others_cores"] for one in done)
    yield "# Many real launchers on one machine"
    yield (
        f"`python -m benchmarks.bench_launchers{''.join(f' --flag={flag}' for flag in flags)}` on "
        f"{time.strftime('%Y-%m-%d')}, commit {commit.stdout.strip()}: {processor()}, {os.cpu_count()} cores, load "
        f"average {loads[0]:.0f} to {loads[-1]:.0f} at the start of a run, {others:.1f} cores used by others (median); "
        f"Python {platform.python_version()}, torch {torch.__version__}."
    )
    yield REMARKS
    counts = {name: sum(bool(one.get(name)) for one in done) for name in WRONG}
    injections = sum(one["case"] != "normal end" for one in done)
    yield (
        f"{len(done)} starts, {injections} injections, {well} runs without a fault. Runs past a deadline: "
        f"{counts['late']}; runs in which a healthy host was taken for lost: {counts['false']}; launchers that hung: "
        f"{counts['hung']}; runs that left a process: {counts['left']}; runs with an error of the launcher: "
        f"{counts['trouble']}; cuts after which both parts trained: {counts['split']}."
    )
    sizes = sorted({one["size"] for one in done})
    yield "## Starts"
    yield "\n".join(start_rows(done, sizes))
    for size in sizes:
        yield f"## Injections at {size} launchers"
        yield "\n".join(injection_rows([one for one in done if one["size"] == size]))


def start_rows(done: Sequence[dict[str, Any]], sizes: Sequence[int]) -> Iterator[str]:
    """Rows of seconds by phase, processor time and memory."""
    yield "| | " + " | ".join(f"{size} launchers, {kind}" for size in sizes for kind in ("cold", "cached")) + " |"
    yield "|---|" + "--:|" * (2 * len(sizes))
    groups = []
    for size in sizes:
        ran = [one for one in done if one["size"] == size and "start_s" in one]
        groups += [[one for one in ran if one.get("measured_s") is not None]]
        groups += [[one for one in ran if one.get("measured_s") is None]]
    for key, words in PHASES.items():
        yield f"| {words} (s) | " + " | ".join(spread([one[key] for one in group]) for group in groups) + " |"
    ends = [[one for one in group if one["case"] == "normal end"] for group in groups]
    for key, words in ENDS.items():
        yield f"| {words} (s) | " + " | ".join(spread([one[key] for one in group]) for group in ends) + " |"
    for key, words in (("first_memory", "first launcher"), ("memory", "another launcher")):
        for place, what in enumerate(MEMORY):
            cells = (spread([one[key] and one[key][place] for one in group]) for group in groups)
            yield f"| {words}: {what} | " + " | ".join(cells) + " |"


def spread(values: Sequence[float | None]) -> str:
    """Return median and largest value; empty without values."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{statistics.median(known):.1f} ({max(known):.1f})" if len(known) > 1 else f"{known[0]:.1f}"


def injection_rows(done: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows of recoveries, by injection."""
    yield "| injection | runs | hosts hit | ranks then | to the last new worker (s) | to the iteration (s) | result |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    for case in CASES:
        ran = [one for one in done if one["case"] == case.name]
        if ran:
            worlds = ", ".join(map(str, sorted({one["world"] for one in ran if one.get("world")})))
            went_on = sum(one.get("recovered_s") is not None for one in ran)
            bad = sum(not is_well(one) for one in ran)
            result = f"{went_on} went on, {len(ran) - went_on} ended" + (f", **{bad} bad**" if bad else "")
            yield (
                f"| {case.name} | {len(ran)} | {max(len(one['hit']) for one in ran)} | {worlds} "
                f"| {spread([one.get('last_worker_s') for one in ran])} "
                f"| {spread([one.get('recovered_s') for one in ran])} | {result} |"
            )


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64", help="numbers of launchers, comma-separated")
    parser.add_argument("--runs", type=int, default=2 * len(CASES), help="runs of each size, after a first cold start")
    parser.add_argument("--cases", nargs="*", default=[], help="only cases whose names contain one of these words")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of pipette-launch")
    parser.add_argument("--log", type=Path, default=Path("launchers.jsonl"))
    parser.add_argument("--keep", type=Path, help="folder for all lines of each run")
    parser.add_argument("--record", action="store_true", help="write the report into benchmarks/results")
    args = parser.parse_args()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    # Namespaces and processes of a run are removed after SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    look_up_names_in_files()
    gc.collect()
    gc.freeze()
    done = [json.loads(line) for line in args.log.read_text().splitlines()] if args.log.exists() else []
    for size in map(int, args.sizes.split(",")):
        for found in runs(args, size, done):
            with args.log.open("a") as log:
                log.write(json.dumps(found) + "\n")
            done.append(found)
            print(line_of(found), flush=True)
    text = "\n\n".join(report(done, args.flag)) + "\n"
    print(text)
    if args.record:
        (RESULTS / "launchers.md").write_text(text, encoding="utf-8")
    return 0 if all(map(is_well, done)) else 1


if __name__ == "__main__":
    sys.exit(main())
