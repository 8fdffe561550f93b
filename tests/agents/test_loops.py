"""Loops by name, from the catalog, a YAML or a plugin; react_agent; interactions from a YAML; gsm8k."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strop.agents.episode import Episode
from strop.agents.interaction import Interactions
from strop.agents.loops import AgentLoops
from strop.agents.parsers.base import Malformed, ToolCall
from strop.agents.tool_agent import action_of
from strop.catalog import AGENT_LOOPS
from tests.agents.stage import (
    SAMPLING,
    ScriptedEngine,
    episode_context,
    play,
    prompt,
    text,
    tokenizer_of,
    tool_set,
)

ROOT = Path(__file__).parents[2]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def upper(word: str) -> str:
    """Write in capitals."""
    return word.upper()


def test_built_in_loops_are_in_the_catalog() -> None:
    loops = AgentLoops("single_turn_agent")
    assert {"single_turn_agent", "tool_agent", "react_agent"} <= set(loops.names()) and set(
        AGENT_LOOPS.names()
    ) <= set(loops.names())
    assert loops.batched(None) and loops.batched("single_turn_agent") and not loops.batched("tool_agent")
    assert loops.lists_tools("tool_agent") and not loops.lists_tools("react_agent")
    assert AgentLoops("tool_agent").lists_tools(None)


@dataclass
class Leaving:
    """A loop that leaves the program in the episode of its first row."""

    async def run(self, episode: Any) -> None:
        await episode.answer()
        if episode.prompt.index == 0:
            raise SystemExit(1)


def test_a_loop_that_leaves_fails_its_own_episode_only() -> None:
    loops = AgentLoops("leaving", {"leaving": (Leaving, {})})
    scene = episode_context(ScriptedEngine(["4"]))
    left, stayed = play(scene, *(prompt(index=i, agent=None) for i in range(2)), loops=loops)
    assert "SystemExit: 1" in str(left.error) and stayed.error is None


@dataclass(frozen=True)
class Conformance:
    """What the conformance tests need to know about one agent loop."""

    answers: tuple[str, ...]
    """What the policy says: as far as the loop allows, one call of `add` and then an answer."""
    roles: tuple[str, ...]
    """Who speaks in the response, turn by turn."""
    lists_tools: bool = False
    batched: bool = False


CONFORMANCE = {
    "single_turn_agent": Conformance(("4",), ("assistant",), batched=True),
    "tool_agent": Conformance(
        ('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>', "4"),
        ("assistant", "tool", "assistant"),
        lists_tools=True,
    ),
    "react_agent": Conformance(
        ('Action: add\nAction Input: {"a": 2, "b": 2}', "Final Answer: 4"), ("assistant", "user", "assistant")
    ),
}
"""Test data by loop. A loop of the catalog without an entry here fails every conformance test."""


def conformance(name: str) -> Conformance:
    assert name in CONFORMANCE, f"The loop {name!r} of the catalog has no test data: add it to CONFORMANCE."
    return CONFORMANCE[name]


def test_every_loop_of_the_catalog_has_test_data() -> None:
    assert sorted(CONFORMANCE) == AGENT_LOOPS.names()


@pytest.mark.parametrize("name", AGENT_LOOPS.names())
def test_a_loop_holds_an_exact_conversation(name: str) -> None:
    case = conformance(name)
    engine = ScriptedEngine(list(case.answers))
    context = episode_context(engine, tools=tool_set(add), response_length=600)
    [episode] = play(context, prompt(agent=name))
    assert episode.error is None
    sample = episode.trajectory()
    assert tuple(turn.role for turn in sample.turns) == case.roles
    sampled = [turn for turn in sample.turns if turn.role == "assistant"]
    for turn, request, completion in zip(sampled, engine.requests, engine.completions, strict=True):
        assert sample.response[turn.start : turn.end] == completion.ids
        assert list(request.ids) == [*sample.prompt.ids, *sample.response[: turn.start]]
    assert ("4" in text(sample.response)) and sample.finish == "stop"


@pytest.mark.parametrize("name", AGENT_LOOPS.names())
def test_a_loop_keeps_to_the_budget_of_tokens(name: str) -> None:
    engine = ScriptedEngine(["word " * 100])
    [episode] = play(episode_context(engine, tools=tool_set(add), response_length=60), prompt(agent=name))
    assert episode.error is None
    sample = episode.trajectory()
    assert sample.finish == "length" and len(sample.response) <= 60


@pytest.mark.parametrize("name", AGENT_LOOPS.names())
def test_a_loop_does_without_tools(name: str) -> None:
    [episode] = play(episode_context(ScriptedEngine(["4"])), prompt(agent=name))
    assert episode.error is None and [turn.role for turn in episode.trajectory().turns] == ["assistant"]


@pytest.mark.parametrize("name", AGENT_LOOPS.names())
def test_what_a_loop_says_of_itself(name: str) -> None:
    case, loops = conformance(name), AgentLoops("single_turn_agent")
    assert loops.lists_tools(name) == case.lists_tools and loops.batched(name) == case.batched


def test_loops_of_a_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    loops = AgentLoops.from_config("single_turn_agent", "examples/math_expression/loops.yaml")
    engine = ScriptedEngine(["5*3", "5+9", "15"])
    [episode] = play(episode_context(engine), prompt("(2+3)*(4-1)=", agent="math_expression"), loops=loops)
    sample = episode.trajectory()
    assert sample.score == 1.0 and list(sample.turn_rewards.values()) == [0.1] and sample.extras["steps"] == 1
    assert [m["content"] for m in episode.messages] == ["(2+3)*(4-1)=", "5*3", "=", "5+9", "-", "15"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: x", "must hold a list"),
        ("- {name: x}", "needs `name` and `_target_`"),
        ("- {name: tool_agent, _target_: json.loads}", "'tool_agent' is taken already"),
        ("- {name: x, _target_: nothing}", "must be module.Name"),
        ("- {name: x, _target_: json.laods}", "Did you mean 'loads'"),
        ("- {name: x, _target_: json.JSONDecoder, surprise: 1}", "cannot be made with {'surprise': 1}"),
        ("- {name: x, _target_: json.JSONDecoder}", "async def run"),
        ("- [", "is not YAML"),
    ],
)
def test_a_wrong_list_of_loops_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "loops.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"(?s).*") as caught:
        AgentLoops.from_config("x", str(file)).get("x")
    assert message in str(caught.value)


def test_unknown_loops_name_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"Unknown agent loop 'toolagent'\. Did you mean 'tool_agent'"):
        AgentLoops("single_turn_agent").get("toolagent")
    with pytest.raises(ValueError, match="there is no such file"):
        AgentLoops.from_config("x", "/nowhere.yaml")


# --- react_agent ---------------------------------------------------------------------------------------------------------


def test_react_explains_acts_observes_and_answers() -> None:
    engine = ScriptedEngine(
        [
            'Thought: add.\nAction: add\nAction Input: {"a": 2, "b": 2}\nObservation: 5\nFinal Answer: 5',
            "Thought: done.\nFinal Answer: 4",
        ]
    )
    scene = episode_context(engine, tools=tool_set(add), response_length=600)
    [episode] = play(scene, prompt("2+2?", agent="react_agent"))
    sample = episode.trajectory()
    said = text(sample.response)
    assert "Observation: 4" in said and "Observation: 5" not in said, "what the model made up is cut away"
    assert [turn.role for turn in sample.turns] == ["assistant", "user", "assistant"]
    first = sample.turns[0]
    assert sample.response[first.start : first.end] == engine.completions[0].ids[: first.end], (
        "a prefix of what was sampled"
    )
    assert text(sample.response[: first.end]).endswith('"b": 2}\n')
    assert "- add: Add two numbers." in text(sample.prompt.ids) and text(sample.prompt.ids).count("2+2?") == 1
    assert list(engine.requests[0].ids) == sample.prompt.ids


@pytest.mark.parametrize(
    ("said", "until", "answer", "kept"),
    [
        ("search(x)\nObservation: no", "\nObservation", "search(x)", "search(x)\n"),
        ("search(x)\nObservation: no", "Observation", "search(x)\n", "search(x)\n"),
        ("search(x)\n", "\n", "search(x)", "search(x)\n"),
        ("Observation: no", "Observation", "", "O"),
        ("four", "<|im_end|>", "four", "four<|im_end|>"),
        ("four", None, "four", "four<|im_end|>"),
    ],
)
def test_the_text_before_a_stop_is_whole(said: str, until: str | None, answer: str, kept: str) -> None:
    """Tokenizers of models have tokens such as `)\\n`, in which `\\nObservation` begins."""
    tokenizer = tokenizer_of()
    tokenizer.add_tokens([")\n"])
    scene = episode_context(ScriptedEngine([said], tokenizer), tokenizer=tokenizer)
    episode = Episode(scene, prompt(), SAMPLING, seeds=(1, 0))
    found = asyncio.run(episode.answer(until=until))
    assert (found.text, found.finish) == (answer, "stop")
    assert episode.messages[-1] == {"role": "assistant", "content": answer}
    assert tokenizer.decode(episode.trajectory().response) == kept


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('Action: add\nAction Input: {"a": 1, "b": 2}', ToolCall("add", {"a": 1, "b": 2})),
        ("Thought: x\n  Action:  upper \nAction Input: hello", ToolCall("upper", {"word": "hello"})),
        ('Action: upper\nAction Input: "hello"\nand so on', ToolCall("upper", {"word": "hello"})),
        ('Action: add\nAction Input: {"a": {"b": [1]}} tail', ToolCall("add", {"a": {"b": [1]}})),
        ("Final Answer: 3\nAction: add", None),
        ("I think it is 3", None),
        ("", None),
    ],
)
def test_actions_are_read(said: str, expected: ToolCall | None) -> None:
    assert action_of(said, tool_set(add, upper).schemas) == expected


@pytest.mark.parametrize(
    "said",
    [
        "Action: add",
        "Action: add\nAction Input: [1, 2]",
        "Action: nobody\nAction Input: x",
        "Action: add\nAction Input: " + "9" * 5000,  # more digits than Python reads
    ],
)
def test_actions_that_cannot_be_read_are_malformed(said: str) -> None:
    assert isinstance(action_of(said, tool_set(add, upper).schemas), Malformed)


def test_react_fits_its_explanation_or_fails_the_episode() -> None:
    engine = ScriptedEngine(["Final Answer: 4"])
    scene = episode_context(engine, tools=tool_set(add), prompt_length=100)
    short, long = play(scene, prompt(index=1, agent="single_turn_agent"), prompt(agent="react_agent"))
    assert short.error is None and "over data.max_prompt_length=100" in str(long.error)


# --- interactions ---------------------------------------------------------------------------------------------------------

GSM8K = """
interaction:
  - class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
  - name: easy
    class_name: strop.agents.gsm8k.Gsm8kInteraction
    config: {method: flexible, wrong: No.}
