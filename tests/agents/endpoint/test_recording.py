"""Calls as tokens: continued conversations are one row, rewritten ones further rows, nothing tokenized twice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agents.endpoint.clients import Client, run_agent
from tests.agents.stage import STOP, ScriptedEngine, text, tokenizer_of
from tests.data.tokens import CHATML, REWRITING

Messages = list[dict[str, Any]]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def trained(row: Any) -> list[tuple[int, ...]]:
    """The ids of each turn that is trained."""
    turns = [turn for turn in row.turns if turn.role == "assistant"]
    return [tuple(row.response[turn.start : turn.end]) for turn in turns]


@pytest.mark.parametrize("template", [CHATML, REWRITING])
def test_a_continued_conversation_is_one_row_of_the_sampled_ids(template: str) -> None:
    tokenizer = tokenizer_of(template)
    engine = ScriptedEngine([" first \n", "second", "third"], tokenizer)

    async def agent(client: Client) -> None:
        messages: Messages = [user("2+2?")]
        for number in range(3):
            answer = await client.chat(messages)
            # As clients do: white space removed, the content as a list of parts.
            parts = [{"type": "text", "text": answer["content"].strip()}]
            messages += [{"role": "assistant", "content": parts}, user(f"more {number}")]

    [episode] = run_agent(agent, engine, tokenizer=tokenizer)
    assert episode.error is None
    sample = episode.trajectory()
    assert sample.branches == [] and [turn.role for turn in sample.turns] == ["assistant", "user"] * 2 + [
        "assistant"
    ]
    assert trained(sample) == [tuple(completion.ids) for completion in engine.completions]
    for turn, request in zip(
        [t for t in sample.turns if t.role == "assistant"], engine.requests, strict=True
    ):
        assert list(request.ids) == [*sample.prompt.ids, *sample.response[: turn.start]]
    assert "<|im_end|>\n<|im_start|>user\nmore 0<|im_end|>\n<|im_start|>assistant\n" in text(sample.response)
    assert sample.version == 7 and sample.finish == "stop"
    kept = [value for value, sampled in zip(sample.log_probs, sample.mask) if sampled]
    assert kept == [value for completion in engine.completions for value in completion.log_probs]
    assert episode.messages[-1] == {"role": "assistant", "content": "third"}


class Spelled(ScriptedEngine):
    """Samples ids that the tokenizer would never give for their text: each answer begins with <unk>."""

    async def agenerate(self, request: Any, sampling: Any) -> Any:
        [completion] = await super().agenerate(request, sampling)
        completion.ids[:0] = [self.tokenizer.unk_token_id]
        completion.log_probs[:0] = [-0.25]
        return [completion]


def test_answers_keep_their_ids_in_a_rewritten_context() -> None:
    engine = Spelled(["one", "two", "three", "four"])

    async def agent(client: Client) -> None:
        system = {"role": "system", "content": "Be brief."}
        messages: Messages = [system, user("a")]
        for question in ("b", "c"):
            answer = await client.chat(messages)
            messages += [{"role": "assistant", "content": answer["content"]}, user(question)]
        await client.chat(messages)
        # The first exchange is dropped and the second answer kept.
        await client.chat([system, user("summary"), messages[4], user("go on")])

    [episode] = run_agent(agent, engine)
    assert episode.error is None
    sample = episode.trajectory()
    [branch] = sample.branches
    ids = [tuple(completion.ids) for completion in engine.completions]
    assert trained(sample) == [ids[3]] and trained(branch) == ids[:3]
    shared = text(sample.prompt.ids)
    assert shared.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nsummary")
    second = list(ids[1])
    places = [
        at for at in range(len(sample.prompt.ids)) if sample.prompt.ids[at : at + len(second)] == second
    ]
    assert len(places) == 1, "the kept answer is in the prompt by its sampled ids"
    assert sample.prompt.ids.count(STOP) == 4, "the end of a turn is not repeated"
    assert sum(sample.mask) + sum(branch.mask) == sum(map(len, ids)), "each sampled token is trained once"
    assert episode.counts["branches"] == 1


def test_a_second_continuation_of_a_call_is_a_row_with_the_first_part_as_its_prompt() -> None:
    engine = ScriptedEngine(["root", "left", "right", "leaf"])

    async def agent(client: Client) -> None:
        start: Messages = [user("q")]
        answer = await client.chat(start)
        start.append({"role": "assistant", "content": answer["content"]})
        await client.chat([*start, user("left?")])
        right = await client.chat([*start, user("right?")])
        end = [user("right?"), {"role": "assistant", "content": right["content"]}, user("leaf?")]
        await client.chat([*start, *end])

    [episode] = run_agent(agent, engine)
    sample = episode.trajectory()
    [branch] = sample.branches
    ids = [tuple(completion.ids) for completion in engine.completions]
    assert trained(sample) == [ids[2], ids[3]] and trained(branch) == [ids[0], ids[1]]
    whole = [*branch.prompt.ids, *branch.response]
    start = len(branch.prompt.ids) + len(ids[0])
    assert sample.prompt.ids[:start] == whole[:start]


def test_a_text_that_the_agent_wrote_itself_is_context() -> None:
    engine = ScriptedEngine(["yes"])

    async def agent(client: Client) -> None:
        await client.chat([user("a"), {"role": "assistant", "content": "made up"}, user("b")])

    [episode] = run_agent(agent, engine)
    sample = episode.trajectory()
    assert "made up" in text(sample.prompt.ids) and trained(sample) == [tuple(engine.completions[0].ids)]
