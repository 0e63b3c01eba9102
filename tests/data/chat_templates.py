"""Templates as popular models have them, written from their documented formats, on a small tokenizer."""

from typing import Any

from lit_llm.data.tokenizer import train_tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
NO_END = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
REORDERED = "{% for message in messages | reverse %}{{ message['content'] + '<|im_end|>' }}{% endfor %}"


def tokenizer_with(template: str, specials: list[str], eos: str, pad: str) -> Any:
    tokenizer = train_tokenizer(["What is two and two? Four.\n"] * 4, vocab_size=290)
    tokenizer.add_special_tokens({"extra_special_tokens": specials, "eos_token": eos, "pad_token": pad})
    tokenizer.chat_template = template
    return tokenizer


def chatml() -> Any:
    return tokenizer_with(CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>", "<|im_end|>")


def llama3() -> Any:
    specials = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return tokenizer_with(LLAMA3, specials, "<|eot_id|>", "<|eot_id|>")
