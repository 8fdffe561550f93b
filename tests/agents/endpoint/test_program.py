"""A program per episode: its environment, its rewards, and programs that hang, crash, flood or leave children."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import proxy_bypass_environment

import pytest

from strop.agents.endpoint.program import (
    PROGRAM_AGENT,
    ProgramAgent,
    endpoint_environment,
    read_rewards,
    set_rewards,
)
from strop.agents.endpoint.server import EndpointServer
from strop.agents.episode import Episode, EpisodeError
from strop.agents.loops import AgentLoops
from strop.agents.runner import AgentSetup
from strop.config.schema.rollout import AgentConfig, RolloutConfig
from strop.data.chat import Chat
from tests.agents.stage import TOKENIZER, ScriptedEngine, episode_context, play, prompt

CALL = """
import json, os, sys, urllib.request
def chat(messages, key=None):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages}).encode(),
        {"Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"])},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]
"""


GAME = """
keys = json.loads(os.environ["STROP_API_KEYS"])
assert list(keys) == ["white", "black"] and keys["white"] == os.environ["OPENAI_API_KEY"]
said = {name: [{"role": "user", "content": "Play."}] for name in keys}
for name in ("white", "black", "white", "black"):
    other = "black" if name == "white" else "white"
    move = chat(said[name], keys[name])
    said[name].append(move)
    said[other].append({"role": "user", "content": move["content"]})
json.dump({"scores": {"white": 1, "black": -1}}, open(os.environ["STROP_REWARD_FILE"], "w"))
"""


def run_program(tmp_path: Path, source: str, options: str = "-S -E", **settings: Any) -> Episode:
    """One episode whose agent is a script. `options` of the interpreter make it start fast."""
    script = tmp_path / "agent.py"
    script.write_text(CALL + source)
    command = f"{sys.executable} {options} {script} {{task}} {{task_file}}"
    agent = ProgramAgent(AgentConfig(command=command, **settings))
    server = EndpointServer("hermes", host="127.0.0.1", max_calls=agent.settings.max_calls)
    context = replace(episode_context(ScriptedEngine(["4", "5"])), endpoint=server)

    class Loop:
        run = agent.run

    loops = AgentLoops(PROGRAM_AGENT, {PROGRAM_AGENT: (Loop, {})})
    row = prompt("2 + $(2)?", agent=None)
    try:
        [episode] = play(context, row, loops=loops)
    except ValueError as error:  # the only episode failed
        assert isinstance(error.__cause__, Exception)
        raise error.__cause__ from error
    return episode


@pytest.mark.parametrize(
    ("given", "direct", "by_proxy"),
    [
        ({}, ["127.0.0.1", "10.1.2.3"], ["db.corp.example"]),
        (
            {"NO_PROXY": ".corp.example, 10.9.9.9"},
            ["db.corp.example", "10.9.9.9", "10.1.2.3", "localhost"],
            ["example.org"],
        ),
        (
            {"no_proxy": "a.example", "NO_PROXY": "b.example"},
            ["a.example", "b.example", "10.1.2.3"],
            ["c.example"],
        ),
        ({"NO_PROXY": "*"}, ["10.1.2.3", "example.org"], []),
    ],
)
def test_a_program_reaches_the_endpoint_and_the_hosts_of_no_proxy_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], direct: list[str], by_proxy: list[str]
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for name, value in endpoint_environment("http://10.1.2.3:4711", "key").items():
        monkeypatch.setenv(name, value)
    assert all(map(proxy_bypass_environment, direct))
    assert not any(map(proxy_bypass_environment, by_proxy))


def test_a_program_gets_its_task_and_writes_its_reward(tmp_path: Path) -> None:
    source = """
assert sys.argv[1] == "2 + $(2)?", sys.argv
row = json.load(open(sys.argv[2]))
assert row["messages"] == [{"role": "user", "content": sys.argv[1]}] and "ground_truth" not in row
answer = chat(row["messages"])
chat([*row["messages"], answer, {"role": "user", "content": "more"}])
json.dump({"score": 0.5, "turns": [0.25, -1]}, open(os.environ["STROP_REWARD_FILE"], "w"))
"""
    episode = run_program(tmp_path, source, reward="file")
    sample = episode.trajectory()
    assert sample.score == 0.5 and list(sample.turn_rewards.values()) == [0.25, -1.0]
    assert [turn.role for turn in sample.turns] == ["assistant", "user", "assistant"]
    assert set(sample.turn_rewards) == {turn.end - 1 for turn in sample.turns if turn.role == "assistant"}


def test_two_players_have_their_own_conversations_and_scores(tmp_path: Path) -> None:
    sample = run_program(tmp_path, GAME, reward="file", players=["white", "black"]).trajectory()
    [black] = sample.branches
    assert (sample.player, sample.score, black.player, black.score) == ("white", 1.0, "black", -1.0)
    assert [turn.role for turn in sample.turns] == ["assistant", "user", "assistant"]
    assert [turn.role for turn in black.turns] == ["assistant", "user", "assistant"]
    assert len(black.prompt.ids) > len(sample.prompt.ids), "black has read the first move of white"


@pytest.mark.parametrize(
    "scores", ['{"score": 1}', '{"scores": {"white": 1}}', '{"scores": {"white": "x", "black": 1}}']
)
def test_every_player_needs_a_score(tmp_path: Path, scores: str) -> None:
    source = GAME.replace('{"scores": {"white": 1, "black": -1}}', scores)
    with pytest.raises(EpisodeError, match="player"):
        run_program(tmp_path, source, reward="file", players=["white", "black"])


@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_is_a_reward(tmp_path: Path, status: int) -> None:
    source = f'chat([{{"role": "user", "content": "?"}}]); sys.exit({status})'
    assert run_program(tmp_path, source, reward="exit").score == float(status == 0)


@pytest.mark.parametrize(
    ("source", "message", "settings"),
    [
        ("chat([{'role': 'user', 'content': '?'}]); raise SystemExit('broken pipe')", "broken pipe", {}),
        ("", "made no call", {}),
        (
            "import signal; print('waits', flush=True); signal.pause()",
            "did not end within 1 seconds",
            {"timeout": 1.0},
        ),
        ("chat([])", "at least one message", {}),
        ("chat([{'role': 'user', 'content': '?'}], 'wrong')", "status 1", {}),
        ("chat([{'role': 'user', 'content': '?'}])", "wrote no reward", {"reward": "file"}),
        (
            "while True:\n  try: chat([{'role': 'user', 'content': '?'}])\n  except OSError: pass",
            "rollout.agent.max_calls=2",
            {"max_calls": 2},
        ),
    ],
    ids=["crash", "silent", "hang", "bad call", "wrong key", "no reward", "flood"],
)
def test_what_a_program_does_wrong_fails_its_episode_alone(
    tmp_path: Path, source: str, message: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(EpisodeError, match=message):
        run_program(tmp_path, source, **settings)


def until_ended(pid: int) -> None:
    """A process that was killed ends when it is scheduled next; it may remain as a zombie."""
    deadline = time.monotonic() + 60
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.01)


def test_children_of_a_program_end_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    source = f"""
chat([{{"role": "user", "content": "?"}}])
child = os.fork()
if child == 0:
    import signal
    signal.pause()
