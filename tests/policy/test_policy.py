"""The primitives of `Policy` on one device: sampling, losses, updates, adapters, state, and bad input."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.algorithms.rollout_correction import correct_rollout
from strop.backends.base import Outputs, use_deterministic_kernels
from strop.backends.micro_batches import NonFiniteLoss
from strop.models.build import has_bf16_instructions
from strop.policy.batches import Datum, StepOutput
from strop.policy.gate import Gate
from strop.policy.losses import SumLoss
from strop.policy.policy import Policy
from strop.policy.stops import Stops
from strop.types import Batch, Prompt, Trajectory
from tests.models.vision.test_passes import rows_of
from tests.models.vision.tiny_vlm import tiny_vlm, tokenizer_of

PROMPTS = ["1+2=", "3+4=", "5+5="]
FAST: dict[str, object] = {"dtype": "float32", "lr": 1e-2, "enable_gradient_checkpointing": False}


def make(task: Path, **keys: object) -> Policy:
    return Policy(task / "model", **{**FAST, **keys})  # type: ignore[arg-type] # any key


@pytest.fixture
def policy(task: Path) -> Iterator[Policy]:
    with make(task) as made:
        yield made


@pytest.fixture
def adapted(task: Path) -> Iterator[Policy]:
    with make(task, lora_rank=4) as made:
        yield made


def rows(policy: Policy, seed: int = 0, adapter: str = "default") -> list[Datum]:
    """Samples with advantages that depend on the tokens."""
    found = []
    for t in itertools.chain(*policy.sample(PROMPTS, n=4, max_tokens=5, seed=seed, adapter=adapter)):
        advantages = [float(token % 3 - 1) for token in t.response]
        found.append(Datum(t.prompt.ids, t.response, advantages=advantages, log_probs=t.log_probs))
    return found


def masters(policy: Policy, adapter: str = "default") -> dict[str, Tensor]:
    policy._core.adapters.activate(adapter)
    return {name: weight.detach().clone() for name, weight in policy._core.backend.weights.masters.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def mean_loss(outputs: Outputs, batch: Batch) -> Tensor:
    assert outputs.log_probs is not None and batch.advantages is not None
    return -(outputs.log_probs * batch.advantages * batch.mask).sum() / batch.mask.sum()


# --- sampling -----------------------------------------------------------------------------------------------


def test_sampled_log_probs_are_those_of_the_model(policy: Policy) -> None:
    groups = policy.sample(PROMPTS, n=3, max_tokens=5)
    assert [len(group) for group in groups] == [3, 3, 3]
    samples = [t for group in groups for t in group]
    for t, log_probs in zip(samples, policy.log_probs(samples), strict=True):
        torch.testing.assert_close(torch.tensor(t.log_probs), log_probs, rtol=1e-5, atol=1e-5)
    assert policy.sample(PROMPTS, n=3, max_tokens=5) != groups
    assert policy.sample(PROMPTS, max_tokens=5, seed=3) == policy.sample(PROMPTS, max_tokens=5, seed=3)


def test_coroutines_get_the_samples_of_their_seeds(policy: Policy) -> None:
    async def all_at_once() -> list[list[Trajectory]]:
        calls = [policy.asample(prompt, n=2, max_tokens=5, seed=7) for prompt in PROMPTS]
        return list(await asyncio.gather(*calls))

    for prompt, found in zip(PROMPTS, asyncio.run(all_at_once()), strict=True):
        (alone,) = policy.sample([prompt], n=2, max_tokens=5, seed=7)
        assert [t.response for t in found] == [t.response for t in alone]


def test_a_training_operation_waits_for_samples_of_another_thread(policy: Policy) -> None:
    async def both() -> tuple[list[Trajectory], StepOutput]:
        data = rows(policy)
        sampling = asyncio.ensure_future(policy.asample(PROMPTS[0], n=4, max_tokens=20, seed=1))
        await asyncio.sleep(0)
        training = asyncio.to_thread(policy.forward_backward, data, "ppo")
        return await asyncio.gather(sampling, training)

    samples, output = asyncio.run(both())
    assert samples == [*policy.sample(PROMPTS[:1], n=4, max_tokens=20, seed=1)[0]]
    assert output.loss == pytest.approx(policy.forward(rows(policy), "ppo").loss)


def test_a_training_operation_in_the_loop_of_its_samples_is_refused(policy: Policy) -> None:
    async def both() -> None:
        sampling = asyncio.ensure_future(policy.asample(PROMPTS[0], max_tokens=5))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="to_thread"):
            policy.log_probs([([1], [2])])
        await sampling

    asyncio.run(both())


def test_an_operation_in_a_loss_function_is_refused(policy: Policy) -> None:
    """It would wait for the operation that called the function, for ever."""
    data = rows(policy)

    def asks(outputs: Outputs, batch: Batch) -> Tensor:
        return mean_loss(outputs, batch) + policy.log_probs([([1], [2])])[0].sum()

    def samples(outputs: Outputs, batch: Batch) -> Tensor:
        asyncio.run(policy.asample(PROMPTS[0], max_tokens=2))
        return mean_loss(outputs, batch)

    for loss in (asks, samples):
        with pytest.raises(ValueError, match="inside another one"):
            policy.forward_backward(data, loss)
    policy.forward_backward(data, mean_loss)


def test_samples_go_on_after_a_training_operation_was_interrupted() -> None:
    gate = Gate()

    async def sample() -> None:
        async with gate.sampling():
            with pytest.raises(KeyboardInterrupt):
                await asyncio.to_thread(interrupted)

    def interrupted() -> None:
        def wait_for(_: object) -> None:
            raise KeyboardInterrupt  # in a notebook, while the samples are running

        with unittest.mock.patch.object(gate._changed, "wait_for", wait_for), gate.training():
            raise AssertionError("samples are running")

    asyncio.run(asyncio.wait_for(sample(), 10))
    asyncio.run(asyncio.wait_for(sample(), 10))


def test_images_of_a_prompt_are_seen_by_every_operation() -> None:
    ids, images, _ = rows_of("qwen2_5_vl")[0]
    prompt = Prompt(0, list(ids), [], data_source="images", images=images)
    keys = {key: value for key, value in FAST.items() if key != "lr"}
    with Policy(tiny_vlm("qwen2_5_vl"), tokenizer_of("qwen2_5_vl"), **keys) as policy:  # type: ignore[arg-type]
        (samples,) = policy.sample([prompt], n=2, max_tokens=5, seed=1)
        again = asyncio.run(policy.asample(prompt, n=2, max_tokens=5, seed=1))
        assert [t.response for t in again] == [t.response for t in samples]
        for t, log_probs in zip(samples, policy.log_probs(samples), strict=True):
            torch.testing.assert_close(torch.tensor(t.log_probs), log_probs, rtol=1e-5, atol=1e-5)


def test_texts_and_tokens_end_a_response(policy: Policy) -> None:
    (plain,) = policy.sample(PROMPTS[:1], max_tokens=8, seed=5)[0]
    token = plain.response[2]
    text = policy.tokenizer.decode([token])
    first = plain.response.index(token) + 1
    stops: list[Stops] = [
        [token],
        [text],
        token,
        text,
        f"{text}{policy.tokenizer.decode(plain.response[3:4])}",
    ]
    for stop in stops[:-1]:
        (cut,) = policy.sample(PROMPTS[:1], max_tokens=8, seed=5, stop=stop)[0]
        assert cut.response == plain.response[:first] and cut.finish == "stop"
        assert len(cut.mask) == len(cut.log_probs) == first
    (cut,) = policy.sample(PROMPTS[:1], max_tokens=8, seed=5, stop=stops[-1])[0]
    assert len(cut.response) > first, "a text ends a response, not each of its letters"


def test_prompts_are_texts_tokens_or_messages(policy: Policy) -> None:
    messages = [{"role": "user", "content": "1+2="}]
    for prompt in ("1+2=", [5, 6, 7], messages, policy.prompt(messages, index=3)):
        assert policy.sample([prompt], max_tokens=2)[0][0].response
    with pytest.raises(ValueError, match="Prompt 0"):
        policy.sample([[]], max_tokens=2)


# --- losses -------------------------------------------------------------------------------------------------


def test_losses_by_name_are_their_formulas(task: Path) -> None:
    policy = make(task, skip_zero_advantages=False)
    data = rows(policy)
    log_probs = torch.cat(policy.log_probs(data))
    old = torch.cat([torch.tensor(d.log_probs) for d in data]) - 0.3
    shifted = [Datum(d.prompt, d.response, log_probs=[x - 0.3 for x in d.log_probs or []],
                     advantages=d.advantages, weights=d.advantages, mask=[1] * len(d.response))
               for d in data]  # fmt: skip
    advantages = torch.cat([torch.tensor(d.advantages) for d in data])
    ratio = (log_probs - old).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.2) * advantages)
    expected = {
        "cross_entropy": -(advantages * log_probs).sum(),
        "importance_sampling": -(ratio * advantages).sum(),
        "ppo": -clipped.sum(),
    }
    for name, value in expected.items():
        settings = {"clip_low": 0.1} if name == "ppo" else {}
        output = policy.forward_backward(shifted, name, aggregation="token-sum", **settings)
        assert output.loss == pytest.approx(float(value), rel=1e-4), name
        torch.testing.assert_close(torch.cat([row for row in output.log_probs if row is not None]), log_probs)
        forward = policy.forward(shifted, name, aggregation="token-sum", **settings)
        assert forward.loss == pytest.approx(output.loss)
        policy.drop_gradients()


@pytest.mark.parametrize(
    "keys", [{}, {"actor_rollout_ref.rollout.quantization": "int8"}], ids=["plain", "int8"]
)
def test_weights_of_a_batch_are_those_of_its_loss(task: Path, keys: dict[str, object]) -> None:
    """Without them, samples of quantised weights are weighted as in training."""
    with make(task, skip_zero_advantages=False, **keys) as policy:
        batch = policy.batch(rows(policy))
        assert batch.advantages is not None and batch.rollout_log_probs is not None
        log_probs = policy.forward(batch, "cross_entropy").log_probs
        gap = (
            torch.cat([row for row in log_probs if row is not None]) - batch.rollout_log_probs[batch.mask > 0]
        )
        expected = -(batch.advantages[batch.mask > 0] * (gap.exp() if keys else 1)).sum()
        default = policy.forward_backward(batch, "vanilla", aggregation="token-sum")
        assert default.loss == pytest.approx(float(expected), abs=1e-4)
        own = batch.replace(rollout_weights=3 * torch.ones_like(batch.advantages))
        tripled = policy.forward_backward(own, "vanilla", aggregation="token-sum")
        assert tripled.loss == pytest.approx(-3 * float((batch.advantages * batch.mask).sum()), abs=1e-4)
        assert ("rollout_corr/rollout_is_mean" in default.metrics) == bool(keys)
        assert "rollout_corr/rollout_is_mean" not in tripled.metrics


CORRECTION = "algorithm.rollout_correction"
REJECTED = {f"{CORRECTION}.rollout_rs": "token_k1", f"{CORRECTION}.rollout_rs_threshold": "0.9_1.1"}
NORMALIZED = {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_batch_normalize": True}


@pytest.mark.parametrize("old", [False, True], ids=["on-policy", "old"])
@pytest.mark.parametrize(
    "keys", [REJECTED, NORMALIZED, REJECTED | NORMALIZED], ids=["rejection", "normalised", "both"]
)
def test_rollouts_are_corrected_as_in_training(task: Path, keys: dict[str, object], old: bool) -> None:
    with make(task, skip_zero_advantages=False, **keys) as policy:
        batch = policy.batch(rows(policy))
        assert batch.advantages is not None and batch.rollout_log_probs is not None
        gap = torch.tensor([0.02, -0.4, 0.05, 0.3, 0.0])[: batch.mask.shape[1]] * batch.mask
        now = batch.rollout_log_probs
        batch = batch.replace(rollout_log_probs=now - gap, old_log_probs=now if old else None)
        correction = correct_rollout(
            now, now - gap, batch.mask,
            rollout_is="token" if NORMALIZED.items() <= keys.items() else None,
            rollout_is_batch_normalize=True,
            rollout_rs="token_k1" if REJECTED.items() <= keys.items() else None,
            rollout_rs_threshold="0.9_1.1",
        )  # fmt: skip
        weights = 1 if correction.weights is None else correction.weights
        expected = -(batch.advantages * weights * correction.mask).sum() / correction.mask.sum()
        for call in (policy.forward, policy.forward_backward):
            output = call(batch, "vanilla", aggregation="token-mean")
            assert output.loss == pytest.approx(float(expected), abs=1e-4)
            for name, value in correction.metrics.items():
                assert output.metrics[name] == pytest.approx(float(value), abs=1e-3), name
        own = batch.replace(rollout_weights=torch.ones_like(batch.mask))
        plain = -(batch.advantages * batch.mask).sum() / batch.mask.sum()
        output = policy.forward(own, "vanilla", aggregation="token-mean")
        assert output.loss == pytest.approx(float(plain), abs=1e-4)
        if REJECTED.items() <= keys.items():
            far = batch.replace(rollout_log_probs=now - 3)
            with pytest.raises(ValueError, match="rollout_rs=token_k1 rejected every token of this batch"):
                policy.forward(far, "vanilla")


def test_engine_log_probs_are_the_old_ones_as_in_training(task: Path) -> None:
    with make(task, skip_zero_advantages=False, **{f"{CORRECTION}.bypass_mode": True}) as policy:
        batch = policy.batch(rows(policy))
        assert batch.advantages is not None and batch.rollout_log_probs is not None
        shifted = batch.replace(rollout_log_probs=batch.rollout_log_probs - 0.1 * batch.mask)
        expected = -(batch.advantages * batch.mask).sum() * math.exp(0.1)
        output = policy.forward(shifted, "vanilla", aggregation="token-sum")
        assert output.loss == pytest.approx(float(expected), abs=1e-3)


@pytest.mark.parametrize("micro", [1, 5, 100])
def test_an_own_loss_sees_the_whole_batch_whatever_the_micro_batches(task: Path, micro: int) -> None:
    with make(task, ppo_micro_batch_size_per_gpu=micro, skip_zero_advantages=False) as policy:
        data = rows(policy)
        own = policy.forward_backward(data, mean_loss)
        norm = policy.optim_step()["grad_norm"]
        with make(task) as other:
            named = other.forward_backward(data, "gpg")
            assert own.loss == pytest.approx(named.loss, rel=1e-5)
            assert norm == pytest.approx(other.optim_step()["grad_norm"], rel=1e-4)
            a, b = masters(policy), masters(other)
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=2e-3)


def test_an_own_loss_gets_rows_in_their_order(policy: Policy) -> None:
    data = sorted(rows(policy), key=lambda d: len(d.prompt))
    seen = []

    def loss(outputs: Outputs, batch: Batch) -> Tensor:
        assert outputs.log_probs is not None
        seen.append([s.tolist() for s in batch.sequences])
        return outputs.log_probs.sum()

    policy.forward_backward(data[:6], loss)
    assert seen == [[[*d.prompt, *d.response] for d in data[:6]]]


def test_an_own_loss_may_want_no_log_probs(policy: Policy) -> None:
    data = rows(policy)

    def entropy(outputs: Outputs, batch: Batch) -> Tensor:
        assert outputs.entropy is not None
        return (outputs.entropy * batch.mask).sum()

    found = policy.forward(data, entropy, want=["entropy"])
    assert found.loss == pytest.approx(policy.forward_backward(data, entropy, want=["entropy"]).loss)
    assert found.log_probs == [None] * len(data)


@pytest.mark.parametrize("micro", [1, 64])
def test_parameters_of_an_own_loss_get_their_gradients(task: Path, micro: int) -> None:
    """In one pass and in two."""
    with make(task, ppo_micro_batch_size_per_gpu=micro) as policy:
        scale = torch.nn.Parameter(torch.tensor(2.0))
        batch = policy.batch(rows(policy))
        found = policy.forward_backward(batch, lambda o, b: scale * mean_loss(o, b))
        assert scale.grad is not None
        torch.testing.assert_close(scale.grad * 2.0, torch.tensor(found.loss))
        policy.optim_step()


def test_iterators_of_rows_and_prompts_are_read_whole(policy: Policy) -> None:
    groups = policy.sample(iter(PROMPTS), n=4, max_tokens=5, seed=0)
    assert [len(group) for group in groups] == [4, 4, 4]
    for place, trajectory in enumerate(itertools.chain(*groups)):
        trajectory.score = float(place % 3)
    whole = policy.batch(list(itertools.chain(*groups)), advantages="grpo")
    batch = policy.batch(itertools.chain(*groups), advantages="grpo")
    assert len(batch) == 12 and batch.advantages is not None and whole.advantages is not None
    assert torch.equal(batch.advantages, whole.advantages)
    loss = policy.forward(iter(rows(policy)), "importance_sampling").loss
    assert loss == policy.forward(rows(policy), "importance_sampling").loss


def test_a_closed_policy_does_nothing(task: Path) -> None:
    """Its model belongs to its owner again, and its engine is gone."""
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    policy = Policy(model, AutoTokenizer.from_pretrained(task / "model"), **FAST)  # type: ignore[arg-type]
    policy.close()
    policy.close()
    for call in (
        lambda: policy.sample(PROMPTS, max_tokens=2),
        lambda: policy.forward_backward([Datum([1], [2])], "cross_entropy"),
        lambda: asyncio.run(policy.asample(PROMPTS[0], max_tokens=2)),
    ):
        with pytest.raises(ValueError, match="policy is closed"):
            call()


def test_hyperparameters_of_one_step_hold_for_that_step(policy: Policy) -> None:
    data = rows(policy)
    policy.forward_backward(data, "ppo")
    before = masters(policy)
    assert policy.optim_step(lr=0.0, weight_decay=0.0)["lr"] == 0.0
    assert same(before, masters(policy))
    policy.forward_backward(data, "ppo")
    assert policy.optim_step()["lr"] == 1e-2
    assert not same(before, masters(policy))


# --- adapters -----------------------------------------------------------------------------------------------


def trained(policy: Policy, adapter: str, steps: int = 1) -> list[float]:
    found = []
    for step in range(steps):
        found.append(policy.forward_backward(rows(policy, step, adapter), "ppo", adapter=adapter).loss)
        found.append(policy.optim_step(adapter=adapter)["grad_norm"])
    return found


def test_adapters_in_turn_get_the_numbers_that_each_has_alone(task: Path) -> None:
    names = {"default": 0, "b": 11, "c": 12}
    with make(task, lora_rank=4) as together:
        for name, seed in list(names.items())[1:]:
            together.add_adapter(name, rank=2 + seed % 2, seed=seed)
        assert together.adapters == list(names)
        seen: dict[str, list[float]] = {name: [] for name in names}
        for name in [*names, *reversed(names)]:
            seen[name] += trained(together, name)
        for name, seed in names.items():
            with make(task, lora_rank=4) as alone:
                if name != "default":
                    alone.add_adapter(name, rank=2 + seed % 2, seed=seed)
                numbers: list[float] = []
                for _ in range(2):
                    numbers += trained(alone, name)
                assert numbers == seen[name]
                assert same(masters(alone, name), masters(together, name))
    assert len({tuple(numbers) for numbers in seen.values()}) == 3


def test_adapters_accumulate_gradients_of_their_own(task: Path) -> None:
    with make(task, lora_rank=4) as policy, make(task, lora_rank=4) as alone:
        data = rows(alone)
        policy.add_adapter("b")
        policy.forward_backward(data, "ppo")
        policy.forward_backward(data, "cross_entropy", adapter="b")
        with pytest.raises(ValueError, match="no adapter 'd'"):
            policy.forward_backward(data, "ppo", adapter="d")
        policy.optim_step(adapter="b")
        with pytest.raises(ValueError, match="without gradients of 'b'"):
            policy.optim_step(adapter="b")
        policy.optim_step()
        alone.forward_backward(data, "ppo")
        alone.optim_step()
        assert same(masters(policy), masters(alone))


OFFLOADED = {"actor_rollout_ref.actor.fsdp_config.optimizer_offload": True}


def test_only_the_adapter_that_computes_is_on_the_device(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With optimizer_offload, though gradients of two adapters accumulate in turn."""
    with make(task, lora_rank=4, **OFFLOADED) as policy:
        data = rows(policy)
        policy.add_adapter("b")
        core = policy._core
        on_device: set[str] = set()
        moves = {
            "onload": lambda **parts: on_device.add(core.adapters.active),
            "offload": lambda **parts: on_device.discard(core.adapters.active),
        }
        for name, move in moves.items():
            monkeypatch.setattr(core.backend, name, move)
        for adapter in ("default", "b", "default", "b"):
            policy.forward_backward(data, "ppo", adapter=adapter)
            assert on_device == {adapter}
        update = core.backend._step
        during: list[set[str]] = []
        monkeypatch.setattr(core.backend, "_step", lambda *a: during.append(set(on_device)) or update(*a))
        for adapter in ("default", "b"):
            policy.optim_step(adapter=adapter)
            assert not on_device
        assert during == [{"default"}, {"b"}]


