"""Text environments as agent loops: what the policy reads, what it earns, how an episode ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from strop.agents.environments.choose import environment_agent, needs_endpoint
from strop.agents.environments.openenv import OpenEnvSession
from strop.agents.episode import within
from strop.agents.loops import AgentLoops
from tests.agents.stage import ScriptedEngine, episode_context, play, prompt, text

GAME = '''
class Guess:
    """Guess a digit; each guess costs 0.1."""

    def __init__(self, limit=3, old_form=False, broken=False):
        self.limit, self.old_form, self.broken = limit, old_form, broken

    def reset(self, *, seed=None, options=None):
        self.target, self.tries = str(options.get("digit", seed % 10)), 0
        return "Guess a digit.", {}

    def step(self, action):
        self.tries += 1
        if self.broken:
            return "nothing"
        right = action.strip() == self.target
        reward, cut = 1.0 if right else -0.1, self.tries >= self.limit
        info = {"tries": self.tries, "note": "text is left out"}
        if self.old_form:
            return "right" if right else "wrong", reward, right or cut, info
        return "right" if right else "wrong", reward, right, cut, info
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "guess.py"
    path.write_text(GAME)
    return path


def loops_of(place, **arguments):
    loops = AgentLoops("environment")
    loops.add("environment", environment_agent, {"environment": place, "arguments": arguments})
    return loops


@pytest.mark.parametrize("old_form", [False, True])
def test_an_episode_of_a_gym_environment(file, old_form):
    scene = episode_context(ScriptedEngine(["4", "7"]))
    loops = loops_of(f"gym:{file}:Guess", old_form=old_form)
    [episode] = play(scene, prompt("Play.", agent=None, digit=7), loops=loops)
    assert episode.error is None
    sample = episode.trajectory()
    assert text(sample.prompt.ids).count("Play.\n\nGuess a digit.") == 1
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "user", "assistant"]
    assert episode.messages[2]["content"] == "wrong"
    assert list(sample.turn_rewards.values()) == [-0.1, 1.0] and sample.score == 0.0
    assert sample.extras["tries"] == 2.0 and "note" not in sample.extras
    assert sample.reward == pytest.approx(0.9)


def test_a_row_starts_the_same_episode_for_all_samples_and_limits_hold(file):
    loops = loops_of(f"gym:{file}:Guess", limit=100)
    scene = episode_context(ScriptedEngine(["3"]), max_assistant_turns=2)
    rows = [
        prompt("a", index=3, agent=None),
        prompt("b", index=13, agent=None),
        prompt("c", index=4, agent=None),
    ]
    first, second, third = play(scene, *rows, loops=loops)
    assert first.trajectory().reward == second.trajectory().reward == 1.0
    assert third.stopped == "max_assistant_turns" and third.trajectory().reward == pytest.approx(-0.2)


def threads_that_keep_the_program_alive():
    return {thread for thread in threading.enumerate() if not thread.daemon}


@pytest.mark.parametrize("method", ["__init__", "step", "close"])
def test_an_environment_that_hangs_does_not_keep_the_program_alive(tmp_path, monkeypatch, method):
    path = tmp_path / "stuck.py"
    path.write_text(
        "import threading\n"
        "class Stuck:\n"
        "    def reset(self, *, seed=None, options=None): return 'Go.', {}\n"
        "    def step(self, action): return 'Done.', 1.0, True, False, {}\n"
        f"    def {method}(self, *_): threading.Event().wait()\n"
    )
    scene = episode_context(ScriptedEngine(["3"]), call_timeout=0.2)
    said = {"__init__": "start"}.get(method, method)

    def patient_with_others(work, seconds, what):
        """On a busy machine, a call that does not hang may take longer than the limit."""
        return within(work, seconds if what.endswith(said) else 60.0, what)

    monkeypatch.setattr("strop.agents.environments.text.within", patient_with_others)
    before = threads_that_keep_the_program_alive()
    with pytest.raises(ValueError, match=rf"{said} did not answer within 0\.2 seconds"):
        play(scene, prompt("a", agent=None), loops=loops_of(f"gym:{path}:Stuck"))
    assert threads_that_keep_the_program_alive() <= before


def test_an_environment_may_change_its_options(tmp_path):
    path = tmp_path / "pile.py"
    path.write_text(
        "class Pile:\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        self.pile = options['pile']\n"
        "        return 'Take.', {}\n"
        "    def step(self, action):\n"
        "        self.pile.pop()\n"
        "        return 'Again.', 1.0, not self.pile, False, {}\n"
    )
    row = prompt("a", agent=None, pile=["x", "y"])
    found = play(episode_context(ScriptedEngine(["3"])), row, row, loops=loops_of(f"gym:{path}:Pile"))
    assert [episode.trajectory().reward for episode in found] == [2.0, 2.0]


def test_a_broken_environment_fails_its_episode(file):
    scene = episode_context(ScriptedEngine(["3"]))
    with pytest.raises(ValueError, match=r"step returned str; expected \(observation, reward"):
        play(scene, prompt("a", agent=None), loops=loops_of(f"gym:{file}:Guess", broken=True))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("gym", "expected gym:module:Class, openenv:URL or verifiers:NAME"),
        ("atari:pong", "expected gym:module:Class"),
        ("gym:no_such_module_here:Env", "cannot be imported"),
        ("gym:json:JSONDecoder", "JSONDecoder has no method 'reset'"),
        ("openenv:localhost", "expected the address of a server"),
    ],
)
def test_what_cannot_be_an_environment_is_said(place, said):
    with pytest.raises(ValueError, match=said):
        environment_agent(place, {})


def test_only_verifiers_calls_the_policy_over_http():
    assert needs_endpoint("verifiers:wordle")
    assert not needs_endpoint("gym:a:B") and not needs_endpoint(None)


class Client:
    """Answers as a client of OpenEnv does."""

    def __init__(self):
        self.asked = []

    async def reset(self, **arguments):
        self.asked.append(arguments)
        return Result({"board": "..", "done": False, "metadata": {}}, None, False)

    async def step(self, action):
        self.asked.append(action)
        return Result({"board": "x."}, 0.5, True)


class Result:
    def __init__(self, observation, reward, done):
        self.observation, self.reward, self.done = observation, reward, done


def test_actions_and_observations_of_openenv():
    client = Client()
    settings = {"action_key": "move", "action": {"player": 1}, "reset": {"size": 2}, "observation_key": None}
    session = OpenEnvSession(client, settings)

    async def both():
        return await session.reset(5, {}), await session.step("a1")

    first, second = asyncio.run(both())
    assert client.asked == [{"seed": 5, "size": 2}, {"player": 1, "move": "a1"}]
    assert (first.text, first.reward, first.done) == ('{"board": ".."}', 0.0, False)
    assert (second.text, second.reward, second.done) == ('{"board": "x."}', 0.5, True)
    named = OpenEnvSession(client, {**settings, "observation_key": "board"})
    assert asyncio.run(named.reset(0, {})).text == ".."
    with pytest.raises(ValueError, match=r"no 'bord'.*it has board, done"):
        asyncio.run(OpenEnvSession(client, {**settings, "observation_key": "bord"}).reset(0, {}))
