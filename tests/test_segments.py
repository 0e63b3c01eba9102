"""Boundaries against plain Python loops: every conversion, on every cut of a short sequence that hypothesis finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_llm import segments

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@settings(deadline=None)  # a busy machine is no defect
@given(LENGTHS)
def test_conversions_match_a_loop_over_documents(lengths: list[int]) -> None:
    boundaries = [0]
    documents: list[int] = []
    positions: list[int] = []
    for document, length in enumerate(lengths):
        boundaries.append(boundaries[-1] + length)
        documents += [document] * length
        positions += range(length)

    cu_seqlens = segments.cu_seqlens_from_lengths(lengths)

    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == boundaries
    assert segments.document_lengths(cu_seqlens).tolist() == lengths
    assert segments.document_ids(cu_seqlens).tolist() == documents
    assert segments.position_ids(cu_seqlens).tolist() == positions
    for derived in (segments.document_lengths, segments.document_ids, segments.position_ids):
        assert derived(cu_seqlens).dtype == torch.int64
    segments.check_cu_seqlens(cu_seqlens, sum(lengths))


@settings(deadline=None)  # a busy machine is no defect
@given(LENGTHS)
def test_positions_that_start_at_zero_give_back_every_boundary_also_of_one_token_documents(lengths: list[int]) -> None:
    cu_seqlens = segments.cu_seqlens_from_lengths(lengths)
    inferred = segments.cu_seqlens_from_position_ids(segments.position_ids(cu_seqlens))
    assert inferred.dtype == torch.int32
    assert torch.equal(inferred, cu_seqlens)


@settings(deadline=None)  # a busy machine is no defect
@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=4))
def test_boundaries_of_arbitrary_positions_match_a_loop_over_rows(rows: list[list[int]]) -> None:
    expected = []
    for index, row in enumerate(rows):
        for column, position in enumerate(row):
            if column == 0 or position != row[column - 1] + 1:
                expected.append(4 * index + column)
    expected.append(4 * len(rows))
    assert segments.cu_seqlens_from_position_ids(torch.tensor(rows)).tolist() == expected


def test_a_row_starts_a_document_even_where_positions_go_on() -> None:
    """A document cut by the end of a row: the model sees two sequences, whatever the positions say."""
    rows = torch.tensor([[0, 1, 2], [3, 4, 5]])
    assert segments.cu_seqlens_from_position_ids(rows).tolist() == [0, 3, 6]


@settings(deadline=None)  # a busy machine is no defect
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_a_padded_batch_has_a_document_and_a_padding_document_in_each_row(tokens_per_row: list[int]) -> None:
    expected = [0]
    for row, tokens in enumerate(tokens_per_row):
        if 0 < tokens < 5:
            expected.append(5 * row + tokens)
        expected.append(5 * (row + 1))
    mask = torch.tensor([[1] * tokens + [0] * (5 - tokens) for tokens in tokens_per_row])
    for typed in (mask, mask.bool(), mask.float()):
        assert segments.cu_seqlens_from_attention_mask(typed).tolist() == expected


@pytest.mark.parametrize("row", [[0, 1, 1], [1, 0, 1]])
def test_left_padding_and_holes_are_refused_by_the_row_that_has_them(row: list[int]) -> None:
    with pytest.raises(ValueError, match="row 1 is not right-padded"):
        segments.cu_seqlens_from_attention_mask(torch.tensor([[1, 1, 0], row]))


def test_a_mask_that_is_not_a_batch_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 1, 2, 2\]"):
        segments.cu_seqlens_from_attention_mask(torch.ones(1, 1, 2, 2))


@pytest.mark.parametrize("length", [0, -3])
def test_empty_documents_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {length}"):
        segments.cu_seqlens_from_lengths([2, length, 2])


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([1, 4]), "start at 0, got 1"),
        (torch.tensor([0, 3]), "4; got 3"),
        (torch.tensor([0, 2, 2, 4]), r"entry 2 \(2\) is not larger than entry 1 \(2\)"),
        (torch.tensor([0, 5, 4]), r"entry 2 \(4\) is not larger than entry 1 \(5\)"),
        (torch.tensor([0.0, 4.0]), "float32"),
        (torch.tensor([[0, 4]]), r"\[1, 2\]"),
        (torch.tensor([0]), r"\[1\]"),
    ],
)
def test_boundaries_that_do_not_describe_four_tokens_are_refused(cu_seqlens: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segments.check_cu_seqlens(cu_seqlens, 4)
