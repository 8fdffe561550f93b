"""Environments of the real packages: gymnasium, openenv-core and verifiers. `make test-environments` runs them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.resources
import threading

import pytest

from strop.agents.endpoint.server import EndpointServer
from strop.agents.environments.choose import environment_agent
from strop.agents.loops import AgentLoops
from tests.agents.stage import ScriptedEngine, episode_context, play, prompt

pytestmark = pytest.mark.environments


def loops_of(place, **arguments):
    loops = AgentLoops("environment")
    loops.add("environment", environment_agent, {"environment": place, "arguments": arguments})
    return loops


def test_a_registered_environment_of_gymnasium():
    import gymnasium

    class Words(gymnasium.Env):
        observation_space = gymnasium.spaces.Text(100)
        action_space = gymnasium.spaces.Text(100)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.word = ("red", "blue")[int(self.np_random.integers(2))]
            return f"say {self.word}", {}

        def step(self, action):
            return "done", float(action == self.word), True, False, {}

    gymnasium.register("StropWords-v0", lambda: Words(), max_episode_steps=3, disable_env_checker=True)
    scene = episode_context(ScriptedEngine(lambda told, _: told.rpartition("say ")[2].split("<")[0].strip()))
    episodes = play(
        scene, *(prompt("Do it.", index=i, agent=None) for i in range(4)), loops=loops_of("gym:StropWords-v0")
    )
    assert [episode.error for episode in episodes] == [None] * 4
    assert [episode.trajectory().reward for episode in episodes] == [1.0] * 4


@contextlib.contextmanager
def served(environment, action, observation):
    """An environment behind the server of openenv-core; gives its address."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app

    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def openenv_server():
    """A counting game."""
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Move(Action):
        message: str

    class Board(Observation):
        text: str

    class Count(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.at = 0

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.at = seed or 0
            return Board(text=f"at {self.at}", done=False, reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            right = action.message == str(self.at + 1)
            self.at += 1
            return Board(text=f"at {self.at}", done=self.at >= 5, reward=float(right))

        @property
        def state(self):
            return State()

    with served(Count, Move, Board) as address:
        yield address


def test_a_server_of_openenv(openenv_server):
    def count(told, _):
        return str(int(told.rpartition("at ")[2].split("<")[0]) + 1)

    scene = episode_context(ScriptedEngine(count))
    loops = loops_of(f"openenv:{openenv_server}", observation_key="text")
    rows = [prompt("Count on.", index=i, agent=None) for i in range(5)]
    episodes = play(scene, *rows, loops=loops)
    assert [episode.error for episode in episodes] == [None] * 5
    assert [episode.trajectory().reward for episode in episodes] == [5.0, 4.0, 3.0, 2.0, 1.0]


def test_the_echo_environment_that_openenv_ships(tmp_path, monkeypatch):
    """`openenv init` starts from it: an answer is echoed, each of its characters earns 0.1."""
    template = importlib.resources.files("openenv.cli.templates") / "openenv_env"
    for source in (template, template / "server"):
        folder = tmp_path / "echo_env" / source.name.replace("openenv_env", "")
        folder.mkdir(exist_ok=True, parents=True)
        for file in source.iterdir():
            if file.name.endswith(".py"):
                text = file.read_text().replace("__ENV_NAME__", "echo").replace("__ENV_CLASS_NAME__", "Echo")
                (folder / file.name.replace("__ENV_NAME__", "echo")).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    models = importlib.import_module("echo_env.models")
    module = importlib.import_module("echo_env.server.echo_environment")
    parts = (module.EchoEnvironment, models.EchoAction, models.EchoObservation)
    with served(*parts) as address:
        loops = loops_of(f"openenv:{address}", observation_key="echoed_message")
        scene = episode_context(ScriptedEngine(["hello", "good day"]), max_assistant_turns=2)
        [episode] = play(scene, prompt("Talk.", agent=None), loops=loops)
    assert episode.error is None
    assert [message["content"] for message in episode.messages[1:]] == ["hello", "hello", "good day"]
    assert episode.trajectory().reward == pytest.approx(0.5 + 0.8)


TASKSET = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class ColourTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Colours(vf.Taskset[ColourTask, vf.TasksetConfig]):
    def load(self):
        for colour in ("red", "blue"):
            yield ColourTask(Data(prompt=f"say {colour}", answer=colour), self.config.task)


__all__ = ["Colours"]
"""


def test_an_environment_of_verifiers(tmp_path, monkeypatch):
    (tmp_path / "strop_colours.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    engine = ScriptedEngine(lambda told, _: "red")
    server = EndpointServer("hermes", host="127.0.0.1", max_calls=10)
    scene = dataclasses.replace(episode_context(engine), endpoint=server)
    rows = [prompt("unused", index=i, agent=None) for i in range(3)]
    episodes = play(scene, *rows, loops=loops_of("verifiers:strop_colours"))
    assert [episode.error for episode in episodes] == [None] * 3
    assert [episode.score for episode in episodes] == [1.0, 0.0, 1.0]
    assert [episode.messages[-2]["content"] for episode in episodes] == ["say red", "say blue", "say red"]
    for episode in episodes:
        sample = episode.trajectory()
        assert sum(sample.mask) == len("red") + 1 and sample.log_probs[0] == -0.5


def test_the_error_of_a_shipped_environment_is_named_where_no_call_was_made():
    """The taskset `openenv` of verifiers, with no server behind its address."""
    server = EndpointServer("hermes", host="127.0.0.1", max_calls=10)
    scene = dataclasses.replace(episode_context(ScriptedEngine(lambda told, _: "1")), endpoint=server)
    loops = loops_of("verifiers:openenv", taskset={"base_url": "http://127.0.0.1:9"})
    with pytest.raises(ValueError, match=r"verifiers:openenv failed: EnvError: OpenEnvEnv\.run\(\)"):
        play(scene, prompt("unused", index=0, agent=None), loops=loops)
