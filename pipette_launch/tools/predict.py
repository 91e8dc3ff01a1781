"""`pipette predict` says whether exactly this configuration fits, and how long its step is."""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from pathlib import Path

from pipette_launch.tools.command import Command

MEMORY_MARGIN = 0.08


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette predict`; what stands behind the script belongs to the script."""
    add = parser.add_argument
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument("--cluster", metavar="FILE", type=Path, help="cluster.json that a warm-up measured")
    machines.add_argument("--gpu", metavar="NAME", help="imagine machines with this device, e.g. H100-SXM or A100-80GB")
    add(
        "--fabric", metavar="FILE|NAME", help="network between the hosts of --gpu: a file, uniform, or fat-tree-2:1 ..."
    )
    add("--world-size", metavar="N", type=int, help="ranks of the job")
    add("--nodes", "--nnodes", metavar="N", type=int, help="nodes of the job")
    add("--nproc-per-node", "--nproc_per_node", metavar="N", type=int, help="ranks on each (default 8)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--rank", metavar="R", type=int, help="tell only the stage of this RANK")
    shown.add_argument("--stage", metavar="S", type=int, help="tell only this pipeline rank, from 0")
    add(
        "--method",
        choices=("closed", "abstract"),
        default="closed",
        help="count the memory by formula (default), or run megatron-core's own code under fake tensors",
    )
    add(
        "--memory-margin",
        metavar="FRACTION",
        type=float,
        default=MEMORY_MARGIN,
        help=f"part of the device memory that must stay free (default {MEMORY_MARGIN})",
    )
    add("--megatron-version", metavar="V", help="whose flags are read, e.g. 0.16.1 (default: what SCRIPT would import)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="what it runs on, without --cluster and --gpu")
    add("--json", action="store_true", help="print a document of kind `prediction` instead of a screen")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as for torchrun")
    add("script", metavar="SCRIPT", help="as in the job's own command; it need not be here")
    add("arguments", metavar="ARGS", nargs=REMAINDER, help="the script's own flags, exactly as in the job")


def run(args: Namespace) -> int:
    """Print the prediction; returns 0 whether it fits or not, for `fits` in the document says that."""
    # Parsing --help must not wait for numpy.
    from pipette_launch.facts import files
    from pipette_launch.forecast import foretell
    from pipette_launch.launch.cache.plans import default_root
    from pipette_launch.report import prediction_screen

    prediction = foretell(
        args.arguments,
        world_size=args.world_size,
        num_hosts=args.nodes,
        devices_per_host=args.nproc_per_node,
        gpu=args.gpu,
        cluster=args.cluster,
        fabric=args.fabric,
        rank=args.rank,
        stage=args.stage,
        method=args.method,
        memory_margin=args.memory_margin,
        megatron_version=args.megatron_version,
        device_kind=args.device,
        script=args.script,
        environment=os.environ,
        cache=root / "executed" if (root := default_root()) else None,
    )
    sys.stdout.write(files.dumps(prediction) + "\n" if args.json else prediction_screen(prediction))
    return 0


COMMAND = Command(
    summary="Does exactly this configuration fit in memory, and how long is its step?",
    add_arguments=add_arguments,
    run=run,
)
