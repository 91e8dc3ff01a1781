"""The nanotron sweep's rows, as Megatron-like jobs cut the way nanotron cuts its models."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.validation.shapes import job_of
from benchmarks.validation.tables import Row, Table, number, one_of, optional, read_table, size, whole
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Batch, Job, Layout

COLUMNS = {
    "model_B": number,
    "nodes": size,
    "mbs": size,
    "grad_acc": size,
    "dp": size,
    "pp": size,
    "tp": size,
    "zero": whole,
    "tok_s_gpu": optional(number),
    "gpu_mem_GB": optional(number),
    "status": one_of("ok", "no_result"),
}
DEVICES_PER_HOST = 8
SEQUENCE = 4096
VOCABULARY = 131072


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One of the sweep's models."""

    billions: float
    """Parameters in 1e9, the sweep's own name of the model."""
    layers: int
    hidden: int
    ffn: int
    heads: int

    @property
    def is_tied(self) -> bool:
        """True if input and output embedding share weights (script of the sweep: below 4B parameters)."""
        return self.ffn < 10_000


SHAPES = (
    Shape(billions=1.34, layers=16, hidden=2048, ffn=8192, heads=32),
    Shape(billions=3.57, layers=28, hidden=3072, ffn=8192, heads=32),
    Shape(billions=8.86, layers=32, hidden=4096, ffn=14336, heads=32),
    Shape(billions=80.0, layers=80, hidden=8192, ffn=28672, heads=64),
)
"""From the data's README and huggingface/nanotron scripts/scaling_benchmarks.py: vocabulary 131,072, no GQA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One configuration of the sweep: all its rows, and the job that stands for it."""

    model: str
    nodes: int
    words: str
    job: Job
    tokens: int
    """One step."""
    lines: tuple[int, ...]
    tok_s_gpu: tuple[float, ...]
    """Every measurement; empty without a result."""
    memory_gb: tuple[float, ...]

    @property
    def group(self) -> str:
        """Model and number of nodes: rows of one group are compared with each other."""
        return f"{self.model}, {self.nodes} node{'s' if self.nodes > 1 else ''}"

    @property
    def is_measured(self) -> bool:
        """True if any row has a result. A `no_result` beside it then says nothing."""
        return bool(self.tok_s_gpu)

    @property
    def has_plain_replicas(self) -> bool:
        """True if replicas of a pipeline reduce gradients without ZeRO."""
        own = self.job.own
        return own.pp > 1 and own.dp > 1 and not own.use_distributed_optimizer

    @property
    def step_s(self) -> float:
        """Measured seconds of one step: the median over repeated rows."""
        return self.tokens / (statistics.median(self.tok_s_gpu) * self.job.own.world_size)

    @property
    def spread(self) -> float:
        """Fastest over slowest measurement."""
        return max(self.tok_s_gpu) / min(self.tok_s_gpu)


def read(path: Path) -> tuple[Table, tuple[Configuration, ...], tuple[tuple[str, str], ...]]:
    """Read the sweep. Returns its distinct configurations, and (reason, row) of each row that is left out."""
    table = read_table(path, COLUMNS)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in table.rows:
        key = tuple(row[name] for name in ("model_B", "nodes", "mbs", "grad_acc", "dp", "pp", "tp", "zero"))
        groups.setdefault(key, []).append(row)
    found, skipped = [], []
    for rows in groups.values():
        item = _configuration(rows)
        if isinstance(item, Configuration):
            found.append(item)
        else:
            skipped += [(item, f"line {row.line}") for row in rows]
    return table, tuple(found), tuple(skipped)


def _configuration(rows: Sequence[Row]) -> Configuration | str:
    """One configuration, or why it cannot be priced."""
    row = rows[0]
    shape = next((item for item in SHAPES if abs(item.billions - row["model_B"]) < 0.005 * item.billions), None)
    if shape is None:
        return f"the shape of a model of {row['model_B']:g}B is not known"
    if row["dp"] * row["pp"] * row["tp"] != row["nodes"] * DEVICES_PER_HOST:
        return "dp x pp x tp is not 8 x nodes"
    if row["grad_acc"] < row["pp"] - 1:
        return "nanotron needs grad_acc >= pp - 1"
    if shape.heads % row["tp"]:
        return f"tp {row['tp']} does not divide {shape.heads} heads"
    try:
        job = _job(shape, row)
    except PipetteError as error:
        return str(error).split(";")[0]
    measured = [other for other in rows if other["status"] == "ok" and other["tok_s_gpu"]]
    return Configuration(
        model=f"{row['model_B']:g}B",
        nodes=row["nodes"],
        words=f"dp{row['dp']} pp{row['pp']} tp{row['tp']} mbs{row['mbs']} x{row['grad_acc']} zero{row['zero']}",
        job=job,
        tokens=job.batch.global_batch_size * SEQUENCE,
        lines=tuple(other.line for other in rows),
        tok_s_gpu=tuple(other["tok_s_gpu"] for other in measured),
        memory_gb=tuple(other["gpu_mem_GB"] for other in measured if other["gpu_mem_GB"]),
    )


def _job(shape: Shape, row: Row) -> Job:
    """Read the model from flags, and cut it as nanotron does."""
    layout = Layout(
        tp=row["tp"],
        pp=row["pp"],
        dp=row["dp"],
        etp=row["tp"],
        layers_per_chunk=stage_layers(shape, row["pp"]),
        micro_batch_size=row["mbs"],
        # nanotron's REDUCE_SCATTER mode of tensor parallelism, which the sweep uses.
        sequence_parallel=row["tp"] > 1,
        use_distributed_optimizer=row["zero"] >= 1,
        overlap_grad_reduce=True,
    )
    batch = Batch(global_batch_size=row["dp"] * row["mbs"] * row["grad_acc"])
    return replace(job_of(model_flags(shape), world_size=1), own=layout, batch=batch)


def model_flags(shape: Shape) -> Mapping[str, Any]:
    """The model in Megatron's words; NullTokenizer counts one token more than its flag says."""
    return {
        "num-layers": shape.layers,
        "hidden-size": shape.hidden,
        "ffn-hidden-size": shape.ffn,
        "num-attention-heads": shape.heads,
        "seq-length": SEQUENCE,
        "max-position-embeddings": SEQUENCE,
        "vocab-size": VOCABULARY - 1,
        "tokenizer-type": "NullTokenizer",
        "untie-embeddings-and-output-weights": not shape.is_tied,
        "swiglu": True,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "disable-bias-linear": True,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "attention-backend": "flash",
        "bf16": True,
        "micro-batch-size": 1,
    }


def stage_layers(shape: Shape, stages: int) -> tuple[int, ...]:
    """Layers of each stage by nanotron's rule (nanotron/models/base.py, build_model).

    Blocks go to a stage until their summed cost passes its share of the whole; a layer costs its matrices, the head
    vocabulary x hidden, all else nothing. The head may come before the last stage there; here it is always on the last.
    """
    layer = 4 * shape.hidden**2 + 3 * shape.ffn * shape.hidden
    whole = layer * shape.layers + VOCABULARY * shape.hidden
    counts = [0] * stages
    stage = 0
    for place in range(1, shape.layers + 1):
        counts[stage] += 1
        # In whole numbers, so that a sum that just reaches the share does not pass it.
        if place * layer * stages > whole * (stage + 1) and stage < stages - 1:
            stage += 1
    return tuple(counts)
