"""The data loader's attention mask: whether it makes the peak, and the flag that leaves it out.

Causal attention of Transformer Engine's flash and fused backends reads no mask. Unfused attention, Megatron's own too,
adds the mask to the causal one, so only documents that `--reset-attention-mask` separates change its result (TE v2.8,
dot_product_attention/utils.py, get_full_mask; megatron/core fusions/fused_softmax.py of core_v0.16.1). No plan adds the
flag: a script's own attention may read the mask.
"""

from __future__ import annotations

from dataclasses import replace

from pipette_launch.cost.layers.attention import is_local
from pipette_launch.cost.layers.embedding_and_head import whole_mask_bytes
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.megatron.performance import performance_options
from pipette_launch.text import bytes_text, plural

NO_MASK = "--no-create-attention-mask-in-dataloader"
MATTERS = 0.01
"""Smallest share of a stage's peak for which the mask has a note."""
_RESET = "--reset-attention-mask"
_SFT_ASSERTS = (0, 16)
"""First release whose data set for --sft asserts that it is to make no mask (sft_dataset.py, __getitem__)."""
_HOST_BYTES = 8
"""For each entry of a mask: ones and their lower triangle, both in fp32 (gpt_dataset.py)."""


def without_mask(job: Job) -> Job | None:
    """Return the job whose data loader makes no mask; None where it makes none, or where attention reads it."""
    reads = is_local(job.model) or job.model.attention_backend == "unfused"
    if not whole_mask_bytes(job, job.own) or (reads and _RESET in job.performance_flags):
        return None
    return _with_no_mask(job)


def _with_no_mask(job: Job) -> Job:
    return replace(job, performance_flags=tuple(sorted((*job.performance_flags, NO_MASK))))


def mask_notes(job: Job, layout: Layout) -> tuple[str, ...]:
    """Name the stages that the mask makes larger, in one sentence, and say how to leave it out."""
    whole = whole_mask_bytes(job, layout)
    if whole and performance_options(job).sft and job.release >= _SFT_ASSERTS:
        return (f"With --sft the first sample ends the job: its data set makes no attention mask; add {NO_MASK}.",)
    with_mask, without = ([part.total for part in peak_memory_bytes(one, layout)] for one in (job, _with_no_mask(job)))
    raised = [rank for rank, peak in enumerate(with_mask) if peak > (1 + MATTERS) * without[rank]]
    if not raised:
        return ()
    fullest = max(raised, key=lambda rank: with_mask[rank])
    cut = " before context parallelism cuts it" if layout.cp > 1 else ""
    need, bare_need = bytes_text(with_mask[fullest]), bytes_text(without[fullest])
    advice = f"{NO_MASK} leaves it out; causal attention needs none. " if without_mask(job) else ""
    workers = performance_options(job).num_workers
    maker = f"each of the {workers} {plural('worker', workers)} of a data loader" if workers else "the data loader"
    note = (
        f"The data loader's attention mask, {bytes_text(whole)} a micro-batch, goes whole to the device{cut}: with it "
        f"the tensors of stage {fullest} need {need}, without it {bare_need}. {advice}To make one, {maker} needs "
        f"{bytes_text(_HOST_BYTES * job.model.seq_length**2)} of host memory."
    )
    return (note,)
