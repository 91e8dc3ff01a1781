"""Make pipette_launch/megatron/data/flags.json from Megatron-LM's own parser, and print what becomes of every flag.

Usage: python benchmarks/make_flag_table.py CHECKOUT [RELEASE]    add the release of a checkout of Megatron-LM
       python benchmarks/make_flag_table.py DEFINITIONS.json      make the table anew from definitions of all tags
       python benchmarks/make_flag_table.py                       print every flag with its effect, as CSV

The first form imports the checkout's parser with this Python, so torch and the packages that Megatron-LM imports must
be installed. It ends with the flags that have no effect yet: add a word for each to data/effects.csv.

DEFINITIONS.json maps a tag to its option strings, each with `dest`, `action`, `nargs`, `type`, `default` and `choices`
(names, for a flag that takes an enumeration; null for signals, which differ between machines). Only what reading a
command line needs is kept, from the oldest supported release on; equal definitions of neighbouring tags share one row.
"""

from __future__ import annotations

import argparse
import ast
import csv
import enum
import json
import signal
import sys
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipette_launch.facts.job import PerformanceOptions
from pipette_launch.megatron.flags import EFFECTS, OLDEST, flag_table, releases
from pipette_launch.megatron.layout import DESTS_OF
from pipette_launch.megatron.pins import HELD_BY, REFUSED, UNMODELLED, UNPLANNED, UNTIMED
from pipette_launch.megatron.script import script_version

MEGATRON = Path(__file__).parent.parent / "pipette_launch" / "megatron"
TARGET = MEGATRON / "data" / "flags.json"
VERSION_OF_MAIN = "0.20"
"""Version in megatron/core/package_info.py on the main branch from which the definitions come."""
PLAIN_TYPES = {"int", "float", "bool"}
"""Other converters are Megatron's own parsers; their values are kept as text."""
READERS = ("model", "layout", "chunks", "read", "tokenizers", "performance", "pins")
"""Modules that read flags for a prediction or a plan. The other modules check flags, or write them."""
ACTIONS = {"BooleanOptionalAction": "boolean_optional", "help": "help"}


def named_releases(definitions: dict[str, Any]) -> dict[str, Any]:
    """Tags of supported releases, by release."""
    named = {
        VERSION_OF_MAIN if tag == "main" else tag.removeprefix("core_v").rsplit(".", 1)[0]: flags
        for tag, flags in definitions.items()
    }
    return {release: flags for release, flags in named.items() if int(release.split(".")[1]) >= OLDEST[1]}


def row(flag: dict[str, Any]) -> list[Any]:
    """One definition without what reading does not need."""
    kind = flag["type"] if flag["type"] in PLAIN_TYPES else None
    choices = [flag["choices"]] if flag.get("choices") else []
    return [flag["dest"], flag["action"], flag["nargs"], kind, flag["default"], *choices]


def table(rows_of: dict[str, dict[str, list[Any]]]) -> dict[str, list[list[Any]]]:
    """For each option string its rows, neighbouring releases with equal definitions merged."""
    rows: dict[str, list[list[Any]]] = {}
    previous: set[str] = set()
    for release, flags in rows_of.items():
        for option, found in flags.items():
            known = rows.setdefault(option, [])
            if known and option in previous and known[-1][2:] == found:
                known[-1][1] = release
            else:
                known.append([release, release, *found])
        previous = set(flags)
    return rows


def known_rows() -> dict[str, dict[str, list[Any]]]:
    """The present table as rows of each release."""
    flags, names = json.loads(TARGET.read_text(encoding="utf-8"))["flags"], releases()
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in names}
    for option, rows in flags.items():
        for first, last, *rest in rows:
            for name in names[names.index(first) : names.index(last) + 1]:
                found[name][option] = rest
    return found


