"""From messages to ids: chat templates, the tokens that carry loss, and the ids of later turns.

A conversation only ever grows: ids that were rendered (or sampled) once are kept, and a further turn adds ids behind them.
What an engine is prompted with, what supervised training shows and what an agent appends are therefore the same ids.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
RESERVED = ("tokenize", "add_generation_prompt", "continue_final_message", "chat_template", "tools", "return_dict")
ANSWER = "ANSWERxOFxTHExASSISTANT"  # stands for a sampled answer; one word, so that no template trims or splits it


@dataclass(frozen=True)
class Rendered:
    """A conversation in ids; `mask` is 1 on the assistant's tokens, their end-of-turn token included."""

    ids: list[int]
    mask: list[int]


@dataclass(frozen=True)
class Chat:
    """A tokenizer and the way it renders messages."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    """A Jinja template, or a .jinja file, that replaces the tokenizer's."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Schemas of the tools that the template lists."""
    plain: bool = False
    """No template: the contents as they stand, one after the other, each assistant turn closed by the end-of-text token."""

    def __post_init__(self) -> None:
        clash = sorted(set(self.kwargs) & set(RESERVED))
        if clash:
            raise ValueError(f"data.apply_chat_template_kwargs sets {clash}, which Strop sets itself. Remove it.")
        if self.template is not None and self.template.endswith((".jinja", ".j2")):
            file = Path(self.template).expanduser()
            if not file.is_file():
                raise ValueError(f"The chat template file {self.template} does not exist.")
            object.__setattr__(self, "template", file.read_text(encoding="utf-8"))
        if not self.plain and self.template is None and not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"The tokenizer {self.tokenizer.name_or_path or 'of the model'} has no chat template. Set "
                "data.apply_chat_template=false to use prompts as they stand, or give a Jinja template: "
                "actor_rollout_ref.model.custom_chat_template (reinforcement learning), data.chat_template (supervised)."
            )

    def text(self, messages: Sequence[Message], *, generate: bool = False, tools: Sequence[Any] | None = None) -> str:
        """Messages as the text the model reads; `generate` opens the next assistant turn."""
        if self.plain:
            return "".join(self._plain(message) for message in messages)
        import jinja2

        try:
            rendered = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools or self.tools or []) or None,  # type: ignore[arg-type]
                chat_template=self.template,
                add_generation_prompt=generate,
                tokenize=False,
                **self.kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"The chat template fails on messages of roles [{roles}]: {type(error).__name__}: {error}"
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def ids(self, messages: Sequence[Message], *, generate: bool = True, tools: Sequence[Any] | None = None) -> list[int]:
        """Messages as ids; by default with the prefix that opens the assistant's turn."""
        return self.encode(self.text(messages, generate=generate, tools=tools), start=True)

    def lengths(self, conversations: Sequence[Sequence[Message]], *, tools: Sequence[Any] | None = None) -> list[int]:
        """How many ids each prompt has, tokenised together."""
        texts = [self.text(messages, generate=True, tools=tools) for messages in conversations]
        if not texts:
            return []
        opening = len(self._opening())
        return [opening + len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def encode(self, text: str, *, start: bool = False) -> list[int]:
        """Ids of text; at the `start` of plain text the tokenizer's own opening token (if it has one) comes first."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._opening() + ids if start else ids

    def conversation(self, messages: Sequence[Message], *, learn_from: int = 0, tools: Sequence[Any] | None = None) -> Rendered:
        """Ids up to the last assistant turn, and the mask of what the assistant says from message `learn_from` on.

        Each assistant turn is rendered twice, opened and whole; what the second has more is the turn. Loss falls on it up to
        and including its end-of-turn token, not on white space that the template puts behind that.
        """
        done, ids, mask = "", self._opening(), [0] * len(self._opening())
        for place, message in enumerate(messages):
            if message["role"] != "assistant" or place < learn_from:
                continue
            for part, learn in ((messages[:place], False), (messages[: place + 1], True)):
                whole = self.text(part, generate=not learn, tools=tools)
                new = self._grown(done, ids, whole, turn=place)
                kept = self._end_of_turn(new) if learn else 0
                ids, mask, done = ids + new, mask + [1] * kept + [0] * (len(new) - kept), whole
        if not any(mask):
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(f"A conversation of roles [{roles}] has no assistant turn with text, so nothing can be learned.")
        return Rendered(ids, mask)

    def later_turn(
        self,
        messages: Sequence[Message],
        *,
        last_id: int | None = None,
        tools: Sequence[Any] | None = None,
        history: Sequence[Message] | None = None,
    ) -> list[int]:
        """Ids that follow a sampled answer: the rest of its turn, the new messages, and the opening of the next answer.

        `last_id` is the last sampled id. If it is the end-of-turn token it is not repeated; if the answer was cut by a
        length limit, the turn is closed first. The turns before stay as they were sampled; `history` are the messages up to
        the answer, for templates that count turns or look back (by default a stand-in).
        """
        ids = _short_ids(self.tokenizer, self.later_text(messages, history=history, tools=tools))
        for place, token in enumerate(ids):
            if token == last_id:
                return list(ids[place + 1 :])
            if self._shown(token).strip():
                break
        return list(ids)

    def later_text(
        self, messages: Sequence[Message], *, history: Sequence[Message] | None = None, tools: Sequence[Any] | None = None
    ) -> str:
        """What the template writes after an answer, up to and including the opening of the next one."""
        before = [*(history or [{"role": "user", "content": "?"}]), {"role": "assistant", "content": ANSWER}]
        _, found, tail = self.text([*before, *messages], generate=True, tools=tools).rpartition(ANSWER)
        if not found:
            raise ValueError("The chat template leaves out what the assistant said, so later turns cannot be appended.")
        return tail

    def _plain(self, message: Message) -> str:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        if message["role"] == "assistant":
            return content + str(self.tokenizer.eos_token or "")
        return content

    def _opening(self) -> list[int]:
        """What the tokenizer puts before every text; chat templates write it themselves."""
        return _opening_ids(self.tokenizer) if self.plain else []

    def _grown(self, done: str, ids: list[int], whole: str, *, turn: int) -> list[int]:
        """Ids by which a conversation grew from the text `done`."""
        if not whole.startswith(done):
            raise ValueError(
                f"The chat template rewrites earlier turns when message {turn} is added, so no ids can be kept: it rendered "
                f"...{done[-60:]!r} before and ...{whole[max(0, len(done) - 60) : len(done)]!r} now. Use a template that only "
                "appends (data.chat_template), or train single turns."
            )
        all_ids = self.encode(whole, start=True)
        if all_ids[: len(ids)] == ids:
            return all_ids[len(ids) :]
        return self.encode(whole[len(done) :])  # a token would span the border; an engine starts anew there as well

    def _end_of_turn(self, ids: Sequence[int]) -> int:
        end = len(ids)
        while end and not self._shown(ids[end - 1]).strip():
            end -= 1
        return end

    def _shown(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills up batches; the end-of-text token is taken where a tokenizer has no pad token."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path or 'of the model'} has neither a pad token nor an end-of-text token. "
                "Set eos_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
        _say_once(f"The tokenizer has no pad token; {tokenizer.eos_token!r} fills up batches (masked, so it teaches nothing).")
    return int(tokenizer.pad_token_id)


def stop_ids(tokenizer: PreTrainedTokenizerBase, further: Sequence[int] | int | None = None) -> set[int]:
    """Ids that end a generation: the tokenizer's end-of-text token and `further` ones, from a generation config."""
    named = [further] if isinstance(further, int) else list(further or [])
    return {int(token) for token in [tokenizer.eos_token_id, *named] if token is not None}


@functools.lru_cache(maxsize=64)
def _say_once(message: str) -> None:
    logger.warning(message)


@functools.lru_cache(maxsize=4096)
def _short_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Ids of a short text that is likely to come again: what a tool says to the samples of one prompt is often the same."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    bare = list(tokenizer("x", add_special_tokens=False)["input_ids"])
    dressed = list(tokenizer("x", add_special_tokens=True)["input_ids"])
    for place in range(len(dressed) - len(bare) + 1):
        if dressed[place : place + len(bare)] == bare:
            return dressed[:place]
    return []
