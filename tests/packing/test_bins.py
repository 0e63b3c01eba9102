import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_llm.packing import best_fit


def naive_best_fit_decreasing(lengths: list[int], max_length: int) -> int:
    """One sample at a time, from the longest, to the bin with the least space that still holds it."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, space in enumerate(spaces) if space >= length]
        if fitting:
            spaces[min(fitting, key=lambda i: spaces[i])] -= length
        else:
            spaces.append(max_length - length)
    return len(spaces)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    max_length = draw(st.integers(1, 60))
    return draw(st.lists(st.integers(1, max_length), max_size=80)), max_length


@given(problems())
def test_as_many_bins_as_one_by_one_and_none_overfull(problem: tuple[list[int], int]) -> None:
    lengths, max_length = problem
    bins = best_fit(lengths, max_length)
    assert bins.dtype == np.int64 and bins.shape == (len(lengths),)
    num_bins = naive_best_fit_decreasing(lengths, max_length)
    assert sorted(set(bins.tolist())) == list(range(num_bins))
    if lengths:
        assert np.bincount(bins, weights=lengths).max() <= max_length


@pytest.mark.parametrize("max_length", [2048, 1000, 37])
def test_long_tailed_lengths(max_length: int) -> None:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(3, 1, 600).astype(int), 1, max_length)
    assert best_fit(lengths, max_length).max() + 1 == naive_best_fit_decreasing(lengths.tolist(), max_length)


def test_a_million_samples_take_less_than_two_seconds_of_cpu() -> None:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(400) - 0.5, 1, 1_000_000).astype(int), 1, 2048)
    start = time.process_time()
    bins = best_fit(lengths, 2048)
    assert time.process_time() - start < 2
    assert lengths.sum() / ((bins.max() + 1) * 2048) > 0.9999


def test_no_samples() -> None:
    assert best_fit([], 8).tolist() == []


@pytest.mark.parametrize(
    ("lengths", "max_length", "words"),
    [
        ([3, 9, 2], 8, [r"lengths\[1\] is 9", "max_length 8", "raise max_length"]),
        ([3, 0], 8, [r"lengths\[1\] is 0", "at least 1"]),
        ([3], 0, ["max_length", "got 0"]),
        ([[3]], 8, ["vector of integers"]),
        ([3.5], 8, ["vector of integers", "float64"]),
    ],
)
def test_impossible_problems_are_refused(lengths: list, max_length: int, words: list[str]) -> None:
    for word in words:
        with pytest.raises(ValueError, match=word):
            best_fit(lengths, max_length)
