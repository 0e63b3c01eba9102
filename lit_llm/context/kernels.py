r"""Attention over tiles: forward with log-sum-exp, and the backward from the *global* output and log-sum-exp.

For one query with scores :math:`s_j = q \cdot k_j \cdot scale`, attention over all keys is
:math:`o = \sum_j e^{s_j - L} v_j` with :math:`L = \log \sum_j e^{s_j}`. Over two disjoint sets of keys with partial
results :math:`(o_1, L_1)` and :math:`(o_2, L_2)`

.. math::
    L = \log(e^{L_1} + e^{L_2}), \qquad o = o_1 e^{L_1 - L} + o_2 e^{L_2 - L} = o_1 + \sigma(L_2 - L_1) (o_2 - o_1),

so partial results merge exactly, in any order (Milakov and Gimelshein, arXiv 1805.02867; Liu et al., Ring Attention,
arXiv 2310.01889). In the backward the probabilities of a tile are :math:`e^{s - L}` with the global :math:`L`, so
that each tile's gradients can be computed by itself and summed (Dao, arXiv 2307.08691, section 3.1).

A band is split into tiles without a window, exactly and with no masked score computed: causal squares, full rectangles,
and squares in which query :math:`i` sees keys :math:`i` to the last. Read backwards, queries and keys both, the last
kind is a causal square. The CUDA flash kernel knows windows on a causal tile itself.

Everything here works on one packed sequence: queries ``[tokens, heads, head_dim]``, keys and values
``[tokens, kv_heads, head_dim]`` with ``heads`` a multiple of ``kv_heads``, log-sum-exp ``[heads, tokens]`` in float32
(float64 for float64 inputs). Outputs are accumulated in the same precision as the log-sum-exp.

Backends, chosen by device and dtype: the CPU flash kernel; on CUDA the flash kernel for half precision and the
memory-efficient one for float32; plain matrix products for anything else.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lit_llm.context.plan import Tile

__all__ = ["attend", "attend_backward", "empty_state"]

_aten = torch.ops.aten


def empty_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the output ``[tokens, heads, head_dim]`` and log-sum-exp ``[heads, tokens]`` of :func:`attend`."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    tokens, heads, _ = q.shape
    return q.new_empty(q.shape, dtype=dtype), q.new_empty(heads, tokens, dtype=dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Tile], out: Tensor, lse: Tensor, scale: float, first: bool
) -> None:
    """Merge attention over ``tiles`` into ``out`` and ``lse``, in place.

    Args:
        q: ``[q_tokens, heads, head_dim]``.
        k: ``[k_tokens, kv_heads, head_dim]``.
        v: as ``k``.
        tiles: what to compute, causal tiles first.
        out: ``[q_tokens, heads, head_dim]``, from :func:`empty_state`.
        lse: ``[heads, q_tokens]``, from :func:`empty_state`.
        scale: factor of the scores, usually ``head_dim ** -0.5``.
        first: whether the causal tiles find nothing computed yet and are written instead of merged.
    """
    backend = _backend(q)
    for part in _parts(tiles, backend.knows_windows):
        rows, columns = part.rows, part.columns
        queries, keys, values = part.order(q[rows], k[columns], v[columns])
        tile_out, tile_lse = backend.forward(queries, keys, values, part, scale)
        (tile_out,), (tile_lse,) = part.order(tile_out), part.order(tile_lse, dim=1)
        if first and part.causal and not part.backwards:
            out[rows] = tile_out
            lse[:, rows] = tile_lse
        else:
            weight = torch.sigmoid(tile_lse - lse[:, rows])
            out[rows] = torch.lerp(out[rows], tile_out.to(out.dtype), weight.t().unsqueeze(-1))
            lse[:, rows] = torch.logaddexp(lse[:, rows], tile_lse.to(lse.dtype))


def attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Iterable[Tile],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
) -> None:
    """Add the gradients of ``tiles`` to ``dq``, ``dk`` and ``dv``, in place.

    Args:
        grad_out: gradient of the output, ``[q_tokens, heads, head_dim]``.
        q: ``[q_tokens, heads, head_dim]``.
        k: ``[k_tokens, kv_heads, head_dim]``.
        v: as ``k``.
        out: the output over *all* keys, in the dtype of ``q``.
        lse: the log-sum-exp over *all* keys, ``[heads, q_tokens]``.
        tiles: what to differentiate.
        dq: like ``q``, in accumulation precision.
        dk: like ``k``, in accumulation precision.
        dv: like ``v``, in accumulation precision.
        scale: as in :func:`attend`.
    """
    backend = _backend(q)
    for part in _parts(tiles, backend.knows_windows):
        rows, columns = part.rows, part.columns
        ordered = part.order(grad_out[rows], q[rows], k[columns], v[columns], out[rows])
        grads = backend.backward(*ordered, *part.order(lse[:, rows], dim=1), part=part, scale=scale)
        tile_dq, tile_dk, tile_dv = part.order(*grads)
        dq[rows] += tile_dq
        dk[columns] += tile_dk
        dv[columns] += tile_dv


class _Part(NamedTuple):
    """What one call of a kernel computes: rows of queries against columns of keys."""

    rows: slice
    columns: slice
    causal: bool = False
    backwards: bool = False  # both read from the last to the first
    window: int | None = None  # only for a kernel that knows windows

    def order(self, *tensors: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """The tensors in the order in which the part is read, and back."""
        return tuple(tensor.flip(dim) for tensor in tensors) if self.backwards else tensors


def _parts(tiles: Iterable[Tile], knows_windows: bool) -> Iterator[_Part]:
    for tile in tiles:
        if tile.first_key is None or (knows_windows and tile.causal):
            window = None if tile.first_key is None else 1 - tile.first_key
            yield _Part(slice(*tile[:2]), slice(*tile[2:4]), tile.causal, window=window)
        elif not tile.causal:
            whole = tile.q_start - tile.first_key  # the queries before see every key
            if whole > tile.q_start:
                yield _Part(slice(tile.q_start, whole), slice(*tile[2:4]))
            yield from _cut_off(whole, tile.q_stop, tile.k_start, tile.k_stop)
        else:
            # blocks as long as the window: each sees itself and, falling off, the one before
            window, shift = 1 - tile.first_key, tile.k_start - tile.q_start
            for start in range(tile.q_start, tile.q_stop, window):
                stop = min(start + window, tile.q_stop)
                yield _Part(slice(start, stop), slice(start + shift, stop + shift), causal=True)
            for start in range(tile.q_start + window, tile.q_stop, window):
                stop = min(start + window - 1, tile.q_stop)
                yield from _cut_off(start, stop, start + shift - window + 1, start + shift)


def _cut_off(q_start: int, q_stop: int, k_start: int, k_stop: int) -> Iterator[_Part]:
    """Query ``i`` sees keys ``i`` to the last: a square read backwards and a rectangle."""
    rows, edge = slice(q_start, q_stop), k_start + q_stop - q_start
    if q_stop > q_start:
        yield _Part(rows, slice(k_start, edge), causal=True, backwards=True)
        if k_stop > edge:
            yield _Part(rows, slice(edge, k_stop))


class _Backend(NamedTuple):
    forward: Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, part, scale) -> out, lse
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]  # (grad_out, q, k, v, out, lse, part, scale) -> dq, dk, dv
    knows_windows: bool = False  # on a causal tile; else it is always None


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """``[tokens, heads, head_dim]`` to ``[1, heads, tokens, head_dim]``, as views."""
    return [tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors]


def _tokens_first(tensor: Tensor) -> Tensor:
    """``[1, heads, tokens, head_dim]`` to ``[tokens, heads, head_dim]``, as a view."""
    return tensor.squeeze(0).transpose(0, 1)


# CPU flash. Groups of query heads share a key head inside the kernel. An empty tile would kill the process
# (division by zero in the kernel): plans hold none.


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*_heads_first(q, k, v), 0.0, part.causal, scale=scale)
    return _tokens_first(out), lse.squeeze(0)


def _cpu_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: _Part,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(grad_out, q, k, v, out), lse.unsqueeze(0), 0.0, part.causal, scale=scale
    )
    dq, dk, dv = map(_tokens_first, grads)
    return dq, dk, dv


# CUDA flash, half precision only, layout [1, tokens, heads, head_dim]. Through the aten operators, so that an
# activated FlashAttention 3 or 4 is used. The generator state is unused without dropout, but has to be given back.


def _flash_window(window: int | None) -> dict[str, int]:
    """A causal tile is square, so it does not matter which corner the kernel aligns a window to."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _cuda_flash_forward(q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._flash_attention_forward(
        q[None],
        k[None],
        v[None],
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        part.causal,
        False,
        scale=scale,
        **_flash_window(part.window),
    )
    return out.squeeze(0), lse.squeeze(0)


