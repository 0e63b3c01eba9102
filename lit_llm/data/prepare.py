"""From chats to two stores of tokens, training and held out, built once per content.

The stores' place in the cache is a hash of everything that went into them: the data, the tokenizer, the template and
the options. So nothing stale is ever read, and nothing has to be invalidated.
"""

import copy
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from lit_llm.data.masks import encode_chat
from lit_llm.data.sources import Chat, ChatSource, read_chats
from lit_llm.data.store import TokenStore, cached, write_store
from lit_llm.data.tokenizer import library_versions, load_tokenizer, train_tokenizer
from lit_llm.packing import Sample
from lit_llm.targets import IGNORE_INDEX

__all__ = ["Options", "Overlong", "Prepared", "prepare", "split_chats", "tokenise"]

Overlong = Literal["error", "drop", "truncate"]
_FORMAT = 1  # of the cache


@dataclass(frozen=True)
class Options:
    """What of the data module's arguments changes the tokens.

    Attributes:
        max_length: tokens of a sequence.
        overlong: what happens to a longer sample.
        val_fraction: share held out if there is no validation data.
        vocab_size: of a tokenizer trained here.
    """

    max_length: int = 2048
    overlong: Overlong = "error"
    val_fraction: float = 0.05
    vocab_size: int = 4096


class Prepared(NamedTuple):
    """The result of :func:`prepare`."""

    train: TokenStore
    val: TokenStore
    tokenizer: Any


def prepare(
    train: ChatSource,
    val: ChatSource | None,
    tokenizer: Any,
    chat_template: str | None,
    options: Options,
    cache_dir: Path,
) -> Prepared:
    """Tokenised training and held-out samples, from the cache if they are there.

    Args:
        train: the training chats.
        val: the held-out chats; if None, the training source's own held-out part or ``options.val_fraction`` of it.
        tokenizer: a name, a path, a tokenizer, or None to train one on the training texts.
        chat_template: Jinja text, or a file with it, that replaces the tokenizer's; None keeps it.
        options: see :class:`Options`.
        cache_dir: where results are kept.

    Raises:
        ValueError: for data, a tokenizer or a template that cannot be used, with the remedy.
    """
    data = [
        train.fingerprint(),
        val.fingerprint() if val is not None else "",
        options.val_fraction,
        _FORMAT,
        library_versions(),
    ]
    if tokenizer is None:
        folder = cached(
            cache_dir / "tokenizers" / _key(data, options.vocab_size),
            partial(_build_tokenizer, train=train, val=val, options=options),
        )
        tokenizer = load_tokenizer(folder)
    elif isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    if chat_template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = _template(chat_template)
    folder = cached(
        cache_dir / "sft" / _key(data, _tokenizer_key(tokenizer), options.max_length, options.overlong),
        partial(_build_stores, train=train, val=val, tokenizer=tokenizer, options=options),
    )
    return Prepared(TokenStore(folder / "train"), TokenStore(folder / "val"), tokenizer)


def split_chats(train: ChatSource, val: ChatSource | None, val_fraction: float) -> tuple[list[Chat], list[Chat]]:
    """Training and held-out chats.

    In this order: the validation source (its held-out part, if it has one); the training source's own held-out part;
    the ``val_fraction`` of the training chats with the smallest hashes of their content, so that copies of one chat
    are never on both sides and a chat stays on its side when others are added or reordered.

    Raises:
        ValueError: if no chat is left to train on.
    """
    trained = list(read_chats(train, "train"))
    if not trained:
        raise ValueError(f"the training data holds no chats ({train}): check that train= names the right files")
    if val is not None:
        held_out = list(read_chats(val, "val")) or list(read_chats(val, "train"))
        if not held_out:
            raise ValueError(f"the validation data holds no chats ({val}): check val=, or leave it out to split train=")
        return trained, held_out
    held_out = list(read_chats(train, "val"))
    if held_out or val_fraction == 0:
        return trained, held_out
    hashes = np.array([xxhash.xxh3_64_intdigest(json.dumps(chat.messages).encode()) for chat in trained], np.uint64)
    cut = np.sort(hashes)[max(1, round(val_fraction * len(trained))) - 1]
    if (hashes <= cut).all():
        raise ValueError(
            f"cannot hold out {val_fraction:.0%} of {len(trained)} chat(s) that are all the same: "
            "give val=, or val_fraction=0 to train without validation"
        )
    return (
        [chat for chat, value in zip(trained, hashes, strict=True) if value > cut],
        [chat for chat, value in zip(trained, hashes, strict=True) if value <= cut],
    )


