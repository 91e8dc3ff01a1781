"""The command `pipette-launch`, which takes torchrun's flags and Pipette's flags and returns torchrun's exit codes."""

from __future__ import annotations

import gc
import logging
import os
import sys
from argparse import ArgumentError, ArgumentTypeError
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipette_launch import defaults
from pipette_launch.cli.flags import names
from pipette_launch.errors import OptionError, PipetteError, UsageError
from pipette_launch.installed import check_installed
from pipette_launch.text import HEAD, escape_log_lines, log_for_debugging, nearest_word, say

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipette_launch.launch.options import Options

PREFIX = "--pipette-"
INTERRUPTED = 130
"""Exit code that a shell reports for a process ended by SIGINT."""


def parser() -> ArgumentParser:
    """Return torchrun's parser with the `--pipette-` flags added. No flag of torchrun begins with `--pipette-`."""
    from torch.distributed.run import get_args_parser

    from pipette_launch import __version__

    whole = get_args_parser()
    whole.prog = "pipette-launch"
    # Raise an error for a wrong value, which prints one line instead of torchrun's usage text.
    whole.exit_on_error = False
    whole.description = (
        "torchrun for Megatron-LM: measures the machines of the job, chooses the parallel configuration and the "
        "placement of ranks, and starts the unmodified script with them."
    )
    group = whole.add_argument_group("pipette")
    _add_choices(group.add_argument)
    _add_amounts_and_files(group.add_argument)
    detail = group.add_mutually_exclusive_group()
    for name, text in (
        ("quiet", "print only errors and one line with the choice"),
        ("verbose", "print all notes of a plan, and debug logs"),
    ):
        flag, dest = f"{PREFIX}{name}", "pipette_detail"
        detail.add_argument(flag, action="store_const", const=name, default="usual", dest=dest, help=text)
    group.add_argument("--pipette-version", action="version", version=f"pipette-launch {__version__}")
    return whole


def _add_choices(add: Callable[..., object]) -> None:
    add("--pipette-plan", metavar="FILE", type=_path, help="run the plan in this file, without measuring or planning")
    text = "measure, write the measurements to FILE, print them, and stop"
    add("--pipette-probe", metavar="FILE", type=_absolute, dest="pipette_probe_to", help=text)
    add("--pipette-dry-run", action="store_true", help="measure, plan, print the plan, and stop before training")
    text = "keep these parts of your layout, for example tp,pp,mbs"
    add("--pipette-fix", metavar="NAMES", type=names, default=(), help=text)
    text = (
        "pipeline schedules that a plan may use: stock (default, Megatron's own), all, or names between commas: "
        "zb-1p, v-zb, v-half, v-min"
    )
    add("--pipette-schedules", metavar="NAMES", default="stock", help=text)
    text = (
        "if measuring or planning fails: train with your own configuration, or stop (default: train; but stop if "
        "--pipette-plan or --pipette-device cannot be followed)"
    )
    add("--pipette-on-error", choices=("train", "fail"), help=text)
    text = (
        "if a node is slow or damaged: print a warning (default), train without the node if --nnodes MIN:MAX "
        "allows it, or stop"
    )
    add("--pipette-on-sick", choices=("warn", "exclude", "fail"), default="warn", help=text)
    text = (
        "if steps become slower during training: print a warning (default), measure again and restart from the "
        "last checkpoint with a new plan, or do nothing"
    )
    add("--pipette-watch", choices=("warn", "restart", "off"), default="warn", help=text)
    text = "order the hosts of a job that cannot be planned by their measured links (default), or as torchrun does"
    add("--pipette-host-order", choices=("measured", "given"), default="measured", help=text)
    add("--pipette-device", choices=("auto", "cuda", "cpu"), default="auto", help="device of the job")


