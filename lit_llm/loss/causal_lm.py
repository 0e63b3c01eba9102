"""The loss of next-token prediction, with the memory of one chunk of logits at a time."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lit_llm import targets

__all__ = ["causal_lm_loss", "shifted_labels"]


def shifted_labels(batch: Mapping[str, Any]) -> Tensor:
    """The targets of a batch: its ``shift_labels`` if it was sharded, else its ``labels`` shifted in each document.

    Raises:
        ValueError: if the batch has neither.
    """
    if batch.get("shift_labels") is not None:
        return batch["shift_labels"]
    if batch.get("labels") is None:
        raise ValueError(f"the batch has no 'labels', only {sorted(batch)}: a loss needs them, shaped like 'input_ids'")
    return targets.shift(batch["labels"], targets.batch_cu_seqlens(batch))


def causal_lm_loss(logits: Tensor, batch: Mapping[str, Any], chunk_size: int = 2048) -> Tensor:
    """Mean cross-entropy over the valid targets of a batch; 0, with zero gradients, if it has none.

    Softmax is computed in float32, for ``chunk_size`` tokens at a time, and again in the backward: a full float32 copy
    of the logits would dominate the memory of long contexts.

    Args:
        logits: ``[batch, seq, vocab]``, the model's output at each token.
        batch: with ``shift_labels``, or with ``labels`` and its document boundaries.
        chunk_size: tokens per chunk.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: if the batch has no labels or their shape is not that of the logits.

    Example:
        >>> batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[-100, 2, 3]])}
        >>> causal_lm_loss(torch.zeros(1, 3, 4), batch)
        tensor(1.3863)
    """
    labels = shifted_labels(batch)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"logits are {list(logits.shape)}, but the targets are {list(labels.shape)}")
    rows, flat = logits.flatten(0, -2), labels.flatten()
    total = sum(
        (
            checkpoint(_chunk_loss, chunk, chunk_labels, use_reentrant=False, preserve_rng_state=False)
            for chunk, chunk_labels in zip(rows.split(chunk_size), flat.split(chunk_size), strict=True)
        ),
        start=torch.zeros((), dtype=torch.float32, device=logits.device),
    )
    return total / targets.num_targets(flat).clamp(min=1)


def _chunk_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, ignore_index=targets.IGNORE_INDEX, reduction="sum")
