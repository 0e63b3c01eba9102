"""Ring attention over a plan: keys and values travel from rank to rank while each computes on what it holds.

At step ``s`` rank ``r`` computes the tiles of its queries against the block of rank ``r - s``, while that block
already travels on to ``r + 1``. A block travels only as far as somebody reads it (:meth:`ShardPlan.last_hop`), and
steps without tiles compute nothing. In the backward the block makes the same journey, and its gradient follows it from
its first reader to its last, who sends the sum home.

Liu et al., Ring Attention, arXiv 2310.01889; the tiles make it exact for packed documents and any layout.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_llm.context.kernels import attend, attend_backward, empty_state
from lit_llm.context.plan import ShardPlan, Tile

__all__ = ["ring_attention"]

_Operation = tuple[Any, Tensor, int]  # dist.isend or dist.irecv, the block, the peer (any integer congruent to it)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ShardPlan,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention inside the documents of a packed sequence whose tokens are spread over ``group``.

    Args:
        q: queries of this rank's shard, ``[tokens, heads, head_dim]``.
        k: keys, ``[tokens, kv_heads, head_dim]`` with ``heads`` a multiple of ``kv_heads``.
        v: values, like ``k``.
        plan: who holds what; the same on every rank.
        group: the ranks that share the sequence. None if the plan has only one.
        scale: factor of the scores, ``head_dim ** -0.5`` if None.
        window: keys of its document that a query sees at most, itself included; None for all before it.

    Returns:
        The attention output ``[tokens, heads, head_dim]``, differentiable.

    Raises:
        ValueError: if a shape does not fit the plan or the heads do not divide.

    Example:
        >>> from lit_llm.context.plan import make_plan
        >>> q, k, v = torch.randn(3, 12, 4, 16)
        >>> ring_attention(q, k, v, make_plan([0, 5, 12], num_ranks=1)).shape
        torch.Size([12, 4, 16])
    """
    rank = check_shard(q, k, v, plan, group)
    return _Ring.apply(q, k, v, plan, rank, group, q.shape[-1] ** -0.5 if scale is None else scale, window)


def check_shard(q: Tensor, k: Tensor, v: Tensor, plan: ShardPlan, group: dist.ProcessGroup | None) -> int:
    """Refuse tensors that are not this rank's shard of the plan; answers with its rank in ``group``.

    Raises:
        ValueError: if a shape does not fit the plan or the heads do not divide.
    """
    rank = 0 if group is None else dist.get_rank(group)
    size = 1 if group is None else dist.get_world_size(group)
    if plan.num_ranks != size:
        raise ValueError(f"the plan is for {plan.num_ranks} ranks, the process group has {size}")
    if q.shape[0] != plan.lengths[rank] or k.shape[0] != q.shape[0] or v.shape != k.shape:
        raise ValueError(
            f"rank {rank} holds {plan.lengths[rank]} tokens, but q, k, v are {list(q.shape)}, {list(k.shape)}, "
            f"{list(v.shape)}: expected [tokens, heads, head_dim]"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot be grouped over {k.shape[1]} key heads")
    return rank


class _Ring(torch.autograd.Function):
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
        out, lse = empty_state(q)
        block = torch.stack([k, v])
        journey = _Journey(plan, rank, group, k.shape[1:], window)
        for step in range(plan.num_ranks):
            transfer = journey.pass_on(block, step)
            attend(q, block[0], block[1], journey.tiles(step), out, lse, scale, first=step == 0)
            block = transfer.wait_for_block()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.rank, ctx.group, ctx.scale, ctx.window = plan, rank, group, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, rank, scale = ctx.plan, ctx.rank, ctx.scale
        grad_out = grads[0].to(q.dtype)
        block = torch.stack([k, v])
        dq = torch.zeros_like(q, dtype=lse.dtype)
        own = torch.zeros_like(block, dtype=lse.dtype)
        journey = _Journey(plan, rank, ctx.group, k.shape[1:], ctx.window)
        received, home = _Transfer(), _Transfer()
        for step in range(plan.num_ranks):
            transfer = journey.pass_on(block, step)
            partial = own if step == 0 else torch.zeros_like(block, dtype=lse.dtype)
            tiles = journey.tiles(step)
            attend_backward(grad_out, q, block[0], block[1], out, lse, tiles, dq, partial[0], partial[1], scale)
            so_far = received.wait()
            if so_far is not None:
                partial += so_far
            received, returning = journey.pass_gradient(partial, step)
            if returning.block is not None:
                home = returning
            block = transfer.wait_for_block()
        received.wait()
        returned = home.wait()
        if returned is not None:
            own += returned
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), None, None, None, None, None


