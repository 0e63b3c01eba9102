"""Chats, packed, for a Trainer: the data module."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lit_llm.agreement import raise_together
from lit_llm.data.loader import PackLoader, PackSampler, Position, pack_loader
from lit_llm.data.prepare import Options, Overlong, Prepared, prepare
from lit_llm.data.sources import ChatSource, Message, open_source
from lit_llm.data.store import TokenStore, default_cache_dir

__all__ = ["PackedSFTDataModule"]

Source = str | list[str] | ChatSource | Iterable[Mapping[str, Any]]


class PackedSFTDataModule(pl.LightningDataModule):
    """Chats as packed batches, in an order that any number of ranks reads alike and that resumes exactly.

    Samples are laid end to end by best-fit decreasing, newly shuffled each epoch; no sample is split, and in training
    and validation every one is read exactly once an epoch. Ranks read equally many batches; the last is filled up with
    rows that train nothing. Trained is what the assistant says and the token that ends its turn. Batches are as in
    :func:`lit_llm.packing.collate`.

    There is no ``prepare_data``: ``setup`` tokenises once per content, into a cache that other processes wait for and
    then share, and raises the same error on every rank.

    Args:
        train: files or patterns (JSONL, JSON, Parquet, Arrow), a ``datasets.Dataset``, records, or a source such as
            :class:`~lit_llm.data.PythonDocs`; see :func:`lit_llm.data.sources.open_source`.
        val: the same for validation; if None, the training source's own held-out part or ``val_fraction`` of it.
        tokenizer: the name or path of a pretrained tokenizer, or a tokenizer; if None, a small one is trained on the
            training texts.
        chat_template: Jinja text, or a file with it, in place of the tokenizer's own.
        max_length: tokens of a row.
        batch_size: rows in the batch of one rank.
        overlong: what happens to a sample longer than ``max_length``: ``"error"``, ``"drop"`` or ``"truncate"``.
        val_fraction: share of the training chats held out if there are no others; 0 for no validation.
        vocab_size: entries of a tokenizer trained here.
        seed: of the order.
        num_workers: processes that load batches.
        cache_dir: where tokenised data is kept; ``~/.cache/lit-llm`` if None.

    Raises:
        ValueError: if an option is out of its range; in ``setup``, for data that cannot be trained on, naming file and
            line; on resume, if the data or its order are not those of the checkpoint.

    Example:
        >>> import tempfile
        >>> chats = [
        ...     {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}]}
        ...     for i in range(40)
        ... ]
        >>> data = PackedSFTDataModule(chats, max_length=64, vocab_size=270, cache_dir=tempfile.mkdtemp())
        >>> data.setup("fit")
        >>> next(iter(data.train_dataloader()))["input_ids"].shape
        torch.Size([1, 64])
    """

    def __init__(
        self,
        train: Source,
        val: Source | None = None,
        tokenizer: str | Any | None = None,
        chat_template: str | None = None,
        max_length: int = 2048,
        batch_size: int = 1,
        overlong: Overlong = "error",
        val_fraction: float = 0.05,
        vocab_size: int = 4096,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        if max_length < 2 or batch_size < 1 or num_workers < 0 or seed < 0:
            raise ValueError(
                "need max_length >= 2, batch_size >= 1, num_workers >= 0 and seed >= 0, got "
                f"max_length {max_length}, batch_size {batch_size}, num_workers {num_workers}, seed {seed}"
            )
        if overlong not in ("error", "drop", "truncate"):
            raise ValueError(f'overlong must be "error", "drop" or "truncate", got {overlong!r}')
        if not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction is a share, from 0 to below 1, got {val_fraction}")
        self.train = train
        self.val = val
        self.chat_template = chat_template
        self.options = Options(max_length, overlong, val_fraction, vocab_size)
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        self._given_tokenizer = tokenizer
        self._prepared: Prepared | None = None
        self._position: Position | None = None
        self._sampler: PackSampler | None = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, once ``setup`` has run."""
        return self._data.tokenizer

    @property
    def vocab_size(self) -> int:
        """Entries of the tokenizer, special tokens included."""
        return len(self.tokenizer)

    def setup(self, stage: str | None = None) -> None:
        """Read, check and tokenise the data, or find it in the cache; the same on every rank."""
        self._position, self._sampler = None, None
        if self._prepared is not None:
            return
        with raise_together():
            train = open_source(self.train)
            val = open_source(self.val) if self.val is not None else None
            self._prepared = prepare(
                train, val, self._given_tokenizer, self.chat_template, self.options, self.cache_dir
            )
        rank_zero_info(self._report())

    def train_dataloader(self) -> PackLoader:
        """Packs in the order of the seed and the epoch, from where the run continues."""
        if self.trainer is None:
            self._sampler = self._new_sampler(self._data.train, self.seed)
            return self._loader(self._data.train, self._sampler)
        fit_loop: Any = self.trainer.fit_loop
        position = self._position or Position(fit_loop.epoch_progress.current.processed)
        if self._sampler is not None:  # reload_dataloaders_every_n_epochs
            self._sampler.set_epoch(fit_loop.epoch_progress.current.processed)
            position = self._sampler.here
        self._sampler = self._new_sampler(
            self._data.train, self.seed, position, lambda: fit_loop.epoch_loop.batch_progress.total.processed
        )
        return self._loader(self._data.train, self._sampler)

    def val_dataloader(self) -> PackLoader | list[Any]:
        """The held-out packs, always in the same order; nothing if none are held out."""
        if not len(self._data.val):
            return []
        return self._loader(self._data.val, self._new_sampler(self._data.val, None))

    def state_dict(self) -> dict[str, Any]:
        """Where the run is in its data: plain values, the same on every rank."""
        if self.trainer is None or self._prepared is None:
            return {}
        return {
            **self._current_position()._asdict(),
            "seed": self.seed,
            "max_length": self.options.max_length,
            "global_batch": self._global_batch,
            "fingerprint": self._data.train.meta["fingerprint"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a checkpoint's order where it was.

        Raises:
            ValueError: if that cannot be: other data, another seed or length of rows, or, within an epoch, another
                number of packs in a global batch.
        """
        if not state_dict or self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return
        self._check_resumable(state_dict)
        self._position = Position(*(state_dict[field] for field in Position._fields))
        if self._sampler is None:
            return
        # train_dataloader() was already called, by a configure_optimizers that reads estimated_stepping_batches
        if self.num_workers and self._position != Position():
            raise ValueError(
                "the workers have already loaded batches from the start of the data, because "
                "trainer.estimated_stepping_batches was read before the checkpoint: resume with num_workers=0, "
                "or do not read it in configure_optimizers"
            )
        self._sampler.start_at(self._position)

    def unigram_loss(self) -> float:
        """What a model reaches that knows only how often each token is a target: the mean over held-out targets.

        ``-mean(log((count(target) + 1) / (num_targets + vocab_size)))`` with the counts of the training targets. A
        model that does not beat it has not learnt from context.

        Raises:
            ValueError: if nothing is held out.
        """
        self._check_held_out("unigram_loss()")
        counts = self._data.train.target_counts(self.vocab_size) + 1
        held_out = self._data.val.target_counts(self.vocab_size)
        log_probabilities = np.log(counts) - math.log(counts.sum())
        return float(-(held_out @ log_probabilities) / held_out.sum())

    def example(self) -> list[Message]:
        """A held-out chat of median length, to show what a model answers to it.

        Raises:
            ValueError: if nothing is held out.
        """
        self._check_held_out("example()")
        return self._data.val.meta["example"]

    @property
    def _data(self) -> Prepared:
        if self._prepared is None:
            raise RuntimeError("the data is not ready: call setup() first (a Trainer does)")
        return self._prepared

    @property
    def _replicas(self) -> dict[str, int]:
        """Over how many ranks the data is spread, and which is ours; ranks of one model replica read the same."""
        kwargs = getattr(self.trainer, "distributed_sampler_kwargs", None) if self.trainer is not None else None
        return {"num_replicas": 1, "rank": 0, **(kwargs or {})}

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self._replicas["num_replicas"]

    def _new_sampler(
        self,
        store: TokenStore,
        seed: int | None,
        position: Position = Position(),  # noqa: B008 - immutable
        trained: Callable[[], int] | None = None,
    ) -> PackSampler:
        return PackSampler(
            store.lengths,
            self.options.max_length,
            self.batch_size,
            **self._replicas,
            seed=seed,
            position=position,
            trained=trained,
        )

    def _loader(self, store: TokenStore, sampler: PackSampler) -> PackLoader:
        tokenizer = self._data.tokenizer
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return pack_loader(store, sampler, pad_id, self.num_workers, pin_memory=on_cuda)

    def _current_position(self) -> Position:
        """From the Trainer's counters: what was trained, not what workers have loaded ahead."""
        assert self.trainer is not None
        if self._sampler is None:
            return self._position or Position()
        fit_loop: Any = self.trainer.fit_loop
        epochs, batches = fit_loop.epoch_progress.current, fit_loop.epoch_loop.batch_progress
        start = self._sampler.here
        if not self._sampler.num_trained or epochs.ready > epochs.started:  # the epoch has not begun
            return start
        trained = min(self._sampler.num_trained, batches.current.processed)
        consumed = start.packs_consumed + trained * self._global_batch
        complete = batches.is_last_batch and batches.current.processed == batches.current.ready
        if complete or consumed >= self._sampler.num_packs:
            return Position(start.epoch + 1)
        return Position(start.epoch, consumed)

    def _check_resumable(self, state: Mapping[str, Any]) -> None:
        if state["fingerprint"] != self._data.train.meta["fingerprint"]:
            raise ValueError(
                "the training data is not what the checkpoint was trained on: its tokens have the fingerprint "
                f"{self._data.train.meta['fingerprint']}, the checkpoint's {state['fingerprint']}. Give the same "
                "data, tokenizer, chat_template, max_length and overlong to continue; to train on other data from "
                "these weights, load the weights only"
            )
        for name, now in (("seed", self.seed), ("max_length", self.options.max_length)):
            if state[name] != now:
                raise ValueError(
                    f"the checkpoint's order was made with {name}={state[name]}, now it is {now}: "
                    f"set {name}={state[name]}"
                )
        if state["packs_consumed"] and state["global_batch"] != self._global_batch:
            raise ValueError(
                f"the checkpoint is within an epoch that was read in global batches of {state['global_batch']} packs, "
                f"now they are {self._global_batch} (batch_size {self.batch_size} x "
                f"{self._replicas['num_replicas']} replicas): change batch_size so that the product is "
                f"{state['global_batch']}, or resume from a checkpoint at the end of an epoch"
            )

    def _check_held_out(self, what: str) -> None:
        if not len(self._data.val):
            raise ValueError(f"{what} needs held-out data: give val= or a val_fraction above 0")

    def _report(self) -> str:
        """One line on what will be read."""
        parts = []
        for name, store in (("train", self._data.train), ("val", self._data.val)):
            if not len(store):
                continue
            meta, max_length = store.meta, self.options.max_length
            num_packs = self._new_sampler(store, None).num_packs
            parts.append(
                f"{name}: {meta['samples']:,} samples, {meta['tokens']:,} tokens "
                f"({meta['trained'] / meta['tokens']:.0%} trained) in {num_packs:,} packs of {max_length:,} "
                f"({meta['tokens'] / (num_packs * max_length):.1%} full), "
                f"{meta['dropped']:,} dropped, {meta['truncated']:,} truncated"
            )
        return "; ".join(parts)
