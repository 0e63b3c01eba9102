r"""The window of micro-batches behind one optimizer step, and the gradient of its mean over tokens.

With :math:`m_i` the mean loss of micro-batch :math:`i` over its :math:`n_i` targets, the loss of the window is the
mean over all its targets, on all ranks and in all micro-batches:

.. math::
    L = \frac{1}{T} \sum_i n_i m_i, \qquad T = \sum_i n_i .

A trainer that divides each micro-batch's loss by the number of micro-batches :math:`N` and averages gradients over
:math:`W` ranks computes :math:`\frac{1}{NW} \sum_i \nabla m_i` instead: a mean of means. Weighting each micro-batch in
its backward by :math:`n_i / C` for any constant :math:`C`, and the gradient once per step by :math:`C N W / T`, gives
exactly :math:`\nabla L`. Only :math:`T` has to be communicated, once per step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["LossWindow", "WindowTotal", "rescale_gradients", "weight_gradient"]

# The constant C: near the targets of a usual micro-batch, so that scaled half-precision gradients keep their range,
# and a power of two, so that dividing by it loses nothing.
_UNIT = 1024.0


@dataclass(frozen=True)
class WindowTotal:
    """A closed window, over all ranks. All tensors are float64 scalars.

    Attributes:
        loss_sum: sum of the losses of all targets.
        num_targets: how many targets, exact up to 2**53.
        num_micro_batches: micro-batches of all ranks.
    """

    loss_sum: Tensor
    num_targets: Tensor
    num_micro_batches: Tensor

    @property
    def mean_loss(self) -> Tensor:
        """The token mean; NaN if the window has no target."""
        return self.loss_sum / self.num_targets


class LossWindow:
    """Sums of losses and targets since the last optimizer step, kept on the device without synchronising.

    Example:
        >>> window = LossWindow()
        >>> window.add(torch.tensor(2.0), torch.tensor(3))
        >>> window.add(torch.tensor(6.0), torch.tensor(1))
        >>> window.close().mean_loss
        tensor(3., dtype=torch.float64)
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, mean_loss: Tensor, num_targets: Tensor) -> None:
        """Enter a micro-batch.

        Args:
            mean_loss: scalar, its mean loss over ``num_targets``. Ignored, NaN included, if there are none.
            num_targets: int64 scalar, its valid targets.
        """
        count = num_targets.detach().to(torch.float64)
        loss = torch.where(count > 0, mean_loss.detach().to(torch.float64) * count, 0.0)
        entry = torch.stack([loss, count, torch.ones_like(count)])
        self._sums = entry if self._sums is None else self._sums + entry

    def close(self, group: dist.ProcessGroup | None = None) -> WindowTotal:
        """The totals over the ranks of ``group`` by one all-reduce of three numbers; a new window begins.

        Args:
            group: None for this process alone.

        Raises:
            ValueError: if no micro-batch was added.
        """
        if self._sums is None:
            raise ValueError("the window is empty: add every micro-batch before the optimizer step")
        sums, self._sums = self._sums, None
        if group is not None:
            dist.all_reduce(sums, group=group)
        return WindowTotal(*sums.unbind())


def weight_gradient(loss: Tensor, num_targets: Tensor) -> None:
    """Weight a micro-batch's backward by its targets; the value of ``loss`` stays.

    Args:
        loss: scalar mean loss that is about to be differentiated.
        num_targets: int64 scalar, the targets behind it.

    Example:
        >>> x = torch.tensor(1.0, requires_grad=True)
        >>> loss = x * 2
        >>> weight_gradient(loss, torch.tensor(512))
        >>> loss.backward()
        >>> x.grad
        tensor(1.)
    """
    if loss.requires_grad:
        weight = num_targets.detach() / _UNIT
        loss.register_hook(lambda grad: grad * weight.to(grad.dtype))


def rescale_gradients(parameters: Iterable[Tensor], total: WindowTotal, num_micro_batches: int, num_ranks: int) -> None:
    """Turn the sum left by :func:`weight_gradient` into the gradient of the window's token mean, in place.

    Args:
        parameters: whose ``grad`` to rescale; those without one are left alone. Of a sharded one (DTensor), this
            rank's part.
        total: the closed window, over all ranks that share the gradient.
        num_micro_batches: the number by which the trainer divided every loss (``accumulate_grad_batches``).
        num_ranks: the number of ranks over which the gradient was averaged, 1 if it was summed.

    Note:
        Without any target every gradient is zero already; it stays zero, not NaN.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    if grads:
        factor = _UNIT * num_micro_batches * num_ranks / total.num_targets.clamp(min=1.0)
        torch._foreach_mul_(grads, factor.to(torch.float32))
