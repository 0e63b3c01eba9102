"""Batches are split after the shift, every token once, and come back in their order."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lit_llm.context import LAYOUTS, check_batch, gather_tokens, keep_one_target, make_plan, shard_batch
from lit_llm.gates.processes import run_ranks


@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=8),
    num_ranks=st.integers(1, 3),
    layout=st.sampled_from(LAYOUTS),
)
def test_every_token_keeps_its_target_and_position(lengths, num_ranks, layout):
    """Against a loop over documents: which token follows which, and where it stands."""
    total = sum(lengths)
    if total < num_ranks:
        return
    input_ids = torch.arange(100, 100 + total)[None]
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    follows, stands = {}, {}
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for place in range(start, stop):
            follows[100 + place] = 101 + place if place + 1 < stop else -100
            stands[100 + place] = place - start
    batch = {
        "input_ids": input_ids,
        "labels": input_ids,
        "cu_seqlens": cu_seqlens,
        "weights": input_ids[..., None].expand(1, total, 2) / 2,
        "names": ["a"],
        "scale": torch.tensor(3.0),
    }
    seen = []
    for rank in range(num_ranks):
        shard = shard_batch(batch, num_ranks, rank, layout)
        local = shard.batch
        tokens = local["input_ids"][0].tolist()
        seen += tokens
        assert local["shift_labels"][0].tolist() == [follows[token] for token in tokens]
        assert local["position_ids"][0].tolist() == [stands[token] for token in tokens]
        assert local["weights"][0, :, 1].mul(2).tolist() == tokens, "other entries of a token travel with it"
        assert local["names"] == ["a"] and local["scale"] == 3.0, "entries of the batch are left whole"
        assert int(shard.num_targets) == sum(follows[token] != -100 for token in tokens)
        assert "cu_seqlens" not in local
    assert sorted(seen) == input_ids[0].tolist()


def test_a_shard_without_targets_gets_a_stand_in():
    batch = {"input_ids": torch.tensor([[7, 8, 9, 4]]), "labels": torch.full((1, 4), -100)}
    shard = keep_one_target(shard_batch(batch, 1, 0))
    assert shard.batch["shift_labels"].tolist() == [[7, -100, -100, -100]]
    assert int(shard.num_targets) == 0
    full = {**batch, "labels": batch["input_ids"]}
    assert keep_one_target(shard_batch(full, 1, 0)).batch["shift_labels"].tolist() == [[8, 9, 4, -100]]


def gather_worker(rank):
    answers = []
    for layout in LAYOUTS:
        plan = make_plan([0, 5, 6, 29], dist.get_world_size(), layout, 3)
        whole = torch.arange(29 * 2.0).view(29, 2)
        answers.append(gather_tokens(whole[plan.indices(rank)], plan, dist.group.WORLD).equal(whole))
    return answers


def test_tokens_come_back_in_order():
    assert run_ranks(gather_worker, 3, start_method="fork") == [[True] * 3] * 3
    with pytest.raises(ValueError, match="2 entries for the 3 tokens of rank 0"):
        gather_tokens(torch.zeros(2), make_plan([0, 3], 1))


GOOD = {"input_ids": torch.zeros(2, 4, dtype=torch.long)}


@pytest.mark.parametrize(
    ("batch", "contains"),
    [
        ([1, 2], "must be a dict with 'input_ids' .*, got list"),
        ({"labels": torch.zeros(1)}, r"no tensor 'input_ids', only \['labels'\]"),
        ({"input_ids": torch.zeros(4)}, r"must be \[batch, seq\] and hold tokens, got shape \[4\]"),
        ({"input_ids": torch.zeros(1, 0)}, r"got shape \[1, 0\]"),
        ({**GOOD, "labels": torch.zeros(2, 5)}, r"'labels' is \[2, 5\], but 'input_ids' is \[2, 4\]"),
        ({**GOOD, "labels": [0]}, "'labels' is list"),
        ({**GOOD, "attention_mask": torch.zeros(1, 1, 4, 4)}, r"'attention_mask' is \[1, 1, 4, 4\]"),
    ],
)
def test_malformed_batches(batch, contains):
    with pytest.raises(ValueError, match=contains):
        check_batch(batch)


@pytest.mark.parametrize(
    ("extra", "contains"),
    [
        ({"cu_seqlens": torch.tensor([1, 8])}, "must start at 0, got 1"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "must end at the number of tokens of the flattened batch, 8; got 7"),
        ({"cu_seqlens": torch.tensor([0, 5, 5, 8])}, r"must increase, but entry 2 \(5\) is not larger than"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, "must be int32"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])}, "row 0 is not right-padded"),
    ],
)
def test_boundaries_that_do_not_fit(extra, contains):
    with pytest.raises(ValueError, match=contains):
        shard_batch({**GOOD, **extra}, 2, 0)


def test_more_ranks_than_tokens():
    with pytest.raises(ValueError, match="a batch of 8 tokens cannot be split over 9 context-parallel ranks"):
        shard_batch(GOOD, 9, 0)