class _Transfer:
    """Messages under way, and the block that they bring, if any."""

    def __init__(
        self, block: Tensor | None = None, works: list[dist.Work] | None = None, sent: Tensor | None = None
    ) -> None:
        self.block, self.works, self.sent = block, works or [], sent  # what is sent has to stay alive until then

    def wait(self) -> Tensor | None:
        for work in self.works:
            work.wait()
        self.works, self.sent = [], None
        return self.block

    def wait_for_block(self) -> Tensor:
        block = self.wait()
        return torch.empty(2, 0) if block is None else block


class _Journey:
    """The messages of one ring pass, as seen by one rank.

    Both ends of every link post their messages in the same order, step by step: the block first, then gradients.
    Gloo matches messages between two ranks by that order, and NCCL deadlocks without it.
    """

    def __init__(
        self, plan: ShardPlan, rank: int, group: dist.ProcessGroup | None, row: torch.Size, window: int | None
    ) -> None:
        self.plan, self.rank, self.group, self.size, self.window = plan, rank, group, plan.num_ranks, window
        self._row = row  # shape of one token's keys, [kv_heads, head_dim]

    def source(self, step: int) -> int:
        """The rank whose block is here at ``step``."""
        return (self.rank - step) % self.size

    def tiles(self, step: int) -> tuple[Tile, ...]:
        """The work of this rank's queries on the block of ``step``."""
        return self.plan.tiles(self.rank, self.source(step), self.window)

    def _last_hop(self, rank: int) -> int:
        return self.plan.last_hop(rank, self.window)

    def arrives(self, step: int) -> bool:
        """Whether the block of ``step`` comes this far."""
        return step < self.size and step <= self._last_hop(self.source(step))

    def pass_on(self, block: Tensor, step: int) -> _Transfer:
        """Send the block of ``step`` to the next rank and receive that of ``step + 1``, as far as they are read."""
        operations: list[_Operation] = []
        arriving = None
        if step < self._last_hop(self.source(step)):
            operations.append((dist.isend, block, self.rank + 1))
        if self.arrives(step + 1):
            arriving = block.new_empty(2, self.plan.lengths[self.source(step + 1)], *self._row)
            operations.append((dist.irecv, arriving, self.rank - 1))
        return _Transfer(arriving, self._post(operations), block)

    def pass_gradient(self, partial: Tensor, step: int) -> tuple[_Transfer, _Transfer]:
        """Send on the gradient of the block of ``step``, and receive those that are for this rank.

        Returns:
            The gradient so far of the block of ``step + 1`` (nothing if this rank is its first reader), and the sum
            for this rank's own block if it comes home after this step.
        """
        operations: list[_Operation] = []
        arriving = returning = None
        if step > 0 and self.arrives(step):
            is_last = step == self._last_hop(self.source(step))
            operations.append((dist.isend, partial, self.source(step) if is_last else self.rank + 1))
        if step > 0 and self.arrives(step + 1):
            arriving = partial.new_empty(2, self.plan.lengths[self.source(step + 1)], *self._row)
            operations.append((dist.irecv, arriving, self.rank - 1))
        if step > 0 and step == self._last_hop(self.rank):
            returning = partial.new_empty(2, self.plan.lengths[self.rank], *self._row)
            operations.append((dist.irecv, returning, self.rank + step))
        works = self._post(operations)  # in the order of the operations; each may be waited for only once
        home = [works.pop()] if returning is not None else []
        return _Transfer(arriving, works, partial), _Transfer(returning, home)

    def _post(self, operations: list[_Operation]) -> list[dist.Work]:
        if not operations:
            return []
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(operation, tensor, group=self.group, group_peer=peer % self.size)
                for operation, tensor, peer in operations
            ]
        )
        # NCCL answers with one work for the whole batch: whoever waits first waits for all of it, on the stream
        return works if len(works) == len(operations) else works * len(operations)
