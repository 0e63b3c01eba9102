"""Every backend, tile by tile, against autograd through matrix products in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
# the same queries in bands: one tile of each causal kind, then edges that cut a triangle off
BANDS = [
    Tile(0, 20, 0, 20, True, -6),
    Tile(20, 41, 20, 41, True, -19),
    Tile(20, 30, 0, 20, False, 0),
    Tile(4, 20, 41, 53, False, -5),
    Tile(30, 41, 53, 54, False),
    Tile(40, 41, 54, 70, False, 0),
]


def cases():
    for name, case in BACKENDS.items():
        marks = [pytest.mark.gpu] if case[0] == "cuda" else []
        if case[0] == "cuda" and not torch.cuda.is_available():
            marks.append(pytest.mark.skip(reason="needs a CUDA device"))
        yield pytest.param(*case, id=name, marks=marks)


@pytest.mark.parametrize(("device", "dtype", "backend", "tolerance"), list(cases()))
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("tiles", [TILES, BANDS], ids=["tiles", "bands"])
def test_tiles_merge_and_differentiate(monkeypatch, device, dtype, backend, tolerance, heads, kv_heads, tiles):
    monkeypatch.setattr(kernels, "_backend", lambda q: backend)
    generator = torch.Generator().manual_seed(0)
    shapes = [(41, heads, 16), (70, kv_heads, 16), (70, kv_heads, 16), (41, heads, 16)]
    q, k, v, grad = (torch.randn(s, generator=generator).to(device=device, dtype=dtype) for s in shapes)
    leaves = [tensor.double().cpu().requires_grad_() for tensor in (q, k, v)]
    visible = torch.zeros(41, 70, dtype=torch.bool)
    for tile in tiles:
        part = torch.ones(tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, dtype=torch.bool)
        part = part.tril() if tile.causal else part
        part = part if tile.first_key is None else part.triu(tile.first_key)
        visible[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] = part
    outputs = []
    for head in range(heads):
        key, value = (leaf[:, head // (heads // kv_heads)] for leaf in leaves[1:])
        scores = (leaves[0][:, head] @ key.T / math.sqrt(16)).masked_fill(~visible, -math.inf)
        outputs.append(scores.softmax(-1) @ value)
    expected = torch.stack(outputs, 1)
    expected.backward(grad.double().cpu())

    out, lse = empty_state(q)
    attend(q, k, v, tiles, out, lse, 0.25, first=True)
    accumulated = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (q, k, v)]
    attend_backward(grad, q, k, v, out.to(dtype), lse, tiles, *accumulated, 0.25)
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


@given(queries=st.integers(1, 60), keys=st.integers(1, 60), first_key=st.integers(-60, 0), causal=st.booleans())
def test_parts_of_a_band_cover_it_once(queries, keys, first_key, causal):
    keys = queries if causal else keys
    queries = min(queries, keys - first_key)  # every query sees a key
    tile = Tile(3, 3 + queries, 5, 5 + keys, causal, first_key)
    wanted = torch.ones(queries, keys, dtype=torch.int).triu(first_key)
    count = torch.zeros(3 + queries, 5 + keys, dtype=torch.int)
    for part in kernels._parts([tile], knows_windows=False):
        block = torch.ones_like(count[part.rows, part.columns])
        assert block.numel() and part.window is None
        block = block.tril() if part.causal else block
        count[part.rows, part.columns] += block.flip(0, 1) if part.backwards else block
    assert count[3:, 5:].equal(wanted.tril() if causal else wanted)
