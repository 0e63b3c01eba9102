"""A LightningModule that fine-tunes a causal language model."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics import MeanMetric
from typing_extensions import override

from lit_llm.huggingface import pretrained_location
from lit_llm.loss import LossWindow, causal_lm_loss, token_count

__all__ = ["CausalLMModule"]

# The checkpoint's note of what model it holds, and the entries of a model configuration that decide its weights.
_CHECKPOINT_KEY = "lit_llm_model"
_SHAPING = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip


class CausalLMModule(LightningModule):
    r"""Next-token training of a Hugging Face causal language model on packed batches.

    The loss of a step is the mean over the targets that the step was given. Under a lit-llm strategy the gradient is
    that of the mean over all targets of the global batch. Learning rates are counted in optimizer steps: linear
    warm-up, then :math:`\eta_{min} + (\eta - \eta_{min}) \frac{1 + \cos \pi x}{2}` over the rest, or constant.

    Logged: ``train/loss`` (token mean over the accumulated window and all ranks), ``train/learning_rate``,
    ``train/tokens_per_second`` (of all ranks), ``val/loss`` (token mean), ``val/perplexity`` (its exponential).

    Args:
        model: a name on a hub, a folder, ``package:NAME/FILE.gguf``, or a model configuration with ``model_type``
            (random weights; ``vocab_size`` is that of the data module's tokenizer if not given).
        learning_rate: peak of the schedule.
        weight_decay: for matrices; vectors (norms, biases) are not decayed.
        betas: of AdamW.
        warmup_steps: optimizer steps of linear warm-up, or a fraction of all steps if below 1.
        schedule: after the warm-up.
        min_learning_rate_ratio: the schedule ends at this fraction of ``learning_rate``.
        lora: arguments of ``peft.LoraConfig``; trains adapters only.
        dtype: of the weights, "float32" or "bfloat16".

    Raises:
        MisconfigurationException: before training, for a model that cannot be built or a checkpoint that was written
            by another model; with the remedy.

    Example::

        module = CausalLMModule({"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4})
        Trainer(strategy="context_parallel", devices=2).fit(module, PackedSFTDataModule(train="chats.jsonl"))
    """

    def __init__(
        self,
        model: str | dict[str, Any],
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int | float = 0,
        schedule: Literal["cosine", "constant"] = "cosine",
        min_learning_rate_ratio: float = 0.1,
        lora: dict[str, Any] | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        super().__init__()
        if isinstance(model, dict) and "model_type" not in model:
            raise MisconfigurationException(
                f"the model configuration has no 'model_type', only {sorted(model)}: "
                "add one that transformers knows, for example model_type: llama"
            )
        self.save_hyperparameters()
        self.source, self.lora, self.weight_dtype = model, lora, getattr(torch, dtype)
        self.learning_rate, self.weight_decay, self.betas = learning_rate, weight_decay, (betas[0], betas[1])
        self.warmup_steps, self.schedule, self.min_learning_rate_ratio = warmup_steps, schedule, min_learning_rate_ratio
        self.model: Any = None
        self.val_loss = MeanMetric()
        self._window = LossWindow()
        self._steps: deque[tuple[float, int]] = deque(maxlen=20)  # (seconds, tokens so far) of recent batches

    # ---- the model

    @override
    def configure_model(self) -> None:
        if self.model is None:
            self.build_model(self._tokenizer_vocab_size())

    def build_model(self, vocab_size: int | None = None) -> Any:
        """Build the model if it does not exist yet, and return it.

        Args:
            vocab_size: entries of the tokenizer, used for a configuration without ``vocab_size``.

        Raises:
            MisconfigurationException: if the model cannot be found or built.
        """
        if self.model is not None:
            return self.model
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise MisconfigurationException("CausalLMModule needs transformers: pip install 'lit-llm[hf]'") from error
        if isinstance(self.source, dict):
            settings = dict(self.source)
            if settings.setdefault("vocab_size", vocab_size) is None:
                raise MisconfigurationException(
                    "the model configuration has no 'vocab_size' and there is no data module to ask: add vocab_size"
                )
            try:
                config = AutoConfig.for_model(**settings)
            except ValueError as error:
                raise MisconfigurationException(
                    f"transformers knows no model_type {settings['model_type']!r}: use one that it knows, "
                    "for example llama"
                ) from error
            model = AutoModelForCausalLM.from_config(config, dtype=self.weight_dtype)
        else:
            try:
                location, arguments = pretrained_location(self.source)
                model = AutoModelForCausalLM.from_pretrained(location, dtype=self.weight_dtype, **arguments)
            except (OSError, ValueError) as error:
                raise MisconfigurationException(f"the model {self.source!r} cannot be loaded: {error}") from error
        model.train()
        if vocab_size is not None and model.config.vocab_size < vocab_size:
            raise MisconfigurationException(
                f"the tokenizer has {vocab_size} entries, the model only {model.config.vocab_size}: "
                "use the model's own tokenizer (data.tokenizer), or a larger vocab_size"
            )
        self.model = model if self.lora is None else self._with_adapters(model)
        return self.model

    def _with_adapters(self, model: Any) -> Any:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise MisconfigurationException("lora needs peft: pip install 'lit-llm[peft]'") from error
        return get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **(self.lora or {})}))

    def _tokenizer_vocab_size(self) -> int | None:
        data = getattr(self._trainer, "datamodule", None)
        return getattr(data, "vocab_size", None)

    @override
    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Logits ``[batch, seq, vocab]`` of a batch with ``input_ids`` and, if packed, ``position_ids``."""
        # without use_cache=False transformers would ignore the document boundaries in position_ids
        extra = {key: batch[key] for key in ("position_ids", "attention_mask") if batch.get(key) is not None}
        return self.model(input_ids=batch["input_ids"], use_cache=False, **extra).logits

    # ---- steps

    @override
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = causal_lm_loss(self(batch), batch)
        if not hasattr(self.trainer.strategy, "last_window"):
            self._window.add(loss, token_count(batch))
        return loss

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if hasattr(self.trainer.strategy, "last_window"):  # a lit-llm strategy keeps the window
            total = self.trainer.strategy.last_window
        else:
            total = self._window.close(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
        self._log_training("train/loss", "loss", total.mean_loss.float())
        rate = optimizer.param_groups[0]["lr"]
        self._log_training("train/learning_rate", "lr/1e-3", rate, 1e3)  # bars show three decimals

    def _log_training(self, name: str, short: str, value: Any, scale: float = 1.0) -> None:
        """To the loggers under its full name; to the progress bar, where room is scarce, scaled under a short one."""
        self.log(name, value)
        self.log(short, value * scale, prog_bar=True, logger=False)

    @override
    def on_train_start(self) -> None:
        self._steps.clear()
        self._steps.append((time.perf_counter(), 0))

    @override
    def on_train_batch_end(self, outputs: Any, batch: dict[str, Any], batch_idx: int) -> None:
        # Called with the full batch under every strategy: its tokens count once for each data-parallel replica
        replicas = (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        self._steps.append((time.perf_counter(), self._steps[-1][1] + batch["input_ids"].numel() * replicas))
        (start, before), (stop, after) = self._steps[0], self._steps[-1]
        self._log_training("train/tokens_per_second", "tokens/s", (after - before) / max(stop - start, 1e-9))

    @override
    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate(batch)

    @override
    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate(batch)

    def _evaluate(self, batch: dict[str, Any]) -> None:
        self.val_loss.update(causal_lm_loss(self(batch), batch), token_count(batch))

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    @override
    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, stage: str) -> None:
        loss = self.val_loss.compute()  # over all ranks: a sum of losses and a count, never a mean of means
        self.val_loss.reset()
        # equal on all ranks already; sync_dist only spares a warning
        self.log(f"{stage}/loss", loss, prog_bar=True, sync_dist=True)
        self.log(f"{stage}/perplexity", loss.exp(), sync_dist=True)

    # ---- optimisation

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas)
        total = self.trainer.estimated_stepping_batches
        factor = learning_rate_factor(total, self.warmup_steps, self.schedule, self.min_learning_rate_ratio)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}

    # ---- checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        config = self.model.config.to_dict()
        checkpoint[_CHECKPOINT_KEY] = {key: config[key] for key in _SHAPING if config.get(key) is not None}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(_CHECKPOINT_KEY)
        if self.model is None:
            self.build_model(saved.get("vocab_size") if saved else None)
        config = self.model.config.to_dict()
        differences = [
            f"{key} {value} there and {config.get(key)} here"
            for key, value in (saved or {}).items()
            if config.get(key) != value
        ]
        if saved is None:
            differences = ["it was not written by CausalLMModule"]
        if differences:
            raise MisconfigurationException(
                f"the checkpoint is from another model: {', '.join(differences)}. Continue it with the configuration "
                "it was trained with (config.yaml beside it), or start anew without ckpt_path"
            )

    # ---- use

    @torch.no_grad()
    def generate(self, messages: list[dict[str, Any]], tokenizer: Any, max_new_tokens: int = 64) -> str:
        """The model's answer to a chat, decoded greedily.

        Args:
            messages: the chat so far, ending with the user's turn.
            tokenizer: with a chat template.
            max_new_tokens: at most so many.

        Returns:
            The text of the answer, without special tokens.
        """
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.device)
        was_training = self.model.training
        self.model.eval()
        output = self.model.generate(
            input_ids=prompt["input_ids"],
            attention_mask=prompt["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        self.model.train(was_training)
        return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def learning_rate_factor(
    total_steps: int | float, warmup_steps: int | float, schedule: str, min_ratio: float
) -> Callable[[int], float]:
    """The factor of the peak learning rate at each optimizer step.

    Args:
        total_steps: optimizer steps of the whole run; infinity makes the schedule constant after the warm-up.
        warmup_steps: steps of linear warm-up, or a fraction of ``total_steps`` if below 1.
        schedule: "cosine" or "constant".
        min_ratio: where the cosine ends.

    Example:
        >>> factor = learning_rate_factor(10, 2, "cosine", 0.1)
        >>> [round(factor(step), 2) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    warmup = int(warmup_steps * total_steps) if warmup_steps < 1 and math.isfinite(total_steps) else int(warmup_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant" or not math.isfinite(total_steps):
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
