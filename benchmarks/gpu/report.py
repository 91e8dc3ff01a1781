"""Write the records of a check as Markdown: `python -m benchmarks.gpu.report FOLDER [--out FILE]`.

Without `--out` the file is `benchmarks/results/gpu_<device>_<date>.md`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.notebook import RUNNING, SCHEMA_VERSION, WHOLE, first_line
from benchmarks.gpu.supervise import PARTS
from pipette_launch.errors import FileFormatError
from pipette_launch.facts.files import write_text

RESULTS = Path(__file__).parent.parent / "results"
MODULES = {part.name: part.module for part in PARTS}
SAYS = {part.name: part.says for part in PARTS}


def load(path: Path) -> dict[str, Any]:
    """Read the records of a part; raises FileFormatError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path}: no records of a part ({error})") from error
    if not isinstance(found, dict) or found.get("schema_version") != SCHEMA_VERSION or found.get("part") not in MODULES:
        raise FileFormatError(f"{path}: no records of a part that this version knows")
    return found


def note_end(path: Path, trouble: str) -> None:
    """Write down that a part did not end by itself, unless the part did so or left no file at all."""
    try:
        found = load(path)
    except FileFormatError:
        return
    if found["ended"] != RUNNING:
        return
    write_text(path, json.dumps({**found, "ended": trouble}, indent=1) + "\n")


def part_text(path: Path) -> str:
    """One part as Markdown; a part without records says so."""
    try:
        found = load(path)
    except FileFormatError as error:
        return f"{error}\n"
    return "\n".join(_part_lines(found))


def whole_text(folder: Path) -> str:
    """Return all parts of a check as Markdown; raise FileFormatError if there is no part."""
    parts = [load(folder / f"{part.name}.json") for part in PARTS if (folder / f"{part.name}.json").exists()]
    if not parts:
        raise FileFormatError(f"{folder}: no records of a check")
    return "\n".join(_lines(parts)) + "\n"


def write(folder: Path, file: Path) -> None:
    """Write the report of a check; nothing where no part has left records yet."""
    try:
        text = whole_text(folder)
    except FileFormatError:
        return
    write_text(file, text)


def results_file(parts_folder: Path) -> Path:
    """The name of a check's report among the results."""
    first = next(load(path) for part in PARTS if (path := parts_folder / f"{part.name}.json").exists())
    name = re.sub(r"[^a-z0-9]+", "-", first["device"]["name"].lower().replace("nvidia", "")).strip("-")
    device = "cpu" if first["device"]["kind"] == "cpu" else name
    return RESULTS / f"gpu_{device}_{first['conditions']['date'][:10]}.md"


def _lines(parts: Sequence[dict[str, Any]]) -> Iterator[str]:
    first = parts[0]
    known = first["conditions"]
    yield f"# The GPU check on {first['device']['name']}"
    yield ""
    yield f"`scripts/gpu-check --device {first['device']['kind']}`, {known['date']}, commit {known['commit']};"
    yield f"{known['versions']}; {', '.join(known['packages'])};"
    yield f"{known['machine']}; {first['device']['bytes'] / 2**30:.2f} GiB on the device; load {known['load']}."
    if first["device"]["kind"] == "cpu":
        yield ""
        yield "**This has not run on a GPU.** At toy size on a CPU it shows that the check runs, no more."
    yield ""
    yield "| part | what it finds out | records | not done | seconds | ended |"
    yield "|---|---|--:|--:|--:|---|"
    for part in parts:
        yield (
            f"| {part['part']} | {SAYS[part['part']]} | {len(part['records'])} | {len(part['missing'])} "
            f"| {part['seconds']:.0f} | {part['ended']} |"
        )
    commits = {part["conditions"]["commit"] for part in parts}
    if len(commits) > 1:
        yield ""
        yield f"The parts are of different commits: {', '.join(sorted(commits))}."
    for part in parts:
        yield ""
        yield from _part_lines(part)


def _part_lines(part: dict[str, Any]) -> Iterator[str]:
    yield f"## {part['part']}: {SAYS[part['part']]}"
    yield ""
    if part["ended"] != WHOLE:
        yield f"This part is not whole: {part['ended']}."
        yield ""
    lines = importlib.import_module(f"benchmarks.gpu.{MODULES[part['part']]}").lines
    try:
        told = list(lines(part["records"]))
    except Exception as error:  # noqa: BLE001 - a device that nobody knew may give what nobody thought of
        told = [f"These records cannot be shown ({first_line(error)}); the JSON has them."]
    yield from map(_as_item, told)
    for head, name in (("Failed:", "failed"), ("Not done:", "missing")):
        if part.get(name):
            yield ""
            yield head
            yield ""
            yield from (f"- {one['what']}: {one['why']}" for one in part[name])


def _as_item(line: str) -> str:
    """Turn a sentence into a list item; leave table rows, code and list items unchanged."""
    return line if not line or line.startswith(("|", "-", "    ")) else f"- {line}"


def main(argv: Sequence[str]) -> int:
    """Write the report of a folder's records among the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    try:
        file = args.out or results_file(args.folder)
        write_text(file, whole_text(args.folder))
    except (FileFormatError, StopIteration) as error:
        sys.stderr.write(f"gpu-check report: {error or f'{args.folder}: no records of a check'}\n")
        return 1
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
