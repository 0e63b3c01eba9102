"""Plans against every visible (query, key) pair enumerated, and their balance and reach."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_llm.context import LAYOUTS, ShardPlan, Tile, make_plan, rows_read
from lit_llm.context.balance import balance, cut, deal, rows_received, work_before
from lit_llm.context.plan import assemble

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
WINDOWS = st.none() | st.integers(1, 45)


def boundaries(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def log_normal_documents(total, seed):
    """Document lengths of mean 2,000 and sigma 1.5, the last one cut off."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(total // 500, generator=generator).mul(1.5).add(7.6 - 1.125).exp().long().clamp(min=8)
    found = [0, *lengths.cumsum(0).tolist()]
    return [*(boundary for boundary in found if boundary < total), total]


def visible_pairs(lengths, window):
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (document[:, None] == document[None]).tril()
    return visible if window is None else visible.triu(1 - window)


@settings(max_examples=200, deadline=None)
@given(
    lengths=LENGTHS,
    num_ranks=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
    blocks=st.integers(1, 9),
    window=WINDOWS,
)
def test_tiles_cover_every_visible_pair_once(lengths, num_ranks, layout, blocks, window):
    total, cu_seqlens = sum(lengths), boundaries(lengths)
    if total < num_ranks:
        with pytest.raises(ValueError, match="tokens cannot be split over"):
            make_plan(cu_seqlens, num_ranks, layout, blocks)
        return
    plan = make_plan(cu_seqlens, num_ranks, layout, blocks, window)
    held = [plan.indices(rank) for rank in range(num_ranks)]
    assert min(map(len, held)) >= 1
    assert [len(h) for h in held] == list(plan.lengths)
    count = torch.zeros(total, total, dtype=torch.int)
    for q_rank in range(num_ranks):
        pairs = 0
        for k_rank in range(num_ranks):
            tiles = plan.tiles(q_rank, k_rank, window)
            assert [tile.causal for tile in tiles] == sorted((tile.causal for tile in tiles), reverse=True)
            for tile in tiles:
                rows, columns = held[q_rank][tile.q_start : tile.q_stop], held[k_rank][tile.k_start : tile.k_stop]
                part = torch.ones(len(rows), len(columns), dtype=torch.int)
                part = part.tril() if tile.causal else part
                part = part if tile.first_key is None else part.triu(tile.first_key)
                assert part.any(0).all() and part.any(1).all(), "no row and no column for nothing"
                assert tile.first_key is None or (tile.first_key <= 0 and not part.all())
                assert tile.pairs == part.sum()
                pairs += tile.pairs
                count[rows[:, None], columns[None]] += part
        assert plan.cost(q_rank, window) == pairs
    assert count.equal(visible_pairs(lengths, window).int())


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 6), layout=st.sampled_from(LAYOUTS), window=WINDOWS)
def test_the_last_hop_is_that_of_the_farthest_reader(lengths, num_ranks, layout, window):
    if sum(lengths) < num_ranks:
        return
    plan = make_plan(boundaries(lengths), num_ranks, layout, 3)
    for rank in range(num_ranks):
        readers = [hop for hop in range(num_ranks) if plan.tiles((rank + hop) % num_ranks, rank, window)]
        assert plan.last_hop(rank, window) == readers[-1]


def test_a_block_travels_to_the_last_query_whose_window_reaches_it():
    plan = make_plan([0, 12], 3, "contiguous")
    assert [plan.last_hop(0, window) for window in (1, 2, 5, 6, 7, None)] == [0, 1, 1, 2, 2, 2]
    assert plan.tiles(2, 0, window=6) == (Tile(0, 1, 3, 4, causal=False),)
    assert plan.tiles(2, 0, window=7) == (Tile(0, 2, 2, 4, causal=False, first_key=0),)


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), window=WINDOWS)
def test_work_is_that_of_every_token_summed(lengths, window):
    work = [min(position + 1, window or 40) for length in lengths for position in range(length)]
    everywhere = list(range(sum(lengths) + 1))
    wanted = [sum(work[:stop]) for stop in everywhere]
    assert work_before(boundaries(lengths), everywhere, window).tolist() == wanted


