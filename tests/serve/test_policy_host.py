"""The model of the service: numbers by hand, adapters that do not touch each other, saved and published weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.config.schema.training_service import ServiceConfig, ServiceModelConfig, TrainingServiceConfig
from strop.rewards.server_requests import RequestRefused
from strop.serve.losses import LOSSES
from strop.serve.messages import LossDatum
from strop.serve.policy_host import PolicyHost, changed_keys
from strop.serve.requests import AdamStep, SampleRequest
from strop.types import Batch
from tests.serve.tiny import write_tiny_model

CROSS_ENTROPY = LOSSES["cross_entropy"]
STEP = AdamStep(0.01, (0.9, 0.95), 1e-8, 0.0, None)
NEXT = LossDatum(
    np.array([5, 6, 7, 8]),
    {"target_tokens": np.array([6, 7, 8, 9]), "weights": np.array([0.0, 1.0, 2.0, 1.0])},
)
OTHER = LossDatum(
    np.array([5, 6, 7]),
    {"target_tokens": np.array([[6, 1], [2, 7], [8, 3]]), "weights": np.ones((3, 2))},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1)


def built(model: Path, **policy: str) -> PolicyHost:
    config = TrainingServiceConfig(
        model=ServiceModelConfig(path=str(model)), server=ServiceConfig(device="cpu"), policy=policy
    )
    return PolicyHost.build(config)


@pytest.fixture(scope="module")
def host(model: Path) -> Iterator[PolicyHost]:
    found = built(model)
    yield found
    found.close()


@pytest.fixture(scope="module")
def exact_host(model: Path) -> Iterator[PolicyHost]:
    """In bf16, which not every CPU has, numbers depend on the micro-batch."""
    found = built(model, dtype="float32")
    yield found
    found.close()


def train(host: PolicyHost, adapter: str, datum: LossDatum) -> list[float]:
    result = host.training_pass(adapter, [datum], CROSS_ENTROPY, {}, backward=True)
    host.step(adapter, STEP)
    return [result.loss, *result.log_probs[0].ravel().tolist()]


def test_log_probs_are_those_of_the_model(exact_host: PolicyHost, model: Path) -> None:
    host = exact_host
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    host.add("s1:train:0", rank=4, seed=1)
    for datum in (NEXT, OTHER):
        targets = torch.tensor(datum.targets).reshape(len(datum.tokens), -1)
        logits = plain(torch.tensor(datum.tokens)[None]).logits[0]
        expected = torch.log_softmax(logits.float(), -1).gather(1, targets).detach().numpy()
        found = host.training_pass("s1:train:0", [datum], CROSS_ENTROPY, {}, backward=False)
        np.testing.assert_allclose(found.log_probs[0].reshape(expected.shape), expected, atol=2e-5)
        weights = datum.inputs["weights"].reshape(expected.shape)
        assert found.loss == pytest.approx(float(-(expected * weights).sum()), rel=1e-5)
    host.remove("s1:train:0")


def test_adapters_get_the_numbers_that_each_gets_alone(host: PolicyHost) -> None:
    alone = []
    for number, datum in ((1, NEXT), (2, OTHER)):
        host.add("alone", rank=2 * number, seed=number)
        alone.append([train(host, "alone", datum) for _ in range(3)])
        host.remove("alone")
    host.add("one", rank=2, seed=1)
    host.add("two", rank=4, seed=2)
    together = [(train(host, "one", NEXT), train(host, "two", OTHER)) for _ in range(3)]
    assert [list(run) for run in zip(*together, strict=True)] == alone
    host.remove("one")
    host.remove("two")


def test_a_large_request_runs_each_micro_batch_once(
    exact_host: PolicyHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches are filled by the tokens that the model reads, which a target after the last is not."""
    host = exact_host
    backend = host.policy._core.backend
    passes = []
    run = backend._outputs

    def counted(piece: Batch, want: list[str]) -> dict[str, torch.Tensor]:
        passes.append(len(piece))
        return run(piece, want)

    monkeypatch.setattr(backend, "_outputs", counted)
    data = []
    for first in range(6):
        tokens = np.arange(first, first + 8)
        data.append(LossDatum(tokens, {"target_tokens": tokens + 1, "weights": np.ones(8)}))
    found = []
    for limit in (16384, 16):
        monkeypatch.setattr(
            host.policy._core.config.actor_rollout_ref.actor, "ppo_max_token_len_per_gpu", limit
        )
        host.add("m", rank=4, seed=1)
        result = host.training_pass("m", data, CROSS_ENTROPY, {}, backward=True)
        found.append([result.loss, *np.concatenate(result.log_probs), *host.step("m", STEP).values()])
        host.remove("m")
    assert passes == [6, 2, 2, 2]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_saved_weights_are_loaded_and_published(host: PolicyHost, tmp_path: Path) -> None:
    host.add("m", rank=4, seed=3)
    first = train(host, "m", NEXT)
    host.save("m", tmp_path / "state")
    host.save_sampler("m", tmp_path / "sampler")
    after = train(host, "m", NEXT)
    last = train(host, "m", NEXT)
    assert after[0] < first[0]
    host.load("m", tmp_path / "state", optimizer=True)
    assert train(host, "m", NEXT) == after and train(host, "m", NEXT) == last
    host.load("m", tmp_path / "state", optimizer=False)
    assert train(host, "m", NEXT) == after and train(host, "m", NEXT) != last

    host.publish("path", tmp_path / "sampler")
    (scores,) = host.score("path", [[5, 6, 7, 8, 9]])
    np.testing.assert_allclose(scores, after[1:], atol=1e-5)
    base = host.score(None, [[5, 6, 7, 8, 9], [5]])
    np.testing.assert_allclose(base[0], first[1:], atol=1e-5)
    assert base[1].shape == (0,)

    async def sample() -> list[list[int]]:
        request = SampleRequest([5, 6, 7], 2, 6, 1.0, 0, 1.0, None, None, False, None)
        both = await asyncio.gather(host.sample("path", request, 3), host.sample(None, request, 3))
        again = await host.sample("path", request, 3)
        assert [list(one.tokens) for one in again] == [list(one.tokens) for one in both[0]]
        return [list(one.tokens) for one in (both[0][0], both[1][0])]

    adapted, plain = asyncio.run(sample())
    assert len(adapted) == len(plain) == 6 and adapted != plain
    no_stop = SampleRequest([5], 1, 6, 1.0, 0, 1.0, None, [], False, None)
    with pytest.raises(RequestRefused, match=r"stop=\[\] is not offered"):
        asyncio.run(host.sample(None, no_stop, 3))
    host.withdraw("path")
    host.remove("m")


def test_keys_of_the_model_reach_the_policy() -> None:
    config = ServiceModelConfig(path="x", trust_remote_code=True)
    assert changed_keys(config) == {"actor_rollout_ref.model.trust_remote_code": True}
