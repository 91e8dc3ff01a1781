"""Writes docs/glossary.md from the table of `pipette explain`."""

from __future__ import annotations

from pathlib import Path

from pipette_launch.facts.glossary import GROUPS

PAGE = Path(__file__).parent.parent / "docs" / "glossary.md"
HEAD = """# Glossary

`pipette explain WORD` prints an entry on the terminal, with its formula and source.
`pipette explain WORD a.plan.json` also prints the value in this plan.

Screens write a layout in a short form, such as `tp4 pp4 dp4 cp2 vpp5 mbs1 seq-par dist-opt overlap uneven`.

<!-- scripts/glossary.py makes this page from pipette_launch/facts/data/glossary.json. -->
"""


def page() -> str:
    """Return the text of docs/glossary.md."""
    lines = [HEAD]
    for title, group in GROUPS.items():
        is_words, is_layout = title == "Words", title == "Short form of a layout"
        last = "Flag" if is_layout else "Unit"
        lines.append(f"## {title}\n")
        lines += ["| Word | Meaning |\n|---|---|"] if is_words else [f"| Word | Meaning | {last} |\n|---|---|---|"]
        for key, one in sorted(group.items()) if is_words else group.items():
            end = "" if is_words else f" {one.source if is_layout else one.unit} |"
            lines.append(f"| {key} | {one.what} |{end}")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
