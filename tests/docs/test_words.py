"""The documents name what there is: every flag, and messages that the product really writes."""

from __future__ import annotations

import ast
import re
from argparse import ArgumentParser
from functools import cache
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, blocks, name_of
from torch.distributed.run import get_args_parser

from pipette_launch.cli import launcher
from pipette_launch.cli.pipette import COMMANDS

FLAGS = (ROOT / "docs" / "command_line.md").read_text()
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `([^`]+)` \|", TROUBLES, re.MULTILINE)


def undocumented(parser: ArgumentParser) -> list[str]:
    """Return the flags of a parser of which docs/command_line.md names no spelling."""
    flags = [action.option_strings for action in parser._actions if action.option_strings and action.dest != "help"]
    return [names[0] for names in flags if not any(re.search(rf"{name}(?![\w-])", FLAGS) for name in names)]


def test_every_flag_of_the_launcher_is_documented() -> None:
    """docs/command_line.md names each --pipette-* flag."""
    ours = [flag for flag in undocumented(launcher.parser()) if flag.startswith("--pipette-")]

    assert [] == ours


def test_every_flag_of_torchrun_is_on_its_page() -> None:
    """docs/torchrun.md names each flag of the installed torchrun, so that a new flag of torch is compared first."""
    page = (ROOT / "docs" / "torchrun.md").read_text()
    options = [action.option_strings for action in get_args_parser()._actions if action.option_strings]
    spelt = [[name for name in names if name.startswith("--")] for names in options]

    assert ["--help"] == [names[0] for names in spelt if not any(f"`{name}`" in page for name in names)]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_flag_of_a_subcommand_is_documented(name: str) -> None:
    """docs/command_line.md names each flag of `pipette`."""
    parser = ArgumentParser(add_help=False)
    COMMANDS[name].add_arguments(parser)

    assert [] == undocumented(parser)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_machines_are_asked_for_in_one_way(page: Path) -> None:
    """Commands that imagine machines say `--gpu NAME --nodes N`, NAME in capitals or a file, not --world-size."""
    typed = [line for block in blocks(page) if block.language == "bash" for line in block.text.splitlines()]
    asking = [line for line in typed if re.match("pipette (plan|predict|compare) ", line) and "--gpu" in line]

    assert [] == [line for line in asking if not re.search(r"--gpu ([A-Z][A-Z0-9-]*|\S+\.json) --nodes \d+ ", line)]


@cache
def written() -> str:
    """Return all texts of the product, one a line, with `…` for each value that is put in."""
    texts = []
    for path in (ROOT / "pipette_launch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%s|\{\w+\}", "…", node.value))
    texts += [path.read_text() for path in (ROOT / "pipette_launch").rglob("data/*.csv")]
    return "\n".join(texts)


def test_messages_to_look_up_are_many() -> None:
    """The table is found, so that the next test holds something."""
    assert len(MESSAGES) > 30


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_product(message: str) -> None:
    """Each stretch between two `…` of a message in docs/troubleshooting.md stands in the source."""
    for stretch in message.split("…"):
        assert stretch.strip() in written(), stretch
