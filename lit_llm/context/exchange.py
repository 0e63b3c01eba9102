"""Attention after one planned exchange: every rank receives exactly the keys and values that its tiles read.

The plan says which rows of which rank a rank's tiles read, on both sides alike, so one all-to-all with uneven parts
brings them and nothing else. For one long document that is about half of an all-gather, for packed documents shorter
than a shard almost nothing. Local tiles are computed while the rows are under way; in the backward the gradients of the
received rows travel home while local tiles are differentiated. The received rows are kept for the backward: memory in
return for half of the traffic of a ring.

The dense special case is the all-gather of Llama 3 (arXiv 2407.21783, section 3.3.2).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_llm.context.kernels import attend, attend_backward, empty_state
from lit_llm.context.plan import ShardPlan, Tile
from lit_llm.context.ring import check_shard

__all__ = ["exchange_attention", "rows_read"]


def rows_read(plan: ShardPlan, q_rank: int, k_rank: int, window: int | None = None) -> list[tuple[int, int]]:
    """The rows of ``k_rank``'s shard that the tiles of ``q_rank`` read: disjoint ranges ``[start, stop)``, ascending.

    Example:
        >>> from lit_llm.context.plan import make_plan
        >>> rows_read(make_plan([0, 6, 8, 12], num_ranks=2, layout="zigzag"), 0, 1)
        [(5, 6)]
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((tile.k_start, tile.k_stop) for tile in plan.tiles(q_rank, k_rank, window)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def exchange_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ShardPlan,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention inside the documents of a packed sequence whose tokens are spread over ``group``.

    Arguments, result and errors are those of :func:`lit_llm.context.ring_attention`.

    Example:
        >>> from lit_llm.context.plan import make_plan
        >>> q, k, v = torch.randn(3, 12, 4, 16)
        >>> exchange_attention(q, k, v, make_plan([0, 5, 12], num_ranks=1)).shape
        torch.Size([12, 4, 16])
    """
    rank = check_shard(q, k, v, plan, group)
    return _Exchange.apply(q, k, v, plan, rank, group, q.shape[-1] ** -0.5 if scale is None else scale, window)


@dataclass(frozen=True)
class _Traffic:
    """What one rank sends and receives, and its remote tiles with keys counted in the received rows."""

    num_sent: list[int]
    num_received: list[int]
    sent_rows: Tensor
    tiles: list[Tile]
    silent: bool  # nobody sends anything: every rank knows it, and none takes part


def _traffic(plan: ShardPlan, rank: int, window: int | None) -> _Traffic:
    ranks = range(plan.num_ranks)
    sent = [rows_read(plan, other, rank, window) if other != rank else [] for other in ranks]
    received = [rows_read(plan, rank, other, window) if other != rank else [] for other in ranks]
    tiles, offset = [], 0
    for other, ranges in enumerate(received):
        for start, stop in ranges:
            for tile in plan.tiles(rank, other, window):
                if start <= tile.k_start < stop:
                    shift = offset - start
                    tiles.append(tile._replace(k_start=tile.k_start + shift, k_stop=tile.k_stop + shift))
            offset += stop - start
    rows = [torch.arange(start, stop) for ranges in sent for start, stop in ranges]
    return _Traffic(
        num_sent=[sum(stop - start for start, stop in ranges) for ranges in sent],
        num_received=[sum(stop - start for start, stop in ranges) for ranges in received],
        sent_rows=torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64),
        tiles=tiles,
        silent=not any(plan.last_hop(one, window) for one in ranks),
    )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: ShardPlan,
        rank: int,
        group: dist.ProcessGroup | None,
        scale: float,
        window: int | None,
    ) -> Tensor:
        traffic = _traffic(plan, rank, window)
        own_tiles = plan.tiles(rank, rank, window)
        rows = traffic.sent_rows.to(k.device)
        received = k.new_empty(sum(traffic.num_received), 2, *k.shape[1:])
        work = None
        if not traffic.silent:
            sent = torch.stack([k[rows], v[rows]], 1)
            work = dist.all_to_all_single(
                received, sent, traffic.num_received, traffic.num_sent, group=group, async_op=True
            )
        out, lse = empty_state(q)
        attend(q, k, v, own_tiles, out, lse, scale, first=True)
        if work is not None:
            work.wait()
        attend(q, received[:, 0], received[:, 1], traffic.tiles, out, lse, scale, first=False)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, received, rows)
        ctx.traffic, ctx.own_tiles, ctx.group, ctx.scale = traffic, own_tiles, group, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, received, rows = ctx.saved_tensors
        traffic: _Traffic = ctx.traffic
        grad_out = grads[0].to(q.dtype)
        dq, dk, dv = (torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (q, k, v))
        remote = torch.zeros_like(received, dtype=lse.dtype)
        inputs = (grad_out, q, received[:, 0], received[:, 1], out, lse)
        attend_backward(*inputs, traffic.tiles, dq, remote[:, 0], remote[:, 1], ctx.scale)
        returned, work = remote.new_empty(len(rows), 2, *k.shape[1:]), None
        if not traffic.silent:
            work = dist.all_to_all_single(
                returned, remote, traffic.num_sent, traffic.num_received, group=ctx.group, async_op=True
            )
        attend_backward(grad_out, q, k, v, out, lse, ctx.own_tiles, dq, dk, dv, ctx.scale)
        if work is not None:
            work.wait()
            dk.index_add_(0, rows, returned[:, 0])
            dv.index_add_(0, rows, returned[:, 1])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None
