"""tool_agent and the episode under it: stop conditions, token-exactness, rewards, and what becomes of failures."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strop.agents.episode import Episode, EpisodeContext, EpisodeLimits
from strop.agents.interaction import BaseInteraction, Interactions
from strop.agents.loops import AgentLoops
from strop.agents.metrics import EpisodeFacts, episode_metrics
from strop.agents.parsers.base import ToolCall
from strop.agents.runner import EpisodeRequest, EpisodeRunner
from strop.agents.tool_agent import open_tools, run_tool_calls
from strop.agents.tool_session import CallLimits
from strop.agents.tool_set import ToolSet
from strop.agents.tools import ToolResult, ToolSchema
from strop.agents.verl_tool import BaseTool, ToolResponse, VerlTool
from strop.concurrency import BackgroundLoop
from strop.data.chat import Chat
from strop.data.images import ImageProcessor
from strop.models.forward import response_outputs
from strop.ppo.rank_sharing import PackedTrajectories
from strop.rollout.base import Sampling, build_engine, stream_seed
from strop.stopping import StopRequested
from strop.types import Prompt, Trajectory, batch_of
from tests.agents.stage import (
    SAMPLING,
    STOP,
    ScriptedEngine,
    episode_context,
    play,
    prompt,
    text,
    tokenizer_of,
    tool_set,
)
from tests.data.tokens import CHATML
from tests.models.vision.tiny_vlm import picture, processor_of, tiny_vlm
from tests.models.vision.tiny_vlm import tokenizer_of as vlm_tokenizer


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def broken(a: int) -> str:
    """Never works."""
    raise RuntimeError("out of order")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def only(episodes: list[Episode]) -> tuple[Episode, Trajectory]:
    [episode] = episodes
    return episode, episode.trajectory()


def test_a_tool_is_called_and_its_result_answered() -> None:
    engine = ScriptedEngine([call("add", a=2, b=2), "4"])
    scene = episode_context(engine, tools=tool_set(add))
    episode, sample = only(play(scene, prompt(scene=scene)))
    assert text(sample.response) == (
        call("add", a=2, b=2)
        + "<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    )
    assert [turn.role for turn in sample.turns] == ["assistant", "tool", "assistant"]
    assert (sample.num_turns, sample.finish, sample.version, sample.score) == (4, "stop", 7, None)
    assert episode.counts["tool_calls"] == 1 and episode.error is None


@pytest.mark.parametrize(
    ("opening", "said", "calls"),
    [
        ("<think>\n", "Perhaps {call}?", 0),
        ("<think>\n", "I add.</think>{call}", 1),
        ("<think>\n", "Perhaps {call}?</think>No.", 0),
        ("<think>\n\n</think>\n\n", "{call}", 1),
    ],
)
def test_a_thought_that_the_prompt_opens_makes_no_calls(opening: str, said: str, calls: int) -> None:
    tokenizer = tokenizer_of(CHATML.replace("assistant\n{% endif", f"assistant\n{opening}{{% endif"))
    engine = ScriptedEngine([said.format(call=call("add", a=1, b=1)), "</think>2"], tokenizer)
    scene = episode_context(engine, tools=tool_set(add), tokenizer=tokenizer)
    row = prompt(scene=scene)
    row = replace(row, ids=scene.chat.ids(row.messages, tools=scene.tools.schemas))
    episode, _ = only(play(scene, row))
    assert episode.counts["tool_calls"] == calls and episode.error is None


def test_what_was_sampled_is_what_is_trained() -> None:
    """Every request is a prefix of the final ids; mask, log-probs and stop tokens are those of the completions."""
    engine = ScriptedEngine([call("add", a=1, b=1), call("add", a=2, b=2), "done"])
    scene = episode_context(engine, tools=tool_set(add))
    row = prompt(scene=scene)
    _, sample = only(play(scene, row))
    whole = row.ids + sample.response
    for request, completion in zip(engine.requests, engine.completions, strict=True):
        start = len(request.ids)
        assert whole[:start] == list(request.ids)
        assert whole[start : start + len(completion.ids)] == completion.ids
        inside = slice(start - len(row.ids), start - len(row.ids) + len(completion.ids))
        assert sample.log_probs[inside] == completion.log_probs and all(sample.mask[inside])
        assert sample.response[inside][-1] == STOP, "the token that ended the turn is trained"
    assert sum(sample.mask) == sum(len(completion.ids) for completion in engine.completions)
    assert all(value == 0.0 for value, sampled in zip(sample.log_probs, sample.mask) if not sampled)
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == 3, "each turn draws from a stream of its own"


def test_a_model_that_never_stops_calling_ends_with_its_budget() -> None:
    engine = ScriptedEngine([call("add", a=1, b=1)])
    scene = episode_context(engine, tools=tool_set(add), response_length=200)
    episode, sample = only(play(scene, prompt(scene=scene)))
    assert episode.stopped == "length" and sample.finish == "length"
    assert len(sample.response) <= 200 and sample.mask[-1] == 1, (
        "a result that leaves no room for an answer is not appended"
    )


@pytest.mark.parametrize(
    ("limits", "reason", "answers"),
    [
        ({"max_assistant_turns": 2}, "max_assistant_turns", 2),
        ({"max_user_turns": 1}, "max_user_turns", 2),
        ({"max_model_len": 210, "prompt_length": 60}, "length", None),
    ],
)
def test_turns_and_tokens_are_limited(limits: dict[str, int], reason: str, answers: int | None) -> None:
    engine = ScriptedEngine([call("add", a=1, b=1)])
    scene = episode_context(engine, tools=tool_set(add), **{"response_length": 1000, **limits})
    row = prompt(scene=scene)
    episode, sample = only(play(scene, row))
    assert episode.stopped == reason
    assert answers is None or episode.assistant_turns == answers
    assert len(row.ids) + len(sample.response) <= limits.get("max_model_len", 4000)


def test_an_answer_cut_by_the_budget_ends_the_episode() -> None:
    engine = ScriptedEngine(["a long story without end"])
    scene = episode_context(engine, response_length=10)
    episode, sample = only(play(scene, prompt()))
    assert (sample.finish, episode.stopped, text(sample.response)) == ("length", "length", "a long sto")


def test_malformed_and_unknown_calls_are_answered_and_counted() -> None:
    engine = ScriptedEngine(
        ["<tool_call>{not json</tool_call>", call("ad", a=1, b=1), call("add", a="x", b=1), "I give up"]
    )
    scene = episode_context(engine, tools=tool_set(add), response_length=1000)
    episode, sample = only(play(scene, prompt(scene=scene)))
    said = text(sample.response)
    assert "could not be read" in said and "Did you mean 'add'" in said and "Wrong arguments" in said
    assert episode.counts["tool_failures"] == 3 and episode.counts["tool_failures/malformed"] == 1
    assert sample.finish == "stop" and episode.error is None


def test_tool_error_policy() -> None:
    def ended(policy: str) -> Episode:
        engine = ScriptedEngine([call("broken", a=1), "so be it"])
        scene = episode_context(engine, tools=tool_set(broken), tool_error_policy=policy)
        return play(scene, prompt(scene=scene), prompt(scene=scene, index=1, agent="single_turn_agent"))[0]

    replied = ended("reply").trajectory()
    assert (
        "broken failed: RuntimeError: out of order" in text(replied.response)
        and replied.turns[-1].role == "assistant"
    )
    stopped = ended("stop")
    assert stopped.stopped == "tool_error" and [turn.role for turn in stopped.trajectory().turns] == [
        "assistant"
    ]
    masked = ended("mask")
    assert "tool_error_policy=mask" in str(masked.error) and masked.trajectory().finish == "error"


def test_rewards_of_tools_stand_on_the_turn_that_called() -> None:
    def guess(n: int) -> ToolResult:
        """Guess."""
        return ToolResult("no", reward=-0.25, metrics={"distance": 3.0})

    engine = ScriptedEngine([call("guess", n=1), call("guess", n=2), "bye"])
    scene = episode_context(engine, tools=tool_set(guess))
    _, sample = only(play(scene, prompt(scene=scene)))
    first, _, second, *_ = sample.turns
    assert sample.turn_rewards == {first.end - 1: -0.25, second.end - 1: -0.25}
    assert sample.extras["distance"] == 3.0 and sample.extras["tool_rewards"] == {"guess": 0.0}


class Greedy(BaseInteraction):
    """Changes all that it is given."""

    left: dict[str, list[str]] = {}

    async def start_interaction(self, instance_id: str, left: Any = None, **kwargs: Any) -> str:
        self.left[instance_id] = left
        return instance_id

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        messages.clear()
        self.left[instance_id].pop()
        return not self.left[instance_id], "Go on.", 0.0, {}


def test_an_interaction_may_change_what_it_is_given() -> None:
    scene = episode_context(
        ScriptedEngine(["four"]), interactions=Interactions({"greedy": Greedy({"name": "greedy"})})
    )
    row = prompt(interaction_kwargs={"name": "greedy", "left": ["a", "b"]})
    for episode in play(scene, row, row):
        assert episode.error is None and episode.assistant_turns == 2
        assert [message["role"] for message in episode.messages] == ["user", "assistant", "user", "assistant"]


class Countdown(BaseInteraction):
    """Says `again` until the third answer; each answer earns its number."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.open: dict[str, int] = {}
        self.seen: list[Any] = []

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        self.open[instance_id] = kwargs["first"]
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        self.seen.append((answers[-1], kwargs))
        if answers[-1] == "explode":
            raise KeyError("this interaction is broken")
        if answers[-1] == "nan":
            return False, "", math.nan, {}
        return (
            len(answers) == 3,
            "again",
            float(self.open[instance_id] + len(answers)),
            {"answers": len(answers)},
        )

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return 0.5

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self.open[instance_id]


