"""Several hosts on one machine, joined by links whose rates a file sets.

    python -m benchmarks.netlab run TOPOLOGY.toml [FLAGS] -- COMMAND ...
    python -m benchmarks.netlab compare TOPOLOGY.toml [FLAGS] -- SCRIPT ARGS
    python -m benchmarks.netlab check TOPOLOGY.toml
    python -m benchmarks.netlab clean

`run` starts COMMAND on every host at once. Its environment holds torchrun's flags (PET_NNODES, PET_NPROC_PER_NODE,
PET_RDZV_BACKEND, PET_RDZV_ENDPOINT, PET_RDZV_ID, PET_LOCAL_ADDR), which pipette-launch and torchrun read by themselves:
`-- pipette-launch script.py ARGS` is a whole job. Its own flags win. Other programs find NETLAB_HOST,
NETLAB_ADDRESS, NETLAB_INDEX, NETLAB_SLOTS, NETLAB_NNODES, NETLAB_HEAD (address of the first host), NETLAB_PORT and
NETLAB_FOLDER (a folder of the host's own). {host} {address} {index} {slots} {nnodes} {head} {port} {folder} in COMMAND
are replaced by the same values. Output is marked with the host's name; the exit code is that of the host that failed
first.

`compare` trains SCRIPT under torchrun and under pipette-launch in turns, after one start of pipette-launch that
measures and plans, and prints step times, their ratio, and whether the losses agree. SCRIPT prints Megatron's
iteration lines.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.netlab import everywhere, leftovers, system, topology
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.selfcheck import Reading
from benchmarks.netlab.topology import TopologyError


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line before the first `--`."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.netlab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = made.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run a command on every host")
    run.add_argument("topology", type=Path)
    run.add_argument("--no-check", action="store_true", help="do not measure the links first")
    run.add_argument(
        "--patience", type=float, default=60.0, metavar="S", help="seconds others go on after a failure (60)"
    )
    compare = actions.add_parser("compare", help="the same training under torchrun and under pipette-launch")
    compare.add_argument("topology", type=Path)
    compare.add_argument("--pairs", type=int, default=3, help="trainings of each (3)")
    compare.add_argument("--skip", type=int, default=3, help="first iterations that do not count (3)")
    compare.add_argument("--ours", default="", metavar="FLAGS", help="flags of pipette-launch, in one word")
    check = actions.add_parser("check", help="make the hosts, measure every link, remove them")
    check.add_argument("topology", type=Path)
    check.add_argument("--tolerance", type=float, default=0.10, help="part of a rate that a link may miss (0.1)")
    actions.add_parser("clean", help="remove what killed laboratories left")
    return made


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line; `command` of the answer is what stands behind the first `--`."""
    # Cut here: argparse's REMAINDER would take flags that stand behind the topology for the command's own.
    end = list(words).index("--") if "--" in words else len(words)
    return parser().parse_args(words[:end], argparse.Namespace(command=list(words[end + 1 :])))


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    options = parsed(arguments)
    try:
        if options.action == "clean":
            reason = system.missing()
            removed = [] if reason else leftovers.remove()
            print(reason or f"{len(removed)} laboratories removed: {', '.join(removed) or 'there were none'}")
            return 0
        asked = topology.read(options.topology)
        return ACTIONS[options.action](asked, options)
    except (system.LabError, TopologyError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _words(options: argparse.Namespace) -> list[str]:
    words: list[str] = options.command
    if not words:
        raise system.LabError("no command; it stands behind --")
    return words


def _check(asked: topology.Topology, options: argparse.Namespace) -> int:
    with Lab(asked) as lab:
        return show(lab.readings(), options.tolerance)


def _run(asked: topology.Topology, options: argparse.Namespace) -> int:
    words = _words(options)
    with Lab(asked) as lab:
        if not options.no_check:
            lab.check()
        code, blamed = everywhere.run(lab, words, patience_s=options.patience)
    if code:
        print(f"netlab: {blamed} failed first, exit code {code}", file=sys.stderr)
    return code


def _compare(asked: topology.Topology, options: argparse.Namespace) -> int:
    from benchmarks.netlab.compare import compare

    words = _words(options)

    def say(text: str) -> None:
        print(f"netlab: {text}", file=sys.stderr, flush=True)

    with Lab(asked) as lab:
        lab.check()
        ours = shlex.split(options.ours)
        done = compare(lab, words, pairs=options.pairs, skip=options.skip, ours=ours, say=say)
    print(f"{options.topology}, {' '.join(words)}")
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}")
    print("\n".join(done.lines()))
    return 0


ACTIONS: dict[str, Callable[[topology.Topology, argparse.Namespace], int]] = {
    "check": _check,
    "compare": _compare,
    "run": _run,
}


def show(readings: Sequence[Reading], tolerance: float) -> int:
    """Print one line for each direction; 1 if one misses its rate, else 0."""
    print("from         to           asked Mbit/s  got Mbit/s  ratio  round trip ms")
    for one in readings:
        print(
            f"{one.sender:12} {one.receiver:12} {one.asked_mbit:12g}  {one.got_mbit:10.1f}  {one.ratio:5.3f}"
            f"  {one.round_trip_ms:13.3f}{'' if one.fits(tolerance) else '  misses'}"
        )
    return 0 if all(one.fits(tolerance) for one in readings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
