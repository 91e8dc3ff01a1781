"""Write the verdicts of a checkout of Megatron-LM on drawn command lines into tests/data/megatron_verdicts.json.

Usage: PYTHONPATH=CHECKOUT:tests:... python benchmarks/make_verdicts.py VERSION NUMBER_OF_LINES

Only whether a line is legal is kept: `+` legal, `-` refused, `?` unknown.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "tests" / "data" / "megatron_verdicts.json"
JUDGE = ROOT / "tests" / "contract" / "megatron_verdicts.py"


def sign(answer: list[str]) -> str:
    """One character for a verdict of the judge."""
    if not answer:
        return "+"
    return "?" if answer[0] in ("unknown", "died") else "-"


def main(version: str, number: str) -> None:
    """Draw the lines, let the checkout judge them, and put the verdicts in place."""
    from drawn_lines import draw

    lines = [draw(seed, version) for seed in range(int(number))]
    text = "\n".join(map(json.dumps, lines))
    done = subprocess.run([sys.executable, str(JUDGE)], input=text, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    data = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {"releases": {}}
    data["releases"][version] = {
        "sha256": hashlib.sha256(json.dumps(lines).encode()).hexdigest(),
        "verdicts": "".join(map(sign, answers)),
    }
    TARGET.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