def counting(**limits: Any) -> tuple[Countdown, Any]:
    interaction = Countdown({"name": "countdown"})
    engine = ScriptedEngine(lambda said, _: said.rpartition("user\n")[2].split("<")[0] or "?")
    return interaction, episode_context(
        engine, interactions=Interactions({"countdown": interaction}), **limits
    )


def test_an_interaction_replies_scores_each_turn_and_ends_the_episode() -> None:
    interaction, scene = counting()
    row = prompt("one", interaction_kwargs={"name": "countdown", "first": 10})
    episode, sample = only(play(scene, row))
    assert [turn.role for turn in sample.turns] == ["assistant", "user", "assistant", "user", "assistant"]
    ends = [turn.end - 1 for turn in sample.turns if turn.role == "assistant"]
    assert sample.turn_rewards == dict(zip(ends, [11.0, 12.0, 13.0]))
    assert episode.stopped == "interaction" and sample.num_turns == 6
    assert sample.extras["interaction_score"] == 0.5 and sample.extras["answers"] == 3
    assert interaction.seen[0] == ("one", {"first": 10}) and not interaction.open, "finalized"


def test_the_last_answer_is_judged_where_turns_are_spent() -> None:
    _, scene = counting(max_assistant_turns=2)
    row = prompt("one", interaction_kwargs={"name": "countdown", "first": 0})
    episode, sample = only(play(scene, row))
    assert list(sample.turn_rewards.values()) == [1.0, 2.0] and episode.stopped == "max_assistant_turns"
    assert sample.turns[-1].role == "assistant"