def _cuda_flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: _Part,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    unused_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    grads = _aten._flash_attention_backward(
        grad_out[None].contiguous(),
        q[None],
        k[None],
        v[None],
        out[None].contiguous(),
        lse[None].contiguous(),
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        part.causal,
        unused_state,
        unused,
        scale=scale,
        **_flash_window(part.window),
    )
    dq, dk, dv = (grad.squeeze(0) for grad in grads)
    return dq, dk, dv


# Memory-efficient CUDA kernel, for float32. It knows no grouped heads and pads the log-sum-exp to a multiple of 32.


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _sum_heads(grad: Tensor, kv_heads: int) -> Tensor:
    tokens, heads, head_dim = grad.shape
    return grad.view(tokens, kv_heads, heads // kv_heads, head_dim).sum(2)


def _cuda_efficient_forward(q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float) -> tuple[Tensor, Tensor]:
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        *_heads_first(q, k, v), None, True, 0.0, part.causal, scale=scale
    )
    return _tokens_first(out), lse[0, :, : q.shape[0]]


def _cuda_efficient_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: _Part,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, kv_heads = q.shape[0], k.shape[1]
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    padded = torch.nn.functional.pad(lse, (0, -tokens % 32), value=float("inf"))[None].contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        *_heads_first(grad_out, q, k, v),
        None,
        _heads_first(out)[0],
        padded,
        seed,
        seed,
        0.0,
        [True, True, True, False],
        part.causal,
        scale=scale,
    )
    dq, dk, dv = map(_tokens_first, grads[:3])
    return dq, _sum_heads(dk, kv_heads), _sum_heads(dv, kv_heads)


