"""On-policy distillation: the student approaches a teacher in the process or behind a URL, with and without
the reward of the task."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler

import pytest
import torch

from strop.backends.base import MicroBatching
from strop.backends.single import SingleBackend
from strop.config.compose import load
from strop.config.derived import objective, resource_pools, roles
from strop.config.rules import check
from strop.config.schema.distillation import DistillationConfig
from strop.ppo.build import build_ppo
from strop.ppo.teacher import TeacherServer, parse_log_probs
from strop.preflight.model_checks import teacher_tokenizer_findings
from strop.ranks import Ranks
from tests.http_servers import PatientServer
from tests.models.tiny import tiny_batch, tiny_model
from tests.ppo.runs import run

SECTION = "algorithm.distillation"


@pytest.fixture(scope="session")
def teacher(task, tmp_path_factory):
    """A model with other weights, and far from a uniform distribution."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    torch.manual_seed(1)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(folder)
    return folder


@pytest.fixture
def distilled(overrides, teacher):
    return [
        *overrides,
        f"{SECTION}.enable=true",
        f"{SECTION}.path={teacher}",
        "actor_rollout_ref.ref.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]


def test_the_student_approaches_the_teacher_without_any_score(distilled, tmp_path):
    """No data source has a scorer: nothing asks for one."""
    steps = run(
        distilled,
        f"{SECTION}.task_reward=false",
        "data.val_files=null",
        "custom_reward_function.path=" + str(_failing(tmp_path)),
        "trainer.total_training_steps=10",
    )
    assert steps[10]["distillation/reverse_kl"] < 0.5 * steps[1]["distillation/reverse_kl"]
    assert steps[10]["distillation/teacher_log_prob"] > steps[1]["distillation/teacher_log_prob"]
    assert steps[1]["timing_s/teacher"] > 0
    shown = {name.rpartition("/")[0] for name in steps[1] if name.startswith("critic/")}
    assert shown == {"critic/advantages"}  # no score of 0 where nothing was scored


def _failing(folder):
    file = folder / "never.py"
    file.write_text("def compute_score(*_, **__):\n    raise AssertionError('scored')\n")
    return file


def test_the_term_is_added_to_the_advantages_of_the_task(distilled):
    """The advantages of a step are those of the same step without a teacher, plus coef * gain."""
    first, second = (
        _advantages([*distilled, more]) for more in (f"{SECTION}.coef=0.5", f"{SECTION}.enable=false")
    )
    gain = 0.5 * (first.teacher_log_probs - first.old_log_probs) * first.mask
    assert all(torch.equal(a, b) for a, b in zip(first.sequences, second.sequences, strict=True))
    torch.testing.assert_close(first.advantages, second.advantages + gain)
    assert gain.abs().max() > 0.1


def _advantages(overrides):
    """The batch of the first step with its advantages."""
    trainer = build_ppo(load("ppo_trainer", overrides))
    found = []
    trainer.update = lambda batch, record: found.append(batch)
    with trainer.output:
        trainer.sync_weights(0)
        trainer.step = 1
        trainer.train_step(trainer.output.record(1))
        trainer.close()
    return found[0]


# --- A server -----------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """Rates sequences by a model, in the form of vLLM or, below /echo, of OpenAI's completions."""
    backend = SingleBackend(tiny_model())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send({"data": [{"id": "tiny"}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids = asked["prompt"]
            assert (asked["model"], asked["max_tokens"]) == ("tiny", 1)
            logits = backend.module(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            values = [None, *(float(logits[place, token]) for place, token in enumerate(ids[1:]))]
            if self.path.startswith("/echo"):
                choice = {"logprobs": {"token_logprobs": [*values, -1.0]}}
            else:
                entries = [
                    None if v is None else {str(t): {"logprob": v, "rank": 1}} for t, v in zip(ids, values)
                ]
                choice = {"prompt_logprobs": entries}
            self._send({"choices": [{"text": "x", **choice}]})

        def _send(self, content):
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with PatientServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("place", ["/v1", "/v1/completions", "/echo/v1"])
def test_a_server_gives_the_log_probs_of_a_model_in_this_process(server, place):
    batch = tiny_batch()
    expected = SingleBackend(tiny_model()).forward(batch, ["log_probs"], MicroBatching(rows=4)).log_probs
    found = TeacherServer(DistillationConfig(url=server + place), Ranks()).forward(
        batch, ["log_probs"], MicroBatching(rows=4)
    )
    mask = batch.mask.bool()
    torch.testing.assert_close(found.log_probs[mask], expected[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({}, "0 of 2 prompt tokens"),
        ({"choices": [{"text": "x", "logprobs": None}]}, "0 of 2 prompt tokens"),
        ({"choices": [{"prompt_logprobs": [None, {"9": {"logprob": -1.0}}]}]}, "None as log-prob of token 7"),
        ({"choices": [{"prompt_logprobs": [None, {"7": {"logprob": float("-inf")}}]}]}, "-inf as log-prob"),
    ],
)
def test_a_reply_without_the_log_prob_of_a_token_is_an_error(reply, said):
    with pytest.raises(ValueError, match=said):
        parse_log_probs(reply, [3, 7], "http://x")


# --- The configuration --------------------------------------------------------------------------------------

URL = f"{SECTION}.url=http://localhost:8000/v1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs a teacher"),
        ([f"{SECTION}.path=t", URL], "there is one teacher"),
        ([URL, f"{SECTION}.nnodes=1"], "the teacher is behind url"),
        ([URL, "actor_rollout_ref.rollout.temperature=0.7"], "temperature 1"),
        ([f"{SECTION}.path=t", f"{SECTION}.timeout=3"], "no effect without algorithm.distillation.url"),
        ([f"{SECTION}.path=t", f"{SECTION}.enable=false"], "no effect without algorithm.distillation.enable"),
        ([URL, f"{SECTION}.task_reward=false", "algorithm.filter_groups.enable=true"], "not trained on"),
        ([URL, f"{SECTION}.task_reward=false", "critic.enable=true"], "not trained on"),
    ],
)
def test_what_does_not_go_together_is_said(words, said):
    loaded = load(
        "ppo_trainer",
        ["actor_rollout_ref.model.path=m", "data.train_files=x", f"{SECTION}.enable=true", *words],
    )
    assert any(said in str(finding) for finding in check(loaded))


def test_without_the_reward_of_the_task_there_is_no_critic_and_no_group():
    words = ["actor_rollout_ref.model.path=m", "data.train_files=x", f"{SECTION}.enable=true", URL]
    config = load("ppo_trainer", [*words, f"{SECTION}.task_reward=false"]).config
    assert {role.name for role in roles(config) if role.exists} == {"actor", "teacher"}
    assert "advantage 1*(log teacher - log policy)" in objective(config)
    config = load("ppo_trainer", words).config
    assert {role.name for role in roles(config) if role.exists} == {"actor", "critic", "teacher"}
    assert "advantage gae(score) + 1*(log teacher - log policy)" in objective(config)


def test_a_teacher_can_have_machines_of_its_own():
    words = [
        "actor_rollout_ref.model.path=m",
        f"{SECTION}.enable=true",
        f"{SECTION}.path=t",
        f"{SECTION}.nnodes=2",
    ]
    assert list(resource_pools(load("ppo_trainer", words).config)) == ["teacher"]


def test_a_teacher_with_another_tokenizer_is_refused(task, teacher, tmp_path):
    from transformers import AutoTokenizer

    model = load("ppo_trainer", [f"actor_rollout_ref.model.path={task}/model"]).config.actor_rollout_ref.model
    assert teacher_tokenizer_findings(model, str(teacher)) == []
    smaller = AutoTokenizer.from_pretrained(task / "model")
    own, text = smaller.get_vocab(), smaller.backend_tokenizer.to_str()
    first, second = (token for token in own if token.isdigit() and len(token) == 1 and token in "12")
    content = json.loads(text)
    vocabulary = content["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    smaller.save_pretrained(tmp_path)
    shutil.copy(task / "model" / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    [finding] = teacher_tokenizer_findings(model, str(tmp_path))
    assert "has another tokenizer than the policy" in finding.message
