import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_llm import segments, targets
from lit_llm.packing import Sample, collate


def sample(tokens: list[int], labels: list[int] | None = None) -> Sample:
    return np.array(tokens, np.int32), np.array(tokens if labels is None else labels, np.int32)


def test_a_batch_by_hand() -> None:
    batch = collate(
        [[sample([5, 6, 7], [-100, -100, 7]), sample([8, 9])], [], [sample([1, 2, 3, 4, 5, 6])]], max_length=6, pad_id=0
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0], [0] * 6, [1, 2, 3, 4, 5, 6]]
    assert batch["labels"].tolist() == [[-100, -100, 7, -100, 9, -100], [-100] * 6, [-100, 2, 3, 4, 5, 6]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1, 2], [3] * 6, [4] * 6]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 6, 12, 18]
    assert batch["max_seqlen"] == 6 and type(batch["max_seqlen"]) is int
    assert batch["cu_seqlens"].dtype == torch.int32
    for key in ("input_ids", "labels", "position_ids", "document_ids"):
        assert batch[key].dtype == torch.int64 and batch[key].shape == (3, 6)


@given(st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=4), st.integers(18, 22))
def test_documents_come_back_out(row_lengths: list[list[int]], max_length: int) -> None:
    generator = np.random.default_rng(0)
    rows = []
    for lengths in row_lengths:
        row = []
        for length in lengths:
            tokens = generator.integers(1, 99, length)
            row.append((tokens, np.where(generator.random(length) < 0.5, tokens, -100)))
        rows.append(row)
    batch = collate(rows, max_length, pad_id=0)
    segments.check_cu_seqlens(batch["cu_seqlens"], len(rows) * max_length)
    documents = list(
        zip(
            batch["input_ids"].flatten().split(segments.document_lengths(batch["cu_seqlens"]).tolist()),
            batch["labels"].flatten().split(segments.document_lengths(batch["cu_seqlens"]).tolist()),
            strict=True,
        )
    )
    trained = 0
    for row in rows:
        for tokens, labels in row:
            got_tokens, got_labels = documents.pop(0)
            assert got_tokens.tolist() == tokens.tolist()
            assert got_labels.tolist() == [-100, *labels[1:].tolist()]
            trained += int((labels[1:] != -100).sum())
        if sum(len(tokens) for tokens, _ in row) < max_length:
            padding, masked = documents.pop(0)
            assert set(padding.tolist()) == {0} and set(masked.tolist()) == {-100}
    assert documents == []
    assert int(targets.token_count(batch)) == trained


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        ([[sample([1])], [sample([])]], "row 1 holds a sample without tokens"),
        ([[sample([1, 2], [1])]], "row 0 holds a sample of 2 tokens but 1 labels"),
        ([[sample([1, 2, 3]), sample([4, 5])]], "row 0 holds 5 or more tokens, more than max_length 4"),
    ],
)
def test_impossible_rows_are_refused(rows: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        collate(rows, 4, 0)
