"""Context parallelism as a Lightning strategy: one batch, its sequence over several devices."""

import gc
from typing import Any

import torch
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lit_llm.strategies.mixin import ContextParallelMixin

__all__ = ["ContextParallelStrategy"]


class ContextParallelStrategy(ContextParallelMixin, DDPStrategy):
    """DDP over data-parallel times context-parallel devices; those of one context group share a batch.

    Each step the batch ``[batch, seq]`` is flattened to one packed sequence, its labels are shifted inside each
    document, and each device of the context group gets its part of the tokens: the module's ``training_step`` sees
    ``input_ids``, ``position_ids``, ``labels`` and ``shift_labels`` of shape ``[1, tokens]``. Attention runs over the
    whole sequence, exactly (:mod:`lit_llm.context`). The gradient is that of the mean over all valid
    targets of the global batch and its accumulated micro-batches, however they are spread
    (:mod:`lit_llm.loss.ledger`). Callbacks and loggers keep seeing the full batch.

    A Hugging Face causal model anywhere inside the LightningModule needs no change: the step may call
    ``self.model(**batch).loss`` or ``self.model(batch["input_ids"], labels=batch["labels"]).loss``. Any other model
    whose modules call ``scaled_dot_product_attention(…, is_causal=True)`` works too, if the step takes its positions
    from ``batch["position_ids"]`` and its targets from ``batch["shift_labels"]``.

    Args:
        context_parallel_size: devices that share a sequence. "auto": the devices of a node, or what
            ``data_parallel_size`` leaves.
        data_parallel_size: groups that read different batches. "auto": what ``context_parallel_size`` leaves.
        attention: how keys and queries meet: "ring", or "exchange" of exactly the rows that are read. "auto" is "ring".
        layout: who holds which tokens (:func:`lit_llm.context.make_plan`). "auto" is "balanced".
        blocks_per_rank: for the balanced layout, more blocks balance better and make smaller tiles.
        **kwargs: as for ``lightning.pytorch.strategies.DDPStrategy``.

    Raises:
        MisconfigurationException: before training and on every rank, if the sizes do not fit the devices, the
            attention of the model cannot be routed, or the module optimises by hand.
            At the first batch, if the ranks of a context group got different ones.
        ValueError: at the first batch and on every rank, if it cannot be split.

    Example::

        import lit_llm
        from lightning.pytorch import Trainer

        trainer = Trainer(strategy="context_parallel", accelerator="cpu", devices=2)
        trainer.fit(module, datamodule)

    Source: Liu et al., Ring Attention, arXiv 2310.01889; loss normalisation as derived in :mod:`lit_llm.loss.ledger`.
    """

    strategy_name = "context_parallel"

    @override
    def _configure_launcher(self) -> None:
        # Lightning refuses its default launcher in notebooks, where only forked processes see the user's cells
        assert self.cluster_environment is not None
        if _IS_INTERACTIVE and not self.cluster_environment.creates_processes_externally:
            self._start_method = "fork"
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        if self._start_method == "fork" and self.root_device.type == "cpu":
            # a forked child has its parent's objects but not its threads: using the parent's thread pool hangs, and so
            # does collecting a process group that the parent has left behind
            gc.freeze()
            torch.set_num_threads(1)
        sizes = self._resolve_sizes(self.num_nodes, self.num_processes)
        super().setup_environment()
        self._set_up_mesh(sizes)

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        try:
            super().load_model_state_dict(checkpoint, strict=strict)
        except RuntimeError as error:
            raise self._misfit(error) from error

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: the base class would register its own names once more."""