@pytest.mark.parametrize(
    ("question", "kwargs", "why"),
    [
        ("explode", {"name": "countdown", "first": 0}, "this interaction is broken"),
        ("nan", {"name": "countdown", "first": 0}, "reward of nan"),
        ("x", {"name": "countdwon", "first": 0}, "Did you mean 'countdown'"),
        ("x", {"name": "countdown"}, "first"),
    ],
)
def test_one_failed_episode_is_masked_and_counted_and_the_others_survive(
    question: str, kwargs: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    interaction, scene = counting()
    good = [prompt("x", index=i, interaction_kwargs={"name": "countdown", "first": 0}) for i in range(3)]
    bad = prompt(question, index=9, interaction_kwargs=kwargs)
    episodes = play(scene, *good, bad)
    samples = [episode.trajectory() for episode in episodes]
    assert [sample.finish for sample in samples] == ["stop"] * 3 + ["error"]
    assert why in str(episodes[-1].error) and not interaction.open
    assert "1 of 4 episodes failed; their samples are masked. The first, row 9 of test" in caplog.text
    metrics = episode_metrics([EpisodeFacts.of(episode) for episode in episodes])
    assert metrics["agent/failed"] == 1 and metrics["agent/stopped/interaction"] == 3
    assert metrics["timing_s/agent_loop/generate_sequences/max"] >= 0


def test_rows_with_kwargs_of_no_interaction_have_none() -> None:
    nothing = Interactions({})
    assert nothing.choose({"query": "2+2?", "ground_truth": "4"}) is None  # as in verl's tool data
    with pytest.raises(ValueError, match="interaction_config_path"):
        nothing.choose({"name": "countdown"})


def test_when_all_episodes_fail_the_run_stops() -> None:
    _, scene = counting()
    with pytest.raises(ValueError, match=r"All 2 episodes failed.*row 3 of test.*first"):
        play(scene, *(prompt("x", index=i, interaction_kwargs={"name": "countdown"}) for i in (3, 4)))


def test_a_late_interaction_fails_its_episode() -> None:
    import asyncio

    class Late(Countdown):
        async def generate_response(
            self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
        ) -> Any:
            await asyncio.sleep(60)

    scene = episode_context(
        ScriptedEngine(["hello"]),
        interactions=Interactions({"late": Late({"name": "late"})}),
        call_timeout=0.05,
    )
    rows = [prompt("x", interaction_kwargs={"name": "late", "first": 0}), prompt("x", index=1)]
    late, fine = play(scene, *rows)
    assert "the interaction late did not answer within 0.05 seconds" in str(late.error) and fine.error is None


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), StopRequested(15)])
def test_an_interrupted_run_lets_go_of_everything(
    stop: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    interaction, scene = counting()
    scene.engine.latency = 300.0  # type: ignore[attr-defined]
    runner = EpisodeRunner(scene, AgentLoops("single_turn_agent"), max_concurrency=4)

    class Interrupted:
        def result(self) -> None:
            while not interaction.open:
                time.sleep(0.001)
            raise stop

    start = BackgroundLoop.start
    monkeypatch.setattr(BackgroundLoop, "start", lambda self, work: (start(self, work), Interrupted())[1])
    row = prompt("x", interaction_kwargs={"name": "countdown", "first": 0})
    begun = time.perf_counter()
    with pytest.raises(type(stop)):
        runner.run([EpisodeRequest(row, SAMPLING, (i,)) for i in range(8)])
    assert not interaction.open and time.perf_counter() - begun < 100, "finalized, and nobody was waited for"
    runner.close()


def test_at_most_so_many_episodes_are_in_flight() -> None:
    class Counting(ScriptedEngine):
        now = most = 0

        async def agenerate(self, request: Any, sampling: Any) -> Any:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return await super().agenerate(request, sampling)
            finally:
                self.now -= 1

    engine = Counting(["hello"], latency=0.002)
    episodes = play(episode_context(engine), *(prompt("x", index=i) for i in range(40)), at_once=7)
    assert len(episodes) == 40 and engine.most == 7


def test_a_loop_may_be_a_plain_function_and_score_by_itself() -> None:
    async def twice(episode: Episode, bonus: float = 0.0) -> None:
        await episode.answer(max_tokens=3)
        episode.tell({"role": "user", "content": "more"})
        await episode.answer()
        episode.score = 1.0 + bonus

    engine = ScriptedEngine(["abcdef"])
    loops = AgentLoops("twice", {"twice": (twice, {"bonus": 0.5})})
    _, sample = only(play(episode_context(engine), prompt(agent=None), loops=loops))
    assert (
        text(sample.response)
        == "abc<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nabcdef<|im_end|>"
    )
    assert sample.mask[:4] == [1, 1, 1, 0], "the turn that was cut is closed by us, and that is not trained"
    assert sample.score == 1.5


def test_sampling_reaches_the_engine() -> None:
    engine = ScriptedEngine(["x"])
    play(episode_context(engine, response_length=50), prompt())
    assert engine.requests[0].max_tokens == 50 and SAMPLING.stop_ids == (STOP,)


class Camera(BaseTool):
    """A tool of verl that returns an image and text."""

    async def execute(self, instance_id: str, parameters: Any, **_: Any) -> tuple[ToolResponse, float, Any]:
        return ToolResponse("what", [picture((0, 255, 0), width=24)]), 0.0, {}


class Photographer:
    """Answers, looks, answers again."""

    async def run(self, episode: Episode) -> None:
        async with open_tools(episode) as tools:
            assert tools is not None
            episode.tools = None
            await episode.answer(max_tokens=3)
            assert await run_tool_calls(episode, tools, [ToolCall("look", {})])
            await episode.answer(max_tokens=4)


def test_images_of_tools_are_seen_and_trained_on_exactly() -> None:
    family = "qwen2_5_vl"
    chat = Chat(vlm_tokenizer(family), images=ImageProcessor(lambda: processor_of(family)))
    model = tiny_vlm(family)
    look = ToolSchema("look", "Take a picture.", {"type": "object", "properties": {}})
    tools = ToolSet(
        [VerlTool(Camera({}, SimpleNamespace(function=look)), look)], CallLimits(5, 99, "left", 1)
    )
    limits = EpisodeLimits(64, 64, 128, None, None, "reply", 60.0)
    scene = EpisodeContext(
        build_engine("native", model, max_model_len=128),
        chat,
        limits,
        tools,
        None,
        Interactions(),
        stream_seed,
    )
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}]
    shown, images = chat.with_images([picture()], where="x")
    row = Prompt(0, shown.ids(question), question, "test", images=images)
    runner = EpisodeRunner(scene, AgentLoops("single_turn_agent"), max_concurrency=8)
    episode = Episode(scene, row, Sampling(max_tokens=8), seeds=(1, 0))
    try:
        runner._event_loop.run(Photographer().run(episode))
    finally:
        runner.close()
    sample = episode.trajectory()
    sample.score = 1.0
    assert [turn.role for turn in sample.turns] == ["assistant", "tool", "assistant"]
    told = sample.turns[1]
    token = images[0].token_id
    assert sample.response[told.start : told.end].count(token) == 6, "24 x 16 pixels"
    assert [image.size for image in sample.prompt.images] == [(16, 16), (24, 16)]
    # The same sequence alone, and packed with another one that has only the first image.
    other = Trajectory(row, 1, [5, 6, 7], [1, 1, 1], [0.0] * 3, score=0.0)
    with torch.no_grad():
        alone = response_outputs(model, batch_of([sample]), ["log_probs"])["log_probs"][0]
        batch = batch_of([other, sample, replace(sample, group=2)])
        packed = response_outputs(model, batch, ["log_probs"], packed=True)["log_probs"]
    mask = torch.tensor(sample.mask) > 0
    assert (alone - torch.tensor(sample.log_probs))[mask].abs().max() < 1e-5, "sampled = recomputed"
    for line in packed[1:]:
        assert (line[: len(alone)] - alone)[mask].abs().max() < 1e-5
    # Between ranks only the image of the tool is sent.
    sent = PackedTrajectories.pack([sample], {0: row})
    assert [len(own) for own in sent.images] == [1]
    [received] = sent.unpack({0: row})
    assert received.prompt.images == sample.prompt.images


