"""On-policy distillation: the student approaches a teacher in the process or behind a URL, with and without
the reward of the task."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler

import pytest
import torch

from strop.backends.base import BackendSettings, MicroBatching
from strop.backends.single import SingleBackend
from strop.config.compose import load
from strop.config.derived import resource_pools, roles
from strop.config.objective import objective
from strop.config.rules import check
from strop.config.schema.distillation import DistillationConfig
from strop.ppo.build import build_ppo
from strop.ppo.teacher import TeacherServer, parse_log_probs, parse_top_tokens
from strop.preflight.model_checks import teacher_tokenizer_findings, topk_findings
from strop.ranks import Ranks
from tests.http_servers import PatientServer
from tests.models.tiny import tiny_batch, tiny_model
from tests.ppo.runs import run

SECTION = "algorithm.distillation"
LOSS = ["use_policy_gradient=false", "loss_mode=forward_kl_topk"]


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


# --- A loss of its own --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "factor"), [("forward_kl_topk", 0.3), ("k3", 0.6)], ids=["forward_kl_topk", "k3"]
)
def test_the_student_approaches_the_teacher_by_a_loss(distilled, mode, factor):
    """Two updates per step: the second is not on-policy."""
    steps = run(
        distilled,
        f"{SECTION}.use_policy_gradient=false",
        f"{SECTION}.loss_mode={mode}",
        f"{SECTION}.topk=4",
        f"{SECTION}.task_reward=false",
        "data.val_files=null",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "trainer.total_training_steps=10",
    )
    assert steps[10]["distillation/loss"] < factor * steps[1]["distillation/loss"]
    assert steps[1]["actor/active_rows"] == 1.0  # advantages of 0 leave no row out
    if mode == "forward_kl_topk":
        assert 0 < steps[1]["distillation/student_mass"] < steps[10]["distillation/student_mass"] <= 1
        assert 0 < steps[1]["distillation/teacher_mass"] <= 1


def test_a_teacher_may_be_padded_to_a_larger_vocabulary(distilled, teacher, tmp_path):
    """Its likeliest tokens beyond that of the policy are left out: here all but 17 of 57."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(teacher)
    model.resize_token_embeddings(57, mean_resizing=False)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.3)
    model.get_output_embeddings().weight.data[:17] *= 10
    model.save_pretrained(tmp_path / "padded")
    AutoTokenizer.from_pretrained(teacher).save_pretrained(tmp_path / "padded")
    steps = run(
        distilled,
        f"{SECTION}.path={tmp_path}/padded",
        f"{SECTION}.use_policy_gradient=false",
        f"{SECTION}.loss_mode=forward_kl_topk",
        f"{SECTION}.topk=57",
        f"{SECTION}.task_reward=false",
        "data.val_files=null",
        "trainer.total_training_steps=1",
    )
    assert steps[1]["distillation/student_mass"] == pytest.approx(1.0)
    assert 0.5 < steps[1]["distillation/teacher_mass"] < 0.98
    assert 0.1 < steps[1]["actor/grad_norm"] < 100


def test_more_tokens_than_the_teacher_has_are_refused(task, teacher):
    model = load("ppo_trainer", [f"actor_rollout_ref.model.path={task}/model"]).config.actor_rollout_ref.model
    settings = DistillationConfig(
        enable=True, path=str(teacher), use_policy_gradient=False, loss_mode="forward_kl_topk", topk=17
    )
    assert topk_findings(model, settings) == []
    [finding] = topk_findings(model, dataclasses.replace(settings, topk=18))
    assert finding.key == f"{SECTION}.topk" and "has 17 tokens" in finding.message
    assert topk_findings(model, dataclasses.replace(settings, topk=18, loss_mode="k3")) == []


def test_the_loss_is_added_to_that_of_the_task(distilled):
    """The loss of a step is that of the same step without a teacher, plus coef times the divergence."""
    words = [f"{SECTION}.use_policy_gradient=false", f"{SECTION}.loss_mode=k3", f"{SECTION}.coef=0.5"]
    both, alone = (
        run(distilled, *words, "trainer.total_training_steps=1", more)[1]
        for more in (f"{SECTION}.enable=true", f"{SECTION}.enable=false")
    )
    assert both["actor/pg_loss"] == pytest.approx(alone["actor/pg_loss"], abs=1e-6)
    assert both["distillation/loss"] > 0 and "distillation/loss" not in alone
    assert both["actor/grad_norm"] != pytest.approx(alone["actor/grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["loss_mode=k3"], "loss_mode"),
        (["use_policy_gradient=false"], "loss_mode"),
        ([*LOSS, "log_prob_min_clamp=10"], "log_prob_min_clamp"),
        ([*LOSS, "log_prob_min_clamp=0"], "log_prob_min_clamp"),
        ([*LOSS, "log_prob_min_clamp=nan"], "log_prob_min_clamp"),
    ],
    ids=["a reward is k1", "a loss is not k1", "all the same", "all of them 0", "not a number"],
)
def test_a_divergence_that_does_not_fit_its_use_is_refused(distilled, words, key):
    findings = check(load("ppo_trainer", [*distilled, *(f"{SECTION}.{word}" for word in words)]))
    assert [f.key for f in findings if f.level == "error"] == [f"{SECTION}.{key}"]


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
                choice = {"prompt_logprobs": [None]}
                for row, token in zip(logits, ids[1:]):  # vLLM: the likeliest tokens, and that of the prompt
                    shown = [*row.topk(asked["prompt_logprobs"]).indices.tolist(), token]
                    entry = {str(t): {"logprob": float(row[t]), "rank": n + 1} for n, t in enumerate(shown)}
                    choice["prompt_logprobs"].append(entry)
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


