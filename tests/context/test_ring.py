"""Ring attention against float64 attention of every document by itself, written out in plain matrix products."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_llm.context import LAYOUTS, exchange_attention, make_plan, ring_attention, rows_read
from lit_llm.gates.processes import run_ranks

DOCUMENTS = {
    "one": [0, 193],
    "odd": [0, 7, 8, 61, 62, 63, 150, 193],
    "single tokens": list(range(0, 42)),
    "long then short": [0, 170, 171, 176, 193],
}


def reference(q, k, v, cu_seqlens, window=None):
    """Softmax attention of each document alone: [tokens, heads, head_dim], in the dtype given."""
    group = q.shape[1] // k.shape[1]
    outputs = []
    for start, stop in itertools.pairwise(cu_seqlens):
        document = []
        for head in range(q.shape[1]):
            scores = q[start:stop, head] @ k[start:stop, head // group].T / math.sqrt(q.shape[-1])
            length = stop - start
            hidden = torch.full((length, length), -math.inf, dtype=q.dtype)
            scores = scores + hidden.triu(1)
            if window is not None:
                scores = scores + hidden.tril(-window)
            document.append(scores.softmax(-1) @ v[start:stop, head // group])
        outputs.append(torch.stack(document, 1))
    return torch.cat(outputs)


def make_inputs(total, heads, kv_heads, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(total, heads, 16), (total, kv_heads, 16), (total, kv_heads, 16), (total, heads, 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


METHODS = {"ring": ring_attention, "exchange": exchange_attention}


def worker(rank, cases, method, window):
    group = dist.group.WORLD
    size = dist.get_world_size()
    answers = []
    for cu_seqlens, layout, heads, kv_heads, dtype in cases:
        q, k, v, grad = make_inputs(cu_seqlens[-1], heads, kv_heads, dtype)
        plan = make_plan(cu_seqlens, size, layout, blocks_per_rank=4)
        held = plan.indices(rank)
        local = [tensor[held].clone().requires_grad_() for tensor in (q, k, v)]
        out = METHODS[method](*local, plan, group, window=window)
        out.backward(grad[held])
        answers.append((held, out.detach(), *(tensor.grad for tensor in local)))
    return answers


def compare(world_size, cases, tolerance, method, window=None):
    by_rank = run_ranks(worker, world_size, cases, method, window, start_method="fork")
    for number, (cu_seqlens, layout, heads, kv_heads, dtype) in enumerate(cases):
        inputs = [t.double() for t in make_inputs(cu_seqlens[-1], heads, kv_heads, dtype)]
        leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
        expected = reference(*leaves, cu_seqlens, window)
        expected.backward(inputs[3])
        expected = [expected.detach(), *(leaf.grad for leaf in leaves)]
        held = torch.cat([answers[number][0] for answers in by_rank])
        assert held.sort().values.equal(torch.arange(cu_seqlens[-1])), "every token is on exactly one rank"
        for which, name in enumerate(("out", "dq", "dk", "dv"), start=1):
            got = torch.cat([answers[number][which] for answers in by_rank])
            wanted = expected[which - 1][held]
            # one-token documents have no gradient for q and k: measure theirs against that of v
            error = (got.double() - wanted).norm() / (wanted.norm() or expected[3].norm())
            assert error < tolerance, f"{name} of {cu_seqlens} {layout} {heads}/{kv_heads} {window}: {error}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exact_in_fp32(world_size, method):
    cases = [
        (cu_seqlens, layout, heads, kv_heads, torch.float32)
        for cu_seqlens in DOCUMENTS.values()
        for layout in LAYOUTS
        for heads, kv_heads in ((4, 4), (4, 2), (3, 1))
    ]
    compare(world_size, cases, 1e-6, method)


@pytest.mark.parametrize("method", METHODS)
def test_exact_in_fp64_and_close_in_bf16(method):
    cases = [(DOCUMENTS["odd"], layout, 4, 2, torch.float64) for layout in LAYOUTS]
    compare(2, cases, 1e-14, method)
    cases = [(DOCUMENTS["odd"], layout, 4, 2, torch.bfloat16) for layout in LAYOUTS]
    compare(2, cases, 1e-2, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("window", [1, 2, 7, 30, 64, 150])
@pytest.mark.parametrize("world_size", [2, 3])
def test_windows_are_exact(world_size, window, method):
    cases = [
        (cu_seqlens, layout, 4, 2, dtype)
        for cu_seqlens in DOCUMENTS.values()
        for layout in LAYOUTS
        for dtype in (torch.float32, torch.float64)
    ]
    compare(world_size, cases[::2], 1e-6, method, window)
    compare(world_size, cases[1::2], 1e-14, method, window)


@pytest.mark.parametrize("attend", METHODS.values())
def test_one_rank_needs_no_process_group(attend):
    q, k, v, _ = make_inputs(193, 4, 2, torch.float32)
    plan = make_plan(DOCUMENTS["odd"], 1)
    got = attend(q, k, v, plan)
    wanted = reference(q.double(), k.double(), v.double(), DOCUMENTS["odd"])
    assert (got.double() - wanted).norm() / wanted.norm() < 1e-6
    assert attend(q, k, v, plan, window=193).equal(got), "a window that hides nothing changes nothing"


def test_refusals():
    q, k, v, _ = make_inputs(10, 4, 2, torch.float32)
    plan = make_plan([0, 10], 1)
    with pytest.raises(ValueError, match="window=0: a query sees at least itself"):
        ring_attention(q, k, v, plan, window=0)
    with pytest.raises(ValueError, match="rank 0 holds 10 tokens"):
        ring_attention(q[:9], k, v, plan)
    with pytest.raises(ValueError, match="4 query heads cannot be grouped over 3 key heads"):
        ring_attention(q, torch.randn(10, 3, 16), torch.randn(10, 3, 16), plan)
    with pytest.raises(ValueError, match="the plan is for 2 ranks"):
        ring_attention(q, k, v, make_plan([0, 10], 2))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    num_ranks=st.integers(2, 5),
    layout=st.sampled_from(LAYOUTS),
    window=st.none() | st.integers(1, 30),
)
def test_the_exchange_sends_exactly_the_rows_that_are_read(lengths, num_ranks, layout, window):
    """Against every visible (query, key) pair, enumerated."""
    cu_seqlens = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    if cu_seqlens[-1] < num_ranks:
        return
    plan = make_plan(cu_seqlens, num_ranks, layout, 3)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (document[:, None] == document[None]) & torch.ones(len(document), len(document), dtype=torch.bool).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    held = [plan.indices(rank) for rank in range(num_ranks)]
    for q_rank in range(num_ranks):
        for k_rank in range(num_ranks):
            read = {row for start, stop in rows_read(plan, q_rank, k_rank, window) for row in range(start, stop)}
            assert read == set(visible[held[q_rank]][:, held[k_rank]].any(0).nonzero().flatten().tolist())


def test_the_exchange_sends_half_of_an_all_gather_or_almost_nothing():
    def share(cu_seqlens):
        plan = make_plan(cu_seqlens, 8, "balanced", 8)
        pairs = [(q, k) for q in range(8) for k in range(8) if q != k]
        sent = sum(stop - start for q, k in pairs for start, stop in rows_read(plan, q, k))
        return sent / (7 * cu_seqlens[-1])

    assert share([0, 8192]) < 0.95, "one document: the last block of all is read by nobody else"
    assert share(list(range(0, 8193, 64))) < 0.01, "documents shorter than a block stay at home"