def _add_amounts_and_files(add: Callable[..., object]) -> None:
    trials = "run the best K plans and your own configuration for some iterations, and train with the fastest"
    margin = "share of your step that a plan must save to replace your configuration"
    watched = "relative increase of the step time at which --pipette-watch reacts"
    for name, metavar, default, text in (
        ("budget", "SECONDS", defaults.WARMUP_BUDGET_S, "time limit of the warm-up's measurements"),
        ("margin", "FRACTION", defaults.MARGIN, margin),
        ("memory-margin", "FRACTION", defaults.MEMORY_MARGIN, "share of device memory that a plan leaves free"),
        ("watch-limit", "FRACTION", defaults.WATCH_LIMIT, watched),
        ("trials", "K", defaults.TRIALS, trials),
        ("trial-iters", "N", defaults.TRIAL_ITERS, "timed iterations of each trial"),
        ("spares", "K", defaults.SPARES, "keep K measured nodes without workers, to replace lost nodes"),
    ):
        dest = f"pipette_{name.replace('-', '_')}{'_s' if name == 'budget' else ''}"
        about = f"{text} (default {default:g})"
        add(f"{PREFIX}{name}", metavar=metavar, default=default, type=type(default), dest=dest, help=about)
    text = (
        "make plans in advance for the loss of up to F nodes, so that the job continues at once "
        f"(default {defaults.TOLERATE} if --nnodes MIN:MAX allows it, else 0)"
    )
    add("--pipette-tolerate", metavar="F", type=int, help=text)
    text = "folder in which plans are kept (default: pipette-launch in your cache folder), or `off` for no cache"
    add("--pipette-cache", metavar="DIR", help=text)
    text = "write figures of the job to this file, for node_exporter's textfile collector (Prometheus)"
    add("--pipette-metrics-file", metavar="FILE.prom", type=_metrics_file, help=text)


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _absolute(text: str) -> Path | None:
    return Path(text).absolute() if text else None


def _metrics_file(text: str) -> Path | None:
    if text and not text.endswith(".prom"):
        raise ArgumentTypeError(f"{text}: node_exporter reads only files whose name ends in .prom")
    return _absolute(text)


def main(argv: Sequence[str] | None = None) -> None:
    """Run `pipette-launch`; exits as torchrun would."""
    try:
        check_installed()
    except PipetteError as error:
        _exit_with(error)
    with _without_collections(), _without_torch_warnings():
        from torch.distributed.elastic.multiprocessing.errors import record

    from pipette_launch.agent.signals import end_at_once

    logging.captureWarnings(capture=False)
    escape_log_lines()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _end_as_torchrun(lambda: record(_launch)(words))
    finally:
        if argv is None:
            end_at_once()


def _launch(words: Sequence[str]) -> None:
    with _without_collections():
        from pipette_launch.agent.job import launch
        from pipette_launch.launch import outer_launcher

        # torch's parser reads these variables.
        outer_launcher.drop_outer_flags(os.environ)
        whole = parser()
    check_own_flags(whole, words)
    args = parsed(whole, words)
    outer_launcher.take_flags(args, outer_launcher.given_flags(whole, words, os.environ), os.environ)
    advice = outer_launcher.several_launchers(os.environ)
    options = options_from(args, advice=advice)
    _note_lone_tasks(args, advice, os.environ)
    if options.detail == "verbose":
        log_for_debugging("pipette_launch", HEAD)
    launch(args, options, advice=advice)


def check_own_flags(whole: ArgumentParser, words: Sequence[str]) -> None:
    """Raise UsageError for an unknown `--pipette-` flag, which argparse would take for the script's name."""
    actions = whole._option_string_actions  # noqa: SLF001
    known = [option for option in actions if option.startswith(PREFIX)]
    index = 0
    # The first word that is neither a flag nor a flag's value is the script's name.
    while index < len(words) and words[index].startswith("-"):
        name, joined, _ = words[index].partition("=")
        if name.startswith(PREFIX) and not any(option.startswith(name) for option in known):
            # Compare flags without their common prefix `--pipette-`, which would make all flags similar.
            near = nearest_word(name[len(PREFIX) :], [option[len(PREFIX) :] for option in known])
            hint = f"; did you mean {PREFIX}{near}?" if near else f"; known flags are {', '.join(sorted(known))}"
            raise UsageError(f"unknown flag {name}{hint}")
        index += 2 if name in actions and actions[name].nargs != 0 and not joined else 1


def parsed(whole: ArgumentParser, words: Sequence[str]) -> Namespace:
    """Parse a command line; raises UsageError for a wrong value."""
    try:
        return whole.parse_args(words)
    except ArgumentError as error:
        raise UsageError(str(error).removeprefix("argument ")) from error


