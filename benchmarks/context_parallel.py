"""Attention over a packed sequence: two ranks against one, balanced against zigzag, tiles against a dense mask."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_llm.context import Layout, make_plan, ring_attention, rows_read
from lit_llm.gates.processes import run_ranks

HEADS, HEAD_DIM = 8, 64


def run(repeats: int = 5) -> Iterator[dict[str, Any]]:
    one_document = [0, 4096]
    for dtype in (torch.float32, torch.bfloat16):
        seconds = run_ranks(_ring_and_alone, 2, one_document, dtype, repeats, timeout=600, start_method="fork")
        ring = statistics.median(max(times) for times in zip(*(answer[0] for answer in seconds), strict=True))
        alone = statistics.median(seconds[0][1])
        yield {
            "name": f"two_ranks_{str(dtype).removeprefix('torch.')}",
            "value": ring,
            "unit": "s per forward and backward of 4,096 tokens on two ranks, one thread each",
            "baseline": "one process with one thread, the other idle",
            "ratio": alone / ring,
            "target": None,
            "holds": None,
        }
    lengths = torch.randn(200, generator=torch.Generator().manual_seed(0)).mul(1.5).add(7.6 - 1.125).exp().long() + 8
    cu_seqlens = [0, *lengths.cumsum(0).tolist()]
    work = {layout: _imbalance(cu_seqlens, 64, layout) for layout in ("balanced", "zigzag")}
    yield {
        "name": "balance_64_ranks",
        "value": work["balanced"],
        "unit": "largest over mean work of a rank, 200 log-normal documents, 16 blocks a rank",
        "baseline": "zigzag",
        "ratio": work["zigzag"] / work["balanced"],
        "target": None,
        "holds": None,
    }
    for kind, boundaries in (("one_document", one_document), ("packed", list(range(0, 4097, 256)))):
        ring, exchange = (statistics.mean(_bytes_sent(boundaries, 64, method)) for method in ("ring", "exchange"))
        yield {
            "name": f"bytes_64_ranks_{kind}",
            "value": exchange / 2**20,
            "unit": "MiB of keys and values that a rank sends in a forward by exchange, 4,096 tokens, fp32, 8 x 64",
            "baseline": "ring",
            "ratio": ring / exchange if exchange else None,
            "target": None,
            "holds": None,
        }
    packed = [0, *(256 * number for number in range(1, 9))]
    tiles, dense = _against_dense_mask(packed, repeats)
    yield {
        "name": "eight_documents",
        "value": tiles,
        "unit": "s per forward and backward of 8 documents of 256 tokens, one thread",
        "baseline": "scaled_dot_product_attention with a dense mask",
        "ratio": dense / tiles,
        "target": None,
        "holds": None,
    }


def _inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, HEADS, HEAD_DIM, generator=generator).to(dtype) for _ in range(4)]


def _time(function: Callable[[], Any], repeats: int, before: Callable[[], Any] = lambda: None) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):  # the first is a warm-up
        before()
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def _ring_and_alone(rank: int, cu_seqlens: Sequence[int], dtype: torch.dtype, repeats: int) -> tuple[list, list]:
    """Seconds of the ring on this rank; then rank 0 does all the work while the others wait."""
    tensors = _inputs(cu_seqlens[-1], dtype)
    plan = make_plan(cu_seqlens, dist.get_world_size())
    held = [tensor[plan.indices(rank)] for tensor in tensors]
    ring = _time(lambda: _step(held, plan, dist.group.WORLD), repeats, dist.barrier)
    alone = _time(lambda: _step(tensors, make_plan(cu_seqlens, 1), None), repeats) if rank == 0 else []
    return ring, alone


def _step(tensors: Sequence[Tensor], plan: Any, group: Any) -> None:
    q, k, v = (tensor.detach().requires_grad_() for tensor in tensors[:3])
    ring_attention(q, k, v, plan, group).backward(tensors[3])


def _imbalance(cu_seqlens: Sequence[int], num_ranks: int, layout: Layout) -> float:
    plan = make_plan(cu_seqlens, num_ranks, layout, blocks_per_rank=16)
    costs = [plan.cost(rank) for rank in range(num_ranks)]
    return max(costs) / statistics.mean(costs)


def _bytes_sent(cu_seqlens: Sequence[int], num_ranks: int, method: str) -> list[int]:
    """Bytes of keys and values that each rank sends in one forward."""
    plan, row = make_plan(cu_seqlens, num_ranks), 2 * HEADS * HEAD_DIM * 4
    if method == "exchange":
        others = [[other for other in range(num_ranks) if other != rank] for rank in range(num_ranks)]
        ranges = [[r for other in others[rank] for r in rows_read(plan, other, rank)] for rank in range(num_ranks)]
        return [row * sum(stop - start for start, stop in found) for found in ranges]
    sent = [0] * num_ranks
    for source in range(num_ranks):
        for hop in range(plan.last_hop(source)):
            sent[(source + hop) % num_ranks] += row * plan.lengths[source]
    return sent


def _against_dense_mask(cu_seqlens: Sequence[int], repeats: int) -> tuple[float, float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tensors = _inputs(cu_seqlens[-1], torch.float32)
    document = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), torch.tensor(cu_seqlens).diff())
    mask = (document[:, None] == document[None]) & torch.ones(len(document), len(document), dtype=torch.bool).tril()

    def dense() -> None:
        q, k, v = (tensor.transpose(0, 1)[None].requires_grad_() for tensor in tensors[:3])
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out.backward(tensors[3].transpose(0, 1)[None])

    plan = make_plan(cu_seqlens, 1)
    tiles = statistics.median(_time(lambda: _step(tensors, plan, None), repeats))
    masked = statistics.median(_time(dense, repeats))
    torch.set_num_threads(threads)
    return tiles, masked