"""


def test_several_interactions_of_a_yaml(tmp_path: Path) -> None:
    (tmp_path / "i.yaml").write_text(GSM8K)
    known = Interactions.from_config(str(tmp_path / "i.yaml"))
    assert list(known.by_name) == ["gsm8k", "easy"] and known.by_name["easy"].config["name"] == "easy"
    engine = ScriptedEngine(lambda said, _: "#### 72" if "mistake" in said else "it is 72")
    scene = episode_context(engine, interactions=known)
    rows = [
        prompt("?", index=i, interaction_kwargs={"name": n, "ground_truth": "72"})
        for i, n in enumerate(known.by_name)
    ]
    strict, easy = (episode.trajectory() for episode in play(scene, *rows))
    assert list(strict.turn_rewards.values()) == [0.0, 1.0] and list(easy.turn_rewards.values()) == [1.0]
    assert strict.extras == {"interaction_score": 1.0, "stopped": "interaction"}
    assert not known.by_name["gsm8k"]._truths, "finalized"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tools: []", "must hold `interaction:`"),
        ("interaction: [{name: x}]", "needs class_name"),
        (
            "interaction: [{class_name: strop.agents.gsm8k.Gsm8kInteractoin}]",
            "Did you mean 'Gsm8kInteraction'",
        ),
        (GSM8K.replace("name: easy", "name: gsm8k"), "'gsm8k' is taken"),
    ],
)
def test_wrong_interactions_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "i.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"(?s).*") as caught:
        Interactions.from_config(str(tmp_path / "i.yaml"))
    assert message in str(caught.value)


def test_rows_choose_their_interaction() -> None:
    one, two = object(), object()
    assert Interactions({"a": one}).choose(None) is None and Interactions({"a": one}).choose({"x": 1}) is one
    both = Interactions({"alpha": one, "beta": two})
    assert both.choose({"name": "beta"}) is two
    for kwargs in ({"name": "alhpa"}, {"x": 1}):
        with pytest.raises(ValueError, match="none of the configured interactions"):
            both.choose(kwargs)
    with pytest.raises(ValueError, match="interaction_config_path"):
        Interactions().choose({"name": "alpha"})


def test_gsm8k_wants_a_ground_truth() -> None:
    from strop.agents.gsm8k import Gsm8kInteraction

    made: Any = Gsm8kInteraction({})
    with pytest.raises(ValueError, match="ground_truth"):
        asyncio.run(made.start_interaction("x"))
