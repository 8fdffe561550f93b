"""Convert messages to token ids: chat templates, loss masks, and the ids of later turns.

A conversation only grows: ids that were rendered (or sampled) once are kept, and a later turn appends ids.
The prompt of an engine, the input of supervised training and the turns of an agent are therefore the same
ids.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.data.image_files import UnusableImages
from strop.data.images import ImageProcessor
from strop.data.templates.forms import (
    forms_of,
    opening_advice,
    refuse_lost_parts,
    template_errors,
    with_preamble,
)
from strop.types import Images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools."""
RESERVED = (
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tools",
    "return_dict",
)
CACHED_CHARACTERS = 1024  # of a text of tools or users; thousands of long ones would take gigabytes
ANSWER = "ANSWERxOFxTHExASSISTANT"  # placeholder of a sampled answer; one word, so no template splits it


@dataclass(frozen=True)
class Rendered:
    """A tokenized conversation; `mask` is 1 on the assistant's tokens, including their end-of-turn token."""

    ids: list[int]
    mask: list[int]
    images: Images = ()


def template_text(template: str) -> str:
    """A Jinja template as text, where a setting holds it or names a .jinja file."""
    if not template.endswith((".jinja", ".j2")):
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        raise ValueError(f"The chat template file {template} does not exist.")
    return file.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Chat:
    """A tokenizer with its chat template and template arguments."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    """A Jinja template or a .jinja file that replaces the tokenizer's."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    tools: Tools | None = None
    """Schemas of the tools that the template lists."""
    plain: bool = False
    """No template: the contents are concatenated, and each assistant turn ends with the EOS token."""
    images: ImageProcessor | None = None
    """Prepares images; None: messages have none."""
    expansions: tuple[str, ...] = ()
    """What each image placeholder of a conversation becomes, in order."""
    video_expansions: tuple[str, ...] = ()
    """The same of videos."""

    def __post_init__(self) -> None:
        clash = sorted(set(self.kwargs) & set(RESERVED))
        if clash:
            raise ValueError(
                f"data.apply_chat_template_kwargs sets {clash}, which Strop sets itself. Remove it."
            )
        if self.template is not None:
            object.__setattr__(self, "template", template_text(self.template))
        if not self.plain and self.template is None and not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"The tokenizer {self.tokenizer.name_or_path or 'of the model'} has no chat template. Set "
                "data.apply_chat_template=false to use prompts as they stand, or give a Jinja template: "
                "actor_rollout_ref.model.custom_chat_template (reinforcement learning), data.chat_template "
                "(supervised)."
            )

    def text(self, messages: Sequence[Message], *, generate: bool = False, tools: Tools | None = None) -> str:
        """Return the rendered text; `generate` adds the generation prompt of the next assistant turn."""
        text = self._render(messages, generate, tools)
        if self.expansions or self.video_expansions:
            text = self.expanded(text)
        problem = lone_surrogate(text)
        if problem is not None:
            raise ValueError(f"A message holds {problem}, so it cannot be tokenized.")
        return text

    def with_images(
        self,
        images: Sequence[object],
        videos: Sequence[object] = (),
        *,
        where: str,
        columns: tuple[str, str] = ("images", "videos"),
        folder: Path | None = None,
    ) -> tuple[Chat, Images]:
        """Return the chat that renders a conversation with these images and videos, and both for the model.
        `where` names the row, `columns` the two columns."""
        if self.images is None:
            raise ValueError(f"{where} holds images or videos, which are not used here. Remove them.")
        shown = self.images.prepare(images, where=f"{where}, column {columns[0]!r}", folder=folder)
        moving = self.images.prepare_videos(videos, where=f"{where}, column {columns[1]!r}", folder=folder)
        texts = tuple(one.text for one in shown)
        chat = replace(self, expansions=texts, video_expansions=tuple(one.text for one in moving))
        return chat, tuple(one.inputs for one in (*shown, *moving))

    def expanded(self, text: str) -> str:
        """Replace the placeholders of a rendered text, which may be only the beginning of a
        conversation."""
        assert self.images is not None
        waiting = {"image": list(self.expansions), "video": list(self.video_expansions)}
        found = []
        end = 0
        for match in self.images.placeholders.finditer(text):
            kind = str(match.lastgroup)
            if not waiting[kind]:
                raise UnusableImages(
                    f"A conversation has more {kind} placeholders ({match.group()!r}) than {kind}s."
                )
            found += [text[end : match.start()], waiting[kind].pop(0)]
            end = match.end()
        return "".join([*found, text[end:]])

    def _render(self, messages: Sequence[Message], generate: bool, tools: Tools | None) -> str:
        if self.plain:
            return "".join(self._plain_text(message) for message in messages)
        own = str(self.tokenizer.chat_template)
        forms = forms_of(self.tokenizer, self.template, own)
        plain = not forms.needs_parts and all(map(_is_plain, messages))
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(map(dict, messages)) if plain else forms.fitted(messages, self.template or own),
                tools=list(tools or self.tools or []) or None,  # type: ignore[arg-type]
                chat_template=self.template
                if plain
                else with_preamble(self.tokenizer, self.template, forms.preamble),
                add_generation_prompt=generate,
                tokenize=False,
                **self.kwargs,
            )
        except template_errors() as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"The chat template fails on messages of roles [{roles}]: {type(error).__name__}: {error}"
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def ids(
        self, messages: Sequence[Message], *, generate: bool = True, tools: Tools | None = None
    ) -> list[int]:
        """Return the token ids; by default with the generation prompt."""
        return self.encode(self.text(messages, generate=generate, tools=tools), start=True)

    def lengths(self, conversations: Sequence[Sequence[Message]], *, tools: Tools | None = None) -> list[int]:
        """Return the number of ids of each prompt; all prompts go through one call of the tokenizer."""
        texts = [self.text(messages, generate=True, tools=tools) for messages in conversations]
        if not texts:
            return []
        prefix = len(self._bos_ids())
        return [prefix + len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def encode(self, text: str, *, start: bool = False) -> list[int]:
        """Return the ids of a text; at the `start` of plain text, the tokenizer's BOS token comes first."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if start:
            return self._bos_ids() + ids
        return ids

    def conversation(
        self, messages: Sequence[Message], *, learn_from: int = 0, tools: Tools | None = None
    ) -> Rendered:
        """Return the ids up to the last assistant turn, with the loss mask of assistant turns from
        `learn_from` on.

        Each assistant turn is rendered twice: as a generation prompt, and whole. The difference is the turn.
        The loss covers it up to its end-of-turn token, not the white space that the template puts after that.
        """
        text = ""
        ids = self._bos_ids()
        mask = [0] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant" or turn < learn_from:
                continue
            prompt_text = self.text(messages[:turn], generate=True, tools=tools)
            prompt_ids = self._new_ids(text, ids, prompt_text, turn=turn)
            ids = ids + prompt_ids
            mask += [0] * len(prompt_ids)
            text = self.text(messages[: turn + 1], tools=tools)
            turn_ids = self._new_ids(prompt_text, ids, text, turn=turn, opened=message)
            refuse_lost_parts(message, text[len(prompt_text) :], turn)
            learned = self._end_of_turn(turn_ids)
            ids = ids + turn_ids
            mask += [1] * learned + [0] * (len(turn_ids) - learned)
        if not any(mask):
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(
                f"A conversation of roles [{roles}] has no assistant turn with text, so nothing can be "
                "learned."
            )
        return Rendered(ids, mask)

    def ids_after(self, text: str, last_id: int | None) -> list[int]:
        """Return the ids of `later_text`, to be appended to a sampled answer, whose ids are kept.

        `last_id` is the last sampled id. If it is the end-of-turn token, that token is not repeated; if the
        answer was cut at a length limit, the turn is closed first.
        """
        encode = _cached_ids if len(text) <= CACHED_CHARACTERS else _encoded
        ids = encode(self.tokenizer, text)
        for position, token in enumerate(ids):
            if token == last_id:
                return list(ids[position + 1 :])
            if self._decode(token).strip():
                break
        return list(ids)

    def later_text(
        self,
        messages: Sequence[Message],
        *,
        history: Sequence[Message] | None = None,
        tools: Tools | None = None,
    ) -> str:
        """Return what the template writes after an answer: the end of its turn, the new messages and the next
        generation prompt. `history`: the messages before the answer, for templates that look back (default: a
        placeholder)."""
        before = [*(history or [{"role": "user", "content": "?"}]), {"role": "assistant", "content": ANSWER}]
        _, found, tail = self.text([*before, *messages], generate=True, tools=tools).rpartition(ANSWER)
        if not found:
            raise ValueError(
                "The chat template leaves out what the assistant said, so later turns cannot be appended."
            )
        return tail

    def _plain_text(self, message: Message) -> str:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(self._plain_part(part) for part in content)
        if message["role"] == "assistant":
            return content + str(self.tokenizer.eos_token or "")
        return content

    def _plain_part(self, part: Mapping[str, Any]) -> str:
        if part.get("type") == "image" and self.images is not None:
            return self.images.placeholder
        if part.get("type") == "video" and self.images is not None:
            return str(self.images.processor.video_token)
        return str(part.get("text", ""))

    def _bos_ids(self) -> list[int]:
        """Return the ids that the tokenizer puts before every text; chat templates write them themselves."""
        if self.plain:
            return _prefix_ids(self.tokenizer)
        return []

    def _new_ids(
        self, before: str, ids: list[int], whole: str, *, turn: int, opened: Message | None = None
    ) -> list[int]:
        """Return the ids that `whole` adds to the text `before`, whose ids are `ids`. `opened`: the turn, if
        `before` ends with its generation prompt."""
        if not whole.startswith(before):
            was = before[-60:]
            now = whole[max(0, len(before) - 60) : len(before)]
            if opened is not None:
                template = str(self.template or self.tokenizer.chat_template)
                raise ValueError(
                    f"The chat template opens message {turn} with ...{was!r} when the model generates it, "
                    f"but writes it as ...{now!r}: {opening_advice(template, self.kwargs, opened)}"
                )
            raise ValueError(
                f"The chat template rewrites earlier turns when message {turn} is added, so no ids can be "
                f"kept: it rendered ...{was!r} before and ...{now!r} now. Use a template that only appends "
                "(data.chat_template), or train one turn per row (data.prompt_key with the messages before "
                "it, data.response_key)."
            )
        all_ids = self.encode(whole, start=True)
        if all_ids[: len(ids)] == ids:
            return all_ids[len(ids) :]
        # A token would span the boundary; the new text is tokenized alone, as in generation.
        return self.encode(whole[len(before) :])

    def _end_of_turn(self, ids: Sequence[int]) -> int:
        """Return the number of ids up to and including the last one that is not white space."""
        end = len(ids)
        while end and not self._decode(ids[end - 1]).strip():
            end -= 1
        return end

    def _decode(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


def _is_plain(message: Message) -> bool:
    """Whether a message is a text and nothing else."""
    return isinstance(message.get("content"), str) and "tool_calls" not in message


def stop_ids(tokenizer: PreTrainedTokenizerBase, further: Sequence[int] | int | None = None) -> set[int]:
    """Return the ids that end a generation: the EOS token and `further` ones, from a generation config."""
    if isinstance(further, int):
        further = [further]
    tokens = [tokenizer.eos_token_id, *(further or [])]
    return {int(token) for token in tokens if token is not None}


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@functools.lru_cache(maxsize=4096)
def _cached_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Return the ids of a short text; cached, because a tool often gives the samples of one prompt the same
    text."""
    return _encoded(tokenizer, text)


def _prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special ids that the tokenizer puts before a text."""
    bare = list(tokenizer("x", add_special_tokens=False)["input_ids"])
    with_special = list(tokenizer("x", add_special_tokens=True)["input_ids"])
    for position in range(len(with_special) - len(bare) + 1):
        if with_special[position : position + len(bare)] == bare:
            return with_special[:position]
    return []


# --- text that no tokenizer can read ------------------------------------------------------------------------
#
# JSON can hold one half of a surrogate pair, UTF-8 cannot.

_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")


def has_escaped_surrogate(data: bytes) -> bool:
    """Whether JSON in UTF-8 names a surrogate. If not, its texts hold none."""
    return _ESCAPED.search(data) is not None


def lone_surrogate(text: str) -> str | None:
    """The half of a surrogate pair that a text holds, and where, for a message; None if it is plain text.

    >>> lone_surrogate("ab\\ud83d")
    'half of a surrogate pair (U+D83D at character 2), which is no text'
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return f"half of a surrogate pair (U+{code:04X} at character {error.start}), which is no text"
    return None


def refuse_surrogates(row: Mapping[str, object], where: str) -> None:
    """ValueError that names the column if a row from JSON holds half of a surrogate pair."""
    for name, value in row.items():
        problem = lone_surrogate(name)
        if problem is None and isinstance(value, str):
            problem = lone_surrogate(value)
        elif problem is None:
            problem = lone_surrogate(json.dumps(value, ensure_ascii=False))
        if problem is not None:
            shown = name.encode("utf-8", "backslashreplace").decode()
            raise ValueError(
                f"{where}, column {shown!r} holds {problem}. It was cut out of a longer text; write the "
                "file again, for instance with text.encode('utf-8', 'ignore').decode()."
            )
