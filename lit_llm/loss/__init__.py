"""Losses and their normalisation: means over tokens, whatever the shards, ranks and micro-batches."""

from lit_llm.loss.causal_lm import causal_lm_loss, shifted_labels
from lit_llm.loss.ledger import LossWindow, WindowTotal, rescale_gradients, weight_gradient
from lit_llm.targets import token_count

__all__ = [
    "LossWindow",
    "WindowTotal",
    "causal_lm_loss",
    "rescale_gradients",
    "shifted_labels",
    "token_count",
    "weight_gradient",
]
