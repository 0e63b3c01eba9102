r"""Which tokens of a chat are trained: what the assistant says, and the token with which it ends its turn.

Templates that mark what the assistant says with ``{% generation %}`` say so themselves. Most do not. Then it follows
from the rendered text, if the template renders a chat turn by turn: the text up to an assistant's turn (with the
generation prompt), the text up to its end and the whole must each begin with the one before::

    up to the turn        <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    up to its end         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n
    trained                                                                       ^^^^^^^^^^^^
    whole                 … and so on

What is trained ends with the first special token after the content, the end of the turn; what follows (here a line
break) is written by the program, not by the model. That token is trained even where it is also the padding token:
padding is known by its place, never by its id. Where a template does not render turn by turn, that is an error rather
than a guess.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lit_llm.data.sources import Message
from lit_llm.targets import IGNORE_INDEX

__all__ = ["LossOn", "encode_chat"]

LossOn = Literal["assistant", "all"]
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], loss_on: LossOn = "assistant"
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The tokens of a chat and its unshifted labels.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        messages: ``{"role", "content"}`` of each turn.
        loss_on: ``"assistant"`` trains what the assistant says, ``"all"`` every token but the first.

    Returns:
        ``input_ids`` and ``labels``, int32 ``[num_tokens]``. The first label is -100: nothing comes before it that
        could predict it.

    Raises:
        ValueError: if there is no chat template, it cannot render the chat, or it does not say what the assistant
            said; with the remedy.

    Example:
        >>> from lit_llm.data.tokenizer import train_tokenizer
        >>> tokenizer = train_tokenizer(["Hi Ho"], vocab_size=270)
        >>> chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
        >>> tokens, labels = encode_chat(tokenizer, chat)
        >>> tokenizer.decode(tokens[labels != -100])
        'Ho<|end|>'
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: give chat_template= (Jinja text or a file with it), "
            "or use the tokenizer of a chat model"
        )
    if loss_on == "all":
        tokens = np.asarray(_encoded(tokenizer, _rendered(tokenizer, messages))["input_ids"], dtype=np.int32)
        mask = np.ones(len(tokens), dtype=bool)
    elif _GENERATION.search(_template_text(tokenizer)):
        tokens, mask = _marked(tokenizer, messages)
    else:
        tokens, mask = _derived(tokenizer, messages)
    labels = np.where(mask, tokens, IGNORE_INDEX).astype(np.int32)
    labels[:1] = IGNORE_INDEX
    return tokens, labels


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    return template if isinstance(template, str) else str(template.get("default", ""))


def _marked(tokenizer: Any, messages: Sequence[Message]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """From the template's generation markers."""
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:
        raise _cannot_render(messages, error) from error
    return np.asarray(encoded["input_ids"], np.int32), np.asarray(encoded["assistant_masks"], bool)


def _derived(tokenizer: Any, messages: Sequence[Message]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """From the rendered prefixes of the chat."""
    text = _rendered(tokenizer, messages)
    encoded = _encoded(tokenizer, text)
    starts, ends = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=bool)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = _trained_span(tokenizer, messages, turn, text)
            mask |= (starts >= start) & (ends <= end) & (starts < ends)
    return np.asarray(encoded["input_ids"], np.int32), mask


def _trained_span(tokenizer: Any, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int]:
    """Where in ``text`` the assistant's turn begins and where the token that ends it ends."""
    before = _rendered(tokenizer, messages[:turn], add_generation_prompt=True)
    until = _rendered(tokenizer, messages[: turn + 1])
    if not (until.startswith(before) and text.startswith(until)):
        raise ValueError(
            f"the chat template does not render message {turn + 1} (assistant) the same way alone and in its chat, so "
            "what the assistant said cannot be told from what the template adds: give a chat_template with "
            "{% generation %} … {% endgeneration %} around what the assistant says"
        )
    said = text[len(before) : len(until)]
    content = messages[turn]["content"].strip()
    at = said.find(content)
    while at >= 0:
        end = _end_of_turn(tokenizer, said, at + len(content))
        if end is not None:
            return len(before), len(before) + end
        at = said.find(content, at + 1)
    raise ValueError(
        f"the chat template shows message {turn + 1} (assistant) as {said[:80]!r}, which is not its content followed "
        "by a special token that ends the turn, so a model could not learn where to stop: give a chat_template that "
        "ends turns with one, or with {% generation %} … {% endgeneration %} around what the assistant says"
    )


def _end_of_turn(tokenizer: Any, said: str, content_end: int) -> int | None:
    """Where the special token ends that follows the content, only white space between; None if none does."""
    tail = said[content_end:]
    rest = tail.lstrip()
    found = [str(token) for token in tokenizer.added_tokens_decoder.values() if rest.startswith(str(token))]
    return content_end + len(tail) - len(rest) + max(map(len, found)) if found else None


def _rendered(tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:
        raise _cannot_render(messages, error) from error


def _encoded(tokenizer: Any, text: str) -> Any:
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)


def _cannot_render(messages: Sequence[Message], error: Exception) -> ValueError:
    roles = ", ".join(message["role"] for message in messages)
    return ValueError(
        f"the chat template cannot render messages with the roles [{roles}] ({type(error).__name__}: {error}): "
        "change the data or give another chat_template"
    )
