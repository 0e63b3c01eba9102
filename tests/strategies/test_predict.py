"""Predictions come back for the whole batch, in its order, on every rank."""

import pytest
import torch
from lightning.pytorch import Trainer
from tiny import Batches, External, PlainModule, first, packed_batch, tiny_llama
from torch.utils.data import DataLoader

from lit_llm.gates.processes import run_ranks
from lit_llm.strategies import ContextParallelFSDPStrategy, ContextParallelStrategy


class Predicts(PlainModule):
    def predict_step(self, batch, batch_idx):
        logits = self.model(**batch).logits
        return {"logits": logits, "best": logits.argmax(-1), "mean": logits.mean(), "name": "x"}


def worker(rank, kind, batch):
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=kind(cluster_environment=External()), logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    return trainer.predict(Predicts(tiny_llama()), DataLoader(Batches([batch]), collate_fn=first))[0]


@pytest.mark.parametrize("kind", [ContextParallelStrategy, ContextParallelFSDPStrategy])
@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_are_in_the_order_of_the_batch(kind, rows):
    batch = packed_batch([37, 1, 20, 6])
    model = tiny_llama().double()
    expected = torch.cat(
        [
            model(input_ids=batch["input_ids"][:, start:stop], use_cache=False).logits
            for start, stop in zip(batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:], strict=True)
        ],
        dim=1,
    ).detach()
    batch = {key: value.view(rows, -1) if value.dim() == 2 else value for key, value in batch.items()}
    batch["cu_seqlens"] = torch.tensor([0, 37, 38, 58, 64][:5])
    for found in run_ranks(worker, 2, kind, batch, start_method="fork"):
        assert found["logits"].shape == (rows, 64 // rows, 97)
        assert (found["logits"].flatten(0, 1).double() - expected[0]).norm() < 1e-6 * expected[0].norm()
        assert found["best"].flatten().equal(expected[0].argmax(-1))
        assert found["mean"].dim() == 0 and found["name"] == "x"