def plain(value: Any) -> Any:
    """A default or choice as JSON, with the name of an enumeration's value."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def parsed(checkout: str) -> dict[str, list[Any]]:
    """Rows of the flags that the parser of a checkout defines."""
    sys.path[:0] = [checkout, str(Path(__file__).parent.parent)]
    from benchmarks.stand_ins import StandIns

    # From 0.16 on, Megatron imports triton, which exists only beside CUDA, and from 0.18 on `override` of Python 3.12.
    sys.meta_path.append(StandIns({"triton"}))
    typing.override = getattr(typing, "override", lambda function: function)  # type: ignore[attr-defined]
    from megatron.training import arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    found = {}
    for action in parser._actions:  # noqa: SLF001  argparse lists the defined flags nowhere else
        known = {kind: name for name, kind in parser._registries["action"].items() if name}  # noqa: SLF001
        name = known.get(type(action), type(action).__name__)
        choices = list(action.choices or ())
        for option in action.option_strings:
            found[option] = row(
                {
                    "dest": action.dest,
                    "action": ACTIONS.get(name, name),
                    "nargs": action.nargs,
                    "type": getattr(action.type, "__name__", None),
                    "default": None if action.dest == "help" else plain(action.default),
                    # Machines have different signals.
                    "choices": None if isinstance(next(iter(choices), None), signal.Signals) else plain(choices),
                }
            )
    return found


def write(rows_of: dict[str, dict[str, list[Any]]]) -> None:
    """Write the table, one option string to a line, so that a change can be reviewed."""
    old = json.loads(TARGET.read_text(encoding="utf-8"))
    ordered = dict(sorted(rows_of.items(), key=lambda pair: int(pair[0].split(".")[1])))
    head = {"source": old["source"], "legend": old["legend"], "releases": list(ordered)}
    lines = [f"{json.dumps(option)}: {json.dumps(rows)}" for option, rows in sorted(table(ordered).items())]
    text = json.dumps(head, indent=1)[:-2] + ',\n "flags": {\n' + ",\n".join(lines) + "\n}}\n"
    json.loads(text)
    TARGET.write_text(text, encoding="utf-8")


def derived() -> dict[str, str]:
    """What becomes of the flags that our code names, by destination."""
    every = {flag.dest for release in releases() for flag in flag_table(release).values()}
    found: dict[str, str] = {}
    for name in READERS:
        nodes = [*ast.walk(ast.parse((MEGATRON / f"{name}.py").read_text(encoding="utf-8")))]
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [str(node.value).split() for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs]
        named = {word for words in texts if every.issuperset(words) for word in words}
        found |= {dest: f"read by megatron/{name}.py" for dest in named if dest not in found}
    found |= {dest: f"read as layout.{name}" for name, dests in DESTS_OF.items() for dest in dests}
    found |= {field.name: f"read as {field.name}" for field in fields(PerformanceOptions) if field.name in every}
    found |= {dest: f"pins {', '.join(held)}" for dest, (held, _) in HELD_BY.items() if dest not in found}
    for key, reason in {**REFUSED, **UNPLANNED, **UNMODELLED, **UNTIMED}.items():
        dest, _, value = key.partition("=")
        if not value or dest not in found:
            found[dest] = f"refused{f' if {value}' if value else ''}: {reason}"
    return found


def effect_rows() -> list[tuple[str, str, str, str]]:
    """Option string, first and last release, and effect of every flag."""
    known = derived()
    rows: dict[str, list[str]] = {}
    for release in releases():
        for option, flag in flag_table(release).items():
            rows.setdefault(option, [release, release, known.get(flag.dest) or EFFECTS.get(flag.dest, "")])[1] = release
    return [(option, *columns) for option, columns in sorted(rows.items())]  # type: ignore[misc]


def main(arguments: list[str]) -> None:
    """Write the table of flags, or print what becomes of each flag."""
    if not arguments:
        csv.writer(sys.stdout).writerows([("flag", "first release", "last release", "effect"), *effect_rows()])
        return
    if arguments[0].endswith(".json"):
        definitions = named_releases(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
        write({name: {option: row(flag) for option, flag in flags.items()} for name, flags in definitions.items()})
    else:
        version = script_version(f"{arguments[0]}/pretrain_gpt.py", {})
        release = arguments[1] if len(arguments) > 1 else ".".join(version.split(".")[:2])
        write(known_rows() | {release: parsed(arguments[0])})
    print("no effect yet:", *(option for option, *_, effect in effect_rows() if not effect))


if __name__ == "__main__":
    main(sys.argv[1:])
