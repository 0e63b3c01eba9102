"""Document boundaries of a packed sequence, and the only place that knows how they are written.

Several documents laid end to end in one sequence are described by their cumulative lengths::

    documents      |a a a a|b|c c c|
    cu_seqlens     0       4 5     8          int32 [num_documents + 1]
    position_ids    0 1 2 3 0 0 1 2           int64 [total]
    document_ids    0 0 0 0 1 2 2 2           int64 [total]

``cu_seqlens`` always refers to the *flattened* batch: a ``[batch, seq]`` batch has a boundary at every multiple of
``seq``. Explicit lengths are the truth; ``position_ids`` are derived from them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "check_cu_seqlens",
    "cu_seqlens_from_attention_mask",
    "cu_seqlens_from_lengths",
    "cu_seqlens_from_position_ids",
    "document_ids",
    "document_lengths",
    "position_ids",
]


def cu_seqlens_from_lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    """Cumulative lengths ``[0, l0, l0 + l1, …]`` of documents laid end to end.

    Args:
        lengths: tokens of each document, every one at least 1; ``[num_documents]``.

    Returns:
        int32 ``[num_documents + 1]`` on the CPU (or on the device of ``lengths``).

    Raises:
        ValueError: if a length is smaller than 1.

    Example:
        >>> cu_seqlens_from_lengths([4, 1, 3])
        tensor([0, 4, 5, 8], dtype=torch.int32)
    """
    counts = torch.as_tensor(lengths, dtype=torch.int64)
    if counts.numel() and int(counts.min()) < 1:
        raise ValueError(f"document lengths must be at least 1, got {int(counts.min())}")
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


def document_lengths(cu_seqlens: Tensor) -> Tensor:
    """Tokens of each document: int64 ``[num_documents]``.

    Example:
        >>> document_lengths(torch.tensor([0, 4, 5, 8]))
        tensor([4, 1, 3])
    """
    return cu_seqlens.to(torch.int64).diff()


def document_ids(cu_seqlens: Tensor) -> Tensor:
    """The index of each token's document: int64 ``[total]``.

    Example:
        >>> document_ids(torch.tensor([0, 4, 5, 8]))
        tensor([0, 0, 0, 0, 1, 2, 2, 2])
    """
    lengths = document_lengths(cu_seqlens)
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def position_ids(cu_seqlens: Tensor) -> Tensor:
    """The index of each token inside its document: int64 ``[total]``.

    Example:
        >>> position_ids(torch.tensor([0, 4, 5, 8]))
        tensor([0, 1, 2, 3, 0, 0, 1, 2])
    """
    starts = cu_seqlens[:-1].to(torch.int64)
    total = int(cu_seqlens[-1])
    return torch.arange(total, device=cu_seqlens.device) - starts[document_ids(cu_seqlens)]


def cu_seqlens_from_position_ids(position_ids: Tensor) -> Tensor:
    """Boundaries inferred from positions: a document starts at each row and wherever a position is not its
    predecessor's plus one.

    For batches that carry no ``cu_seqlens``. Two documents of which the second starts at exactly the next position
    cannot be told apart this way.

    Args:
        position_ids: ``[batch, seq]`` or ``[seq]``.

    Returns:
        int32 ``[num_documents + 1]`` over the flattened batch.

    Example:
        >>> cu_seqlens_from_position_ids(torch.tensor([[0, 1, 0, 0], [0, 1, 2, 3]]))
        tensor([0, 2, 3, 4, 8], dtype=torch.int32)
    """
    rows = position_ids if position_ids.dim() == 2 else position_ids[None]
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[:, 1:] = rows[:, 1:] != rows[:, :-1] + 1
    return _cu_seqlens_from_starts(starts.flatten())


def cu_seqlens_from_attention_mask(attention_mask: Tensor) -> Tensor:
    """Boundaries of a right-padded batch: each row is one document, its padding another of its own.

    Args:
        attention_mask: ``[batch, seq]``, 1 for tokens, 0 for padding at the end of a row.

    Returns:
        int32 ``[num_documents + 1]`` over the flattened batch.

    Raises:
        ValueError: if a row is padded anywhere but at its end, or the mask is not two-dimensional.

    Example:
        >>> cu_seqlens_from_attention_mask(torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]))
        tensor([0, 2, 4, 8], dtype=torch.int32)
    """
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must be [batch, seq], got shape {list(attention_mask.shape)}")
    mask = attention_mask.bool()
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        row = int((mask[:, 1:] & ~mask[:, :-1]).any(1).nonzero()[0])
        raise ValueError(f"attention_mask row {row} is not right-padded: pad every row at its end only")
    starts = torch.ones_like(mask)
    starts[:, 1:] = mask[:, 1:] != mask[:, :-1]
    return _cu_seqlens_from_starts(starts.flatten())


def check_cu_seqlens(cu_seqlens: Tensor, total: int) -> None:
    """Refuse boundaries that do not describe ``total`` tokens.

    Raises:
        ValueError: if they are not one-dimensional integers, do not start at 0, do not end at ``total``, or do not
            increase.

    Example:
        >>> check_cu_seqlens(torch.tensor([0, 4, 8]), 8)
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens must be int32 [num_documents + 1] over the flattened batch, "
            f"got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        )
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {first}")
    if last != total:
        raise ValueError(f"cu_seqlens must end at the number of tokens of the flattened batch, {total}; got {last}")
    if int(cu_seqlens.diff().min()) < 1:
        where = int((cu_seqlens.diff() < 1).nonzero()[0])
        raise ValueError(
            f"cu_seqlens must increase, but entry {where + 1} ({int(cu_seqlens[where + 1])}) is not larger than "
            f"entry {where} ({int(cu_seqlens[where])})"
        )


def _cu_seqlens_from_starts(starts: Tensor) -> Tensor:
    boundaries = starts.nonzero().flatten()
    return torch.cat([boundaries, boundaries.new_tensor([starts.numel()])]).to(torch.int32)
