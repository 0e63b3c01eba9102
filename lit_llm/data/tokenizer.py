"""The tokenizer a run starts with: a small one trained on the run's own texts, or a pretrained one.

The trained one is byte-level BPE, so any text can be encoded, with a token for each turn of a chat::

    <|user|>How many legs has a spider?<|end|><|assistant|>Eight.<|end|>

``<|end|>`` closes every turn and is the end-of-sequence token, so a model that learnt it stops after its answer. The
chat template marks what the assistant says, the end of its turn included, with ``{% generation %}``.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lit_llm.huggingface import pretrained_location

__all__ = ["CHAT_TEMPLATE", "library_versions", "load_tokenizer", "train_tokenizer"]

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>' -}}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
_PAD, _END = "<|pad|>", "<|end|>"
_SPECIAL = [_PAD, _END, "<|system|>", "<|user|>", "<|assistant|>"]
_SMALLEST_VOCABULARY = 256 + len(_SPECIAL)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Any:
    """A byte-level BPE tokenizer with a chat template, trained on ``texts``; the same texts give the same tokenizer.

    Args:
        texts: what to train on.
        vocab_size: entries, special tokens included; fewer if the texts do not have that many.

    Returns:
        A ``transformers.PreTrainedTokenizerFast``.

    Raises:
        ValueError: if ``vocab_size`` does not leave room for the 256 bytes and the special tokens.
        ImportError: if ``tokenizers`` or ``transformers`` are not installed.

    Example:
        >>> tokenizer = train_tokenizer(["to be or not to be"] * 3, vocab_size=300)
        >>> tokenizer.decode(tokenizer("not to be")["input_ids"])
        'not to be'
        >>> tokenizer.pad_token, tokenizer.eos_token
        ('<|pad|>', '<|end|>')
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be at least {_SMALLEST_VOCABULARY} (256 bytes and {len(_SPECIAL)} special tokens), "
            f"got {vocab_size}"
        )
    transformers = _transformers()
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=_PAD,
        eos_token=_END,
        extra_special_tokens=_SPECIAL[2:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Any:
    """A pretrained tokenizer, from wherever :func:`lit_llm.huggingface.pretrained_location` finds models.

    Args:
        name_or_path: for example ``runs/tokenizer``, ``models/smollm2.gguf``, ``package:NAME/FILE.gguf`` or
            ``HuggingFaceTB/SmolLM2-135M``.

    Raises:
        ValueError: if there is no such tokenizer, or it is not a fast one (masks need its character offsets).
        ImportError: if ``transformers`` is not installed.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> _ = train_tokenizer(["to be or not to be"], vocab_size=300).save_pretrained(folder)
        >>> load_tokenizer(folder).eos_token
        '<|end|>'
    """
    transformers = _transformers()
    location, arguments = pretrained_location(os.fspath(name_or_path))
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(location, **arguments)
    except ImportError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more for what is not there
        raise ValueError(
            f"cannot load the tokenizer {str(name_or_path)!r} ({_first_line(error)}): give a folder with "
            f"tokenizer.json (resolved to {Path(name_or_path).expanduser().absolute()}), a .gguf file, the name of a "
            "model on the Hugging Face hub, or leave tokenizer out to train one on the data"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"the tokenizer {str(name_or_path)!r} is a slow one ({type(tokenizer).__name__}), which has no character "
            "offsets: save its fast version (tokenizer.json) and give that folder"
        )
    return tokenizer


def library_versions() -> dict[str, str]:
    """The versions of the libraries that tokenise.

    Raises:
        ImportError: if they are not installed.
    """
    transformers = _transformers()
    import tokenizers

    return {"tokenizers": tokenizers.__version__, "transformers": transformers.__version__}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError('tokenizers need transformers: pip install "lit-llm[hf]"') from None
    return transformers
