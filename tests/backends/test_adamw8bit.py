"""Moments in 8 bits: how exact the codes are, training beside AdamW in fp32, memory, exact resumes."""

from __future__ import annotations

import pytest
import torch

from strop.backends.adamw8bit import FIRST_OCTAVES, SECOND_OCTAVES, dequantize, quantize
from strop.backends.optimizer import make_optimizer
from strop.config.compose import load
from strop.config.rules import check
from tests.backends.make import single
from tests.backends.test_conformance import optim, train
from tests.models.tiny import tiny_model

EIGHT = {"optimizer": "AdamW8bit", "override_optimizer_config": {"min_size": 0}}


@pytest.mark.parametrize(("octaves", "levels"), [(FIRST_OCTAVES, 127), (SECOND_OCTAVES, 255)])
def test_codes_are_within_a_step_and_right_on_average(octaves, levels):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(700, generator=generator).abs() * 10 ** torch.linspace(-2, 2, 700)
    values[0] = 0.0
    step = 2 ** (octaves / levels)
    mean = torch.zeros_like(values)
    for _ in range(200):
        found = dequantize(*quantize(values, octaves, levels, generator), octaves, levels)
        mean += found / 200
        assert found[0] == 0
        near = values > values.max() * 2 ** (1 - octaves)
        assert ((found / values)[near] < step * 1.001).all() and (
            (found / values)[near] > 1 / step / 1.001
        ).all()
    blocks = torch.stack([block.max() for block in values.split(256)]).repeat_interleave(256)[:700]
    kept = values > blocks * 2 ** (2 - octaves)
    assert ((mean / values)[kept] - 1).abs().max() < 0.03


def test_it_trains_as_adamw_does():
    """A linear regression with many scales of inputs, to a loss near that of AdamW in fp32."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 64) * 10 ** torch.linspace(-1, 1, 64)
    target = inputs @ torch.randn(64, 80)
    losses = {}
    for name in ("AdamW", "AdamW8bit"):
        weight = torch.zeros(64, 80, requires_grad=True)
        settings = optim(optimizer=name, lr=0.05, weight_decay=0.0, betas=[0.9, 0.999])
        optimizer = make_optimizer({"w": weight}, settings)
        for _ in range(120):
            loss = (inputs @ weight - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    assert losses["AdamW8bit"] < 1.1 * losses["AdamW"] < 0.01 * target.square().mean().item()
    state = optimizer.state[weight]
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert size < 2.1 * weight.numel()


def test_a_resumed_run_is_exact():
    settings = optim(**EIGHT)
    straight, first = (single(tiny_model(), optim=settings) for _ in range(2))
    train(straight, 4)
    train(first, 2)
    second = single(tiny_model(), optim=settings)
    second.load_state_dict(first.state_dict())
    train(second, 2)
    for name, weight in straight.export_weights():
        assert torch.equal(weight, dict(second.export_weights())[name]), name
    kinds = {tensor.dtype for state in second.state_dict()["optimizer"].values() for tensor in state.values()}
    assert kinds == {torch.int8, torch.uint8, torch.float32}


def test_small_weights_keep_fp32_moments_and_equal_adamw():
    weights = [torch.ones(5, 3, requires_grad=True) for _ in range(2)]
    made = [
        make_optimizer({"w": w}, optim(optimizer=n, weight_decay=0.1))
        for w, n in zip(weights, ("AdamW", "AdamW8bit"))
    ]
    for step in range(3):
        for weight, optimizer in zip(weights, made):
            weight.grad = torch.arange(15.0).view(5, 3) - 7 + step
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1])


@pytest.mark.parametrize("name", ["AdamW8bit", "Adafactor"])
@pytest.mark.parametrize("root", ["ppo_trainer", "sft_trainer"])
def test_several_devices_are_refused_with_the_reason(root, name):
    section = "actor_rollout_ref.actor.optim" if root == "ppo_trainer" else "optim"
    words = [f"{section}.optimizer={name}", "data.train_files=x", "trainer.n_gpus_per_node=2"]
    found = [str(finding) for finding in check(load(root, words))]
    assert any(f"{name} works on one device, but there are 2" in text for text in found)
    assert not any("one device" in str(finding) for finding in check(load(root, [*words[:2]])))
