"""Megatron-LM's golden values: the files, their rows, and the distinct layouts among them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.validation.first_step import copies
from benchmarks.validation.tables import DataError, number, optional, read_json_lines, read_table, size, text, word

COLUMNS = {
    "tag": word,
    "model": word,
    "test_case": word,
    "gpu": word,
    "nodes": optional(size),
    "gpus_per_node": optional(size),
    "mem_allocated_bytes_last": optional(number),
    "mem_max_allocated_bytes": optional(number),
    "iter_time_s_median": optional(number),
    "args_key": word,
    "env": text,
}
NO_MEMORY_PREFIXES = (
    "ckpt-",
    "data-",
    "dist-ckpt-",
    "distributed-",
    "eval-",
    "exit-",
    "init-method-",
    "load",
    "log-",
    "logging-",
    "lr",
    "manual-gc",
    "no-ckpt-",
    "no-load-",
    "no-save-",
    "save",
    "tensorboard-",
    "timing-",
    "train-",
    "wandb-",
)
NO_MEMORY = frozenset(
    {
        "adam-beta1",
        "adam-beta2",
        "adam-eps",
        "async-save",
        "auto-detect-ckpt-format",
        "clip-grad",
        "finetune",
        "merge-file",
        "min-lr",
        "mock-data",
        "no-mmap-bin-files",
        "num-workers",
        "seed",
        "split",
        "use-mcore-models",
        "use-persistent-ckpt-worker",
        "vocab-file",
        "weight-decay",
    }
)
"""Flags, and beginnings of flags, on which memory does not depend: two tests that differ in them run one layout."""
IMAGES = Path(__file__).parents[1] / "data" / "megatron_images.csv"
"""Containers of Megatron-LM's CI, with their torch releases."""
OTHER_MODELS = ("bert", "t5", "retro", "multimodal", "mimo", "vision", "ict")
"""First words of Megatron-LM's test folders whose scripts do not train a decoder-only model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """Flags, environment and kind of test of one `args_key`."""

    key: str
    args: Mapping[str, Any]
    environment: Mapping[str, str]
    test_type: str

    @property
    def layout_words(self) -> str:
        """The flags and variables that memory can depend on, in one order: equal for tests of one layout."""
        kept = {
            name: value
            for name, value in self.args.items()
            if name not in NO_MEMORY and not name.startswith(NO_MEMORY_PREFIXES)
        }
        variables = {name: value for name, value in self.environment.items() if name.startswith("NVTE_")}
        return json.dumps([kept, variables], sort_keys=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenRow:
    """One measured row: bytes of torch's allocator on the last pipeline stage."""

    line: int
    tag: str
    model: str
    test_case: str
    gpu: str
    env: str
    world_size: int | None
    """None where a release test does not state it."""
    static_bytes: float | None
    peak_bytes: float
    iteration_s: float | None
    configuration: Configuration
    torch: tuple[int, ...] = ()
    """Release of torch in the container that measured this row; blank if the container is not known."""
    is_copied: bool = False
    """True if an older test of another model has exactly these bytes and seconds, so that this row is a copy."""

    @property
    def is_decoder_only(self) -> bool:
        """True if the script trains a GPT. Tests of one GPT move between folders (gpt, moe, mixtral)."""
        return not self.model.lower().startswith(OTHER_MODELS)

    @property
    def logit_copies(self) -> int:
        """Copies of the logits that torch adds to the peak in the test's first step."""
        return copies(self.torch, self.configuration.args)


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenLayout:
    """A distinct layout on one GPU type: all its measurements, and the newest row to read it from."""

    newest: GoldenRow
    rows: tuple[GoldenRow, ...]
    static_bytes: float | None
    """Median of the distinct measurements, as is `peak_bytes`."""
    peak_bytes: float

    @property
    def distinct(self) -> tuple[GoldenRow, ...]:
        """One row for each distinct pair of values: a renamed test with the same values counts once."""
        return tuple({(row.static_bytes, row.peak_bytes): row for row in self.rows}.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenData:
    """A golden file with its flags."""

    digest: str
    rows: tuple[GoldenRow, ...]
    num_rows: int
    without_memory: int


def read_golden(path: Path, args_path: Path, known: Sequence[GoldenRow] = ()) -> GoldenData:
    """Read rows with a measured peak; raises DataError for a bad cell, a missing column or an unknown `args_key`.

    `known` are rows of other files, which may be the first to have a value of this file.
    """
    configurations = _configurations(args_path)
    table = read_table(path, COLUMNS)
    rows = []
    for row in table.rows:
        if row["args_key"] not in configurations:
            raise DataError(f"{path}, line {row.line}, column args_key: {row['args_key']!r} is not in {args_path}")
        if not row["mem_max_allocated_bytes"]:
            continue
        configuration = configurations[row["args_key"]]
        rows.append(
            GoldenRow(
                line=row.line,
                **{name: row[name] for name in ("tag", "model", "test_case", "env")},
                gpu=gpu_class(row["gpu"]),
                world_size=_world_size(row["nodes"], row["gpus_per_node"], configuration),
                static_bytes=row["mem_allocated_bytes_last"] or None,
                peak_bytes=row["mem_max_allocated_bytes"],
                iteration_s=row["iter_time_s_median"],
                configuration=configuration,
            )
        )
    return GoldenData(
        digest=table.digest,
        rows=_with_torch(_with_copies_marked(rows), known),
        num_rows=len(table.rows),
        without_memory=len(table.rows) - len(rows),
    )


def _with_copies_marked(rows: Sequence[GoldenRow]) -> tuple[GoldenRow, ...]:
    """Mark rows whose values an older test of another model with other flags has to the last byte and second."""
    oldest: dict[tuple[float | None, ...], GoldenRow] = {}
    for row in sorted(rows, key=lambda row: release_words(row.tag)):
        oldest.setdefault((row.static_bytes, row.peak_bytes, row.iteration_s), row)

    def is_copied(row: GoldenRow) -> bool:
        """True if another test had these values first."""
        first = oldest[row.static_bytes, row.peak_bytes, row.iteration_s]
        if row.iteration_s is None:
            return False
        return first.model != row.model and first.configuration.layout_words != row.configuration.layout_words

    return tuple(replace(row, is_copied=is_copied(row)) for row in rows)


def _with_torch(rows: Sequence[GoldenRow], known: Sequence[GoldenRow]) -> tuple[GoldenRow, ...]:
    """Give each row the torch release of the oldest tag with its peak on its GPU, because later tags repeat values."""
    images = read_table(IMAGES, {"tag": word, "env": word, "torch": word}).rows
    torch = {(image["tag"], image["env"]): release_words(image["torch"]) for image in images}
    oldest: dict[tuple[str, float], GoldenRow] = {}
    for row in sorted([*rows, *known], key=lambda row: release_words(row.tag)):
        oldest.setdefault((row.gpu, row.peak_bytes), row)
    firsts = [oldest[row.gpu, row.peak_bytes] for row in rows]
    return tuple(
        replace(row, torch=torch.get((first.tag, first.env.partition("_")[0]), ()))
        for row, first in zip(rows, firsts, strict=True)
    )


def gpu_class(text_of_gpu: str) -> str:
    """`A100?` is an A100 by its times (README of the data). Other unknown devices stay unknown."""
    return "unknown" if text_of_gpu.strip("? ") == "" else text_of_gpu.rstrip("? ")


def distinct_layouts(rows: Iterable[GoldenRow]) -> tuple[GoldenLayout, ...]:
    """Group rows that run the same layout on the same GPU; the measured value is the median of distinct ones.

    Torch releases whose first steps copy the logits a different number of times have layouts of their own.
    """
    groups: dict[tuple[object, ...], list[GoldenRow]] = {}
    for row in rows:
        model = "gpt" if row.is_decoder_only else row.model
        key = (model, row.gpu, row.world_size, row.configuration.layout_words, row.logit_copies)
        groups.setdefault(key, []).append(row)
    return tuple(_layout(members) for members in groups.values())


def release_words(tag: str) -> tuple[int, ...]:
    """`core_v0.16.1` -> (0, 16, 1), for ordering tags; (999,) for a branch without a number, which is newest."""
    digits = "".join(char if char.isdigit() else " " for char in tag).split()
    return tuple(int(part) for part in digits) or (999,)


def _layout(members: list[GoldenRow]) -> GoldenLayout:
    distinct = tuple({(row.static_bytes, row.peak_bytes): row for row in members}.values())
    statics = [row.static_bytes for row in distinct if row.static_bytes is not None]
    return GoldenLayout(
        newest=max(members, key=lambda row: release_words(row.tag)),
        rows=tuple(members),
        static_bytes=statistics.median(statics) if statics else None,
        peak_bytes=statistics.median(row.peak_bytes for row in distinct),
    )


def _world_size(nodes: int | None, gpus_per_node: int | None, configuration: Configuration) -> int | None:
    """One node of 8 is that CI's default; a release test runs on more, and does not say on how many."""
    if nodes is None and configuration.test_type == "release":
        return None
    return (nodes or 1) * (gpus_per_node or 8)


def _configurations(path: Path) -> dict[str, Configuration]:
    found: dict[str, Configuration] = {}
    for line, record in read_json_lines(path):
        for name, kind in (("args_key", str), ("args", dict), ("test_type", str)):
            if not isinstance(record.get(name), kind):
                raise DataError(f"{path}, line {line}, field {name}: {record.get(name)!r} is no {kind.__name__}")
        variables = record.get("env_vars") or {}
        if not isinstance(variables, dict):
            raise DataError(f"{path}, line {line}, field env_vars: {variables!r} is no dict")
        key = record["args_key"]
        if key in found:
            raise DataError(f"{path}, line {line}, field args_key: {key!r} stands here a second time")
        found[key] = Configuration(
            key=key,
            args=record["args"],
            environment={name: str(value) for name, value in variables.items()},
            test_type=record["test_type"],
        )
    return found
