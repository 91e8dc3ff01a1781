"""The command `pipette-launch`: flags turned into `launch.Options`, and what a job raises into an exit code."""

from __future__ import annotations

import gc
import logging
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipette_launch.cli_flags import parser
from pipette_launch.errors import OptionError, PipetteError, UsageError
from pipette_launch.installed import check_installed
from pipette_launch.text import escape_log_lines, log_for_debugging, nearest_word, printable

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipette_launch.launch.options import Options
    from pipette_launch.launch.slurm import Siblings

PREFIX = "--pipette-"
INTERRUPTED = 130
"""What a shell makes of a process that SIGINT has ended."""


def check_own_flags(whole: ArgumentParser, argv: Sequence[str]) -> None:
    """Raise UsageError for a flag of ours that does not exist; argparse would take it for the script's name."""
    known = [option for option in whole._option_string_actions if option.startswith(PREFIX)]  # noqa: SLF001
    for word in argv:
        if not word.startswith("-"):
            # The script, or a value: flags behind the script are the script's. Values cannot look like ours.
            continue
        name = word.split("=")[0]
        if name.startswith(PREFIX) and not any(option.startswith(name) for option in known):
            # The common beginning would make everything look alike.
            near = nearest_word(name[len(PREFIX) :], [option[len(PREFIX) :] for option in known])
            hint = f"; did you mean {PREFIX}{near}?" if near else f"; there are {', '.join(sorted(known))}"
            raise UsageError(f"unknown flag {name}{hint}")


def options_from(args: Namespace, *, advice: str = "") -> Options:
    """Turn parsed flags into the launcher's options; raises UsageError for a value that makes no sense.

    `advice` ends a sentence about launchers that do not fit the number of nodes.
    """
    from pipette_launch.agent.rendezvous import check_meeting
    from pipette_launch.facts.known_schedules import schedule_names
    from pipette_launch.launch.options import Options
    from pipette_launch.megatron import fixed_fields

    _check_sizes(args)
    check_meeting(args, advice=advice)
    late = [word for word in args.training_script_args if word.startswith(PREFIX)]
    if late:
        raise UsageError(
            f"{late[0]} stands behind the script, where flags are the script's own; put it before the script"
        )
    runs_python = not args.no_python and not args.run_path
    fix = tuple(name.strip() for name in args.pipette_fix.split(",") if name.strip())
    fixed_fields(fix)
    options = Options(
        script=args.training_script,
        script_arguments=tuple(args.training_script_args),
        runs_python=runs_python,
        is_module=args.module,
        plan=Path(args.pipette_plan) if args.pipette_plan else None,
        probe_to=Path(args.pipette_probe).absolute() if args.pipette_probe else None,
        fix=fix,
        on_error=args.pipette_on_error,
        on_sick=args.pipette_on_sick,
        watch=args.pipette_watch,
        watch_limit=_number("--pipette-watch-limit", args.pipette_watch_limit),
        device=args.pipette_device,
        budget_s=_number("--pipette-budget", args.pipette_budget),
        margin=_number("--pipette-margin", args.pipette_margin),
        memory_margin=_number("--pipette-memory-margin", args.pipette_memory_margin),
        cache=_cache(args.pipette_cache),
        dry_run=args.pipette_dry_run,
        detail="quiet" if args.pipette_quiet else "verbose" if args.pipette_verbose else "usual",
        trials=_whole("--pipette-trials", args.pipette_trials),
        trial_iters=_whole("--pipette-trial-iters", args.pipette_trial_iters),
        schedules=schedule_names(args.pipette_schedules),
        is_function=args.run_path,
        tolerate=_tolerated(args),
        spares=_whole("--pipette-spares", args.pipette_spares),
        metrics_file=_metrics_file(args.pipette_metrics_file),
        max_restarts=args.max_restarts,
    )
    if runs_python and not args.module and not Path(args.training_script).exists():
        raise UsageError(f"{args.training_script}: no such file; name the script that torchrun would run")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Run `pipette-launch`; exits as torchrun would."""
    try:
        # Without jinja2 a job goes on, and says that it writes no report.
        check_installed(but=frozenset({"jinja2"}))
    except PipetteError as error:
        _exit_with(error)
    with _uncollected(), _quiet():
        from torch.distributed.elastic.multiprocessing.errors import record

    from pipette_launch.agent.signals import end_at_once
    from pipette_launch.launch.slurm import Siblings

    logging.captureWarnings(capture=False)
    escape_log_lines()
    words = list(sys.argv[1:] if argv is None else argv)
    siblings = Siblings()
    try:
        with siblings.told():
            _end_as_torchrun(lambda: record(_launch)(words, siblings))
    finally:
        if argv is None:
            end_at_once()


def _end_as_torchrun(job: Callable[[], None]) -> None:
    """Run the job; turn what it raises into a sentence and torchrun's exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

    try:
        job()
    except PipetteError as error:
        _exit_with(error)
    except (RendezvousConnectionError, RendezvousTimeoutError) as error:
        why = str(error.__cause__ or error).partition("\n")[0] or "too few of them came in time"
        sys.stderr.write(
            f"pipette-launch: error: the nodes cannot meet: {printable(why).rstrip('.')}; look at --rdzv-endpoint or "
            f"--master-addr, whose host must be known to all nodes, and at its agent\n"
        )
        sys.exit(1)
    except SignalException as signalled:
        # Where torch's loop stood by then does not matter to the user; the exit code is that of torchrun.
        sys.stderr.write(f"pipette-launch: ended by {signalled.sigval.name}, and its workers with it\n")
        sys.exit(1)
    except KeyboardInterrupt:
        # Before it starts workers, torchrun has no handler for signals.
        sys.stderr.write("pipette-launch: ended by SIGINT, before there were workers\n")
        sys.exit(INTERRUPTED)


