"""Every backend, tile by tile, against autograd through matrix products in float64."""

import math

import pytest
import torch

from lit_llm.context import Tile, kernels
from lit_llm.context.kernels import attend, attend_backward, empty_state

BACKENDS = {
    "cpu": ("cpu", torch.float32, kernels._CPU, 1e-6),
    "cpu bf16": ("cpu", torch.bfloat16, kernels._CPU, 2e-2),
    "plain": ("cpu", torch.float32, kernels.PLAIN, 1e-6),
    "plain bf16": ("cpu", torch.bfloat16, kernels.PLAIN, 2e-2),
    "flash bf16": ("cuda", torch.bfloat16, kernels._CUDA_FLASH, 2e-2),
    "flash fp16": ("cuda", torch.float16, kernels._CUDA_FLASH, 5e-3),
    "efficient": ("cuda", torch.float32, kernels._CUDA_EFFICIENT, 2e-3),  # its products may use TF32
}
# 41 queries against 70 keys: a causal tile for all, then full tiles of a few, merged one after the other
TILES = [
    Tile(0, 41, 0, 41, True),
    Tile(0, 41, 41, 50, False),
    Tile(7, 30, 50, 51, False),
    Tile(29, 41, 51, 70, False),
]


def cases():
    for name, case in BACKENDS.items():
        marks = [pytest.mark.gpu] if case[0] == "cuda" else []
        if case[0] == "cuda" and not torch.cuda.is_available():
            marks.append(pytest.mark.skip(reason="needs a CUDA device"))
        yield pytest.param(*case, id=name, marks=marks)


@pytest.mark.parametrize(("device", "dtype", "backend", "tolerance"), list(cases()))
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_tiles_merge_and_differentiate(monkeypatch, device, dtype, backend, tolerance, heads, kv_heads):
    monkeypatch.setattr(kernels, "_backend", lambda q: backend)
    generator = torch.Generator().manual_seed(0)
    shapes = [(41, heads, 16), (70, kv_heads, 16), (70, kv_heads, 16), (41, heads, 16)]
    q, k, v, grad = (torch.randn(s, generator=generator).to(device=device, dtype=dtype) for s in shapes)
    leaves = [tensor.double().cpu().requires_grad_() for tensor in (q, k, v)]
    visible = torch.zeros(41, 70, dtype=torch.bool)
    for tile in TILES:
        part = torch.ones(tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, dtype=torch.bool)
        visible[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] = part.tril() if tile.causal else part
    outputs = []
    for head in range(heads):
        key, value = (leaf[:, head // (heads // kv_heads)] for leaf in leaves[1:])
        scores = (leaves[0][:, head] @ key.T / math.sqrt(16)).masked_fill(~visible, -math.inf)
        outputs.append(scores.softmax(-1) @ value)
    expected = torch.stack(outputs, 1)
    expected.backward(grad.double().cpu())

    out, lse = empty_state(q)
    attend(q, k, v, TILES, out, lse, 0.25, first=True)
    accumulated = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (q, k, v)]
    attend_backward(grad, q, k, v, out.to(dtype), lse, TILES, *accumulated, 0.25)
    found = [out, *accumulated]
    wanted = [expected.detach(), *(leaf.grad for leaf in leaves)]
    for name, got, reference in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        error = (got.double().cpu() - reference).norm() / reference.norm()
        assert error < tolerance, f"{name}: {error}"


def test_large_scores_do_not_overflow():
    """Scores of several hundred: exp() of them is infinite, a merge through the log-sum-exp is not."""
    q, k, v = torch.randn(3, 8, 2, 16, generator=torch.Generator().manual_seed(0)).mul(30).unbind()
    out, lse = empty_state(q)
    attend(
        q, k, v, [Tile(0, 4, 0, 4, True), Tile(0, 4, 4, 8, False), Tile(4, 8, 4, 8, True)], out, lse, 1.0, first=True
    )
    assert out.isfinite().all() and lse.isfinite().all() and lse.max() > 500
