"""Samples depend on the text, the seed and the iteration, and on nothing else."""

from pathlib import Path

import byte_text
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


def samples(size: int = 100, *, seq_length: int = 7, seed: int | None = 1) -> byte_text.Samples:
    """Samples of the bytes 0, 1, 2, ..."""
    return byte_text.Samples(text=np.arange(size, dtype=np.uint8), seq_length=seq_length, seed=seed)


def test_a_sample_is_a_window_and_the_byte_after_it() -> None:
    """Consecutive samples of unshuffled text share the byte between them."""
    assert [[0, 1, 2, 3], [3, 4, 5, 6]] == samples(seq_length=3, seed=None).batch(0, 2).tolist()


@given(first=st.integers(0, 60), left=st.integers(1, 9), right=st.integers(1, 9))
def test_a_batch_may_be_cut_anywhere(first: int, left: int, right: int) -> None:
    """Two half batches are the whole batch: how ranks and micro-batches share it changes nothing."""
    whole = samples().batch(first, left + right)

    halves = [samples().batch(first, left), samples().batch(first + left, right)]
    assert whole.tolist() == np.concatenate(halves).tolist()


def test_each_pass_visits_every_window_once_in_an_order_of_its_own() -> None:
    """An epoch is a permutation, and the next one another."""
    made = samples()
    epochs = [made.batch(epoch * made.num_windows, made.num_windows)[:, 0].tolist() for epoch in (0, 1)]

    assert [list(range(0, 98, 7))] * 2 == [sorted(epoch) for epoch in epochs]
    assert epochs[0] != epochs[1]


def test_a_text_without_a_sample_is_refused() -> None:
    """The error names both sizes."""
    with pytest.raises(ValueError, match="7 bytes of text hold no sample of 7"):
        samples(7)


@pytest.mark.parametrize(
    ("proportions", "sizes"), [("969, 30, 1", (969, 30)), ("1,1", (500, 500)), ("1", (1000, 0)), ("8/2", (800, 200))]
)
def test_split(proportions: str, sizes: tuple[int, int]) -> None:
    """The text is cut by the proportions, training first."""
    train, valid = byte_text.split(np.zeros(1000, dtype=np.uint8), proportions)

    assert sizes == (len(train), len(valid))


def test_the_standard_library_is_text_enough() -> None:
    """Without a file there is a bounded amount of Python, the same each time."""
    text = byte_text.read(None)

    assert 1 << 20 <= len(text) <= byte_text.MAX_OWN_BYTES
    assert byte_text.checksum(text) == byte_text.checksum(byte_text.read(None))


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    """Any byte is a token."""
    (tmp_path / "text").write_bytes(bytes(range(256)))

    assert list(range(256)) == byte_text.read(str(tmp_path / "text")).tolist()