# Plain products: the reference, and the way for devices without a kernel of ours.


def _plain_scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), _repeat_heads(k, q.shape[1]).to(dtype)) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float) -> tuple[Tensor, Tensor]:
    scores = _plain_scores(q, k, part.causal, scale)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", probabilities, _repeat_heads(v, q.shape[1]).to(lse.dtype)), lse


def _plain_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: _Part,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = q.shape[1], k.shape[1]
    q, k, v, grad_out, out = (tensor.to(lse.dtype) for tensor in (q, k, v, grad_out, out))
    probabilities = (_plain_scores(q, k, part.causal, scale) - lse[..., None]).exp()
    delta = (grad_out * out).sum(-1).t()[..., None]
    grad_scores = probabilities * (torch.einsum("qhd,khd->hqk", grad_out, _repeat_heads(v, heads)) - delta) * scale
    dq = torch.einsum("hqk,khd->qhd", grad_scores, _repeat_heads(k, heads))
    dk = torch.einsum("hqk,qhd->khd", grad_scores, q)
    dv = torch.einsum("hqk,qhd->khd", probabilities, grad_out)
    return dq, _sum_heads(dk, kv_heads), _sum_heads(dv, kv_heads)


_CPU = _Backend(_cpu_forward, _cpu_backward)
_CUDA_FLASH = _Backend(_cuda_flash_forward, _cuda_flash_backward, knows_windows=True)
_CUDA_EFFICIENT = _Backend(_cuda_efficient_forward, _cuda_efficient_backward)
PLAIN = _Backend(_plain_forward, _plain_backward)


def _backend(q: Tensor) -> _Backend:
    if q.device.type == "cpu":
        return _CPU
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256:
        # the raw operator wants a head_dim that is a multiple of 8
        return _CUDA_FLASH if q.shape[-1] % 8 == 0 else PLAIN
    if q.device.type == "cuda" and q.dtype == torch.float32:
        return _CUDA_EFFICIENT
    return PLAIN
