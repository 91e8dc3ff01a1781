"""`scripts/release`, except for the wheels, which `tests/test_packaging.py` builds."""

from __future__ import annotations

import configparser
import re
import subprocess

from doc_pages import ROOT


def test_the_notes_are_the_newest_section() -> None:
    """The notes begin with the first section of the changelog and end before the second one."""
    done = subprocess.run([ROOT / "scripts" / "release", "notes"], check=True, capture_output=True, text=True)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    first, second = (match.start() for match in list(re.finditer("^## ", changelog, re.MULTILINE))[:2])

    assert changelog[first:second] == done.stdout


def test_the_image_has_what_training_needs() -> None:
    """The Containerfile installs all packages of the extra `train`, except those of NVIDIA's image and Megatron-LM."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = {re.split("[>=<]", line)[0] for line in setup["options.extras_require"]["train"].split()}
    (line,) = re.findall(r"pip install (.*?) &&", (ROOT / "Containerfile").read_text())

    assert needed - {"torch", "megatron-core"} == {word for word in line.split() if word[0] not in "-/"}
