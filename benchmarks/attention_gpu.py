"""One CUDA device: packed attention by tiles against one dense mask. Yields nothing without a device."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lit_llm.context import make_plan, ring_attention


def run(repeats: int = 20) -> Iterator[dict[str, Any]]:
    if not torch.cuda.is_available():
        return
    for dtype in (torch.bfloat16, torch.float32):
        cu_seqlens = [0, *(1024 * number for number in range(1, 9))]
        q, k, v, grad = torch.randn(4, cu_seqlens[-1], 16, 64, device="cuda", dtype=dtype).unbind()
        document = torch.arange(cu_seqlens[-1], device="cuda") // 1024
        mask = (document[:, None] == document[None]).tril()
        plan = make_plan(cu_seqlens, 1)

        def tiles() -> torch.Tensor:
            return ring_attention(*_leaves(q, k, v), plan)  # noqa: B023

        def dense() -> torch.Tensor:
            q_, k_, v_ = (leaf.transpose(0, 1)[None] for leaf in _leaves(q, k, v))  # noqa: B023
            out = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask)  # noqa: B023
            return out[0].transpose(0, 1)

        ours, theirs = _milliseconds(tiles, grad, repeats), _milliseconds(dense, grad, repeats)
        yield {
            "name": f"eight_documents_{str(dtype).removeprefix('torch.')}",
            "value": ours,
            "unit": "ms per forward and backward of 8 documents of 1,024 tokens, 16 heads of 64",
            "baseline": "scaled_dot_product_attention with a dense mask",
            "ratio": theirs / ours,
            "target": None,
            "holds": None,
        }


def _leaves(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in tensors)
    return q, k, v


def _milliseconds(function: Callable[[], torch.Tensor], grad: torch.Tensor, repeats: int) -> float:
    times = []
    for _ in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function().backward(grad)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[3:])
