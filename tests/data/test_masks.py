from typing import Any

import pytest
from chat_templates import CHATML, NO_END, REORDERED, chatml, llama3
from hypothesis import given
from hypothesis import strategies as st

from lit_llm.data.masks import encode_chat
from lit_llm.data.tokenizer import train_tokenizer

TOKENIZERS: dict[str, tuple[Any, str]] = {
    "own": (train_tokenizer(["What is two and two? Four.\n"] * 4, vocab_size=290), "<|end|>"),
    "chatml": (chatml(), "<|im_end|>"),
    "llama3": (llama3(), "<|eot_id|>"),
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Four. Say it: Four."},
    {"role": "assistant", "content": "I said:\n\n  Four. ü 😀"},
]


def pieces(tokenizer: Any, tokens: Any, labels: Any) -> list[str]:
    """The text of every run of trained tokens."""
    runs: list[list[int]] = [[]]
    for token, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        if label == -100:
            runs.append([])
        else:
            assert label == token
            runs[-1].append(label)
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_the_assistant_says_and_its_end_token_are_trained(name: str) -> None:
    tokenizer, end = TOKENIZERS[name]
    tokens, labels = encode_chat(tokenizer, CHAT)
    assert pieces(tokenizer, tokens, labels) == ["Four." + end, "I said:\n\n  Four. ü 😀" + end]
    assert tokens.tolist() == tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert tokens.dtype == labels.dtype == "int32"


letters = st.text(st.sampled_from("ab ü😀.:"), min_size=1, max_size=12).map(str.strip).filter(bool)


@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(st.tuples(letters, letters), min_size=1, max_size=3))
def test_any_turns(name: str, turns: list[tuple[str, str]]) -> None:
    tokenizer, end = TOKENIZERS[name]
    messages = []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert pieces(tokenizer, *encode_chat(tokenizer, messages)) == [answer + end for _, answer in turns]


def test_loss_on_all_trains_everything_but_the_first_token() -> None:
    tokenizer, _ = TOKENIZERS["chatml"]
    tokens, labels = encode_chat(tokenizer, CHAT, loss_on="all")
    assert labels.tolist() == [-100, *tokens[1:].tolist()]


def test_a_chat_without_an_answer_trains_nothing() -> None:
    for tokenizer, _ in TOKENIZERS.values():
        _, labels = encode_chat(tokenizer, CHAT[:2])
        assert set(labels.tolist()) == {-100}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (NO_END, "message 3 .*not its content followed by a special token.*generation"),
        (REORDERED, r"does not render message 3 \(assistant\) the same way alone and in its chat.*generation"),
        (CHATML.replace("message['content']", "message['content'][::-1]"), "not its content followed"),
        ("{{ raise_exception('only two turns') }}", "cannot render .*only two turns"),
        ("{{ nonsense( }}", "cannot render .*TemplateSyntaxError"),
        (None, "no chat template: give chat_template="),
    ],
)
def test_templates_that_do_not_tell_are_errors(template: str | None, words: str) -> None:
    tokenizer = chatml()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=words):
        encode_chat(tokenizer, CHAT)
