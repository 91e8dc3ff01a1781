"""`scripts/release`, except for the wheels, which `tests/test_packaging.py` builds."""

from __future__ import annotations

import configparser
import re
import subprocess

from doc_pages import ROOT

from pipette_launch import __version__


def test_the_notes_are_those_of_the_version() -> None:
    """The notes are the section of the changelog whose heading has the version and a date."""
    done = subprocess.run([ROOT / "scripts" / "release", "notes"], check=True, capture_output=True, text=True)
    sections = re.split("^(?=## )", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)

    assert done.stdout in sections
    assert re.match(rf"## {re.escape(__version__)} \(20\d\d-\d\d-\d\d\)\n", done.stdout)


def test_the_image_has_what_training_needs() -> None:
    """The Containerfile installs all packages of the extra `train`, except those of NVIDIA's image and Megatron-LM."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = {re.split("[>=<]", line)[0] for line in setup["options.extras_require"]["train"].split()}
    (line,) = re.findall(r"pip install (.*?) &&", (ROOT / "Containerfile").read_text())

    assert needed - {"torch", "megatron-core"} == {word for word in line.split() if word[0] not in "-/"}
