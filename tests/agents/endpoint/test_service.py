"""One program for all episodes: answers, rewards, and programs that fail, die, write nonsense or never answer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.agents.endpoint.server import EndpointServer
from strop.agents.endpoint.service import ServiceAgent
from strop.agents.episode import Episode
from strop.agents.loops import AgentLoops
from strop.agents.runner import AgentSetup, EpisodeRequest, EpisodeRunner
from strop.config.schema.rollout import AgentConfig, RolloutConfig
from strop.data.chat import Chat
from tests.agents.endpoint.test_program import CALL
from tests.agents.stage import SAMPLING, TOKENIZER, ScriptedEngine, episode_context, prompt

LOOP = """
for line in sys.stdin:
    episode = json.loads(line)
    os.environ["OPENAI_BASE_URL"] = episode["base_url"]
    answer = {"id": episode["id"]}
    task = episode["task"]
    play()
    print(json.dumps(answer), flush=True)
"""
ASK = "    chat(episode['messages'], episode['api_key'])\n"


def play_all(tmp_path: Path, body: str, tasks: list[str], **settings: Any) -> list[Episode]:
    """Episodes with these tasks, one after the other; `body` is what the program does in each."""
    script = tmp_path / "service.py"
    script.write_text(CALL + LOOP.replace("    play()\n", body))
    agent = ServiceAgent(AgentConfig(command=f"{sys.executable} -S -E {script}", service=True, **settings))
    server = EndpointServer("hermes", host="127.0.0.1", max_calls=agent.settings.max_calls)
    context = replace(episode_context(ScriptedEngine(["4"])), endpoint=server)

    async def loop(episode: Episode) -> None:
        # On a busy machine, the start of the program alone may take longer than the limit of one that is silent.
        may_be_silent = episode.prompt.index == 1
        agent.settings.timeout = settings.get("timeout", 600.0) if may_be_silent else 600.0
        await agent.run(episode)

    runner = EpisodeRunner(context, AgentLoops("service", {"service": (loop, {})}), max_concurrency=1)
    rows = [prompt(task, index=index, agent=None) for index, task in enumerate(tasks)]
    try:
        return runner.run([EpisodeRequest(row, SAMPLING, (row.index,)) for row in rows], all_may_fail=True)
    finally:
        runner.close()


def test_one_program_plays_all_episodes_and_gives_rewards(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = ASK + f"    open({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\n"
    body += "    answer |= {'score': episode['index'], 'turns': [0.5]}\n"
    found = play_all(tmp_path, body, ["a", "b", "c"], reward="file")
    assert [episode.score for episode in found] == [0.0, 1.0, 2.0]
    assert [list(episode.trajectory().turn_rewards.values()) for episode in found] == [[0.5]] * 3
    assert len(set(pids.read_text().split())) == 1 and len(pids.read_text().split()) == 3


FAILURES = {
    "report": ("    if task == 'b': answer['error'] = 'no luck'\n", "no luck", {}),
    "death": ("    if task == 'b': sys.exit('boom')\n", "boom", {}),
    "nonsense": ("    if task == 'b': print('hello', flush=True)\n", "no answer: Expecting value", {}),
    "depth": ("    if task == 'b': print('[' * 100_000, flush=True)\n", "no answer: ", {"timeout": 60.0}),
    "silence": ("    if task == 'b': continue\n", "within 1 seconds", {"timeout": 1.0}),
    "flood": (f"    while task == 'b':\n    {ASK}", "max_calls=2", {"max_calls": 2}),
    "reward": (
        "    answer['score'] = None if task == 'b' else 1\n",
        "must hold a number",
        {"reward": "file"},
    ),
}


@pytest.mark.parametrize(("body", "message", "settings"), FAILURES.values(), ids=FAILURES.keys())
def test_a_failure_is_that_of_one_episode(
    tmp_path: Path, body: str, message: str, settings: dict[str, Any]
) -> None:
    first, failed, last = play_all(tmp_path, ASK + body, ["a", "b", "c"], **settings)
    assert message in str(failed.error) and failed.trajectory().finish == "error"
    assert first.error is None and last.error is None, "a program that died is started again"


def test_an_error_is_a_score_of_0_where_the_exit_counts(tmp_path: Path) -> None:
    found = play_all(tmp_path, ASK + FAILURES["report"][0], ["a", "b"], reward="exit")
    assert [episode.score for episode in found] == [1.0, 0.0]


def test_the_configuration_chooses_the_service() -> None:
    rollout = RolloutConfig()
    rollout.agent.command = f"{sys.executable} agent.py"
    rollout.agent.service = True
    assert isinstance(AgentSetup(rollout, Chat(TOKENIZER)).loops.get(None), ServiceAgent)