@pytest.fixture
def _full_determinism() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    use_deterministic_kernels()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = before


@pytest.mark.gpu
@pytest.mark.usefixtures("_full_determinism")
@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_offload_changes_no_number_of_adapters_in_turn(task: Path) -> None:
    """All runs learn from the same samples. In float32 torch's attention and index_add_ add gradients in any
    order, so two runs have the same bits with full_determinism only."""
    found = []
    data: list[Datum] = []
    for keys in ({}, {}, OFFLOADED):
        with make(task, lora_rank=4, device="cuda", **keys) as policy:
            data = data or rows(policy)
            policy.add_adapter("b", seed=1)
            for _ in range(2):
                policy.forward_backward(data, "ppo")
                policy.forward_backward(data, "cross_entropy", adapter="b")
                policy.optim_step()
                policy.optim_step(adapter="b")
            found.append(
                {name: weight.cpu() for name, weight in {**masters(policy), **masters(policy, "b")}.items()}
            )
    for number, what in ((1, "the same run again"), (2, "with optimizer_offload")):
        far = {name: float((found[0][name] - found[number][name]).abs().max()) for name in found[0]}
        assert same(found[0], found[number]), (
            f"{what}: {max(far.values())} apart in {max(far, key=far.__getitem__)}"
        )


def test_an_adapter_can_be_removed(adapted: Policy) -> None:
    adapted.add_adapter("b")
    trained(adapted, "b")
    adapted.remove_adapter("b")
    assert adapted.adapters == ["default"]
    with pytest.raises(ValueError, match="no adapter 'b'"):
        adapted.sample(PROMPTS, max_tokens=2, adapter="b")
    with pytest.raises(ValueError, match="cannot be removed"):
        adapted.remove_adapter("default")
    with pytest.raises(ValueError, match="already"):
        adapted.add_adapter("default")
    with pytest.raises(ValueError, match="cannot name"):
        adapted.add_adapter("a.b")
    trained(adapted, "default")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_samples_of_all_adapters_share_batches_and_are_their_own(
    task: Path, tmp_path: Path, device: str
) -> None:
    adapted = make(task, lora_rank=4, device=device)
    names = ["default", "b", "c"]
    for seed, name in enumerate(names):
        if seed:
            adapted.add_adapter(name, rank=3 * seed, seed=seed)
        for _ in range(3):
            adapted.forward_backward([Datum([5, 6], [7 + seed] * 4)], "cross_entropy", adapter=name)
            adapted.optim_step(lr=0.05, adapter=name)
    adapted.publish("snap", adapter="b")
    adapted.save_for_sampling(tmp_path / "b", adapter="b")
    adapted.publish("saved", folder=tmp_path / "b")
    chosen: list[str | None] = [*names, "snap", "saved", None]

    async def all_at_once() -> list[list[Trajectory]]:
        calls = [adapted.asample(PROMPTS[1], n=4, max_tokens=5, seed=4, adapter=name) for name in chosen]
        return list(await asyncio.gather(*calls))

    together = asyncio.run(all_at_once())
    for name, samples in zip(chosen, together, strict=True):
        (alone,) = adapted.sample([PROMPTS[1]], n=4, max_tokens=5, seed=4, adapter=name)
        assert [t.response for t in samples] == [t.response for t in alone]
        own = name if name in names else "b"
        assert own is not None
        exact = adapted.log_probs(samples, adapter=own, reference=name is None)
        for t, log_probs in zip(samples, exact, strict=True):
            torch.testing.assert_close(torch.tensor(t.log_probs), log_probs, rtol=1e-3, atol=1e-3)
    texts = [tuple(tuple(t.response) for t in samples) for samples in together]
    assert texts[1] == texts[3] == texts[4]
    assert len(set(texts)) == 4
    assert [samples[0].version for samples in together] == [3, 3, 3, 3, 0, 0]

    adapted.forward_backward([Datum([5, 6], [9] * 4)], "cross_entropy", adapter="b")
    adapted.optim_step(lr=0.5, adapter="b")
    later = asyncio.run(all_at_once())
    assert [t.response for t in later[3]] == [t.response for t in together[3]]
    assert [t.response for t in later[1]] != [t.response for t in together[1]]
    adapted.unpublish("snap")
    with pytest.raises(ValueError, match=r"no adapter 'snap'.*There are: default, b, c, saved"):
        adapted.sample(PROMPTS, max_tokens=2, adapter="snap")
    with pytest.raises(ValueError, match="has this name already"):
        adapted.publish("b")
    with pytest.raises(ValueError, match="published copy 'saved' already"):
        adapted.add_adapter("saved")
    with pytest.raises(ValueError, match="published copy 'saved' already"):
        adapted.load_adapter("saved", tmp_path / "b")
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        adapted.publish("other", folder=tmp_path)


