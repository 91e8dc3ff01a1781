"""`pipette explain` tells what a label or number on the screens means, and its value in a plan."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.errors import UsageError
from pipette_launch.tools.flags import Subcommand
from pipette_launch.tools.misspelt import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipette_launch.facts import Plan
    from pipette_launch.facts.prediction import Explained


def add_arguments(parser: ArgumentParser) -> None:
    """Add the words of `pipette explain`."""
    parser.add_argument(
        "words",
        metavar="KEY",
        nargs="*",
        help="a label or number of a screen, such as gap or data parallel; a plan file behind it gives its value; "
        "nothing lists all keys",
    )
    parser.add_argument("--json", action="store_true", help="print a document of kind `explained` instead of sentences")


def run(args: Namespace) -> int:
    """Print the explanation, or the list of all keys; returns 0."""
    from pipette_launch.facts import Plan, files
    from pipette_launch.facts.glossary import MEANINGS, key_of
    from pipette_launch.facts.prediction import Explained, Explanation

    words = list(args.words)
    plan = files.read(Path(words.pop()), Plan) if words and words[-1].endswith(".json") else None
    key = key_of(" ".join(words))
    if words and key not in MEANINGS:
        raise UsageError(
            f"nothing is called {key!r}{nearest(key, MEANINGS)}; pipette explain without a word lists all keys"
        )
    found = Explained(
        keys=tuple(
            Explanation(
                key=one,
                what=meaning.what,
                unit=meaning.unit,
                how=meaning.how,
                source=meaning.source,
                value=value_of(plan, one) if plan is not None else "",
            )
            for one, meaning in MEANINGS.items()
            if not words or one == key
        )
    )
    sys.stdout.write(files.dumps(found) + "\n" if args.json else "".join(_lines(found, is_list=not words)))
    return 0


def _lines(found: Explained, *, is_list: bool) -> Iterator[str]:
    """A line for each of all keys, or all about one of them."""
    for one in found.keys:
        if is_list:
            yield f"{one.key:<20}{one.value or one.what}\n"
            continue
        yield f"{one.key}: {one.what}\n"
        for name, words in (("unit", one.unit), ("how", one.how), ("source", one.source), ("here", one.value)):
            if words:
                yield f"  {name:<8}{words}\n"


def value_of(plan: Plan, key: str) -> str:
    """Return the value of a key in a plan, with its unit; empty where the plan holds none."""
    from pipette_launch.text import bytes_text, seconds_text

    chosen = plan.chosen
    part = key.replace(" ", "_")
    if part in chosen.breakdown_s:
        return f"{seconds_text(chosen.breakdown_s[part])} of {seconds_text(chosen.step_time_s)}"
    memory = chosen.memory_shown
    layout = chosen.layout
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "ep": layout.ep, "etp": layout.etp}
    sizes |= {"vpp": layout.vpp, "mbs": layout.micro_batch_size}
    values = {
        **{name: str(size) for name, size in sizes.items()},
        "step time": seconds_text(chosen.step_time_s),
        "bound": seconds_text(chosen.bound_s),
        "floor": seconds_text(plan.floor_s) if plan.floor_s else "",
        "gap": "" if plan.gap is None else f"{plan.gap:.2%}",
        "memory": f"{bytes_text(max(memory.need_bytes))} on the fullest stage",
        "peak": f"{bytes_text(max(memory.need_bytes))} on the fullest stage",
        "limit": bytes_text(memory.limit_bytes),
        "memory margin": f"{1 - memory.limit_bytes / memory.free_bytes:.0%}" if memory.free_bytes else "",
        "chosen": layout.words(),
        "yours": f"cannot run: {plan.own_fault}"
        if plan.own_fault
        else f"{plan.own.layout.words()}, {seconds_text(plan.own.step_time_s)} a step predicted",
        "schedule": chosen.schedule,
        "why": " ".join(plan.reasons),
    }
    return values.get(key) or _rate(plan, key)


def _rate(plan: Plan, key: str) -> str:
    from pipette_launch.text import count_text, flops_text

    rate = plan.chosen.rate
    if rate is None:
        return ""
    mfu = "" if rate.mfu is None else f"{rate.mfu:.1%}"
    words = {
        "tokens/s": f"{count_text(rate.tokens_per_s)} tokens/s",
        "tflop/s": flops_text(rate.flops_per_s),
        "mfu": mfu,
    }
    return words.get(key, "")


COMMAND = Subcommand(
    summary="Tell what a number on the screens means, how it is got, and its value in a plan.",
    add_arguments=add_arguments,
    run=run,
    examples=("pipette explain", "pipette explain mfu", "pipette explain gap a.plan.json"),
)
"""For `main.COMMANDS`."""
