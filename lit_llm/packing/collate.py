"""From samples to a batch: rows of documents laid end to end, padded, with their boundaries written down.

::

    samples        (a0 a1 a2) (b0 b1)                     max_length 7
    input_ids       a0 a1 a2 | b0 b1 | pad pad
    labels         -100 a1 a2|-100 b1|-100 -100           the first token of a document has no predecessor to predict it
    position_ids    0  1  2  | 0  1  |  0   1
    document_ids    0  0  0  | 1  1  |  2   2
    cu_seqlens      0          3       5        7

Padding is a document of its own, so that no real token attends to it, and wholly masked, so that it is not trained. A
row of no samples is one such document: a *filler*, which keeps ranks in step where data has run out.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lit_llm import segments
from lit_llm.targets import IGNORE_INDEX

__all__ = ["Sample", "collate"]

Sample = tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]
"""``input_ids`` and ``labels`` of one document, ``[length]`` each; labels are unshifted, -100 = not trained."""


def collate(packs_of_samples: Sequence[Sequence[Sample]], max_length: int, pad_id: int) -> dict[str, Any]:
    """One batch from the samples of each of its rows.

    Args:
        packs_of_samples: for each row its samples, in order; an empty row is a filler.
        max_length: tokens of a row.
        pad_id: the token that fills a row up.

    Returns:
        ``input_ids, labels, position_ids, document_ids``: int64 ``[batch, max_length]``; ``cu_seqlens``: int32
        ``[num_documents + 1]`` over the flattened batch; ``max_seqlen``: the longest document, a Python int (a tensor
        would force a device-to-host copy in every attention layer).

    Raises:
        ValueError: if there are no rows, a sample is empty or its labels are of another length, or a row is too long.

    Example:
        >>> a, b = (np.array([5, 6, 7]), np.array([-100, 6, 7])), (np.array([8, 9]), np.array([8, 9]))
        >>> batch = collate([[a, b]], max_length=7, pad_id=0)
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 7, 8, 9, 0, 0]], [[-100, 6, 7, -100, 9, -100, -100]])
        >>> batch["cu_seqlens"].tolist(), batch["max_seqlen"]
        ([0, 3, 5, 7], 3)
    """
    if not packs_of_samples:
        raise ValueError("cannot collate a batch of no rows")
    shape = (len(packs_of_samples), max_length)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    lengths: list[int] = []
    for row, samples in enumerate(packs_of_samples):
        used = 0
        for tokens, targets in samples:
            length = len(tokens)
            _check_sample(row, length, len(targets), used, max_length)
            input_ids[row, used : used + length] = tokens
            labels[row, used + 1 : used + length] = targets[1:]
            lengths.append(length)
            used += length
        if used < max_length:
            lengths.append(max_length - used)
    cu_seqlens = segments.cu_seqlens_from_lengths(lengths)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "position_ids": segments.position_ids(cu_seqlens).view(shape),
        "document_ids": segments.document_ids(cu_seqlens).view(shape),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max(lengths),
    }


def _check_sample(row: int, length: int, num_labels: int, used: int, max_length: int) -> None:
    if length == 0:
        raise ValueError(f"row {row} holds a sample without tokens: leave it out")
    if num_labels != length:
        raise ValueError(f"row {row} holds a sample of {length} tokens but {num_labels} labels")
    if used + length > max_length:
        raise ValueError(f"row {row} holds {used + length} or more tokens, more than max_length {max_length}")
