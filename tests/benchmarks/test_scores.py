"""Scores agree with their definitions, worked by brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.validation.scores import area_under_curve, determination, errors, ranks, regret, spearman

SMALL = st.lists(st.integers(0, 5), min_size=2, max_size=8)


def test_errors_are_relative_to_the_measured_value() -> None:
    """Of -10 %, +20 % and 0 %: mean, median, largest and signed median."""
    found = errors([90, 120, 100], [100, 100, 100])

    assert found is not None
    assert (3, None) == (found.count, found.spearman)
    assert [0.1, 0.1, 0.2, 0.0] == pytest.approx([found.mean, found.median, found.largest, found.signed_median])
    assert errors([], []) is None


@given(values=SMALL)
def test_ranks_share_ties(values: list[int]) -> None:
    """A value's rank is one, plus those below it, plus half of the others that equal it."""
    expected = [1 + sum(o < v for o in values) + (sum(o == v for o in values) - 1) / 2 for v in values]

    assert expected == list(ranks(values))


def test_spearman_without_ties_is_the_textbook_formula() -> None:
    """1 - 6 * sum(d^2) / (n * (n^2 - 1)), for every order of five values."""
    for order in itertools.permutations(range(5)):
        squares = sum((place - value) ** 2 for place, value in enumerate(order))
        assert 1 - 6 * squares / 120 == pytest.approx(spearman(range(5), order))


def test_spearman_needs_a_difference() -> None:
    """One value, or equal values, have no order."""
    assert (None, None) == (spearman([1], [2]), spearman([1, 1], [2, 3]))


@given(scores=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=9))
def test_area_is_the_share_of_pairs_in_order(scores: list[tuple[int, bool]]) -> None:
    """Every positive against every negative, ties half; None where one kind is missing."""
    positive = [score for score, is_positive in scores if is_positive]
    negative = [score for score, is_positive in scores if not is_positive]
    wins = sum((p > n) + (p == n) / 2 for p in positive for n in negative)
    expected = pytest.approx(wins / (len(positive) * len(negative))) if positive and negative else None

    assert expected == area_under_curve([score for score, _ in scores], [flag for _, flag in scores])


def test_regret_is_what_the_choice_cost() -> None:
    """The predicted best took 3 s where 2 s were to be had; a right choice costs nothing."""
    assert 0.5 == regret([1.0, 2.0, 3.0], [3.0, 2.0, 4.0])
    assert 0.0 == regret([2.0, 1.0], [3.0, 2.0])


def test_determination_is_one_only_for_exact_predictions() -> None:
    """The mean explains nothing, and without variance there is nothing to explain."""
    assert 1.0 == determination([1, 2, 3], [1, 2, 3])
    assert 0.0 == determination([2, 2, 2], [1, 2, 3])
    assert determination([1, 2], [2, 2]) is None
