"""docs/limits.md names every flag that keeps a job from being planned, with the releases that have it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipette_launch.megatron.flags import Flag, flag_table, releases
from pipette_launch.megatron.pins import REFUSED, UNMODELLED, UNPLANNED, UNTIMED

PAGE = (Path(__file__).parents[1] / "docs" / "limits.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """Flags at the beginning of a row -> releases, of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| ((?:`--[\w-]+`(?:, )?)+)[^|]*\| ([\d. to]+) \|", section, re.MULTILINE)
    return {flag: span for flags, span in found for flag in re.findall(r"--[\w-]+", flags)}


def takes(flag: Flag, value: str) -> bool:
    """Whether a flag takes a value; any, where the table names no values."""
    return not value or not flag.choices or value in map(str, flag.choices)


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("Not planned on measured machines", REFUSED | UNPLANNED | UNTIMED),
        ("Planned only on measured machines", UNMODELLED),
    ],
)
def test_every_refused_flag_has_a_row(heading: str, table: dict[str, str]) -> None:
    """With the first and the last release that has it."""
    found = rows(heading)
    for key in table:
        dest, _, value = key.partition("=")
        has = [
            name
            for name in releases()
            if any(flag.dest == dest and takes(flag, value) for flag in flag_table(name).values())
        ]
        options = {flag.option for name in has for flag in flag_table(name).values() if flag.dest == dest}
        span = has[0] if len(has) == 1 else f"{has[0]} to {has[-1]}"

        assert [span] == [found[option] for option in options if option in found]


def test_a_screen_has_all_that_is_not_planned() -> None:
    """The section about measured machines has at most 45 lines."""
    assert len(PAGE.partition("## Not planned on measured machines\n")[2].partition("\n## ")[0].splitlines()) < 45


def test_the_page_names_the_newest_release() -> None:
    """A new flag table makes this page due."""
    assert f"megatron-core {releases()[0]} to {releases()[-1]}" in PAGE
