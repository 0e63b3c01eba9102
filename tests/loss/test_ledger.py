"""The window against hand arithmetic and against one big batch."""

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lit_llm.gates.processes import run_ranks
from lit_llm.loss import LossWindow, rescale_gradients, weight_gradient


def test_by_hand():
    # losses 2 over 3 targets and 6 over 1: (6 + 6) / 4 = 3, where the mean of means is 4
    window = LossWindow()
    window.add(torch.tensor(2.0), torch.tensor(3))
    window.add(torch.tensor(6.0), torch.tensor(1))
    total = window.close()
    assert (total.loss_sum, total.num_targets, total.num_micro_batches) == (12.0, 4.0, 2.0)
    assert total.mean_loss == 3.0


def test_no_targets_and_nan():
    window = LossWindow()
    window.add(torch.tensor(float("nan")), torch.tensor(0))
    window.add(torch.tensor(5.0), torch.tensor(2))
    assert window.close().mean_loss == 5.0
    window.add(torch.tensor(float("nan")), torch.tensor(2))
    assert window.close().mean_loss.isnan(), "a NaN of real targets is not hidden"


def test_a_closed_window_starts_anew():
    import pytest

    window = LossWindow()
    with pytest.raises(ValueError, match="the window is empty"):
        window.close()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.integers(1, 3))
def test_gradient_is_that_of_one_big_batch(counts, world_size):
    """Micro-batches dealt to `world_size` simulated ranks; Lightning's division by N and DDP's average imitated."""
    generator = torch.Generator().manual_seed(sum(counts))
    data = [torch.randn(max(count, 1), 3, generator=generator, dtype=torch.float64) for count in counts]
    weight = torch.randn(3, dtype=torch.float64, generator=generator).requires_grad_()
    big = torch.cat([rows[:count] for rows, count in zip(data, counts, strict=True)])
    ((big @ weight) ** 2).mean().backward()
    expected, weight.grad = weight.grad, None

    window, micro_batches = LossWindow(), 2
    for rows, count in zip(data, counts, strict=True):
        loss = ((rows @ weight) ** 2).mean()  # finite also without targets, as a stand-in makes it
        weight_gradient(loss, torch.tensor(count))
        window.add(loss, torch.tensor(count))
        (loss / micro_batches / world_size).backward()
    rescale_gradients([weight], window.close(), micro_batches, world_size)
    assert torch.allclose(weight.grad, expected, rtol=1e-6, atol=1e-12)


def worker(rank):
    window = LossWindow()
    window.add(torch.tensor(float(rank)), torch.tensor(10 + rank))
    return window.close(dist.group.WORLD).mean_loss.item()


def test_over_ranks():
    # (0 * 10 + 1 * 11 + 2 * 12) / 33
    assert run_ranks(worker, 3, start_method="fork") == [35 / 33] * 3


def test_without_gradients_or_targets_nothing_happens():
    weight = torch.ones(2, requires_grad=True)
    window = LossWindow()
    window.add(torch.tensor(0.0), torch.tensor(0))
    total = window.close()
    rescale_gradients([weight], total, 1, 1)
    assert weight.grad is None
    weight.grad = torch.zeros(2)
    rescale_gradients([weight], total, 1, 1)
    assert weight.grad.equal(torch.zeros(2))
