"""The shift and the count, against loops over documents and by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_llm import segments, targets

DOCUMENTS = st.lists(
    st.lists(st.one_of(st.just(-100), st.integers(0, 9)), min_size=1, max_size=6), min_size=1, max_size=6
)


def naive_shift(documents: list[list[int]]) -> list[int]:
    shifted = []
    for document in documents:
        shifted += [*document[1:], -100]
    return shifted


def packed(documents: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.tensor([[label for document in documents for label in document]])
    return labels, segments.cu_seqlens_from_lengths([len(document) for document in documents])


@settings(deadline=None)  # a busy machine is no defect
@given(DOCUMENTS)
def test_shift_matches_a_loop_over_documents(documents: list[list[int]]) -> None:
    labels, cu_seqlens = packed(documents)
    before = labels.clone()
    shifted = targets.shift(labels, cu_seqlens)
    assert shifted.shape == labels.shape
    assert shifted.flatten().tolist() == naive_shift(documents)
    assert torch.equal(targets.shift(labels.flatten(), cu_seqlens), shifted.flatten())
    assert torch.equal(labels, before)


@settings(deadline=None)  # a busy machine is no defect
@given(DOCUMENTS)
def test_count_matches_a_loop_over_documents(documents: list[list[int]]) -> None:
    labels, cu_seqlens = packed(documents)
    expected = sum(label != -100 for label in naive_shift(documents))
    batch = {"input_ids": labels.abs(), "labels": labels, "cu_seqlens": cu_seqlens}
    assert int(targets.token_count(batch)) == expected
    assert int(targets.token_count({"shift_labels": targets.shift(labels, cu_seqlens)})) == expected


def test_a_two_row_batch_by_hand() -> None:
    # row 0: documents [5 6 7] [8], row 1: document [1 2 3 4]; nothing crosses a document or a row
    labels = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    expected = [[6, 7, -100, -100], [2, 3, 4, -100]]
    assert targets.shift(labels, torch.tensor([0, 3, 4, 8], dtype=torch.int32)).tolist() == expected
    assert int(targets.num_targets(torch.tensor(expected))) == 5


def test_the_loss_of_one_document_is_the_one_that_hugging_face_computes() -> None:
    """Their loss shifts the logits: position t against label t + 1. Ours shifts the labels; same terms, same mean."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 7, 11, generator=generator)
    labels = torch.randint(11, (1, 7), generator=generator)
    labels[0, 2] = -100
    theirs = F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100)
    ours = F.cross_entropy(logits[0], targets.shift(labels, torch.tensor([0, 7]))[0], ignore_index=-100)
    torch.testing.assert_close(ours, theirs)


def test_boundaries_of_another_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="end at the number of tokens"):
        targets.shift(torch.zeros(1, 5, dtype=torch.long), torch.tensor([0, 4]))


IDS = torch.zeros(2, 4, dtype=torch.long)
EXPLICIT = torch.tensor([0, 1, 8], dtype=torch.int32)
PADDED = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 0], [0, 1, 2, 3]])


@pytest.mark.parametrize(
    ("carried", "expected"),
    [
        ({"cu_seqlens": EXPLICIT, "attention_mask": PADDED, "position_ids": POSITIONS}, [0, 1, 8]),
        ({"attention_mask": PADDED, "position_ids": POSITIONS}, [0, 2, 4, 8]),
        ({"attention_mask": torch.ones(2, 4), "position_ids": POSITIONS}, [0, 3, 4, 8]),
        ({"position_ids": POSITIONS}, [0, 3, 4, 8]),
        ({"position_ids": torch.tensor([0, 1, 0, 1])}, [0, 2, 4, 6, 8]),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, [0, 2, 4, 6, 8]),
        ({"cu_seqlens": None, "attention_mask": None, "position_ids": None}, [0, 4, 8]),
        ({}, [0, 4, 8]),
    ],
)
def test_the_most_explicit_boundaries_win(carried: dict[str, Any], expected: list[int]) -> None:
    found = targets.batch_cu_seqlens({"input_ids": IDS, **carried})
    assert found.dtype == torch.int32
    assert found.tolist() == expected


def test_padding_is_not_counted_and_the_label_after_it_is_not_reached() -> None:
    # [a b pad pad]: targets b, none, none, none. A padded label that somebody forgot to mask is still counted: the
    # labels say what is trained, the mask only where a row ends.
    batch = {"input_ids": IDS, "attention_mask": PADDED, "labels": torch.tensor([[1, 2, -100, -100], [1, 2, 3, 4]])}
    assert int(targets.token_count(batch)) == 1 + 3
    batch["labels"] = torch.tensor([[1, 2, 7, 7], [1, 2, 3, 4]])
    assert int(targets.token_count(batch)) == 1 + 1 + 3


def test_a_shard_is_counted_by_its_targets_and_not_by_its_labels() -> None:
    batch = {"input_ids": IDS, "labels": torch.ones(2, 4).long(), "shift_labels": torch.full((2, 4), -100)}
    assert int(targets.token_count(batch)) == 0


def test_a_batch_without_labels_cannot_be_counted_and_says_what_it_has() -> None:
    with pytest.raises(ValueError, match=r"no 'labels', only \['input_ids'\]"):
        targets.token_count({"input_ids": IDS})
