"""Targets of next-token prediction, decided once for every part of the collection.

A causal model at token ``t`` predicts token ``t + 1`` of the same document, so the target of token ``t`` is
``labels[t + 1]``, and the last token of a document has none::

    input_ids      a0  a1  a2 | b0  b1
    labels        -100 a1  a2 |-100 b1        unshifted, -100 = not trained
    shift_labels   a1  a2 -100| b1 -100       what the model's output at each token is compared with

The shift has to happen on the *full* sequence. After a split of the sequence over ranks the target of a shard's last
token lies on another rank and would be lost.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_llm import segments

__all__ = ["IGNORE_INDEX", "batch_cu_seqlens", "num_targets", "shift", "token_count"]

IGNORE_INDEX = -100


def shift(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Next-token targets: ``shift_labels[t] = labels[t + 1]`` inside a document, -100 at its last token.

    Args:
        labels: unshifted labels, ``[batch, seq]`` or ``[total]``.
        cu_seqlens: int32 ``[num_documents + 1]`` over the flattened batch.

    Returns:
        The targets, shaped like ``labels``.

    Raises:
        ValueError: if ``cu_seqlens`` does not describe the flattened labels.

    Example:
        >>> shift(torch.tensor([[7, 8, 9, 5, 6]]), torch.tensor([0, 3, 5]))
        tensor([[   8,    9, -100,    6, -100]])
    """
    flat = labels.reshape(-1)
    segments.check_cu_seqlens(cu_seqlens, flat.numel())
    shifted = torch.full_like(flat, IGNORE_INDEX)
    shifted[:-1] = flat[1:]
    shifted[cu_seqlens[1:].long() - 1] = IGNORE_INDEX
    return shifted.view_as(labels)


def num_targets(shift_labels: Tensor) -> Tensor:
    """How many targets are trained: an int64 scalar tensor on the device of ``shift_labels``.

    Example:
        >>> num_targets(torch.tensor([8, 9, -100, 6, -100]))
        tensor(3)
    """
    return (shift_labels != IGNORE_INDEX).sum()


def batch_cu_seqlens(batch: Mapping[str, Any]) -> Tensor:
    """The document boundaries of a batch, from the most explicit thing that it carries.

    In this order: ``cu_seqlens``; a right-padded ``attention_mask`` with a padded row; ``position_ids``; else every
    row is one document.

    Args:
        batch: with ``input_ids`` ``[batch, seq]``.

    Returns:
        int32 ``[num_documents + 1]`` over the flattened batch.

    Raises:
        ValueError: if the boundaries contradict the tokens or the mask is not right-padded.

    Example:
        >>> batch_cu_seqlens({"input_ids": torch.zeros(2, 3, dtype=torch.long)})
        tensor([0, 3, 6], dtype=torch.int32)
    """
    input_ids = batch["input_ids"]
    rows, columns = input_ids.shape
    if batch.get("cu_seqlens") is not None:
        cu_seqlens = batch["cu_seqlens"]
        segments.check_cu_seqlens(cu_seqlens, rows * columns)
        return cu_seqlens
    mask = batch.get("attention_mask")
    if mask is not None and not bool(mask.bool().all()):
        return segments.cu_seqlens_from_attention_mask(mask)
    if batch.get("position_ids") is not None:
        return segments.cu_seqlens_from_position_ids(batch["position_ids"].expand(rows, columns))
    return segments.cu_seqlens_from_lengths([columns] * rows).to(input_ids.device)


def token_count(batch: Mapping[str, Any]) -> Tensor:
    """Valid targets of a batch after the shift: an int64 scalar tensor.

    The one count by which losses are weighted, whoever does the weighting. A batch that carries ``shift_labels``
    (a context-parallel shard) is counted by them, any other by its ``labels`` shifted inside each document.

    Raises:
        ValueError: if the batch has neither ``shift_labels`` nor ``labels``.

    Example:
        >>> token_count({"input_ids": torch.ones(1, 3).long(), "labels": torch.tensor([[-100, 4, 5]])})
        tensor(2)
    """
    if batch.get("shift_labels") is not None:
        return num_targets(batch["shift_labels"])
    if batch.get("labels") is None:
        raise ValueError(f"cannot count targets: the batch has no 'labels', only {sorted(batch)}")
    return num_targets(shift(batch["labels"], batch_cu_seqlens(batch)))