def test_copies_of_an_adapter_with_a_scale_of_its_own_have_that_scale(task: Path, tmp_path: Path) -> None:
    """use_rslora divides alpha by the root of the rank."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(task / "model")
    settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_rslora=True)
    made = get_peft_model(model, settings)
    torch.manual_seed(0)
    for name, weight in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    made.save_pretrained(str(tmp_path / "stable"))
    with make(task, lora_rank=4, lora_alpha=8, lora_adapter_path=str(tmp_path / "stable")) as policy:
        policy.publish("snap")
        policy.publish("saved", folder=tmp_path / "stable")
        policy.load_adapter("loaded", tmp_path / "stable")
        for adapter in ("default", "snap", "saved", "loaded"):
            (samples,) = policy.sample([PROMPTS[0]], n=4, max_tokens=5, seed=1, adapter=adapter)
            for t, log_probs in zip(samples, policy.log_probs(samples), strict=True):
                torch.testing.assert_close(torch.tensor(t.log_probs), log_probs, rtol=1e-4, atol=1e-4)
        pairs = [((5, 6), (7, 8, 9))]
        torch.testing.assert_close(policy.log_probs(pairs, adapter="loaded"), policy.log_probs(pairs))
        file = tmp_path / "stable" / "adapter_config.json"
        file.write_text(file.read_text().replace('"alpha_pattern": {}', '"alpha_pattern": {"q_proj": 2}'))
        with pytest.raises(
            ValueError, match="sets alpha_pattern: with several adapters, each must have one rank"
        ):
            policy.publish("saved", folder=tmp_path / "stable")


# --- state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_resumed_policy_has_the_numbers_of_one_that_went_on(
    task: Path, tmp_path: Path, lora_rank: int
) -> None:
    keys = {"lora_rank": lora_rank, "lr_scheduler_type": "cosine", "total_training_steps": 10}

    def step(policy: Policy) -> tuple[object, ...]:
        groups = policy.sample(PROMPTS, n=2, max_tokens=4)
        for t in itertools.chain(*groups):
            t.score = float(sum(t.response) % 5)
        output = policy.forward_backward(policy.batch(groups, advantages="grpo"), "vanilla")
        return groups, output.loss, policy.optim_step()

    with make(task, **keys) as policy:
        step(policy)
        policy.forward_backward(rows(policy), "ppo")  # gradients that are not applied yet
        policy.save_state(tmp_path / "state")
        after = [step(policy), step(policy)]
        end = masters(policy)
    with make(task, **keys) as resumed:
        resumed.load_state(tmp_path / "state")
        assert [step(resumed), step(resumed)] == after
        assert same(masters(resumed), end)


def test_the_state_of_another_optimizer_is_refused(task: Path, policy: Policy, tmp_path: Path) -> None:
    """The next step would fail for lack of moments, or begin with none."""
    policy.forward_backward(rows(policy), "ppo")
    policy.optim_step()
    policy.save_state(tmp_path)
    with make(task, optimizer="AdamW8bit") as other:
        before = masters(other)
        with pytest.raises(ValueError, match="AdamW, and this policy has AdamW8bit"):
            other.load_state(tmp_path)
        assert same(masters(other), before)
        other.load_state(tmp_path, optimizer=False)
        assert same(masters(other), masters(policy))


def test_the_state_of_an_adapter_with_another_scale_is_refused(task: Path, tmp_path: Path) -> None:
    with make(task, lora_rank=4, lora_alpha=8) as policy:
        policy.save_state(tmp_path)
    with make(task, lora_rank=4, lora_alpha=16) as other:
        for optimizer in (True, False):
            with pytest.raises(ValueError, match="lora_alpha / lora_rank = 2, and this adapter has 4"):
                other.load_state(tmp_path, optimizer=optimizer)


def test_the_state_of_another_adapter_is_not_replaced(adapted: Policy, tmp_path: Path) -> None:
    adapted.add_adapter("b")
    adapted.save_state(tmp_path / "states")
    with pytest.raises(ValueError, match=r"state of the adapter 'default', and that of 'b' would replace it"):
        adapted.save_state(tmp_path / "states", adapter="b")
    adapted.save_state(tmp_path / "states")
    adapted.save_state(tmp_path / "b", adapter="b")
    adapted.load_state(tmp_path / "states", adapter="b")


def test_an_adapter_may_have_the_name_that_the_engine_has_for_no_adapter(adapted: Policy) -> None:
    plain = adapted.sample(PROMPTS, max_tokens=4, seed=1, adapter=None)
    adapted.add_adapter("base")
    assert adapted.sample(PROMPTS, max_tokens=4, seed=1, adapter="base") == plain
    assert adapted.sample(PROMPTS, max_tokens=4, seed=1, adapter=None) == plain


def test_an_adapter_of_another_model_leaves_nothing_behind(adapted: Policy, tmp_path: Path) -> None:
    adapted.save_for_sampling(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({name: weight[:1].clone() for name, weight in weights.items()}, file)
    with pytest.raises(ValueError):
        adapted.load_adapter("b", tmp_path)
    save_file(weights, file)
    adapted.load_adapter("b", tmp_path)


def test_files_of_different_adapters_are_refused(adapted: Policy, tmp_path: Path) -> None:
    """Its scale is alpha / r: with another r than that of the weights it would sample something else."""
    adapted.save_for_sampling(tmp_path)
    file = tmp_path / "adapter_config.json"
    content = json.loads(file.read_text())
    for rank, message in ((0, "at least 1"), (8, "says r=8, and .* has rank 4")):
        file.write_text(json.dumps({**content, "r": rank}))
        with pytest.raises(ValueError, match=message):
            adapted.publish("b", folder=tmp_path)
    file.write_text(json.dumps(content))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="cannot be read"):
        adapted.load_adapter("b", tmp_path)


def test_another_adapter_can_load_a_state(adapted: Policy, tmp_path: Path) -> None:
    trained(adapted, "default", 2)
    adapted.save_state(tmp_path / "state")
    adapted.add_adapter("b", seed=5)
    adapted.load_state(tmp_path / "state", adapter="b")
    assert trained(adapted, "b") == trained(adapted, "default")
    with pytest.raises(ValueError, match="no saved state"):
        adapted.load_state(tmp_path / "nothing")


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_folder_for_sampling_loads_elsewhere(task: Path, tmp_path: Path, lora_rank: int) -> None:
    with make(task, lora_rank=lora_rank) as policy:
        trained(policy, "default", 2)
        for _ in range(2):  # the second one replaces the first
            policy.save_for_sampling(tmp_path / "out")
        data = rows(policy)
        expected = policy.log_probs(data)
    folder = task / "model" if lora_rank else tmp_path / "out"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora_rank:
        peft = pytest.importorskip("peft")
        plain = peft.PeftModel.from_pretrained(plain, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == policy.tokenizer.vocab_size
    for datum, log_probs in zip(data, expected, strict=True):
        ids = torch.tensor([[*datum.prompt, *datum.response]])
        logits = plain(ids).logits[0].log_softmax(-1)
        found = logits[len(datum.prompt) - 1 : -1].gather(-1, torch.tensor(datum.response)[:, None])[:, 0]
        torch.testing.assert_close(found, log_probs, rtol=1e-4, atol=1e-4)


# --- a loaded model, and bad input --------------------------------------------------------------------------


def test_the_folder_for_sampling_replaces_only_its_own(policy: Policy, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "latest").symlink_to(out, target_is_directory=True)
    for _ in range(2):
        policy.save_for_sampling(tmp_path / "latest")
        assert (tmp_path / "latest").is_symlink() and (out / "config.json").exists()
    (tmp_path / "notes").write_text("x")
    policy.save_state(tmp_path / "state")
    policy.save_state(out)
    for name in ("notes", "state", "out"):
        with pytest.raises(ValueError, match=r"which would be lost. Give a new folder"):
            policy.save_for_sampling(tmp_path / name)
    policy.load_state(tmp_path / "state")
    policy.load_state(out)


def test_a_loaded_model_is_trained_in_place_and_given_back(task: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    before = model.lm_head.weight.detach().clone()
    with Policy(model, tokenizer, **FAST) as policy, make(task) as other:  # type: ignore[arg-type]
        data = rows(policy)
        assert [d.response for d in rows(other)] == [d.response for d in data]
        assert trained(policy, "default", 2) == trained(other, "default", 2)
        with pytest.raises(ValueError, match="belongs to another policy"):
            Policy(model, tokenizer)
        inside = policy.log_probs(data)
    assert not torch.equal(before, model.lm_head.weight)
    with Policy(model, tokenizer, **FAST) as again:  # type: ignore[arg-type]
        for a, b in zip(inside, again.log_probs(data), strict=True):
            assert torch.equal(a, b)


def test_a_loaded_model_comes_back_with_its_adapter_merged(task: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    model.lm_head.weight.requires_grad_(False)
    names = list(model.state_dict())
    with Policy(model, tokenizer, lora_rank=4, dtype="bfloat16", lr=1e-2) as policy:
        policy.add_adapter("b")
        trained(policy, "default", 2)
        data = rows(policy)
        inside = policy.log_probs(data)
    assert list(model.state_dict()) == names and not model.training and not model.is_gradient_checkpointing
    assert not model.lm_head.weight.requires_grad
    with Policy(model, tokenizer, **FAST) as again:  # type: ignore[arg-type]
        for a, b in zip(inside, again.log_probs(data), strict=True):
            # In bf16, which not every CPU has, the merged weights and the adapter beside them round apart.
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-2 if has_bf16_instructions() else 1e-4)
    model(torch.tensor([[5, 6]])).logits.sum().backward()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.requires_grad and weight.grad is not None


def test_a_model_whose_policy_could_not_start_stays_free(task: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    for bad in ({"lr_scheduler_type": "cosine"}, {"lora_dropot": 0.1}, {"ranks": 2}):
        with pytest.raises(ValueError):
            Policy(model, tokenizer, **bad)  # type: ignore[arg-type]
    Policy(model, tokenizer).close()


def test_models_that_cannot_be_trained_are_refused(task: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    with pytest.raises(ValueError, match=r"on cpu, and device=cuda"):
        Policy(model, tokenizer, device="cuda")
    with pytest.raises(ValueError, match="meta device"):
        Policy(AutoModelForCausalLM.from_config(model.config).to("meta"), tokenizer)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    with pytest.raises(ValueError, match="somebody else trains it"):
        Policy(model, tokenizer)


BAD_CALLS = {
    "There is no loss 'vanila'. Did you mean 'vanilla'": lambda p: p.forward_backward(rows(p), "vanila"),
    "outside the vocabulary": lambda p: p.forward_backward([Datum([1], [9999])], "cross_entropy"),
    "token id -1": lambda p: p.log_probs([([1], [-1])]),
    "at least one": lambda p: p.log_probs([([1], [])]),
    "needs advantages": lambda p: p.forward_backward([Datum([1], [2])], "vanilla"),
    "needs the log-probs": lambda p: p.forward_backward([Datum([1], [2], advantages=[1.0])], "ppo"),
    "1 weights for 2": lambda p: p.forward_backward([Datum([1], [2, 3], weights=[1.0])], "cross_entropy"),
    "1 mask values for 2": lambda p: p.forward_backward([Datum([1], [2, 3], mask=[1])], "cross_entropy"),
    "mask is 0": lambda p: p.forward_backward([Datum([1], [2], weights=[0.0])], "cross_entropy"),
    "must both be at least 1": lambda p: p.sample(PROMPTS, n=0, max_tokens=2),
    "leaves no room": lambda p: p.sample([[1] * 999], max_tokens=2),
    "without gradients": lambda p: p.optim_step(),
    "no adapter 'defalt'. Did you mean 'default'": lambda p: p.sample(PROMPTS, max_tokens=2, adapter="defalt"),
    "lora_rank > 0": lambda p: p.add_adapter("b"),
    "lora_rank > 0 to sample": lambda p: p.publish("b"),
    "trains all weights": lambda p: p.sample(PROMPTS, max_tokens=2, adapter=None),
    "with one number": lambda p: p.forward_backward(rows(p), lambda outputs, batch: outputs.log_probs),
    "has no gradient": lambda p: p.forward_backward(rows(p), lambda o, b: o.log_probs.detach().sum()),
    "takes no settings": lambda p: p.forward_backward(rows(p), "cross_entropy", clip_low=0.1),
    "clip_lo": lambda p: p.forward_backward(rows(p), "ppo", clip_lo=0.1),
    "must not be negative": lambda p: p.optim_step(lr=-1.0),
    "give it in a list": lambda p: p.sample("1+2=", max_tokens=2),
    "Prompt 0 is '1'. Give a text": lambda p: p.sample([1, 2], max_tokens=2),
    "holds nothing": lambda p: p.forward_backward([], "ppo"),
    "are estimated from scored": lambda p: p.batch([Datum([1], [2])], advantages="grpo"),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(policy: Policy, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        BAD_CALLS[message](policy)
    assert message in str(caught.value)


def test_an_unknown_setting_names_the_nearest(task: Path) -> None:
    with pytest.raises(ValueError, match="lora_dropout"):
        Policy(task / "model", lora_dropot=0.1)


@pytest.mark.parametrize("micro", [2, 100])
def test_a_loss_that_is_not_finite_moves_nothing(task: Path, micro: int) -> None:
    with make(task, ppo_micro_batch_size_per_gpu=micro) as policy:
        data = rows(policy)
        before = masters(policy)
        with pytest.raises(NonFiniteLoss, match="rows 0"):
            policy.forward_backward([Datum([1], [2], weights=[float("nan")]), Datum([1], [3], weights=[1.0])],
                                    "cross_entropy")  # fmt: skip
        with pytest.raises(NonFiniteLoss):
            policy.forward_backward(data, lambda outputs, batch: outputs.log_probs.sum() * float("nan"))
        with pytest.raises(ValueError, match="without gradients"):
            policy.optim_step()
        assert same(before, masters(policy))
        trained(policy, "default")


def test_a_loss_that_raises_leaves_no_gradients_of_a_part_of_the_batch(task: Path) -> None:
    seen = []

    def fails_later(outputs: Outputs, piece: Batch) -> Tensor:
        seen.append(piece)
        if len(seen) == 2:
            raise KeyboardInterrupt  # in a notebook
        return mean_loss(outputs, piece)

    with make(task, ppo_micro_batch_size_per_gpu=2) as policy:
        with pytest.raises(KeyboardInterrupt):
            policy.forward_backward(rows(policy), SumLoss(fails_later))
        with pytest.raises(ValueError, match="without gradients"):
            policy.optim_step()


def test_lists_of_trajectories_are_groups_whatever_call_sampled_them(policy: Policy) -> None:
    """Every call of `sample` counts its prompts from 0, and `asample` has one prompt: number 0."""
    first = policy.sample(PROMPTS[:1], n=2, max_tokens=5)
    second = policy.sample(PROMPTS[1:2], n=2, max_tokens=5)
    groups = [*first, *second]
    for score, t in enumerate(itertools.chain(*groups)):
        t.score = float(score)
    batch = policy.batch(groups, advantages="rloo")
    assert batch.advantages is not None
    assert batch.advantages[:, 0].tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert batch.groups.tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"Rows 0 and 2 both have group=0, but different prompts"):
        policy.batch([t for group in groups for t in group], advantages="rloo")
    mixed = [[*first[0], second[0][0]], [second[0][1], *first[0]]]  # an older response in a group
    advantages = policy.batch(mixed, advantages="dr_grpo").advantages
    assert advantages is not None
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-1, 0, 1, 5 / 3, -4 / 3, -1 / 3]))