def test_empty_documents_have_no_tiles():
    plan = make_plan(torch.tensor([0, 0, 5, 5, 5, 9, 9], dtype=torch.int32), 2)
    same = make_plan([0, 5, 9], 2)
    assert plan.spans == same.spans
    assert all(plan.tiles(q, k, w) == same.tiles(q, k, w) for q in (0, 1) for k in (0, 1) for w in (None, 2))


def test_plans_know_a_window_that_hides_nothing():
    plan = make_plan([0, 30, 70], 3)
    assert plan.tiles(1, 0, window=40) is plan.tiles(1, 0)
    for ask in (plan.last_hop, plan.cost, lambda rank, window: plan.tiles(rank, rank, window)):
        with pytest.raises(ValueError, match="window=-1: a query sees at least itself, so a window is 1 or more"):
            ask(0, window=-1)
    with pytest.raises(ValueError, match="window=0: "):
        make_plan([0, 30, 70], 3, window=0)


def test_layouts_are_refused_by_name():
    with pytest.raises(ValueError, match="layout='striped' is unknown: choose one of 'contiguous'"):
        make_plan([0, 10], 2, "striped")


@given(total=st.integers(4, 500), num_ranks=st.integers(1, 4), layout=st.sampled_from(LAYOUTS))
def test_lengths_differ_by_little(total, num_ranks, layout):
    lengths = make_plan([0, total], num_ranks, layout, 8).lengths
    assert sum(lengths) == total
    assert max(lengths) - min(lengths) <= 8


def imbalance(plan, window=None):
    costs = [plan.cost(rank, window) for rank in range(plan.num_ranks)]
    return max(costs) * plan.num_ranks / sum(costs)


@pytest.mark.parametrize("num_ranks", [8, 64, 512])
def test_packed_documents_are_balanced(num_ranks):
    """Also where one block in eight a rank would hold more work than a rank should have in all."""
    for seed in range(3):
        cu_seqlens = log_normal_documents(4096 * num_ranks, seed)
        assert imbalance(make_plan(cu_seqlens, num_ranks)) <= 1.02
        assert imbalance(make_plan(cu_seqlens, num_ranks, window=1024), 1024) <= 1.02
        assert imbalance(make_plan(cu_seqlens, num_ranks, "zigzag")) > 1.2
        assert imbalance(make_plan([0, 4096 * num_ranks], num_ranks)) <= 1.02


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 5), blocks=st.integers(1, 6), data=st.data())
def test_rows_received_are_those_that_the_tiles_read(lengths, num_ranks, blocks, data):
    """For blocks dealt at random."""
    cu_seqlens = boundaries(lengths)
    num_blocks = num_ranks * blocks
    if cu_seqlens[-1] < num_blocks:
        return
    edges, owners = cut(cu_seqlens[-1], num_blocks), data.draw(st.permutations([*range(num_ranks)] * blocks))
    plan = ShardPlan(tuple(cu_seqlens), assemble(edges, owners, num_ranks))
    ranks = range(num_ranks)
    read = [r for q_rank in ranks for k_rank in ranks if q_rank != k_rank for r in rows_read(plan, q_rank, k_rank)]
    assert rows_received(cu_seqlens, edges, owners) == sum(stop - start for start, stop in read)


@given(
    costs=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    num_ranks=st.integers(1, 5),
    share=st.floats(0, 1.2),
    data=st.data(),
)
def test_every_rank_is_dealt_equally_many(costs, num_ranks, share, data):
    costs = costs * num_ranks
    documents = data.draw(st.lists(st.integers(-1, 3), min_size=len(costs), max_size=len(costs)))
    owners = deal(costs, num_ranks, documents, share)
    assert [owners.count(rank) for rank in range(num_ranks)] == [len(costs) // num_ranks] * num_ranks


@pytest.mark.parametrize(("num_ranks", "share"), [(8, 0.9), (64, 0.8)])
def test_documents_are_kept_together_within_the_same_balance(num_ranks, share):
    for seed in range(3):
        cu_seqlens = log_normal_documents(16384 * num_ranks, seed)
        edges, owners = balance(cu_seqlens, num_ranks, 16)
        scattered = deal(work_before(cu_seqlens, edges[1:]) - work_before(cu_seqlens, edges[:-1]), num_ranks)
        assert rows_received(cu_seqlens, edges, owners) < share * rows_received(cu_seqlens, edges, scattered)
