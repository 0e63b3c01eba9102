from pathlib import Path

import pytest

from lit_llm.data.tokenizer import load_tokenizer, train_tokenizer

TEXTS = [f"to be or not to be, that is question number {number}" for number in range(50)]


def test_any_text_comes_back(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    assert len(tokenizer) == 300
    for text in ("to be", "Größe 😀\n\t x", "\x00\x7f", "  spaces  , kept ."):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_same_texts_give_the_same_tokenizer_and_it_survives_saving(tmp_path: Path) -> None:
    first, second = train_tokenizer(TEXTS, 350), train_tokenizer(iter(TEXTS), 350)
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    first.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "to be?"}, {"role": "assistant", "content": "not to be"}]
    text = "<|user|>to be?<|end|><|assistant|>not to be<|end|>"
    for tokenizer in (first, loaded):
        assert tokenizer.apply_chat_template(chat, tokenize=False) == text
        assert tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True) == (
            "<|user|>to be?<|end|><|assistant|>"
        )
        assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|end|>")
        assert tokenizer.convert_tokens_to_ids("<|pad|>") == 0
        assert len(tokenizer("<|user|><|end|>")["input_ids"]) == 2


def test_errors_name_the_value_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"at least 261 .* got 100"):
        train_tokenizer(TEXTS, 100)
    with pytest.raises(ValueError, match=rf"the model file '{tmp_path}/no\.gguf' does not exist"):
        load_tokenizer(tmp_path / "no.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"cannot load the tokenizer '{tmp_path}/empty'.*tokenizer.json"):
        load_tokenizer(tmp_path / "empty")
