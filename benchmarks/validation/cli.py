"""Command line of `python -m benchmarks.validation`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks.validation import (
    golden,
    korthikanti,
    latency,
    left_out,
    logs,
    nvidia,
    ratchet,
    readme,
    vtrain,
)
from benchmarks.validation.conditions import conditions
from benchmarks.validation.lines import Section
from benchmarks.validation.options import DEFAULT_FILES, GOLDEN_ARGS, GOLDEN_ROWS, Options, parse
from benchmarks.validation.show import Report, as_json, markdown, print_report
from pipette_launch.errors import PipetteError
from pipette_launch.facts.devices import device_named

TITLE = "Predicted against measured"


def main(argv: Sequence[str] | None = None) -> int:
    """Score, print, write; an exit code above 0 and a line on stderr where a file or a flag is bad."""
    try:
        options = parse(argv)
        if options.leave_model_out:
            found = left_out.left_out(left_out.read_runs(options.files["nvidia"]))
            print(*conditions(options.date).values(), left_out.table(found), sep="\n")
            if options.record:
                left_out.record(found)
            return 0
        if options.record:
            recorded = ratchet.write(ratchet.RECORD, ratchet.lines(), conditions(options.date))
            print(f"recorded {recorded} lines: {ratchet.RECORD}")
            return 0
        report = run(options)
        if options.json:
            options.json.write_text(as_json(report), encoding="utf-8")
        if options.markdown:
            options.markdown.write_text(markdown(report, title=TITLE), encoding="utf-8")
    except (PipetteError, OSError) as error:
        print(f"validation: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    print_report(report, verbose=options.verbose)
    return 0


def run(options: Options) -> Report:
    """Score every data set that the options name."""
    sections = tuple(SECTIONS[name](options) for name in options.files)
    return Report(conditions=conditions(options.date), sections=sections)


def golden_section(options: Options) -> Section:
    """Memory of Megatron-LM's golden values."""
    files = golden.Files(rows=options.files["golden"], args=options.args)
    data = golden.read(files, golden.Files(rows=GOLDEN_ROWS, args=GOLDEN_ARGS))
    found = golden.run(data, "closed form", golden.closed_form)
    return golden.section(data, files.rows.name, found)


def logs_section(options: Options) -> Section:
    """Memory of every stage in public logs."""
    methods = {"closed form": logs.closed_form}
    return logs.section(options.files["logs"], methods, latency.pipette)


def korthikanti_section(options: Options) -> Section:
    """Iteration times of large models."""
    device = device_named(vtrain.DEVICE)
    return korthikanti.section(options.files["korthikanti"], device, latency.pipette)


def vtrain_section(options: Options) -> Section:
    """Iteration times of many small layouts."""
    path = options.files["vtrain"]
    development = DEFAULT_FILES["vtrain"]
    return vtrain.section(
        path,
        device_named(vtrain.DEVICE),
        fraction=options.fraction,
        seed=options.seed,
        development=None if path == development else development,
    )


def readme_section(options: Options) -> Section:
    """Step times of GPTs from 1.7B to 462B on H100."""
    return readme.section(options.files["readme"], device_named(readme.DEVICE), latency.pipette)


def nvidia_section(options: Options) -> Section:
    """Step times of NVIDIA's tuned recipes, dense and MoE."""
    return nvidia.section(options.files["nvidia"], latency.pipette)


SECTIONS: dict[str, Callable[[Options], Section]] = {
    "golden": golden_section,
    "logs": logs_section,
    "korthikanti": korthikanti_section,
    "vtrain": vtrain_section,
    "readme": readme_section,
    "nvidia": nvidia_section,
}
