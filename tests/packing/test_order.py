import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_llm.packing import FILLER, Packs, best_fit, num_batches, plan_epoch, plan_fixed, rank_packs

LENGTHS = np.random.default_rng(0).integers(1, 100, 500)


def as_lists(packs: Packs) -> list[tuple[int, ...]]:
    return [packs[i] for i in range(len(packs))]


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(0, 2**40), st.integers(0, 9))
def test_every_sample_once_and_no_pack_overfull(lengths: list[int], seed: int, epoch: int) -> None:
    packs = as_lists(plan_epoch(lengths, 20, seed, epoch))
    assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in pack) <= 20 for pack in packs)
    assert len(packs) == len(set(best_fit(lengths, 20).tolist()))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    plan = as_lists(plan_epoch(LENGTHS, 128, 3, 1))
    assert as_lists(plan_epoch(LENGTHS, 128, 3, 1)) == plan
    for seed, epoch in [(3, 2), (4, 1), (1, 3)]:
        other = as_lists(plan_epoch(LENGTHS, 128, seed, epoch))
        assert other != plan and len(other) == len(plan)


def test_packs_are_not_read_by_length() -> None:
    packs = as_lists(plan_epoch(LENGTHS, 128, 0, 0))
    longest = np.array([max(LENGTHS[i] for i in pack) for pack in packs])
    assert abs(np.corrcoef(longest, np.arange(len(packs)))[0, 1]) < 0.2


def test_samples_meet_others_in_the_next_epoch() -> None:
    first, second = ({frozenset(p) for p in as_lists(plan_epoch(LENGTHS, 128, 0, epoch))} for epoch in (0, 1))
    assert len(first & second) < len(first) / 2


def test_the_fixed_plan_is_in_order_of_the_bins() -> None:
    bins = best_fit(LENGTHS, 128)
    assert as_lists(plan_fixed(LENGTHS, 128)) == [
        tuple(np.flatnonzero(bins == index).tolist()) for index in range(bins.max() + 1)
    ]


@given(st.integers(0, 50), st.integers(1, 5), st.integers(1, 4), st.data())
def test_ranks_read_the_global_batches_in_order(
    packs: int, batch_size: int, replicas: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, packs))
    per_rank = [rank_packs(packs, batch_size, replicas, rank, position) for rank in range(replicas)]
    batches = num_batches(packs, batch_size, replicas, position)
    assert {len(indices) for indices in per_rank} == {batches * batch_size}
    read: list[int] = []
    for batch in range(batches):
        for indices in per_rank:
            read += indices[batch * batch_size : (batch + 1) * batch_size].tolist()
    real = [index for index in read if index != FILLER]
    assert real == list(range(position, packs))
    assert read[: len(real)] == real  # fillers only at the end
    assert len(read) - len(real) < batch_size * replicas


def test_a_position_continues_the_same_global_list_on_other_ranks() -> None:
    whole = rank_packs(24, batch_size=2, num_replicas=1)
    first = [rank_packs(24, 1, 4, rank) for rank in range(4)]
    consumed = 8  # two global batches of four ranks
    then = [rank_packs(24, 2, 2, rank, consumed) for rank in range(2)]
    read = [int(first[rank][batch]) for batch in range(2) for rank in range(4)]
    read += [int(i) for batch in range(4) for rank in range(2) for i in then[rank][2 * batch : 2 * batch + 2]]
    assert read == whole.tolist()


def test_filler_and_bounds_of_packs() -> None:
    packs = plan_fixed([1, 2], 8)
    assert packs[FILLER] == ()
    with pytest.raises(IndexError, match="pack 1 of 1"):
        packs[1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan_epoch([1], 8, -1, 0), "seed -1"),
        (lambda: plan_epoch([1], 8, 0, -2), "epoch -2"),
        (lambda: plan_epoch([9], 8, 0, 0), "max_length 8"),
        (lambda: rank_packs(4, 0), "batch_size 0"),
        (lambda: rank_packs(4, 1, 2, 2), "rank 2"),
        (lambda: rank_packs(4, 1, position=5), "position 5 .* 4 packs"),
    ],
)
def test_arguments_out_of_range_are_refused(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
