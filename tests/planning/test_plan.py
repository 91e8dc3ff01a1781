"""A request becomes a problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_lines import TEXT

from pipette_launch.megatron import environment, write_arguments
from pipette_launch.planning.plan import PlanRequest, read_problem, search_plan
from pipette_launch.planning.predict import predict


def test_notes_on_the_job_come_before_those_on_assumed_machines() -> None:
    """A short screen shows only the first notes, and a wrong job matters more than wrong hosts."""
    words = (
        *TEXT.split(),
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        "Qwen/Qwen3-8B",
        "-tp",
        "4",
    )
    request = PlanRequest(arguments=words, gpu="H100", nodes=2, megatron_version="0.16.1")

    begins = [note.split()[0] for note in read_problem(request).job.notes]
    assert [*range(3)] == [begins.index(word) for word in ("assumed", "not", "Assumed:")]


def test_a_plan_offloads_where_that_is_faster_than_recompute() -> None:
    """On one GB200 with 23 GiB, a share of attention goes to the host; the plan's own flags get the same prediction."""
    text = "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 4096 --num-attention-heads 32 --seq-length 8192"
    text += " --max-position-embeddings 8192 --vocab-size 32000 --tokenizer-type NullTokenizer --micro-batch-size 1"
    text += " --global-batch-size 8 --train-iters 10 --bf16 --attention-backend flash"
    words = tuple(text.split())
    sizes: dict[str, Any] = {"gpu": "GB200", "nodes": 1, "gpus_per_node": 1}
    request = PlanRequest(arguments=words, megatron_version="0.20.0", memory_margin=0.875, fix=("mbs",), **sizes)
    new, old = (read_problem(replace(request, megatron_version=version)) for version in ("0.20.0", "0.18.0"))

    chosen = search_plan(new).chosen
    assert chosen.layout.recompute.offload_modules == ("qkv_linear", "core_attn", "attn_proj")
    assert chosen.step_time_s < search_plan(old).chosen.step_time_s
    assert search_plan(old).chosen.layout.recompute.granularity != "none"
    written = write_arguments(words, job=new.job, layout=chosen.layout)
    found = predict(written, megatron_version="0.20.0", gpu="GB200", world_size=1)
    assert (found.layout, found.step_time_s) == (chosen.layout, chosen.step_time_s)
    assert found.stages[0].peak_bytes == chosen.memory.need_bytes[0]
    assert "NVTE_CPU_OFFLOAD_V1" in environment(new.job, chosen.layout, device_kind="cuda")
