"""`pipette report`, `order`, `explain` and `devices`, which show plan files, words and devices."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.cli.flags import Subcommand, writing
from pipette_launch.errors import PipetteError, UsageError
from pipette_launch.text import bytes_text, count_text, did_you_mean, flops_text, printable, rate_text, seconds_text

TARGETS = ("ft_launcher", "mpirun", "slurm", "ray", "kubernetes")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipette_launch.facts import Plan
    from pipette_launch.facts.devices import DeviceSpec
    from pipette_launch.facts.prediction import Explained


def _add_report_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="a plan of `pipette plan --out` or of a warm-up, or a cluster.json")
    add("--html", metavar="FILE", type=Path, help="write the plan's report as one HTML file, and print nothing")
    add("--trace", metavar="FILE", type=Path, help="write the plan's steps as a trace for Perfetto, and print nothing")
    add("--cluster", metavar="FILE", type=Path, help="measurements of the plan (default: cluster.json beside the plan)")
    add("-q", "--quiet", action="store_true", help="print one line with a plan's choice and its saving")
    add("--json", action="store_true", help="check the file and print its document instead of a screen")


def _report(args: Namespace) -> int:
    from pipette_launch.facts import Measurements, Plan, files
    from pipette_launch.launch.plan_reports import existing_page
    from pipette_launch.report.measured import measured_screen
    from pipette_launch.report.plan import chosen_line, plan_file_screen

    if args.html is not None or args.trace is not None:
        _write(args)
        return 0
    if args.cluster is not None:
        raise UsageError("--cluster works only with the report and the trace; add --html FILE or --trace FILE")
    is_measured = files.kind_of(args.file) == Measurements.KIND
    if args.json:
        sys.stdout.write(files.dumps(files.read(args.file, Measurements if is_measured else Plan), indent=1) + "\n")
    elif is_measured:
        found = files.read(args.file, Measurements)
        sys.stdout.write(measured_screen(found, title="pipette report", saved_to=args.file))
    else:
        plan, page = files.read(args.file, Plan), existing_page(args.file)
        whole = plan_file_screen(plan, title="pipette report", saved_to=args.file, drawn_to=page)
        sys.stdout.write(f"{chosen_line(plan)}\n" if args.quiet else whole)
    return 0


def _write(args: Namespace) -> None:
    from pipette_launch.facts import files
    from pipette_launch.launch.plan_reports import found_files, page_of, trace_of

    found = found_files(args.file, args.cluster)
    if found.missing:
        sys.stderr.write(f"{printable(found.missing)}\n")
    wanted = (("--html", args.html, page_of), ("--trace", args.trace, trace_of))
    for flag, path, text_of in wanted:
        if path is not None:
            text = text_of(found)
            with writing(flag, path):
                files.write_text(path, text, shared=True)


REPORT = Subcommand(
    summary="Show a plan file, or the measurements of a warm-up.",
    add_arguments=_add_report_arguments,
    run=_report,
    examples=("pipette report a.plan.json", "pipette report --json cluster.json"),
)


def _add_order_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="PLAN", type=Path, help="a plan of `pipette plan --out` or of a warm-up")
    add("--for", dest="target", choices=TARGETS, required=True, help="launcher that shall train the plan")
    add("--out", metavar="DIR", type=Path, help="write the launcher's files to this folder instead of printing them")
    text = "measurements that price a changed order (default: cluster.json beside the plan)"
    add("--cluster", metavar="FILE", type=Path, help=text)


def _order(args: Namespace) -> int:
    from pipette_launch import megatron
    from pipette_launch.facts import Plan, files
    from pipette_launch.launch.plan_reports import job_of, measurements_of
    from pipette_launch.planning.picture import steps_elsewhere_s
    from pipette_launch.report.order import by_host, order_files, order_screen

    plan = files.read(args.file, Plan)
    measured = measurements_of(plan, args.file, args.cluster)
    job = job_of(plan, measured)
    needed = megatron.environment(job, plan.chosen.layout, device_kind=plan.device_kind)
    found = order_files(plan, args.target, needed)
    steps_s, unpriced = None, "no cluster.json with the plan's hosts is beside the plan; name one with --cluster"
    if measured is not None:
        try:
            steps_s = steps_elsewhere_s(plan, job, measured, [plan.chosen.placement, by_host(plan)])
        except PipetteError as error:
            unpriced = str(error)
    if args.out is not None:
        with writing("--out", args.out):
            args.out.mkdir(parents=True, exist_ok=True)
            for file, body in found.items():
                files.write_text(args.out / file, body, shared=True)
    folder = "" if args.out is None else str(args.out)
    sys.stdout.write(order_screen(plan, args.target, found, steps_s=steps_s, unpriced=unpriced, folder=folder))
    return 0


ORDER = Subcommand(
    summary="Print files and a command with which another launcher trains a plan.",
    add_arguments=_add_order_arguments,
    run=_order,
    examples=("pipette order a.plan.json --for slurm", "pipette order a.plan.json --for mpirun --out order"),
)


def _add_explain_arguments(parser: ArgumentParser) -> None:
    text = (
        "a label or number of a screen, such as gap or data parallel; a plan file after KEY adds its value; "
        "without KEY, the command lists all labels"
    )
    parser.add_argument("words", metavar="KEY", nargs="*", help=text)
    parser.add_argument("--json", action="store_true", help="print a document of kind `explained` instead of sentences")


def _explain(args: Namespace) -> int:
    from pipette_launch.facts import Plan, files
    from pipette_launch.facts.glossary import MEANINGS, key_of
    from pipette_launch.facts.prediction import Explained, Explanation

    words = list(args.words)
    plan = files.read(Path(words.pop()), Plan) if words and words[-1].endswith(".json") else None
    key = key_of(" ".join(words))
    if words and key not in MEANINGS:
        hint = did_you_mean(key, MEANINGS, otherwise="no label is similar")
        raise UsageError(f"unknown label {key!r}; {hint} (pipette explain lists all labels)")
    found = Explained(
        keys=tuple(
            Explanation(key=one, value=_value_of(plan, one) if plan else "", **asdict(meaning))
            for one, meaning in MEANINGS.items()
            if not words or one == key
        )
    )
    sys.stdout.write(
        files.dumps(found, indent=1) + "\n" if args.json else "".join(_explanations(found, is_list=not words))
    )
    return 0


def _explanations(found: Explained, *, is_list: bool) -> Iterator[str]:
    for one in found.keys:
        if is_list:
            yield f"{one.key:<20}{one.value or one.what}\n"
            continue
        yield f"{one.key}: {one.what}\n"
        for name, words in (("unit", one.unit), ("how", one.how), ("source", one.source), ("here", one.value)):
            if words:
                yield f"  {name:<8}{words}\n"


def _value_of(plan: Plan, key: str) -> str:
    """Return a key's value in a plan, with the unit; empty if the plan has no value of this key."""
    from pipette_launch.report.screen import mfu_text

    chosen, layout, memory = plan.chosen, plan.chosen.layout, plan.chosen.memory
    part = key.replace(" ", "_")
    if part in chosen.breakdown_s:
        return f"{seconds_text(chosen.breakdown_s[part])} of {seconds_text(chosen.step_time_s)}"
    fullest = f"{bytes_text(max(memory.need_bytes))} on the fullest stage"
    own = f"{plan.own.layout.words()}, {seconds_text(plan.own.step_time_s)} a step predicted"
    values = {
        **{name: str(getattr(layout, name)) for name in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp")},
        "mbs": str(layout.micro_batch_size),
        "step time": seconds_text(chosen.step_time_s),
        "bound": seconds_text(chosen.bound_s),
        "floor": seconds_text(plan.floor_s) if plan.floor_s else "",
        "gap": "" if plan.gap is None else f"{plan.gap:.2%}",
        "memory": fullest,
        "peak": fullest,
        "limit": bytes_text(memory.limit_bytes),
        "memory margin": f"{1 - memory.limit_bytes / memory.free_bytes:.0%}" if memory.free_bytes else "",
        "chosen": layout.words(),
        "yours": f"cannot run: {plan.own_fault}" if plan.own_fault else own,
        "schedule": chosen.schedule,
        "why": " ".join(plan.reasons),
    }
    if chosen.rate is not None:
        values |= {
            "tokens/s": f"{count_text(chosen.rate.tokens_per_s)} tokens/s",
            "tflop/s": flops_text(chosen.rate.flops_per_s),
            "mfu": mfu_text(chosen.rate),
        }
    return values.get(key, "")


EXPLAIN = Subcommand(
    summary="Explain a word or number on the screens: meaning, formula, and the value in a plan.",
    add_arguments=_add_explain_arguments,
    run=_explain,
    examples=("pipette explain", "pipette explain mfu", "pipette explain gap a.plan.json"),
)


def _add_devices_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="show only this device, with the source of its figures")
    text = "print a document instead of a table: of kind `device`, for --gpu FILE, or without NAME of kind `devices`"
    parser.add_argument("--json", action="store_true", help=text)