def test_a_server_gives_the_likeliest_tokens_of_a_model_in_this_process(server):
    batch = tiny_batch()
    want = ["log_probs", "top_ids", "top_log_probs"]
    here = SingleBackend(tiny_model(), BackendSettings(topk=3)).forward(batch, want, MicroBatching(rows=4))
    settings = DistillationConfig(url=f"{server}/v1", topk=3)
    found = TeacherServer(settings, Ranks()).forward(batch, want, MicroBatching(rows=4))
    assert found.top_ids.dtype == torch.int32 and torch.equal(found.top_ids, here.top_ids)
    torch.testing.assert_close(found.top_log_probs, here.top_log_probs, atol=1e-5, rtol=1e-5)
    echo = TeacherServer(DistillationConfig(url=f"{server}/echo/v1", topk=3), Ranks())
    with pytest.raises(ValueError, match=r"0 tokens with log-probs at position 1.*--max-logprobs 3"):
        echo.forward(batch, want, MicroBatching(rows=4))


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"7": {"logprob": -1.0}},
        {"a": {"logprob": -1.0}, "7": {"logprob": "x"}, "8": None, "9": -1.0},
        {"7": {"logprob": -1.0}, "8": {"logprob": 3.0}, "9": {"logprob": True}},  # logits
        {"7": {"logprob": -1.0}, "4294967303": {"logprob": -1.0}, "8": {"logprob": float("nan")}},
    ],
)
def test_a_reply_with_too_few_tokens_at_a_place_is_an_error(entry):
    with pytest.raises(ValueError, match="topk=2 are wanted"):
        parse_top_tokens({"choices": [{"prompt_logprobs": [None, entry]}]}, [3, 7], 2, "http://x")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({}, "0 of 2 prompt tokens"),
        ({"choices": [{"text": "x", "logprobs": None}]}, "0 of 2 prompt tokens"),
        ({"choices": [{"prompt_logprobs": [None, {"9": {"logprob": -1.0}}]}]}, "None as log-prob of token 7"),
        ({"choices": [{"prompt_logprobs": [None, {"7": {"logprob": float("-inf")}}]}]}, "-inf as log-prob"),
        ({"choices": [{"prompt_logprobs": [None, {"7": {"logprob": 3.5}}]}]}, "3.5 as log-prob of token 7"),
        (
            {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1e300}}]}]},
            "-1e.300 as log-prob of token",
        ),
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


@pytest.mark.parametrize(
    ("loss", "as_loss", "task_reward", "said"),
    [
        ("kl_cov", True, False, "ppo_kl_coef, on tokens that it chooses by advantage"),
        ("dro", True, False, "dro_beta, on all tokens"),
        ("DRO", True, False, "Set it to vanilla"),
        ("kl_cov", True, True, None),
        ("dro", False, False, None),  # the advantages are the teacher's term
        ("clip_cov", True, False, None),
        ("vanilla", True, False, None),
    ],
)
def test_a_policy_loss_of_which_only_a_penalty_would_be_left_is_refused(loss, as_loss, task_reward, said):
    """Without rewards the advantages are 0 where the teacher's term is a loss: kl_cov then put its penalty on
    tokens that it chose by their place in the batch."""
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    words = [
        "actor_rollout_ref.model.path=m",
        "data.train_files=x",
        f"{SECTION}.enable=true",
        URL,
        f"{key}={loss}",
    ]
    words.append(f"{SECTION}.task_reward={task_reward}")
    if as_loss:
        words += [f"{SECTION}.use_policy_gradient=false", f"{SECTION}.loss_mode=k3"]
    found = [str(finding) for finding in check(load("ppo_trainer", words)) if finding.key == key]
    assert [said in text for text in found] == ([] if said is None else [True]), found


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
