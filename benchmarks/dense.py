"""Dense models for benchmarks of single devices: 1B to 7B on a GPU, tiny ones on a CPU, and how they are run there."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import util
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from benchmarks.gpt import gpt_job
from benchmarks.validation.conditions import conditions
from pipette_launch.facts import Device, Job, Layout, Recompute
from pipette_launch.probe import inventory

DeviceKind = Literal["cpu", "cuda"]
FULL = Recompute(granularity="full", method="uniform", num_layers=1)
MICRO_BATCHES = (1, 2, 4)
SHAPES: dict[DeviceKind, dict[str, tuple[int, int, int, int, int, int]]] = {
    "cuda": {
        "1B": (16, 2048, 5504, 16, 4096, 32000),
        "3B": (26, 3072, 8192, 24, 4096, 32000),
        "7B": (32, 4096, 11008, 32, 4096, 32000),
    },
    "cpu": {"tiny": (8, 256, 704, 8, 128, 4096)},
}
"""Layers, hidden size, width of the gated MLP, heads, sequence length, vocabulary: the Llama family's proportions."""
DATA_PARALLEL = {"cuda": 16, "cpu": 4}
WITHOUT_KERNELS = (
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
)
"""What needs Transformer Engine or Apex."""
PACKAGES = ("torch", "megatron-core", "transformer-engine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One stage of one job."""

    name: str
    job: Job
    pp_rank: int = 0

    @property
    def layout(self) -> Layout:
        """How the job is cut."""
        return self.job.own


def dense_job(device_kind: DeviceKind, name: str, layout: Layout, *, has_te: bool) -> Job:
    """Return a Llama-like job in bf16, of four micro-batches a step or two a stage, whichever is more."""
    layers, hidden, ffn, heads, length, vocab = SHAPES[device_kind][name]
    job = gpt_job(
        (layers, hidden, heads),
        seq_length=length,
        vocab_size=vocab,
        params_dtype="bf16",
        transformer_impl="transformer_engine" if has_te else "local",
        attention_backend="auto" if has_te else "local",
        global_batch_size=max(4, 2 * layout.pp) * layout.dp * layout.micro_batch_size,
        own=layout,
    )
    model = replace(
        job.model,
        ffn_hidden_size=ffn,
        gated_linear_unit=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    return replace(job, model=model, performance_flags=() if has_te else WITHOUT_KERNELS)


def gpt2_job(layout: Layout) -> Job:
    """Return a tiny GPT with LayerNorm and GELU, whose kernels keep the same on a CPU as on a GPU."""
    layers, hidden, _, heads, length, vocab = SHAPES["cpu"]["tiny"]
    job = gpt_job(
        (layers, hidden, heads),
        seq_length=length,
        vocab_size=vocab,
        params_dtype="bf16",
        transformer_impl="local",
        attention_backend="local",
        global_batch_size=max(4, 2 * layout.pp) * layout.dp * layout.micro_batch_size,
        own=layout,
    )
    model = replace(job.model, attention_dropout=0.0, hidden_dropout=0.0)
    return replace(job, model=model, performance_flags=WITHOUT_KERNELS)


def cases(device_kind: DeviceKind, *, has_te: bool) -> Iterator[Case]:
    """Every model at three micro-batches, as it is and recomputed; then the ends of a pipeline of the largest."""
    whole = Layout(dp=DATA_PARALLEL[device_kind], use_distributed_optimizer=True)
    piped = replace(whole, pp=4)
    for name in SHAPES[device_kind]:
        for size in MICRO_BATCHES:
            plain = replace(whole, micro_batch_size=size)
            for layout in (plain, replace(plain, recompute=FULL)):
                yield Case(name=name, job=dense_job(device_kind, name, layout, has_te=has_te))
    for pp_rank in (0, 3):
        yield Case(name=name, job=dense_job(device_kind, name, piped, has_te=has_te), pp_rank=pp_rank)
    if device_kind == "cpu":
        plain = dense_job(device_kind, name, replace(whole, micro_batch_size=4), has_te=False)
        yield Case(name="tiny, LayerNorm", job=replace(plain, model=replace(plain.model, normalization="LayerNorm")))
        yield Case(name="tiny GPT", job=gpt2_job(replace(whole, micro_batch_size=4)))
        for pp_rank in (0, 3):
            yield Case(name="tiny GPT", job=gpt2_job(piped), pp_rank=pp_rank)


def has_transformer_engine(device_kind: str) -> bool:
    """Whether Megatron-core would build its layers from Transformer Engine's."""
    from megatron.core.models.gpt import gpt_layer_specs

    return device_kind == "cuda" and bool(getattr(gpt_layer_specs, "HAVE_TE", False))


def refusal(case: str, error: Exception) -> str:
    """Say which case could not be measured and why, in the error's first line."""
    return f"- {case}: {(str(error).splitlines() or [type(error).__name__])[0]}"


def report(
    name: str, doc: str, *, title: str, reason: str, measure: Callable[[Device, str], tuple[list[str], list[str]]]
) -> None:
    """Be the command of such a benchmark: measure what its words ask for, print it, and file it.

    Args:
        name: of the module.
        doc: what it does, for `--help`.
        title: of what it reports.
        reason: why a report from a CPU says less.
        measure: takes a device and a part of models' names; returns the report's lines, none where nothing could be
            measured, and the refusals.

    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--only", default="", help="models whose name holds this")
    topic = name.removeprefix("bench_")
    parser.add_argument("--out", type=Path, help=f"such as benchmarks/results/{topic}_cpu_2026-11-21.md")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    device = inventory.host(name="here", address="", num_devices=1, device=args.device).devices[0]
    # Before the work: the load is that of others.
    head = [*circumstances(f"python -m benchmarks.{name} --device {device.kind}", device, reason)]
    lines, refused = measure(device, args.only)
    if not lines:
        sys.exit("\n".join([f"{name}: nothing could be measured", *refused]))
    missing = ["", "Not measured:", "", *refused] if refused else []
    text = "\n".join([f"# {title}", "", *head, "", *lines, *missing]) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


def circumstances(command: str, device: Device, reason: str) -> Iterator[str]:
    """What must be known to doubt the figures."""
    known = conditions(None)
    yield f"`{command}`, {known['date']}, commit {known['commit']};"
    yield f"{known['versions']}, {', '.join(_versions(PACKAGES))};"
    yield f"{known['machine']}; device {device.name}; load {os.getloadavg()[0]:.1f} at the start."
    if device.kind == "cpu":
        yield ""
        yield f"**This has not run on a GPU**: {reason}"


def _versions(packages: Sequence[str]) -> Iterator[str]:
    for package in packages:
        found = util.find_spec(package.replace("-", "_") if package != "megatron-core" else "megatron.core")
        yield f"{package} {version(package)}" if found else f"no {package}"