open({str(pid_file)!r}, "w").write(str(child))
"""
    assert run_program(tmp_path, source).error is None
    child = int(pid_file.read_text())
    assert os.getpid() != child
    until_ended(child)  # killed with its group


def test_a_process_that_leaves_its_session_ends_with_the_episode(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    source = f"""
chat([{{"role": "user", "content": "?"}}])
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import signal
        open({str(pid_file)!r}, "w").write(str(os.getpid()))
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        os.write(writing, b"x")
        signal.pause()
    os._exit(0)
os.read(reading, 1)
"""
    assert run_program(tmp_path, source).error is None
    until_ended(int(pid_file.read_text()))


SHARED = """
import pathlib, time
own, key_file, done = sys.argv[1] == "first", pathlib.Path(os.environ["KEY_FILE"]), pathlib.Path(os.environ["DONE"])
ask = [{"role": "user", "content": "?"}]
if own:
    chat(ask)
    key_file.with_suffix(".part").write_text(os.environ["OPENAI_API_KEY"])
    key_file.with_suffix(".part").rename(key_file)
    while not done.exists():
        time.sleep(0.02)
else:
    while not key_file.exists():
        time.sleep(0.02)
    try:
        chat(ask, key_file.read_text())
    except urllib.error.HTTPError as error:
        found = json.load(error)["error"]
        assert error.code == 403 and found["code"] == "key_of_another_episode", found
    else:
        raise SystemExit("accepted")
    finally:
        done.touch()
    chat(ask)
"""


def test_a_program_with_the_key_of_another_is_refused_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("DONE", str(tmp_path / "done"))
    script = tmp_path / "agent.py"
    script.write_text(CALL.replace("import json", "import json, urllib.error") + SHARED)
    agent = ProgramAgent(AgentConfig(command=f"{sys.executable} -S -E {script} {{task}}"))
    server = EndpointServer("hermes", host="127.0.0.1", max_calls=9)
    context = replace(episode_context(ScriptedEngine(["4"])), endpoint=server)

    class Loop:
        run = agent.run

    loops = AgentLoops(PROGRAM_AGENT, {PROGRAM_AGENT: (Loop, {})})
    rows = [prompt("first", agent=None), prompt("second", agent=None, index=1)]
    first, second = play(context, *rows, loops=loops)
    assert "key belongs to the episode of another program" in str(first.error)
    assert first.counts["shared_keys"] == 1 and first.trajectory().finish == "error"
    assert second.error is None and second.counts["calls"] == 1


@pytest.mark.parametrize(
    "content", ["x", "[1]", '{"turns": [1]}', '{"score": 1, "turns": ["a"]}', "NaN", "null"]
)
def test_a_wrong_reward_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "reward.json"
    file.write_text(content)
    session: Any = SimpleNamespace(others=[])
    with pytest.raises(EpisodeError, match="STROP_REWARD_FILE"):
        set_rewards(session, read_rewards(file), "$STROP_REWARD_FILE")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no_such_program_here {task}", "there is no program"),
        ("'x", "cannot be read"),
        (" ", "there is no program"),
    ],
)
def test_a_wrong_command_is_refused_before_the_run(command: str, message: str) -> None:
    rollout = RolloutConfig()
    rollout.agent.command = command
    with pytest.raises(ValueError, match=message):
        AgentSetup(rollout, Chat(TOKENIZER)).loops.get(None)


def test_rows_without_an_agent_use_the_command() -> None:
    rollout = RolloutConfig()
    rollout.agent.command = f"{sys.executable} agent.py"
    setup = AgentSetup(rollout, Chat(TOKENIZER))
    assert isinstance(setup.loops.get(None), ProgramAgent) and setup.endpoint is not None
    assert not setup.loops.batched(None) and setup.loops.batched("single_turn_agent")
