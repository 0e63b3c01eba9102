"""A tiny Llama, packed data, and the reference: every document by itself, in one process, in float64."""

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

VOCAB = 97


def tiny_llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "attn_implementation": "sdpa",
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def packed_batch(lengths, seed=0, masked=0.3):
    """Random documents laid end to end in one row; some labels untrained, and the first of every document."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    input_ids = torch.randint(0, VOCAB, (1, total), generator=generator)
    labels = input_ids.masked_fill(torch.rand(1, total, generator=generator) < masked, -100)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    labels[0, cu_seqlens[:-1].long()] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": input_ids, "labels": labels, "position_ids": positions, "cu_seqlens": cu_seqlens}


def reference_step(model, batches):
    """Loss and gradients of the token mean over all batches, every document run by itself in float64."""
    model = model.double()
    total, count = 0.0, 0
    for batch in batches:
        for start, stop in zip(batch["cu_seqlens"][:-1].tolist(), batch["cu_seqlens"][1:].tolist(), strict=True):
            if stop - start < 2:
                continue
            tokens, labels = batch["input_ids"][:, start:stop], batch["labels"][0, start:stop]
            logits = model(input_ids=tokens, use_cache=False).logits[0]
            total = total + functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
            count += int((labels[1:] != -100).sum())
    loss = total / count
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


class Batches(Dataset):
    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def first(items):
    return items[0]


class PlainModule(LightningModule):
    """What a user has: no word of lit-llm in it."""

    def __init__(self, model, call="batch"):
        super().__init__()
        self.model, self.call = model, call

    def loss(self, batch):
        if self.call == "batch":
            return self.model(**batch).loss
        if self.call == "two arguments":
            return self.model(batch["input_ids"], labels=batch["labels"]).loss
        return self.model(batch["input_ids"], None, labels=batch["labels"]).loss

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Record(Callback):
    """Keeps the gradients that the optimizer sees and the loss that the strategy states."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.grads = {name: p.grad.clone() for name, p in pl_module.model.named_parameters() if p.grad is not None}
        window = getattr(trainer.strategy, "last_window", None)
        self.loss = None if window is None else window.mean_loss.item()
        self.targets = None if window is None else int(window.num_targets)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch_shape = tuple(batch["input_ids"].shape)


def fit(module, batches, **arguments):
    """One epoch over batches, shuffling off; returns the record."""
    record = Record()
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": [record],
    }
    trainer = Trainer(**{**settings, **arguments})
    trainer.fit(module, DataLoader(Batches(batches), batch_size=1, collate_fn=first))
    return record


class External(LightningEnvironment):
    """The processes exist already."""

    @property
    def creates_processes_externally(self):
        return True

    def world_size(self):
        return torch.distributed.get_world_size()

    def set_world_size(self, size):
        pass

    def global_rank(self):
        return torch.distributed.get_rank()

    def set_global_rank(self, rank):
        pass

    def local_rank(self):
        return torch.distributed.get_rank()