def options_from(args: Namespace, *, advice: str = "") -> Options:
    """Turn parsed flags into the launcher's options; raises UsageError for a wrong value.

    `advice` is the end of the error message that is printed if more launchers than nodes run.
    """
    from pipette_launch.agent.rendezvous import check_meeting
    from pipette_launch.facts.schedule import schedule_names
    from pipette_launch.launch.options import Options
    from pipette_launch.megatron import fixed_fields

    tolerate = _checked_sizes(args)
    check_meeting(args, advice=advice)
    late = [word for word in args.training_script_args if word.startswith(PREFIX)]
    if late:
        raise UsageError(
            f"{late[0]} is after the script's name, so it is a flag of the script; put it before the script"
        )
    fixed_fields(args.pipette_fix)
    own = {name.removeprefix("pipette_"): value for name, value in vars(args).items() if name.startswith("pipette_")}
    own |= {"cache": _cache(args.pipette_cache), "schedules": schedule_names(args.pipette_schedules)}
    own["tolerate"] = tolerate
    options = Options(
        script=args.training_script,
        script_arguments=tuple(args.training_script_args),
        runs_python=not args.no_python and not args.run_path,
        is_module=args.module,
        is_function=args.run_path,
        max_restarts=args.max_restarts,
        **own,
    )
    if options.runs_python and not args.module and not Path(args.training_script).exists():
        raise UsageError(f"{args.training_script}: no such file; name the script that torchrun would run")
    return options


def _checked_sizes(args: Namespace) -> int:
    """Return the number of lost nodes to plan for; raises UsageError for sizes that torchrun cannot handle."""
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        least, most = parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError):
        least = most = 0
    if not 0 < least <= most:
        raise UsageError(f"--nnodes needs a number above 0, or MIN:MAX with MIN not above MAX, got {args.nnodes!r}")
    why = ""
    try:
        num_slots = determine_local_world_size(args.nproc_per_node)
    except ValueError as error:
        num_slots, why = 0, f" ({error})"
    if num_slots < 1:
        raise UsageError(
            f"--nproc-per-node needs a number above 0, or auto, cpu, gpu or xpu for devices of this machine, got "
            f"{args.nproc_per_node!r}{why}"
        )
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts must be at least 0, got {args.max_restarts}")
    if args.pipette_tolerate is not None:
        return int(args.pipette_tolerate)
    return defaults.TOLERATE if most > least else 0


def _cache(text: str | None) -> Path | None:
    from pipette_launch.launch.cache import default_root, distrust

    if text == "off":
        return None
    root = Path(text) if text else default_root()
    homeless = "there is no home folder, so no plan is kept; name a folder with --pipette-cache"
    trouble = distrust(root) if root else homeless
    if trouble:
        say(trouble)
        return None
    return root


def _note_lone_tasks(args: Namespace, advice: str, environ: Mapping[str, str]) -> None:
    """Warn in the first of several SLURM tasks that each task starts a separate job, as torchrun does."""
    from pipette_launch.agent.rendezvous import becomes_standalone

    if advice and becomes_standalone(args) and environ.get("SLURM_LOCALID", "0") == "0":
        say(f"each task of this step trains a job of its own{advice}")


def _end_as_torchrun(job: Callable[[], None]) -> None:
    """Run the job. After an error, print the error in one line, and exit with torchrun's code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

    try:
        job()
    except PipetteError as error:
        _exit_with(error)
    except (RendezvousConnectionError, RendezvousTimeoutError) as error:
        why = str(error.__cause__ or error).partition("\n")[0] or "too few nodes came in time"
        say(
            f"error: the nodes cannot meet: {why.rstrip('.')}; check --rdzv-endpoint or --master-addr: all nodes must "
            "reach the host in this flag, and the launcher of this host must run"
        )
        sys.exit(1)
    except SignalException as signalled:
        say(f"{signalled.sigval.name} ended the job and its workers")
        sys.exit(1)
    except KeyboardInterrupt:
        # torchrun handles signals only after the start of its workers.
        say("SIGINT ended the job before workers started")
        sys.exit(INTERRUPTED)


def _exit_with(error: PipetteError) -> NoReturn:
    if isinstance(error, OptionError):
        error = error.renamed(lambda option: f"{PREFIX}{option.replace('_', '-')}")
    say(f"error: {error}")
    sys.exit(error.exit_code)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Import without garbage collections, which scan all of torch many times and find almost nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Imported objects live as long as the process, so let later garbage collections skip these objects too.
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _without_torch_warnings() -> Iterator[None]:
    """Import torch without C++ warnings, which would print 20 lines for each lost connection before the error."""
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        # Keep the log level that the user chose for torch's C++ code.
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        # torch has read TORCH_CPP_LOG_LEVEL at import. Remove the variable, so that workers keep torch's warnings.
        del os.environ[name]