def test_a_sampled_image_token_does_not_take_the_place_of_an_image_of_a_tool() -> None:
    """Images are put at the first image tokens of a sequence: passes of such a sample ended the run."""
    family = "qwen2_5_vl"
    tokenizer = vlm_tokenizer(family)
    processor = ImageProcessor(lambda: processor_of(family))
    said = tokenizer.decode([processor.token_id])

    def look() -> ToolResult:
        return ToolResult("there", images=(picture(),))

    engine = ScriptedEngine([f"a{said}b"], tokenizer)
    scene = replace(episode_context(engine, tools=tool_set(look)), chat=Chat(tokenizer, images=processor))
    question = [{"role": "user", "content": "what"}]
    episode = Episode(
        scene, Prompt(0, scene.chat.ids(question), question, "test"), Sampling(max_tokens=8), seeds=(1,)
    )
    with pytest.raises(ValueError, match="an image token that belongs to no image was sampled"):
        BackgroundLoop().run(Photographer().run(episode))
    assert not episode.images and len(episode.trajectory().turns) == 1


def test_images_of_tools_without_a_model_for_them_mask_the_episode() -> None:
    def look() -> ToolResult:
        """Take a picture."""
        return ToolResult("there", images=(picture(),))

    scene = episode_context(ScriptedEngine([call("look"), "4"]), tools=tool_set(look))
    rows = [prompt(scene=scene), prompt(scene=scene, agent="single_turn_agent", index=1)]
    failed = play(scene, *rows)[0]
    assert failed.trajectory().finish == "error" and "the model takes none" in str(failed.error)
