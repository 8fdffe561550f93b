"""A character tokenizer with chat templates, made on the spot: one id per character, so lengths can be counted by eye."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Puts an empty thought before the last answer only, as some families do: earlier turns change when a turn is added.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Never writes the end-of-turn token.
UNENDING = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def character_tokenizer(
    template: str | None = CHATML, eos: str | None = "<|im_end|>", pad: str | None = "<pad>"
):  # type: ignore[no-untyped-def]
    characters = [c for c in string.printable if c not in "\r\x0b\x0c"]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", eos_token=eos, pad_token=pad
    )
    tokenizer.chat_template = template
    return tokenizer


def decoded(tokenizer, ids: list[int]) -> str:  # type: ignore[no-untyped-def]
    return "".join(tokenizer.convert_ids_to_tokens(ids))
