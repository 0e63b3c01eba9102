"""One batch, split over the ranks of a context-parallel group.

The batch is flattened to one packed sequence, its labels are shifted there, and only then is it cut: a shard's last
token keeps its target although the next token lies on another rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_llm import segments, targets
from lit_llm.context.plan import Layout, ShardPlan, make_plan

__all__ = ["Shard", "check_batch", "gather_tokens", "keep_one_target", "shard_batch"]

# Entries that describe the packed sequence as a whole, or that the shard replaces by its own.
_SEQUENCE_ENTRIES = ("attention_mask", "cu_seqlens", "document_ids", "max_seqlen", "position_ids")


@dataclass(frozen=True)
class Shard:
    """What one rank gets of a batch.

    Attributes:
        batch: ``input_ids``, ``position_ids`` and, if the batch has labels, ``labels`` and ``shift_labels``, all
            ``[1, tokens]``; every other per-token entry cut the same way; everything else as it was.
        plan: who holds what.
        rank: whose shard this is.
        num_targets: valid targets in the shard, an int64 scalar tensor; None without labels.
    """

    batch: dict[str, Any]
    plan: ShardPlan
    rank: int
    num_targets: Tensor | None


def check_batch(batch: Any) -> None:
    """Refuse a batch that cannot be split.

    Raises:
        ValueError: with what is wrong and what is expected.

    Example:
        >>> check_batch({"input_ids": torch.zeros(2, 8, dtype=torch.long)})
    """
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a context-parallel batch must be a dict with 'input_ids' [batch, seq], got {type(batch).__name__}: "
            "return a dict from the collate function"
        )
    if not isinstance(batch.get("input_ids"), Tensor):
        raise ValueError(
            f"the batch has no tensor 'input_ids', only {sorted(map(str, batch))}: context parallelism needs "
            "'input_ids' [batch, seq], and 'labels' of the same shape to train"
        )
    input_ids = batch["input_ids"]
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"'input_ids' must be [batch, seq] and hold tokens, got shape {list(input_ids.shape)}")
    for key in ("labels", "document_ids", "attention_mask"):
        entry = batch.get(key)
        if entry is not None and (not isinstance(entry, Tensor) or entry.shape != input_ids.shape):
            shape = list(entry.shape) if isinstance(entry, Tensor) else type(entry).__name__
            raise ValueError(f"'{key}' is {shape}, but 'input_ids' is {list(input_ids.shape)}: they must be equal")


def shard_batch(
    batch: Mapping[str, Any],
    num_ranks: int,
    rank: int,
    layout: Layout = "balanced",
    blocks_per_rank: int = 8,
) -> Shard:
    """The shard of ``rank``: labels shifted on the full sequence, then permuted and sliced.

    Args:
        batch: with ``input_ids`` ``[batch, seq]``, optionally ``labels`` (unshifted, -100 = not trained),
            ``cu_seqlens``, ``position_ids`` or a right-padded ``attention_mask``.
        num_ranks: ranks that share the batch.
        rank: whose shard.
        layout: see :func:`lit_llm.context.make_plan`.
        blocks_per_rank: see :func:`lit_llm.context.make_plan`.

    Returns:
        The shard. Positions count from each document's start, also for documents that began on another rank.

    Raises:
        ValueError: for a batch that cannot be split (see :func:`check_batch`), or with fewer tokens than ranks.

    Example:
        >>> batch = {"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}
        >>> [shard_batch(batch, 2, rank, "contiguous").batch["shift_labels"].tolist() for rank in (0, 1)]
        [[[1, 2, 3]], [[4, 5, -100]]]
    """
    check_batch(batch)
    input_ids = batch["input_ids"]
    cu_seqlens = targets.batch_cu_seqlens(batch)
    plan = make_plan(cu_seqlens.tolist(), num_ranks, layout, blocks_per_rank)
    indices = plan.indices(rank, input_ids.device)

    full = {key: value for key, value in batch.items() if key not in _SEQUENCE_ENTRIES}
    full["position_ids"] = segments.position_ids(cu_seqlens.to(input_ids.device)).view_as(input_ids)
    if full.get("labels") is not None:
        full["shift_labels"] = targets.shift(full["labels"], cu_seqlens)
    local = {
        key: value.flatten(0, 1)[indices][None] if _is_per_token(value, input_ids) else value
        for key, value in full.items()
    }
    num_targets = targets.num_targets(local["shift_labels"]) if "shift_labels" in local else None
    return Shard(local, plan, rank, num_targets)


def keep_one_target(shard: Shard) -> Shard:
    """A shard whose mean loss is finite: if it has no valid target, its first token gets one.

    A mean over no targets is 0 / 0, and a gradient weight of zero does not make NaN zero. The caller weights the
    loss by the true ``num_targets``, so the stand-in adds exactly nothing. Decided on the device, without a wait.
    """
    if shard.num_targets is None:
        return shard
    shift_labels = shard.batch["shift_labels"].clone()
    shift_labels[0, 0] = torch.where(shard.num_targets > 0, shift_labels[0, 0], shard.batch["input_ids"][0, 0])
    return Shard({**shard.batch, "shift_labels": shift_labels}, shard.plan, shard.rank, shard.num_targets)


def gather_tokens(local: Tensor, plan: ShardPlan, group: dist.ProcessGroup | None = None) -> Tensor:
    """The whole sequence, in its original order, from what every rank has of it.

    Args:
        local: one entry for each token of this rank's shard, in shard order: ``[tokens, …]``.
        plan: who holds what.
        group: the ranks that share the sequence; None for one.

    Returns:
        ``[total, …]``, the same on every rank. Not differentiable.

    Raises:
        ValueError: if ``local`` has not as many entries as the shard has tokens.

    Example:
        >>> import torch
        >>> gather_tokens(torch.tensor([5, 6, 7]), make_plan([0, 3], 1))
        tensor([5, 6, 7])
    """
    rank = 0 if group is None else dist.get_rank(group)
    if local.shape[0] != plan.lengths[rank]:
        raise ValueError(
            f"{local.shape[0]} entries for the {plan.lengths[rank]} tokens of rank {rank}: give one for each"
        )
    parts = [local.detach()]
    if group is not None:
        # padded to equal lengths: not every backend gathers unequal ones
        padded = local.new_zeros(max(plan.lengths), *local.shape[1:])
        padded[: local.shape[0]] = local.detach()
        parts = [torch.empty_like(padded) for _ in range(plan.num_ranks)]
        dist.all_gather(parts, padded, group=group)
        parts = [part[:length] for part, length in zip(parts, plan.lengths, strict=True)]
    indices = torch.cat([plan.indices(number, local.device) for number in range(plan.num_ranks)])
    return torch.cat(parts)[indices.argsort()]


def _is_per_token(value: Any, input_ids: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == input_ids.shape
