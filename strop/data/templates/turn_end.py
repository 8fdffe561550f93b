"""The token that ends an assistant turn."""

from __future__ import annotations

import contextlib

from strop.data.chat import Chat

QUESTION = {"role": "user", "content": "What is 2 plus 3?"}
ANSWER = {"role": "assistant", "content": "It is 5."}
# Some templates open a thought in the generation prompt, so that only answers with a thought can be trained.
ANSWERS = (ANSWER, {**ANSWER, "reasoning_content": "2 plus 3 is 5."})


def turn_end(chat: Chat) -> int | None:
    """Return the last token of an assistant turn that is trained; None if the template cannot be trained
    with."""
    for answer in ANSWERS:
        with contextlib.suppress(ValueError):
            rendered = chat.conversation([QUESTION, answer])
            return max(zip(rendered.mask, range(len(rendered.ids)), rendered.ids))[2]
    return None


def turn_end_token(chat: Chat) -> int | None:
    """Return the token that ends an assistant turn; None if the template writes none, so that turns end with
    their text."""
    token = turn_end(chat)
    if token is None or token not in chat.tokenizer.added_tokens_decoder:
        return None
    return token
