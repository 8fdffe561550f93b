"""Is a chat template fit for training? Asked by the preflight, before any weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strop.data.chat import Chat, stop_ids
from strop.data.findings import Finding, Level

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "That makes 6."},
]


def probe_template(
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    plain: bool = False,
    further_stop_ids: Sequence[int] | int | None = None,
    multi_turn: bool = False,
) -> list[Finding]:
    """Render a short conversation and see whether it only grows, opens the assistant's turn, and ends it with a stop token.

    With `multi_turn` (agents, conversations in supervised training) a template that rewrites earlier turns is an error,
    otherwise a warning. An empty list: nothing to complain of.
    """
    found: list[Finding] = []
    try:
        chat = Chat(tokenizer, template=template, kwargs=dict(kwargs or {}), tools=tools, plain=plain)
        ids = chat.ids(CONVERSATION[:1])
        chat.text(CONVERSATION)
    except ValueError as error:
        return [Finding("error", str(error))]
    if not ids:
        found.append(Finding("error", "A prompt renders to no tokens at all."))
    if "2 plus 3" not in chat.text(CONVERSATION[:1]):
        found.append(Finding("error", "The chat template loses what the user said."))
    if tokenizer.eos_token_id is not None and tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        said = f"The tokenizer has no pad token of its own; {tokenizer.eos_token!r} fills up batches, where it teaches nothing."
        found.append(Finding("info", said))
    if not plain and _leaves_the_answer_unopened(chat):
        found.append(
            Finding(
                "warning",
                "The chat template ignores add_generation_prompt: the model must open its own turn before it answers.",
            )
        )
    found += _growth(chat, "error" if multi_turn else "warning")
    found += _stops(chat, stop_ids(tokenizer, further_stop_ids))
    return found


def _leaves_the_answer_unopened(chat: Chat) -> bool:
    """Whether answers have a beginning (a role, a marker) that the prompt for one lacks."""
    asked, answered = chat.text(CONVERSATION[:1]), chat.text(CONVERSATION[:2])
    begins_at_once = answered.startswith(asked + CONVERSATION[1]["content"])
    return not begins_at_once and chat.text(CONVERSATION[:1], generate=True) == asked


def _growth(chat: Chat, level: Level) -> list[Finding]:
    """Each rendering must begin with the ids of the one before."""
    for count in range(1, len(CONVERSATION)):
        answered = CONVERSATION[count]["role"] == "assistant"
        for generate in (False, True) if answered else (False,):
            before = chat.ids(CONVERSATION[:count], generate=generate)
            after = chat.ids(CONVERSATION[: count + 1], generate=False)
            if after[: len(before)] != before:
                same = next((place for place, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
                was, now = (chat.tokenizer.decode(ids[same : same + 12]) for ids in (before, after))
                what = "the opened answer" if generate else f"{count} messages"
                return [
                    Finding(
                        level,
                        f"The chat template is not prefix-stable: {what} rendered {was!r} at token {same}, but with one more "
                        f"message it is {now!r}. Supervised training on conversations of several turns cannot use it; agents "
                        "keep each turn as it was sampled.",
                    )
                ]
    return []


def _stops(chat: Chat, stops: set[int]) -> list[Finding]:
    """The last token the assistant learns in its turn must be one that ends a generation."""
    if not stops:
        return [Finding("error", "The tokenizer has no end-of-text token, so no answer would ever stop. Set eos_token.")]
    try:
        rendered = chat.conversation(CONVERSATION[:2])
    except ValueError:
        return []  # said already: it is not prefix-stable
    last = max(place for place, learned in enumerate(rendered.mask) if learned)
    if rendered.ids[last] in stops:
        return []
    shown = chat.tokenizer.decode([rendered.ids[last]])
    known = ", ".join(repr(chat.tokenizer.decode([token])) for token in sorted(stops))
    return [
        Finding(
            "warning",
            f"The chat template ends the assistant's turn with {shown!r}, which does not stop generation ({known} would). "
            "A model trained with it does not learn to stop. Add that token to the stop tokens, or set eos_token to it.",
        )
    ]
