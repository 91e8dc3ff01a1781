"""`pipette predict` says whether exactly this configuration fits, and how long its step is."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace

from pipette_launch.tools import flags
from pipette_launch.tools.flags import Subcommand


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette predict`; what stands behind the script belongs to the script."""
    flags.add_machine_flags(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--rank", metavar="R", type=int, help="show only the stage of this RANK")
    shown.add_argument("--stage", metavar="S", type=int, help="show only this pipeline rank, from 0")
    parser.add_argument(
        "--method",
        choices=("closed", "abstract"),
        default="closed",
        help="count the memory by formula (default), or run megatron-core's own code under fake tensors",
    )
    flags.add_reading_flags(parser)
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="what the job runs on, where neither --cluster nor --gpu is given",
    )
    parser.add_argument("--json", action="store_true", help="print a document of kind `prediction` instead of a screen")
    flags.add_script(parser)


def run(args: Namespace) -> int:
    """Print the prediction; returns 0 whether it fits or not, for `fits` in the document says that."""
    # Parsing --help must not wait for numpy.
    from pipette_launch.facts import files
    from pipette_launch.launch.cache import default_root, distrust
    from pipette_launch.planning.predict import predict
    from pipette_launch.report import prediction_screen

    prediction = predict(
        args.arguments,
        world_size=args.world_size,
        num_hosts=args.nodes,
        devices_per_host=args.gpus_per_node,
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
        cache=root / "executed" if (root := default_root()) and not distrust(root) else None,
    )
    sys.stdout.write(files.dumps(prediction) + "\n" if args.json else prediction_screen(prediction))
    return 0


COMMAND = Subcommand(
    summary="Predict whether exactly this configuration fits in memory, and how long its step is.",
    add_arguments=add_arguments,
    run=run,
    examples=(
        "pipette predict --gpu H100 --nodes 2 pretrain_gpt.py $ARGS",
        "pipette predict --gpu H100 --nodes 2 --stage 0 --json pretrain_gpt.py $ARGS",
        "pipette predict --world-size 16 pretrain_gpt.py $ARGS --tensor-model-parallel-size 2   # memory only",
    ),
)
