"""`pipette plan` and `pipette predict`, which plan and predict without using the job's machines."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.cli import flags
from pipette_launch.cli.flags import Subcommand
from pipette_launch.defaults import TOP
from pipette_launch.errors import PipetteError
from pipette_launch.text import printable

if TYPE_CHECKING:
    # Each function imports numpy and rich itself, so that --help does not wait for these imports.
    from pipette_launch.facts import Plan
    from pipette_launch.planning.plan import PlanProblem


def _add_plan_arguments(parser: ArgumentParser) -> None:
    flags.add_machine_flags(parser)
    flags.add_search_flags(parser)
    flags.add_reading_flags(parser)
    text = "write the plan to this file, for --pipette-plan, and a report beside it"
    parser.add_argument("--out", metavar="FILE", type=Path, help=text)
    text = f"layouts of the ranked list, the best of each set of degrees (default: {TOP} in files, fewer on the screen)"
    parser.add_argument("--top", metavar="N", type=int, help=text)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan's document instead of a screen")
    form.add_argument("--csv", action="store_true", help="print the ranked list and the front as CSV")
    detail = parser.add_mutually_exclusive_group()
    detail.add_argument("-q", "--quiet", action="store_true", help="print one line with the choice and its saving")
    detail.add_argument("-v", "--verbose", action="store_true", help="print the whole screen, with all notes")
    flags.add_script(parser)


def _plan(args: Namespace) -> int:
    from pipette_launch.facts import files
    from pipette_launch.launch.terminal import ProgressLine, ticking
    from pipette_launch.planning.plan import PlanRequest, read_problem, search_plan
    from pipette_launch.report.plan import chosen_line, plan_file_screen, ranked_csv

    environment = _take_launch_line(args)
    given = {name: value for name, value in vars(args).items() if name in PlanRequest.__slots__}
    # The list takes up to half of a short search, and one printed line does not have it.
    given["top"] = args.top if args.top is not None else 0 if args.quiet and args.out is None else TOP
    request = PlanRequest(**{**given, "arguments": tuple(args.arguments), "environment": environment})
    problem = read_problem(request)
    if args.out is not None:
        # Check the file before the search, because the plan would be lost if the file cannot be written.
        with flags.writing("--out", args.out):
            files.check_writable(args.out)
    with ticking(ProgressLine(sys.stderr, head="pipette plan: "), "searching, {:.0f} s".format):
        plan = search_plan(problem)
    page = None if args.out is None else _write_plan(args.out, plan, problem)
    if args.json:
        sys.stdout.write(f"{files.dumps(plan, indent=1)}\n")
    elif args.csv:
        sys.stdout.write(ranked_csv(plan))
    elif args.quiet:
        sys.stdout.write(f"{chosen_line(plan)}\n")
    else:
        title, whole = "pipette plan", args.verbose
        screen = plan_file_screen(plan, title=title, saved_to=args.out, drawn_to=page, is_whole=whole, top=args.top)
        sys.stdout.write(screen)
    return 0


def _take_launch_line(args: Namespace) -> dict[str, str]:
    """Move script, arguments and sizes from a pasted launch line into `args`. Return the variables of the workers."""
    from pipette_launch.planning.launch_line import read_launch_line

    line = read_launch_line((args.script, *args.arguments), is_module=args.module)
    sizes = {name: getattr(args, name) for name in ("nodes", "gpus_per_node", "world_size")}
    sizes = line.merged(is_measured=args.cluster is not None, **sizes)
    vars(args).update(sizes, script=line.script, arguments=list(line.arguments))
    return {**os.environ, **line.environment}


def _write_plan(out: Path, plan: Plan, problem: PlanProblem) -> Path | None:
    """Write the plan's file, trace and report. Return the path of the report, or None if the report cannot be made."""
    from pipette_launch.facts import files
    from pipette_launch.launch.plan_reports import PlanDocuments, page_of, page_path, trace_of, trace_path
    from pipette_launch.planning.picture import picture_of

    with flags.writing("--out", out):
        files.write(out, plan, shared=True)
        picture = picture_of(plan, problem.job, problem.measurements)
        documents = PlanDocuments(plan=plan, measurements=problem.measurements, picture=picture)
        files.write_text(trace_path(out), trace_of(documents), shared=True)
    page = page_path(out)
    try:
        files.write_text(page, page_of(documents), shared=True)
    except (OSError, PipetteError) as error:
        sys.stderr.write(f"no report beside {printable(str(out))}: {printable(str(error))}\n")
        return None
    return page


PLAN = Subcommand(
    summary="Choose the fastest layout and rank order for described machines, and print bounds on every other layout.",
    add_arguments=_add_plan_arguments,
    run=_plan,
    examples=(
        "pipette plan --gpu H100 --nodes 2 --out a.plan.json pretrain_gpt.py $ARGS",
        "pipette plan --gpu H100 --nodes 2 --fabric fat-tree-4:1 --fix tp,cp pretrain_gpt.py $ARGS",
        "pipette plan --cluster cluster.json pretrain_gpt.py $ARGS   # measured by pipette probe",
    ),
)


def _add_predict_arguments(parser: ArgumentParser) -> None:
    flags.add_machine_flags(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--rank", metavar="R", type=int, help="show only the pipeline stage of this RANK")
    shown.add_argument("--stage", metavar="S", type=int, help="show only this pipeline stage (the first is 0)")
    flags.add_reading_flags(parser)
    text = "kind of device that trains, if neither --cluster nor --gpu is given"
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=text)
    parser.add_argument("--json", action="store_true", help="print a document of kind `prediction` instead of a screen")
    flags.add_script(parser)


def _predict(args: Namespace) -> int:
    """Print the prediction; returns 0 even if the configuration does not fit."""
    from pipette_launch.facts import files
    from pipette_launch.planning.predict import predict
    from pipette_launch.report.prediction import prediction_screen

    environment = _take_launch_line(args)
    machines = ("gpu", "nodes", "gpus_per_node", "world_size", "cluster", "fabric")
    same = (*machines, "rank", "stage", "memory_margin", "megatron_version", "bridge_config")
    prediction = predict(
        args.arguments,
        **{name: getattr(args, name) for name in same},
        device_kind=args.device,
        script=args.script,
        environment=environment,
    )
    sys.stdout.write(files.dumps(prediction, indent=1) + "\n" if args.json else prediction_screen(prediction))
    return 0


PREDICT = Subcommand(
    summary="Predict whether the configuration of the script's flags fits in memory, and the duration of its step.",
    add_arguments=_add_predict_arguments,
    run=_predict,
    examples=(
        "pipette predict --gpu H100 --nodes 2 pretrain_gpt.py $ARGS",
        "pipette predict --gpu H100 --nodes 2 --stage 0 --json pretrain_gpt.py $ARGS",
        "pipette predict --gpu H100 torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py $ARGS",
        "pipette predict --world-size 16 pretrain_gpt.py $ARGS --tensor-model-parallel-size 2   # memory only",
    ),
)
