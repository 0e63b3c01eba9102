"""A ready LightningModule for causal language models."""

from lit_llm.module.causal_lm import CausalLMModule, learning_rate_factor

__all__ = ["CausalLMModule", "learning_rate_factor"]
