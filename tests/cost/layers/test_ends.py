"""Embedding, head and loss by hand: s 32, b 1, h 64 in bf16, 256 tokens in the vocabulary."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.ends import attention_mask_bytes, head_bytes, loss_bytes_per_logit
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Batch, Job, Layout


def job(*flags: str, **changes: object) -> Job:
    """A bf16 GPT."""
    model = {"params_dtype": "bf16", "transformer_impl": "transformer_engine", "attention_backend": "fused"}
    return tiny_job(model=tiny_model(**(model | changes)), performance_flags=flags)


def test_head() -> None:
    """Norm input and output 4*s*b*h, logits and their fp32 copy 6*s*b*V/t; fp32 logits are worked on in place."""
    assert head_bytes(job(), Layout()) == 4 * 2048 + 6 * 32 * 256
    assert head_bytes(job(), Layout(tp=2)) == 4 * 2048 + 3 * 32 * 256
    assert head_bytes(job(params_dtype="fp32"), Layout()) == 8 * 2048 + 4 * 32 * 256


def test_the_heads_of_multi_token_prediction() -> None:
    """One depth doubles the logits and their fp32 copies; a second one adds a copy only."""
    assert head_bytes(job(mtp_num_layers=1), Layout()) == 4 * 2048 + 12 * 32 * 256
    assert head_bytes(job(mtp_num_layers=2), Layout()) == 4 * 2048 + 16 * 32 * 256


@pytest.mark.parametrize(
    ("flags", "dtype", "expected"),
    [
        ((), "bf16", (4, 0)),
        ((), "fp32", (0, 0)),
        (("--cross-entropy-loss-fusion",), "bf16", (4, 4)),
        (("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl native"), "bf16", (4, 4)),
        (("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl te"), "bf16", (0, 0)),
    ],
)
def test_bytes_of_the_loss(flags: tuple[str, ...], dtype: str, expected: tuple[int, int]) -> None:
    """Kept for the backward, and needed by it, for each logit."""
    assert loss_bytes_per_logit(job(*flags, params_dtype=dtype)) == expected


def test_a_fused_loss_needs_more() -> None:
    """10*s*b*V in place of 6*s*b*V."""
    assert head_bytes(job("--cross-entropy-loss-fusion"), Layout()) == 4 * 2048 + 10 * 32 * 256


def test_the_vocabulary_is_padded_before_it_is_cut() -> None:
    """250 tokens are 256 on two ranks: 128 each."""
    assert head_bytes(job(vocab_size=250), Layout(tp=2)) == 4 * 2048 + 6 * 32 * 128


def test_the_attention_mask() -> None:
    """One byte for each of b * s/c * s, unless the data loader makes none."""
    assert attention_mask_bytes(job(), Layout(micro_batch_size=3)) == 3 * 32 * 32
    assert attention_mask_bytes(job(), Layout(cp=2)) == 16 * 32
    assert attention_mask_bytes(job("--no-create-attention-mask-in-dataloader"), Layout()) == 0


@pytest.mark.parametrize(
    ("flags", "microbatches", "expected"),
    [
        ((), 8, 0),
        (("--defer-embedding-wgrad-compute",), 8, 8),
        (("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit 2"), 8, 2),
        (("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit 2"), 1, 1),
    ],
)
def test_deferred_weight_gradient_of_the_head(flags: tuple[str, ...], microbatches: int, expected: int) -> None:
    """Input and gradient of the logits for each deferred micro-batch."""
    each = 2 * 2048 + 2 * 32 * 256

    this = replace(job(*flags), batch=Batch(global_batch_size=microbatches))

    assert [part.deferred for part in peak_memory_bytes(this, Layout(pp=2))] == [0, expected * each]
    assert [part.deferred for part in peak_memory_bytes(this, Layout())] == [0]
