"""A model of one number and chats of one word, to see exactly which packs a Trainer reads."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lit_llm.data import PackedSFTDataModule


def chats(count: int, longest: int = 12) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{number}?"},
                {"role": "assistant", "content": "abcdefghijklmnop"[: 1 + number * 7 % longest]},
            ]
        }
        for number in range(count)
    ]


def data_module(folder: Path, count: int = 40, **options: Any) -> PackedSFTDataModule:
    options = {"max_length": 32, "batch_size": 1, "vocab_size": 261, "val_fraction": 0.1, **options}
    return PackedSFTDataModule(chats(count), cache_dir=str(folder / "cache"), **options)


def rows(batch: dict[str, Any]) -> list[str]:
    """What a batch holds, a string for each row."""
    return [" ".join(map(str, row.tolist())) for row in batch["input_ids"]]


class Reader(pl.LightningModule):
    """Records the rows of every batch it trains on, by epoch."""

    def __init__(self, read_steps_early: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read_steps_early = read_steps_early
        self.trained: list[str] = []
        self.validated: list[str] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.trained += rows(batch)
        return (self.weight - 1) ** 2

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated += rows(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.read_steps_early:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    options = {"max_epochs": 3, "callbacks": [], **options}
    return pl.Trainer(
        accelerator="cpu",
        devices=options.pop("devices", 1),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, pl.callbacks.Checkpoint) for c in options["callbacks"]),
        num_sanity_val_steps=0,
        **options,
    )


class SaveAt(pl.Callback):
    """Saves a checkpoint in a hook, when so many batches were trained."""

    def __init__(self, hook: str, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path
        setattr(self, hook, self._save)

    def _save(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.batches and not self.path.exists():
            trainer.save_checkpoint(self.path)
