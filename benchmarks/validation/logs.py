"""Memory lines of public Megatron-LM logs: every stage that was printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.validation.latency import METHOD, Machines, StepTime, device_of, hosts_of
from benchmarks.validation.lines import Line, Section, step_time_line
from benchmarks.validation.scores import errors
from benchmarks.validation.shapes import job_of
from benchmarks.validation.tables import Row, number, one_of, optional, read_table, size, text, whole, word
from benchmarks.validation.workspace import STATED, stated_bytes
from pipette_launch.cost.memory.peak import MemoryParts, peak_memory_bytes
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job
from pipette_launch.facts.devices import DeviceSpec
from pipette_launch.megatron.performance import options_of_flags
from pipette_launch.text import MIB

DATA = "public logs"
COLUMNS = {
    "source": word,
    "hardware": word,
    "code": text,
    "model": word,
    **dict.fromkeys(("gpus", "tp", "pp", "dp", "ep", "layers", "hidden", "ffn", "heads", "seq", "mbs", "gbs"), size),
    "recompute": word,
    "distopt": one_of("yes", "no"),
    "rank": whole,
    "stage": whole,
    "when": word,
    "allocated_MB": optional(number),
    "max_allocated_MB": optional(number),
    "max_reserved_MB": optional(number),
    "iter_ms": optional(number),
    "notes": text,
}
GPT2_VOCABULARY = 50257
VOCABULARIES = {"llama-2": 32000, "llama2": 32000, "mixtral": 32000, "mistral": 32000, "llama-3": 128256}
"""Tokens by the beginning of a model's name, where the log's notes do not say."""
GROUPED = {"llama-2-70b": 8, "llama-3": 8, "mixtral": 8, "mistral": 8}
EXPERTS = {"mixtral-8x7b": (8, 2), "mixtral-8x22b": (8, 2)}
"""Experts and how many of them a token goes to."""
ADAM_BYTES = 8
MASTER_BYTES = 4
FIRST_DUMMIES = (0, 14)
"""First release whose own linear layers use TransformerEngine's dummy gradients."""
NOTES = (
    (
        "What a log does not print is taken from its notes and the model's name: vocabulary, grouped queries, experts; "
        "a feed-forward width other than 4 x hidden means SwiGLU, RMSNorm and untied embeddings without biases."
    ),
    "'iter1': the peak is from before the first optimizer step, without Adam's moments, or from within that step.",
    "Memory includes the stated workspaces of cuBLAS and TransformerEngine; nothing is fitted.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One line of a log, with the job behind it."""

    row: Row
    job: Job
    device: DeviceSpec | None
    """None if the hardware is unknown."""

    @property
    def name(self) -> str:
        """Source of the line."""
        return f"line {self.row.line}: {self.row['model']} stage {self.row['stage']}"


StageMemory = Callable[[Stage], tuple[float, float]]
"""Peak, and bytes allocated after the step, of one stage without workspaces; raises PipetteError if it cannot tell."""


def section(
    path: Path,
    methods: Mapping[str, StageMemory],
    step_time: StepTime,
) -> Section:
    """Score memory of every stage, and step times where a log has them.

    Args:
        path: the log lines.
        methods: our own, by name, that predict every stage.
        step_time: latency model.

    """
    table = read_table(path, COLUMNS)
    stages, skipped = [], []
    for row in table.rows:
        found = _stage(row)
        if isinstance(found, Stage):
            stages.append(found)
        else:
            skipped.append((found, f"line {row.line}: {row['model']}"))
    lines: list[Line] = []
    details: list[str] = []
    for name, method in methods.items():
        answers, refused = _answers(stages, method)
        skipped += [(f"{name}: {reason}", stage.name) for stage, reason in refused]
        lines += _memory_lines(f"{name}, {STATED}", answers, len(refused))
        details += [_detail(name, *answer) for answer in answers]
    lines += _reserve_lines(stages)
    timed, missing = _time_line(stages, step_time)
    return Section(
        data=DATA,
        source=f"{path.name} ({table.digest})",
        lines=(*lines, timed),
        skipped=(*skipped, *missing),
        notes=(f"{len(table.rows)} rows", *NOTES),
        details=tuple(details),
    )


def job_flags(row: Row) -> dict[str, Any]:
    """Flags of the run behind a row; raises ValueError with the reason where the row does not say enough."""
    name, notes = row["model"].lower(), row["notes"]
    gated = row["ffn"] != 4 * row["hidden"]
    flags: dict[str, Any] = {
        "num-layers": row["layers"],
        "hidden-size": row["hidden"],
        "ffn-hidden-size": row["ffn"],
        "num-attention-heads": row["heads"],
        "seq-length": row["seq"],
        "max-position-embeddings": row["seq"],
        "micro-batch-size": row["mbs"],
        "global-batch-size": row["gbs"],
        "tensor-model-parallel-size": row["tp"],
        "pipeline-model-parallel-size": row["pp"],
        "expert-model-parallel-size": row["ep"],
        "use-distributed-optimizer": row["distopt"] == "yes",
        "transformer-impl": "local" if "local" in row["code"] else "transformer_engine",
        "sequence-parallel": "sequence parallel" in notes and "no sequence parallel" not in notes,
        "bf16": True,
        **_vocabulary(name, notes),
        **_recompute(row["recompute"]),
    }
    if gated:
        flags |= {
            "swiglu": True,
            "normalization": "RMSNorm",
            "disable-bias-linear": True,
            "position-embedding-type": "rope",
            "untie-embeddings-and-output-weights": True,
            "attention-dropout": 0.0,
            "hidden-dropout": 0.0,
        }
    groups = _by_name(GROUPED, name)
    if groups:
        flags |= {"group-query-attention": True, "num-query-groups": groups}
    return flags | _experts(name, row["ep"])


def _vocabulary(name: str, notes: str) -> dict[str, Any]:
    found = re.search(r"vocab(?:ulary)?(?: size)?[ =:]*([\d,]+)", notes)
    if found:
        tokens = int(found[1].replace(",", ""))
        return {"vocab-size": tokens, **({"tokenizer-type": "NullTokenizer"} if "NullTokenizer" in notes else {})}
    return {"vocab-size": _by_name(VOCABULARIES, name) or GPT2_VOCABULARY}


def _recompute(words: str) -> dict[str, Any]:
    parts = words.split()
    if parts == ["none"]:
        return {}
    if parts == ["selective"]:
        return {"recompute-granularity": "selective"}
    if len(parts) == 3 and parts[0] == "full" and parts[1] in ("uniform", "block") and parts[2].isdigit():
        return {
            "recompute-granularity": "full",
            "recompute-method": parts[1],
            "recompute-num-layers": int(parts[2]),
        }
    raise ValueError(f"recompute {words!r} is not understood")


def _experts(name: str, ep: int) -> dict[str, Any]:
    experts = _by_name(EXPERTS, name)
    if experts:
        return {"num-experts": experts[0], "moe-router-topk": experts[1]}
    if ep > 1 or re.search(r"\d+x\d+", name):
        raise ValueError("the number of experts is not stated")
    return {}


def _by_name(known: Mapping[str, Any], name: str) -> Any:
    return next((value for start, value in known.items() if name.startswith(start)), None)


def _stage(row: Row) -> Stage | str:
    if row["tp"] * row["pp"] * row["dp"] != row["gpus"]:
        return "tp x pp x dp is not the number of GPUs"
    if row["stage"] >= row["pp"]:
        return "there is no such stage"
    device = device_of(row["hardware"])
    try:
        name = device.name if device else ""
        job = job_of(job_flags(row), world_size=row["gpus"], device_name=name)
        return Stage(row=row, job=of_release(job, row["code"]), device=device)
    except (PipetteError, ValueError) as error:
        return str(error).split(";")[0]


def of_release(job: Job, code: str) -> Job:
    """Count a job as the release that ran it does, where the page names one; flags are read as the nearest known."""
    release = re.search(r"\d+\.\d+(\.\d+)?", code)
    if not release:
        return job
    options = options_of_flags(job.performance_flags, release[0])
    return replace(job, megatron_version=release[0], options=options)


def closed_form(stage: Stage) -> tuple[float, float]:
    """Peak, and bytes allocated after the step, of one stage by the closed form."""
    parts = peak_memory_bytes(stage.job, stage.job.own)[stage.row["stage"]]
    if stage.job.release < FIRST_DUMMIES:
        parts = replace(parts, dummy_gradients=0)
    peak = first_iteration_peak(parts, stage.job) if stage.row["when"] == "iter1" else parts.total
    return peak, parts.static


def first_iteration_peak(parts: MemoryParts, job: Job) -> int:
    """Peak of the first iteration: its passes have no Adam moments yet, its optimizer step has."""
    master = 0 if job.model.params_dtype == "fp32" else MASTER_BYTES
    moments = 0 if job.optimizer == "sgd" else parts.optimizer * ADAM_BYTES // (ADAM_BYTES + master)
    # Bytes that the passes add, even if they do not set the steady peak: the peak of a rank without an optimizer step.
    passes = replace(parts, optimizer_step=0).total - parts.static  # type: ignore[arg-type]
    return max(parts.static + passes - moments, parts.static + parts.optimizer_step)


def _answers(
    stages: Sequence[Stage], method: StageMemory
) -> tuple[list[tuple[Stage, float, float]], list[tuple[Stage, str]]]:
    """Peak and static bytes of each stage with the stated workspaces, and who could not be answered."""
    answers, refused = [], []
    for stage in stages:
        found = _attempt(method, stage)
        if isinstance(found, str):
            refused.append((stage, found))
        else:
            workspaces = stated_bytes(stage.job, stage.device.name if stage.device else "", {})
            answers.append((stage, found[0] + workspaces, found[1] + workspaces))
    return answers, refused


def _attempt(method: StageMemory, stage: Stage) -> tuple[float, float] | str:
    try:
        return method(stage)
    except PipetteError as error:
        return str(error).split(";")[0][:100]


def _memory_lines(method: str, answers: Sequence[tuple[Stage, float, float]], skipped: int) -> list[Line]:
    peaks = [(peak / MIB, stage.row["max_allocated_MB"]) for stage, peak, _ in answers if stage.row["max_allocated_MB"]]
    static = [(rest / MIB, stage.row["allocated_MB"]) for stage, _, rest in answers if stage.row["allocated_MB"]]
    return [
        Line(
            data=DATA,
            group="all stages",
            method=method,
            quantity=name,
            scored=len(pairs),
            skipped=skipped,
            errors=errors([predicted for predicted, _ in pairs], [measured for _, measured in pairs]),
        )
        for name, pairs in (("peak", peaks), ("static", static))
    ]


def _reserve_lines(stages: Sequence[Stage]) -> list[Line]:
    """Reserved bytes divided by allocated bytes: measured, and predicted by no method here."""
    ratios = [
        stage.row["max_reserved_MB"] / stage.row["max_allocated_MB"]
        for stage in stages
        if stage.row["max_reserved_MB"] and stage.row["max_allocated_MB"]
    ]
    if not ratios:
        return []
    figures = {"least": min(ratios), "most": max(ratios)}
    quantity = "reserved / allocated"
    return [
        Line(data=DATA, group="all stages", method="measured", quantity=quantity, scored=len(ratios), figures=figures)
    ]


def _detail(method: str, stage: Stage, peak: float, static: float) -> str:
    row = stage.row
    return (
        f"{method}: peak {peak / MIB:8.0f} / {row['max_allocated_MB'] or 0:8.0f} MiB  static {static / MIB:8.0f} / "
        f"{row['allocated_MB'] or 0:8.0f} MiB  {stage.name}"
    )


def _time_line(stages: Sequence[Stage], step_time: StepTime) -> tuple[Line, list[tuple[str, str]]]:
    """Return a line over the runs that print an iteration time, each counted once, and the runs that it lacks."""
    runs = {(stage.job, stage.row["hardware"]): stage for stage in stages if stage.row["iter_ms"]}
    pairs, skipped = [], []
    for stage in runs.values():
        answer = _seconds(stage, step_time)
        if isinstance(answer, str):
            skipped.append((f"{METHOD}: {answer}", stage.name))
        else:
            pairs.append((answer, stage.row["iter_ms"] / 1e3))
    return step_time_line(DATA, "iteration time", METHOD, pairs, skipped=len(skipped)), skipped


def _seconds(stage: Stage, step_time: StepTime) -> float | str:
    if stage.device is None:
        return f"no figures of {stage.row['hardware']}"
    num_hosts, per_host = hosts_of(stage.row["gpus"], 8)
    try:
        return step_time(stage.job, Machines(device=stage.device, num_hosts=num_hosts, devices_per_host=per_host))
    except PipetteError as error:
        return str(error).split(";")[0][:100]
