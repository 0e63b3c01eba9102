"""What each of two ranks reads under DDP, written to files."""

import json
from pathlib import Path

import lightning.pytorch as pl
import tiny_training as tiny


class Writer(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: pl.Trainer, module: tiny.Reader) -> None:
        content = json.dumps({"train": module.trained, "val": module.validated})
        (self.folder / f"rank{trainer.global_rank}.json").write_text(content)


def fit(folder: Path, count: int = 40) -> None:
    trainer = tiny.trainer(
        folder, max_epochs=2, devices=2, strategy="ddp_spawn", callbacks=[Writer(folder)], limit_val_batches=1.0
    )
    trainer.fit(tiny.Reader(), tiny.data_module(folder, count, val_fraction=0.3))
