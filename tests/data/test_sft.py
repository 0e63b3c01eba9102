import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sft_ranks
import tiny_training as tiny
import torch
from lightning.pytorch.cli import LightningArgumentParser

from lit_llm import targets
from lit_llm.data import PackedSFTDataModule, PythonDocs
from lit_llm.packing import plan_epoch


def test_batches_hold_every_chat_once_and_train_the_answers(tmp_path: Path) -> None:
    data = tiny.data_module(tmp_path, batch_size=2)
    data.setup("fit")
    answers: Counter[str] = Counter()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        for batch in loader:
            shifted = targets.shift(batch["labels"], batch["cu_seqlens"])
            text = data.tokenizer.decode(shifted[shifted != -100])
            answers.update(text.split("<|end|>")[:-1])
    assert answers == Counter(chat["messages"][1]["content"] for chat in tiny.chats(40))


def test_setup_may_run_twice_and_two_modules_share_the_cache(tmp_path: Path) -> None:
    first, second = tiny.data_module(tmp_path), tiny.data_module(tmp_path)
    first.setup("fit")
    prepared = first._prepared
    first.setup("validate")
    assert first._prepared is prepared
    second.setup()
    assert second._data.train.folder == first._data.train.folder
    assert second.vocab_size == len(second.tokenizer) == 261


def test_unigram_loss_by_hand(tmp_path: Path) -> None:
    data = tiny.data_module(tmp_path)
    data.setup()
    counts, held_out = np.ones(data.vocab_size), []
    for batch in data.train_dataloader():
        for label in batch["labels"][batch["labels"] != -100].tolist():
            counts[label] += 1
    for batch in data.val_dataloader():
        held_out += batch["labels"][batch["labels"] != -100].tolist()
    expected = -sum(math.log(counts[label] / counts.sum()) for label in held_out) / len(held_out)
    assert data.unigram_loss() == pytest.approx(expected, rel=1e-12)


def test_the_example_is_held_out(tmp_path: Path) -> None:
    data = tiny.data_module(tmp_path)
    data.setup()
    example = data.example()
    text = data.tokenizer.apply_chat_template(example, tokenize=False)
    assert example in [chat["messages"] for chat in tiny.chats(40)]
    assert text in "".join(data.tokenizer.decode(row) for b in data.val_dataloader() for row in b["input_ids"])


def test_without_held_out_data(tmp_path: Path) -> None:
    data = tiny.data_module(tmp_path, val_fraction=0)
    tiny.trainer(tmp_path, max_epochs=1).fit(tiny.Reader(), data)
    assert data.val_dataloader() == []
    with pytest.raises(ValueError, match=r"unigram_loss\(\) needs held-out data: give val="):
        data.unigram_loss()
    with pytest.raises(ValueError, match=r"example\(\) needs held-out data"):
        data.example()


def test_two_ranks_share_each_epoch_and_validate_every_chat_once(tmp_path: Path) -> None:
    sft_ranks.fit(tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    data = tiny.data_module(tmp_path, val_fraction=0.3)
    data.setup()
    filler = " ".join(["0"] * 32)
    for split, epochs in (("train", 2), ("val", 2)):
        assert len(ranks[0][split]) == len(ranks[1][split])
        per_epoch = len(ranks[0][split]) // epochs
        loader = data.train_dataloader() if split == "train" else data.val_dataloader()
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            whole = [row for batch in loader for row in tiny.rows(batch)]
            share = [rank[split][epoch * per_epoch : (epoch + 1) * per_epoch] for rank in ranks]
            together = [row for rows in zip(*share, strict=True) for row in rows]
            assert [row for row in together if row != filler] == whole


def test_every_rank_raises_the_same_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="training data holds no chats"):
        sft_ranks.fit(tmp_path, count=0)


@pytest.mark.parametrize("train", ["path", "list", "docs"])
def test_every_argument_can_be_set_from_yaml(tmp_path: Path, train: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(chat) for chat in tiny.chats(30)))
    docs = {"class_path": "lit_llm.data.PythonDocs", "init_args": {"max_source_lines": 7}}
    sources: dict[str, Any] = {"path": str(path), "list": [str(path)], "docs": docs}
    options = {
        "val": str(path), "tokenizer": None, "chat_template": None, "max_length": 64, "batch_size": 2,
        "overlong": "drop", "val_fraction": 0.1, "vocab_size": 300, "seed": 3, "num_workers": 0,
        "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(PackedSFTDataModule, "data")
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"data": {"train": sources[train], **options}}))
    data = parser.instantiate_classes(parser.parse_path(config)).data
    assert (data.options.overlong, data.batch_size, data.seed) == ("drop", 2, 3)
    if train == "docs":
        assert isinstance(data.train, PythonDocs) and data.train.max_source_lines == 7
    else:
        data.setup()
        assert len(data._data.train) == len(data._data.val) == 30


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": 1}, "max_length 1"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"seed": -1}, "seed -1"),
        ({"num_workers": -1}, "num_workers -1"),
        ({"overlong": "cut"}, "got 'cut'"),
        ({"val_fraction": 1.0}, "val_fraction .* 1.0"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny.data_module(tmp_path, **options)


def test_data_is_not_there_before_setup(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"call setup\(\) first"):
        tiny.data_module(tmp_path).tokenizer


def test_the_order_is_that_of_the_plan(tmp_path: Path) -> None:
    data = tiny.data_module(tmp_path, seed=5)
    data.setup()
    packs = plan_epoch(data._data.train.lengths, 32, 5, 0)
    first = next(iter(data.train_dataloader()))
    expected = torch.cat([torch.from_numpy(data._data.train[i][0].copy()) for i in packs[0]])
    assert first["input_ids"][0, : len(expected)].tolist() == expected.tolist()
