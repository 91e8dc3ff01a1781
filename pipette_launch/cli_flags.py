"""torchrun's own parser plus one group of `--pipette-*` flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipette_launch import defaults

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable


def parser() -> ArgumentParser:
    """Return torchrun's parser with our group added; no torchrun flag begins like ours."""
    from torch.distributed.run import get_args_parser

    from pipette_launch import __version__

    whole = get_args_parser()
    whole.prog = "pipette-launch"
    whole.description = (
        "torchrun, for Megatron-LM: measures the machines of the job, chooses the parallel configuration and the "
        "placement of ranks, and starts the unmodified script with them."
    )
    group = whole.add_argument_group("pipette")
    _add_choices(group.add_argument)
    _add_amounts(group.add_argument)
    group.add_argument(
        "--pipette-metrics-file",
        metavar="FILE.prom",
        help="keep figures of the job in this file, for node_exporter's textfile collector (Prometheus)",
    )
    detail = group.add_mutually_exclusive_group()
    detail.add_argument("--pipette-quiet", action="store_true", help="print errors, and in one line what was chosen")
    detail.add_argument(
        "--pipette-verbose", action="store_true", help="print all notes of a plan, and log for debugging"
    )
    group.add_argument("--pipette-version", action="version", version=f"pipette-launch {__version__}")
    return whole


def _add_choices(add: Callable[..., object]) -> None:
    """Add the flags that choose what the launcher does: which plan, how far to go, and what to do after a failure."""
    add("--pipette-plan", metavar="FILE", help="use this plan.json instead of measuring and planning")
    add("--pipette-probe", metavar="FILE", help="measure only: write what was measured to FILE, show it, and stop")
    add("--pipette-dry-run", action="store_true", help="measure and plan, show the plan, and stop before training")
    add("--pipette-fix", metavar="NAMES", default="", help="keep these as they are on the command line, e.g. tp,pp,mbs")
    add(
        "--pipette-schedules",
        metavar="NAMES",
        default="stock",
        help="pipeline schedules that a plan may use: stock (default, Megatron's own), all, or names between commas: "
        "eager-1f1b, zb-h1, zb-1p, zb-2p, interleaved-zb, gis, 1f1b-v, v-half, v-min, v-zb",
    )
    add(
        "--pipette-on-error",
        choices=("train", "fail"),
        help="when measuring or planning fails: train with the user's own configuration, or stop (default: train, but "
        "stop where --pipette-plan or --pipette-device asks for what is not there)",
    )
    add(
        "--pipette-on-sick",
        choices=("warn", "exclude", "fail"),
        default="warn",
        help="when a node is slow or damaged: print a warning (default), train without it as far as --nnodes MIN:MAX "
        "allows, or stop",
    )
    add(
        "--pipette-watch",
        choices=("warn", "restart", "off"),
        default="warn",
        help="when steps slow down during the training: print a warning (default), measure all machines again and go "
        "on from the last checkpoint under a new plan, or do nothing",
    )


def _add_amounts(add: Callable[..., object]) -> None:
    """Add devices, amounts and places."""
    add("--pipette-device", choices=("auto", "cuda", "cpu"), default="auto", help="what the job trains on")
    _add_hosts(add)
    add(
        "--pipette-budget",
        metavar="SECONDS",
        default=defaults.WARMUP_BUDGET_S,
        help=f"seconds that the warm-up may measure (default {defaults.WARMUP_BUDGET_S:g})",
    )
    add(
        "--pipette-margin",
        metavar="FRACTION",
        default=defaults.MARGIN,
        help="predicted gain over the user's own configuration that another plan must pass "
        f"(default {defaults.MARGIN:g})",
    )
    add(
        "--pipette-memory-margin",
        metavar="FRACTION",
        default=defaults.MEMORY_MARGIN,
        help=f"part of the device memory that a plan must leave free (default {defaults.MEMORY_MARGIN:g})",
    )
    add(
        "--pipette-watch-limit",
        metavar="FRACTION",
        default=defaults.WATCH_LIMIT,
        help=f"by how much steps may become longer before --pipette-watch acts (default {defaults.WATCH_LIMIT:g})",
    )
    add(
        "--pipette-trials",
        metavar="K",
        default=defaults.TRIALS,
        help="run the best K plans and the user's own configuration for some iterations, and train with the measured "
        "best (default 0: none)",
    )
    add(
        "--pipette-trial-iters",
        metavar="N",
        default=defaults.TRIAL_ITERS,
        help=f"iterations of each trial that count, behind those that warm up (default {defaults.TRIAL_ITERS})",
    )
    add(
        "--pipette-cache",
        metavar="DIR",
        default=None,
        help="where plans are kept (default: pipette-launch in the user's cache folder); `off` keeps none",
    )


def _add_hosts(add: Callable[..., object]) -> None:
    """Add how many hosts may be lost, and how many wait for that."""
    add(
        "--pipette-tolerate",
        metavar="F",
        default=None,
        help="make plans ahead for the loss of up to F nodes, and go on with them at once (default 1 where --nnodes "
        "MIN:MAX leaves room, else 0)",
    )
    add(
        "--pipette-spares",
        metavar="K",
        default=0,
        help="measure K more nodes than train, never below MIN of --nnodes; they take the places of lost ones "
        "(default 0)",
    )
