from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, chatml
from tiny_training import chats

from lit_llm.data.prepare import Options, prepare, split_chats
from lit_llm.data.sources import open_source

LONG = {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "x" * 200}]}
LONG_QUESTION = {"messages": [{"role": "user", "content": "why? " * 50}, {"role": "assistant", "content": "x"}]}


def prepared(folder: Path, records: Any, val: Any = None, tokenizer: Any = None, **options: Any) -> Any:
    template = options.pop("chat_template", None)
    given = Options(**{"max_length": 64, "vocab_size": 261, **options})
    return prepare(open_source(records), open_source(val) if val else None, tokenizer, template, given, folder)


def contents(split: list[Any]) -> set[str]:
    return {chat.messages[0]["content"] for chat in split}


def test_held_out_chats_do_not_depend_on_order_and_copies_stay_together() -> None:
    records = chats(100)
    train, val = split_chats(open_source(records), None, 0.1)
    assert len(val) == 10 and len(train) == 90 and not contents(train) & contents(val)
    again = split_chats(open_source(records[::-1]), None, 0.1)[1]
    assert contents(again) == contents(val)
    doubled = split_chats(open_source(records * 2), None, 0.1)
    assert not contents(doubled[0]) & contents(doubled[1])


def test_a_validation_source_is_used_whole() -> None:
    train, val = split_chats(open_source(chats(5)), open_source(chats(3)), 0.5)
    assert (len(train), len(val)) == (5, 3)
    assert [len(split) for split in split_chats(open_source(chats(5)), None, 0)] == [5, 0]


def test_results_are_cached_by_everything_that_made_them(tmp_path: Path) -> None:
    def folder(**options: Any) -> Path:
        return prepared(tmp_path, options.pop("records", chats(20)), **options).train.folder

    first = folder()
    assert folder() == first
    others = [
        folder(max_length=65),
        folder(val_fraction=0.5),
        folder(vocab_size=262),
        folder(overlong="drop"),
        folder(tokenizer=chatml()),
        folder(tokenizer=chatml(), chat_template=CHATML.replace("<|im_start|>", "<|im_start|>The ")),
        folder(records=chats(21)),
        folder(val=chats(3)),
    ]
    assert len({first, *others}) == 9


def test_a_template_from_a_file_leaves_the_given_tokenizer_alone(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CHATML.replace("<|im_start|>", "<|im_start|>The "))
    tokenizer = chatml()
    result = prepared(tmp_path, chats(20), tokenizer=tokenizer, chat_template=str(tmp_path / "chat.jinja"))
    assert "The user" in result.tokenizer.decode(result.train[0][0])
    assert tokenizer.chat_template == CHATML
    with pytest.raises(ValueError, match=f"chat_template 'no.jinja' is neither Jinja text nor a file .*{Path.cwd()}"):
        prepared(tmp_path, chats(20), chat_template="no.jinja")


def test_overlong_samples(tmp_path: Path) -> None:
    records = [*chats(20), LONG, LONG_QUESTION]
    with pytest.raises(ValueError, match=r"2 of 22 training .* max_length 64 tokens \(the longest has"):
        prepared(tmp_path, records, val=chats(3))
    dropped = prepared(tmp_path, records, val=chats(3), overlong="drop").train.meta
    assert (dropped["samples"], dropped["dropped"], dropped["truncated"]) == (20, 2, 0)
    cut = prepared(tmp_path, records, val=chats(3), overlong="truncate").train
    assert (cut.meta["samples"], cut.meta["dropped"], cut.meta["truncated"]) == (21, 1, 1)
    assert cut.lengths.max() == 64
    with pytest.raises(ValueError, match="all 1 training samples are longer than max_length 64: raise"):
        prepared(tmp_path, [LONG], val=chats(3), overlong="drop")


def test_data_that_trains_nothing_is_named(tmp_path: Path) -> None:
    silent = {"messages": [{"role": "user", "content": "hello?"}]}
    with pytest.raises(ValueError, match=r"record 21: nothing in this chat is trained \(roles: user\): add"):
        prepared(tmp_path, [*chats(20), silent], val=chats(3))
    with pytest.raises(ValueError, match=r"training data holds no chats \(0 rows in memory\): check that train="):
        prepared(tmp_path, [])
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"training data holds no chats \(/.*empty.jsonl\)"):
        prepared(tmp_path, str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match=r"validation data holds no chats \(/.*empty.jsonl\): check val="):
        prepared(tmp_path, chats(20), val=str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match=r"1 chat\(s\) that are all the same: give val="):
        prepared(tmp_path, chats(1))


def test_a_template_that_does_not_tell_names_the_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"record 1: the chat template .*generation"):
        prepared(tmp_path, chats(3), val=chats(3), tokenizer=chatml(), chat_template="{{ messages[0]['content'] }}")


def test_a_tokenizer_must_be_a_fast_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a dict is no fast Hugging Face tokenizer"):
        prepared(tmp_path, chats(3), tokenizer={})
