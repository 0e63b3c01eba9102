"""A resumed run reads exactly what the uninterrupted one would have read."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny_training as tiny
import torch
from lightning.pytorch.trainer.states import TrainerFn

PACKS = 16  # of an epoch
EPOCHS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[str]:
    data = tiny.data_module(folder)
    data.setup()
    loader = data.train_dataloader()
    read = []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        read += [row for batch in loader for row in tiny.rows(batch)]
    assert len(read) == EPOCHS * PACKS
    return read


def run(folder: Path, ckpt: Path | None = None, read_early: bool = False, **options: Any) -> list[str]:
    data_options = {name: options.pop(name) for name in ("num_workers", "batch_size", "seed") if name in options}
    module = tiny.Reader(read_early)
    data = tiny.data_module(folder, options.pop("count", 40), **data_options)
    tiny.trainer(folder, **options).fit(module, data, ckpt_path=ckpt, weights_only=True if ckpt else None)
    return module.trained


def checkpoint(folder: Path, hook: str, batches: int) -> Path:
    path = folder / f"{hook}-{batches}.ckpt"
    if not path.exists():
        run(folder, callbacks=[tiny.SaveAt(hook, batches, path)], max_epochs=batches // PACKS + 1)
    assert path.exists()
    return path


def test_an_uninterrupted_trainer_reads_the_plan(folder: Path, uninterrupted: list[str]) -> None:
    assert run(folder) == uninterrupted


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("hook", "batches"),
    [
        ("on_train_batch_end", 3),
        ("on_train_batch_end", PACKS),
        ("on_train_batch_end", PACKS + 5),
        ("on_train_batch_start", PACKS - 1),
        ("on_validation_end", PACKS),
        ("on_train_epoch_end", PACKS),
    ],
)
def test_resumed(folder: Path, uninterrupted: list[str], hook: str, batches: int, num_workers: int) -> None:
    path = checkpoint(folder, hook, batches)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        assert run(folder, path, num_workers=num_workers) == uninterrupted[batches:]


def test_resumed_with_the_number_of_steps_read_before_the_checkpoint(folder: Path, uninterrupted: list[str]) -> None:
    path = checkpoint(folder, "on_train_batch_end", PACKS + 5)
    assert run(folder, path, read_early=True) == uninterrupted[PACKS + 5 :]


@pytest.mark.parametrize("steps", [3, PACKS, PACKS + 5])
def test_resumed_after_max_steps(folder: Path, uninterrupted: list[str], steps: int) -> None:
    first, second = folder / f"steps-{steps}.ckpt", folder / f"more-{steps}.ckpt"
    for path, ckpt, limit in ((first, None, steps), (second, first, steps + 2)):
        trainer = tiny.trainer(folder, max_steps=limit, max_epochs=-1)
        trainer.fit(tiny.Reader(), tiny.data_module(folder), ckpt_path=ckpt, weights_only=True if ckpt else None)
        trainer.save_checkpoint(path)
    read = run(folder, second, max_steps=EPOCHS * PACKS, max_epochs=-1)
    assert read == uninterrupted[steps + 2 :]


def test_the_rest_of_an_epoch_cut_short_is_an_epoch_to_a_trainer_that_counts_epochs(
    folder: Path, uninterrupted: list[str]
) -> None:
    path, later = folder / "cut.ckpt", folder / "cut-later.ckpt"
    trainer = tiny.trainer(folder, max_steps=3)
    trainer.fit(tiny.Reader(), tiny.data_module(folder))
    trainer.save_checkpoint(path)
    read = run(folder, path, max_epochs=3, callbacks=[tiny.SaveAt("on_train_batch_end", 6, later)])
    assert read == uninterrupted[3 : 2 * PACKS]
    state = torch.load(later, weights_only=True)["PackedSFTDataModule"]
    assert (state["epoch"], state["packs_consumed"]) == (0, 6)


def test_a_new_fit_after_a_limited_one_goes_on_to_the_next_epoch(folder: Path, uninterrupted: list[str]) -> None:
    read = run(folder, limit_train_batches=4, max_epochs=2)
    assert read == uninterrupted[:4] + uninterrupted[PACKS : PACKS + 4]
    assert run(folder, reload_dataloaders_every_n_epochs=1) == uninterrupted


def test_another_split_of_the_same_global_batch(folder: Path) -> None:
    path = folder / "batches.ckpt"
    whole = run(folder, batch_size=2, max_epochs=1, callbacks=[tiny.SaveAt("on_train_batch_end", 3, path)])
    state = torch.load(path, weights_only=True)["PackedSFTDataModule"]
    assert state == {
        "epoch": 0, "packs_consumed": 6, "seed": 0, "max_length": 32, "global_batch": 2,
        "fingerprint": state["fingerprint"],
    }  # fmt: skip
    assert run(folder, path, batch_size=2, max_epochs=1) == whole[6:]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"count": 41}, "not what the checkpoint was trained on.*load the weights only"),
        ({"seed": 1}, "seed=0, now it is 1: set seed=0"),
        ({"batch_size": 2}, r"global batches of 1 packs, now they are 2 \(batch_size 2 x 1 replicas\): change"),
    ],
)
def test_what_cannot_be_continued_is_refused(folder: Path, options: dict[str, Any], words: str) -> None:
    path = checkpoint(folder, "on_train_batch_end", 3)
    with pytest.raises(ValueError, match=words):
        run(folder, path, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_checkpoint_that_comes_after_the_loader(folder: Path, uninterrupted: list[str], num_workers: int) -> None:
    """As under sharded strategies, which restore after ``configure_optimizers``, if that has asked for the steps."""
    state = torch.load(checkpoint(folder, "on_train_batch_end", 3), weights_only=True)["PackedSFTDataModule"]
    data = tiny.data_module(folder, num_workers=num_workers)
    data.trainer = tiny.trainer(folder)
    data.trainer.state.fn = TrainerFn.FITTING
    data.setup("fit")
    loader = data.train_dataloader()
    if num_workers:
        with pytest.raises(ValueError, match=r"estimated_stepping_batches.*num_workers=0"):
            data.load_state_dict(state)
    else:
        data.load_state_dict(state)
        assert [row for batch in loader for row in tiny.rows(batch)] == uninterrupted[3:PACKS]


def test_a_changed_data_set_may_still_be_validated_with_the_checkpoint(folder: Path) -> None:
    path = checkpoint(folder, "on_train_batch_end", 3)
    data = tiny.data_module(folder, 41)
    tiny.trainer(folder).validate(tiny.Reader(), data, ckpt_path=path, weights_only=True, verbose=False)
