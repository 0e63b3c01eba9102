"""RunSummary alone, in a module and data module that know nothing of it."""

import json

import pytest
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from tiny import Batches, PlainModule, first, packed_batch, tiny_llama
from torch.utils.data import DataLoader

from lit_llm.callbacks import RunSummary
from lit_llm.callbacks.run_summary import draw_loss_curve, read_metrics


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Batches([packed_batch([20, 9], seed) for seed in range(3)]), collate_fn=first)

    def val_dataloader(self):
        return self.train_dataloader()


def test_in_somebody_elses_module(tmp_path, capsys):
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        num_sanity_val_steps=-1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        logger=CSVLogger(tmp_path, "run", version=""),
        callbacks=[RunSummary(monitor="val_loss")],
    )
    trainer.fit(PlainModule(tiny_llama()), datamodule=Data())
    printed = capsys.readouterr().out
    assert "after 6 steps" in printed and "untrained model" in printed and "unigram" not in printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["tokens"] == 6 * 29
    assert summary["loss"] == pytest.approx(summary["untrained_loss"]), "the learning rate is zero"
    assert summary["unigram_loss"] is None and summary["checkpoint"] is None


def test_its_state_survives_a_checkpoint():
    one, other = RunSummary(), RunSummary()
    one._untrained, one._tokens, one._seconds = 8.0, 100, 2.5
    other.load_state_dict(one.state_dict())
    assert (other._untrained, other._tokens, other._seconds) == (8.0, 100, 2.5)


def test_metrics_before_and_after_a_resume_are_one_curve(tmp_path):
    import os

    (tmp_path / "metrics.1.csv").write_text("step,train/loss,val/loss\n0,5.0,\n1,4.0,\n1,,4.5\n2,3.9,\n")
    (tmp_path / "metrics.csv").write_text("step,train/loss\n2,3.0\n3,2.0\n")
    os.utime(tmp_path / "metrics.1.csv", (1, 1))
    assert read_metrics(tmp_path, "train/loss") == [(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0)]
    assert read_metrics(tmp_path, "val/loss") == [(1, 4.5)]
    assert draw_loss_curve(tmp_path) == tmp_path / "loss.png"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert draw_loss_curve(tmp_path / "nothing") is None
