"""What `python -m benchmarks.validation` does, in one screen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks.validation import golden
from benchmarks.validation.conditions import conditions
from benchmarks.validation.lines import Found, Section
from benchmarks.validation.options import GOLDEN_ARGS, GOLDEN_ROWS, Options, parse
from benchmarks.validation.show import Report, as_json, markdown, print_report
from pipette_launch.errors import PipetteError

TITLE = "Predicted against measured"


def main(argv: Sequence[str] | None = None) -> int:
    """Score, print, write; 1 and a line on stderr where a file or a flag is bad."""
    try:
        options = parse(argv)
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
    found = Found()
    if "closed" in options.methods:
        found += golden.run(data, "closed form", golden.closed_form)
    return golden.section(data, files.rows.name, found)


SECTIONS: dict[str, Callable[[Options], Section]] = {"golden": golden_section}
