"""Make pipette_launch/megatron/data/flags.json from the argparse definitions of several Megatron-LM tags.

Usage: python benchmarks/make_flag_table.py DEFINITIONS.json

DEFINITIONS.json maps a tag to its option strings, each with `dest`, `action`, `nargs`, `type`, `default` and `choices`
(names, for a flag that takes an enumeration; null for signals, which differ between machines). Only what
reading a command line needs is kept, for core_v0.14 and later; equal definitions of neighbouring tags share one row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "pipette_launch" / "megatron" / "data" / "flags.json"
VERSION_OF_MAIN = "0.20"
"""Version in megatron/core/package_info.py on the main branch from which the definitions come."""
SOURCE = (
    "Option strings and defaults of NVIDIA/Megatron-LM's command line, tags core_v0.14.0 to core_v0.19.0 and main "
    "d98e8a64dd (0.20). Copyright NVIDIA CORPORATION & AFFILIATES; Megatron-LM is under a BSD-3-Clause style licence."
)
LEGEND = (
    "option string -> rows of [first release, last release, dest, action, nargs, type, default], "
    "then the choices if any"
)
PLAIN_TYPES = {"int", "float", "bool"}
"""Other converters are Megatron's own parsers; their values are kept as text."""


def releases(definitions: dict[str, Any]) -> dict[str, Any]:
    """Tags from core_v0.14 on, by release."""
    named = {
        VERSION_OF_MAIN if tag == "main" else tag.removeprefix("core_v").rsplit(".", 1)[0]: flags
        for tag, flags in definitions.items()
    }
    return {release: flags for release, flags in named.items() if int(release.split(".")[1]) >= 14}


def row(flag: dict[str, Any]) -> list[Any]:
    """One definition without what reading does not need."""
    kind = flag["type"] if flag["type"] in PLAIN_TYPES else None
    choices = [flag["choices"]] if flag.get("choices") else []
    return [flag["dest"], flag["action"], flag["nargs"], kind, flag["default"], *choices]


def table(definitions: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """For each option string its rows, neighbouring releases with equal definitions merged."""
    rows: dict[str, list[list[Any]]] = {}
    previous: set[str] = set()
    for release, flags in releases(definitions).items():
        for option, flag in flags.items():
            known = rows.setdefault(option, [])
            if known and option in previous and known[-1][2:] == row(flag):
                known[-1][1] = release
            else:
                known.append([release, release, *row(flag)])
        previous = set(flags)
    return rows


def main(source: str) -> None:
    """Write the table, one option string to a line, so that a change can be reviewed."""
    definitions = json.loads(Path(source).read_text(encoding="utf-8"))
    head = {"source": SOURCE, "legend": LEGEND, "releases": list(releases(definitions))}
    lines = [f"{json.dumps(option)}: {json.dumps(rows)}" for option, rows in sorted(table(definitions).items())]
    text = json.dumps(head, indent=1)[:-2] + ',\n "flags": {\n' + ",\n".join(lines) + "\n}}\n"
    json.loads(text)
    TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
