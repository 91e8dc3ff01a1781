"""A golden row's flags, as the command line that ran, read by the product's own front door."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.validation.golden_rows import GoldenLayout, GoldenRow
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job
from pipette_launch.facts.job import ALLOCATOR_VARIABLES
from pipette_launch.megatron import read_job
from pipette_launch.megatron.flags import Flag, flag_table, known_release, release_of, releases

DEVICES = {"A100": "A100-80GB", "H100": "H100-SXM"}
"""Known device by the GPU of a golden row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLayout:
    """A layout with the job that the product reads from it, or the reason why it is not scored."""

    layout: GoldenLayout
    job: Job | None
    reason: str = ""
    """Short, for counting; blank where there is a job."""
    detail: str = ""
    notes: tuple[str, ...] = ()


def read_layout(layout: GoldenLayout) -> ReadLayout:
    """Read one layout from its newest row; what cannot be read or is not modelled comes back with the reason."""
    row = layout.newest
    if not row.is_decoder_only:
        return ReadLayout(layout=layout, job=None, reason="not a decoder-only model", detail=row.model)
    if all(each.is_copied for each in layout.rows):
        return ReadLayout(layout=layout, job=None, reason="its values are those of another model's test")
    if row.world_size is None:
        return ReadLayout(layout=layout, job=None, reason="world size of a release test is not stated")
    version, notes = nearest_release(row.tag)
    table = flag_table(version)
    words = command_line(row.configuration.args, table)
    unknown = sorted({name for name in row.configuration.args if f"--{name}" not in table})
    notes += [f"flag not known to Megatron {known_release(version)}: --{name}" for name in unknown]
    try:
        job = _read_old(words, row, version) if version == releases()[0] else _read(words, row, version)
    except PipetteError as error:
        return ReadLayout(layout=layout, job=None, reason=short_reason(error), detail=str(error), notes=tuple(notes))
    return ReadLayout(layout=layout, job=job, notes=tuple(notes))


def nearest_release(tag: str) -> tuple[str, list[str]]:
    """The Megatron version to read a tag with, and a note where it is not the tag's own."""
    match = re.search(r"\d+\.\d+(\.\d+)?", tag)
    newest, oldest = releases()[-1], releases()[0]
    if not match:
        return newest, [f"tag {tag} read as {newest}"]
    wanted = tuple(int(part) for part in match[0].split(".")[:2])
    if wanted < release_of(oldest):
        return oldest, [f"tag older than {oldest} read as {oldest}"]
    if wanted > release_of(newest):
        return match[0], [f"tag newer than {newest} read as {newest}"]
    return match[0], []


def command_line(args: Mapping[str, Any], table: Mapping[str, Flag]) -> list[str]:
    """The words that the test's own runner makes of `MODEL_ARGS` (Megatron-LM `_run_training.sh`).

    `true` gives the bare flag; brackets, and blanks where the flag takes several values, give several words; the
    backslashes that protect a pipe from the shell go.
    """
    words = []
    for name, value in args.items():
        option = f"--{name}"
        if value is True:
            words.append(option)
        elif value is not False and value is not None:
            words += [option, *_values(str(value).strip(), table.get(option))]
    return words


def _values(text: str, flag: Flag | None) -> list[str]:
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1].replace(",", " ").replace('"', "").replace("'", "").split()
    if flag is not None and flag.nargs is not None:
        return text.split()
    return [text.replace("\\", "")]


def _read(words: Sequence[str], row: GoldenRow, version: str) -> Job:
    assert row.world_size is not None
    variables = row.configuration.environment
    return read_job(
        words,
        world_size=row.world_size,
        megatron_version=version,
        device_kind="cuda",
        without_probes=True,
        # Measured are bytes that were allocated, so twins under other options of the allocator stay one family.
        environment={name: value for name, value in variables.items() if name not in ALLOCATOR_VARIABLES},
        device_name=DEVICES.get(row.gpu, ""),
    )


def _read_old(words: Sequence[str], row: GoldenRow, version: str) -> Job:
    """Read a job of an older release: up to 0.12 layers had biases beside experts without them."""
    if "--num-experts" not in words or "--disable-bias-linear" in words:
        return _read(words, row, version)
    job = _read([*words, "--disable-bias-linear"], row, version)
    return replace(job, model=replace(job.model, add_bias_linear=True, add_qkv_bias=True))


def short_reason(error: Exception) -> str:
    """The part of a message that says why, without the values of this one row."""
    message = str(error)
    parts = message.split(": ")
    reason = parts[-1] if message.startswith("--") and len(parts) > 1 else message
    return reason.split(";")[0][:160]