def _exit_with(error: PipetteError) -> NoReturn:
    if isinstance(error, OptionError):
        error = error.renamed(lambda option: f"{PREFIX}{option.replace('_', '-')}")
    sys.stderr.write(f"pipette-launch: error: {printable(str(error))}\n")
    sys.exit(error.exit_code)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Import without garbage collections: they look through all of torch again and again, and find next to nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # What the imports made stays as long as the process: no later collection looks through it either.
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Import torch without its warnings in C++: each lost connection would put twenty lines before our sentence."""
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        # The user wants to read them, or fewer.
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        # It is read at the import; the workers' own torch warns as it always does.
        del os.environ[name]


def _launch(words: Sequence[str], siblings: Siblings) -> None:
    with _uncollected():
        from pipette_launch.launch import slurm
        from pipette_launch.launch.node_controller import launch

        whole = parser()
    flags = _before_script(whole, words)
    check_own_flags(whole, flags)
    args = whole.parse_args(words)
    step = slurm.take_flags(args, slurm.given_flags(whole, words, os.environ), os.environ)
    # The tasks of a step that we arrange ourselves share one launcher.
    advice = "" if step is not None else slurm.several_launchers(os.environ)
    options = options_from(args, advice=advice)
    _note_lone_tasks(args, advice, os.environ)
    if options.detail == "verbose":
        log_for_debugging("pipette_launch", "pipette-launch: ")
    if step is not None and step.num_tasks > 1:
        if step.local_id:
            sys.exit(slurm.await_agent(f"{step.name}/{step.node}"))
        siblings.open(f"{step.name}/{step.node}", step.num_tasks - 1)
    launch(args, options, advice=advice)


def _note_lone_tasks(args: Namespace, advice: str, environ: Mapping[str, str]) -> None:
    """Print, in the first of several tasks, that each of them starts a job of its own, as under torchrun."""
    from pipette_launch.agent.rendezvous import becomes_standalone

    if advice and becomes_standalone(args) and environ.get("SLURM_LOCALID", "0") == "0":
        sys.stderr.write(f"pipette-launch: each task of this step trains a job of its own{advice}\n")


def _before_script(whole: ArgumentParser, words: Sequence[str]) -> Sequence[str]:
    """Return the words before the script's name, as far as they can be recognised before parsing."""
    actions = whole._option_string_actions  # noqa: SLF001
    index = 0
    while index < len(words) and words[index].startswith("-"):
        name, joined, _ = words[index].partition("=")
        takes_value = name in actions and actions[name].nargs != 0 and not joined
        index += 2 if takes_value else 1
    return words[:index]


def _check_sizes(args: Namespace) -> None:
    """Raise UsageError for sizes of the job at which torchrun would raise in the middle of its own code."""
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
            f"--nproc-per-node needs a number above 0, or auto, cpu, gpu or xpu where there is one, got "
            f"{args.nproc_per_node!r}{why}"
        )
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts must be at least 0, got {args.max_restarts}")


def _tolerated(args: Namespace) -> int:
    """How many lost nodes plans are made for: one where nobody says otherwise and --nnodes leaves room for it."""
    from torch.distributed.run import parse_min_max_nnodes

    if args.pipette_tolerate is not None:
        return _whole("--pipette-tolerate", args.pipette_tolerate)
    least, most = parse_min_max_nnodes(args.nnodes)
    return 1 if most > least else 0


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{flag} needs a number, got {text!r}") from None


def _whole(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{flag} needs a whole number, got {text!r}") from None


def _metrics_file(text: str | None) -> Path | None:
    if not text:
        return None
    if not text.endswith(".prom"):
        raise UsageError(f"--pipette-metrics-file {text}: node_exporter reads no file whose name does not end in .prom")
    return Path(text).absolute()


def _cache(text: str | None) -> Path | None:
    from pipette_launch.launch.cache import default_root, distrust

    if text == "off":
        return None
    root = Path(text) if text else default_root()
    trouble = distrust(root) if root else "there is no home folder, so no plan is kept; --pipette-cache names one"
    if trouble:
        sys.stderr.write(f"pipette-launch: {printable(trouble)}\n")
        return None
    return root
