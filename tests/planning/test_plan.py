"""A request becomes a problem."""

from __future__ import annotations

from megatron_lines import TEXT

from pipette_launch.planning.plan import PlanRequest, read_problem


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
    assert [*range(4)] == [begins.index(word) for word in ("assumed", "not", "H100", "8")]
