"""The chunked loss against torch's cross-entropy in float64."""

import pytest
import torch
from torch.nn import functional

from lit_llm.loss import causal_lm_loss


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_value_and_gradient(chunk_size):
    torch.manual_seed(0)
    logits = torch.randn(2, 11, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 5, (2, 11)).masked_fill(torch.rand(2, 11) < 0.4, -100)
    cu_seqlens = torch.tensor([0, 4, 11, 12, 22])
    targets = torch.full((22,), -100)
    for start, stop in ((0, 4), (4, 11), (11, 12), (12, 22)):
        targets[start : stop - 1] = labels.flatten()[start + 1 : stop]
    expected = functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100)
    (wanted,) = torch.autograd.grad(expected, logits)
    batch = {"input_ids": labels, "labels": labels, "cu_seqlens": cu_seqlens}
    loss = causal_lm_loss(logits, batch, chunk_size)
    (got,) = torch.autograd.grad(loss, logits)
    assert abs(loss.item() - expected.item()) < 1e-6
    assert (got - wanted).abs().max() < 1e-7
    shifted = causal_lm_loss(logits, {"input_ids": labels, "shift_labels": targets.view(2, 11)}, chunk_size)
    assert shifted == loss


def test_no_targets_is_zero_not_nan():
    logits = torch.randn(1, 4, 5, requires_grad=True)
    loss = causal_lm_loss(logits, {"input_ids": torch.zeros(1, 4), "labels": torch.full((1, 4), -100)})
    loss.backward()
    assert loss == 0
    assert logits.grad.equal(torch.zeros_like(logits))


def test_errors():
    with pytest.raises(ValueError, match="the batch has no 'labels', only"):
        causal_lm_loss(torch.zeros(1, 2, 3), {"input_ids": torch.zeros(1, 2)})
    with pytest.raises(ValueError, match=r"logits are \[1, 2, 3\], but the targets are \[1, 4\]"):
        causal_lm_loss(torch.zeros(1, 2, 3), {"shift_labels": torch.zeros(1, 4).long()})