def tokenise(
    chats: Iterable[Chat], tokenizer: Any, max_length: int, overlong: Overlong, split: str
) -> tuple[list[Sample], list[int], dict[str, int]]:
    """Tokens and labels of chats, none longer than ``max_length`` and each with something to train.

    Args:
        chats: what to encode.
        tokenizer: see :func:`~lit_llm.data.masks.encode_chat`.
        max_length: tokens of a sequence.
        overlong: ``"error"``, ``"drop"`` the sample, or ``"truncate"`` it; one whose trained part is wholly cut off
            is dropped.
        split: named in errors.

    Returns:
        The samples, the index of each one's chat, and how many were ``dropped`` and ``truncated``.

    Raises:
        ValueError: if a chat cannot be encoded or trains nothing (naming its place), or one is too long and
            ``overlong`` is ``"error"``, or none is left.
    """
    samples: list[Sample] = []
    kept: list[int] = []
    counts = {"dropped": 0, "truncated": 0}
    too_long: list[int] = []
    total = 0
    for index, chat in enumerate(_progress(chats, split)):
        total += 1
        try:
            tokens, labels = encode_chat(tokenizer, chat.messages)
        except ValueError as error:
            raise ValueError(f"{chat.where}: {error}") from error
        if not (labels != IGNORE_INDEX).any():
            raise ValueError(
                f"{chat.where}: nothing in this chat is trained (roles: "
                f"{', '.join(message['role'] for message in chat.messages)}): add what the assistant answers, "
                "or remove the record"
            )
        if len(tokens) > max_length:
            too_long.append(len(tokens))
            tokens, labels = tokens[:max_length], labels[:max_length]
            if overlong == "drop" or not (labels != IGNORE_INDEX).any():
                counts["dropped"] += 1
                continue
            counts["truncated"] += 1
        samples.append((tokens, labels))
        kept.append(index)
    if too_long and overlong == "error":
        raise ValueError(
            f"{len(too_long)} of {total} {split} samples are longer than max_length {max_length} tokens "
            f'(the longest has {max(too_long)}): raise max_length, or set overlong="drop" to leave them out or '
            '"truncate" to cut them'
        )
    if not samples:
        raise ValueError(f"all {total} {split} samples are longer than max_length {max_length}: raise max_length")
    return samples, kept, counts


def _build_tokenizer(folder: Path, train: ChatSource, val: ChatSource | None, options: Options) -> None:
    trained, _ = split_chats(train, val, options.val_fraction)
    texts = (message["content"] for chat in trained for message in chat.messages)
    train_tokenizer(texts, options.vocab_size).save_pretrained(folder)


def _build_stores(folder: Path, train: ChatSource, val: ChatSource | None, tokenizer: Any, options: Options) -> None:
    splits = dict(zip(("train", "val"), split_chats(train, val, options.val_fraction), strict=True))
    for split, chats in splits.items():
        (folder / split).mkdir()
        if not chats:
            write_store(folder / split, [], {"dropped": 0, "truncated": 0, "example": None})
            continue
        name = "training" if split == "train" else "validation"
        samples, kept, counts = tokenise(chats, tokenizer, options.max_length, options.overlong, name)
        middle = int(np.argsort([len(tokens) for tokens, _ in samples], kind="stable")[len(samples) // 2])
        write_store(folder / split, samples, {**counts, "example": chats[kept[middle]].messages})
    (folder / "options.json").write_text(json.dumps(asdict(options)))


def _template(chat_template: str) -> str:
    """The template's text; what has no Jinja in it is the name of a file."""
    if "{" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise ValueError(
            f"chat_template {chat_template!r} is neither Jinja text nor a file ({path.absolute()}): check the path"
        )
    return path.read_text(encoding="utf-8")


def _tokenizer_key(tokenizer: Any) -> list[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"a {type(tokenizer).__name__} is no fast Hugging Face tokenizer: give one (PreTrainedTokenizerFast), "
            "a folder, or a name"
        )
    return [backend.to_str(), str(tokenizer.chat_template), str(sorted(tokenizer.special_tokens_map.items()))]


def _key(*parts: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


def _progress(chats: Iterable[Chat], split: str) -> Iterable[Chat]:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    return tqdm(chats, desc=f"tokenising {split} chats", unit=" chats", delay=5, leave=False)