def _devices(args: Namespace) -> int:
    from pipette_launch.facts import files
    from pipette_launch.facts.devices import KNOWN_DEVICES, DeviceFiles, device_named, file_of

    shown = KNOWN_DEVICES.values() if args.name is None else (device_named(args.name),)
    if args.json:
        described = tuple(file_of(device) for device in shown)
        sys.stdout.write(files.dumps(described[0] if args.name else DeviceFiles(devices=described), indent=1) + "\n")
        return 0
    sys.stdout.write(_row("device", "memory", "16-bit peak", "in a host", "between hosts", "per host"))
    for device in shown:
        sys.stdout.write(_row(*_figures(device)))
        if args.name:
            peaks = ", ".join(f"{name} {peak / 1e12:g}" for name, peak in device.flops_per_s.items())
            sys.stdout.write(f"\n{peaks} TFLOP/s without sparsity\n{device.source}\n")
    return 0


def _figures(device: DeviceSpec) -> tuple[str, ...]:
    domain = f", {device.domain_hosts} hosts in an NVLink domain" if device.domain_hosts > 1 else ""
    return (
        device.name.lower(),
        bytes_text(device.memory_bytes),
        f"{device.peak_flops_per_s('fp16') / 1e12:g} TFLOP/s",
        rate_text(device.within_host.fair_bytes_per_s),
        rate_text(device.between_hosts.fair_bytes_per_s),
        f"{device.devices_per_host}{domain}",
    )


def _row(name: str, *columns: str) -> str:
    return f"{name:<25}" + "".join(f"{column:>15}" for column in columns[:-1]) + f"   {columns[-1]}\n"


DEVICES = Subcommand(
    summary="List the devices that --gpu accepts by name, or print one device as a file.",
    add_arguments=_add_devices_arguments,
    run=_devices,
    examples=(
        "pipette devices",
        "pipette devices h20",
        "pipette devices h100-sxm --json   # a file for --gpu FILE: change the figures that differ",
    ),
)
