"""Muon with AdamW as one optimizer: the update of a matrix as published, AdamW for the rest, exact resumes."""

from __future__ import annotations

import math

import pytest
import torch

from strop.backends.muon import Muon, is_hidden_matrix
from strop.backends.optimizer import make_optimizer
from tests.backends.make import single
from tests.backends.test_conformance import optim, train
from tests.models.tiny import tiny_model


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration of degree 5, as in Jordan et al."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    flat = x.shape[0] > x.shape[1]
    x = x.T if flat else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if flat else x).float()


def test_matrices_and_other_weights_by_hand():
    torch.manual_seed(0)
    start = {
        "layers.0.up.weight": torch.randn(6, 4),
        "embed_tokens.weight": torch.randn(5, 4),
        "norm.weight": torch.randn(4),
    }
    ours = {name: weight.clone().requires_grad_() for name, weight in start.items()}
    settings = optim(optimizer="Muon", lr=0.1, weight_decay=0.5)
    made = make_optimizer(ours, settings)
    adamw = [start[name].clone().requires_grad_() for name in ("embed_tokens.weight", "norm.weight")]
    plain = torch.optim.AdamW(
        [{"params": adamw[:1], "weight_decay": 0.5}, {"params": adamw[1:], "weight_decay": 0.0}],
        lr=0.1,
        betas=tuple(settings.betas),
        eps=settings.eps,
    )
    matrix = start["layers.0.up.weight"].clone()
    momentum = torch.zeros(6, 4)
    for _ in range(3):
        gradients = {name: torch.randn_like(weight) for name, weight in start.items()}
        for name, weight in ours.items():
            weight.grad = gradients[name].clone()
        for weight, name in zip(adamw, ("embed_tokens.weight", "norm.weight")):
            weight.grad = gradients[name].clone()
        made.step()
        plain.step()
        gradient = gradients["layers.0.up.weight"]
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalised(0.05 * gradient + 0.95 * momentum)
        matrix = matrix * (1 - 0.1 * 0.5) - 0.1 * 0.2 * math.sqrt(6) * update
    torch.testing.assert_close(ours["layers.0.up.weight"].detach(), matrix, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(ours["embed_tokens.weight"], adamw[0])
    torch.testing.assert_close(ours["norm.weight"], adamw[1])


@pytest.mark.parametrize(
    ("name", "shape", "hidden"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (4, 4), True),
        ("model.layers.0.mlp.up_proj.lora_A.default.weight", (2, 4), True),
        ("model.embed_tokens.weight", (9, 4), False),
        ("lm_head.weight", (9, 4), False),
        ("score.weight", (1, 4), False),
        ("model.layers.0.mlp.experts.gate_up_proj", (3, 4, 4), False),
        ("model.norm.weight", (4,), False),
    ],
)
def test_who_gets_muon(name, shape, hidden):
    assert is_hidden_matrix(name, torch.zeros(shape)) == hidden


def test_a_resumed_run_is_exact_and_the_schedule_reaches_both_parts():
    settings = optim(optimizer="Muon", lr=1e-2, lr_warmup_steps=4, total_training_steps=8)
    straight, first = (single(tiny_model(), optim=settings) for _ in range(2))
    assert isinstance(first.optimizer, Muon) and {g["muon"] for g in first.optimizer.param_groups} == {
        True,
        False,
    }
    train(straight, 5)
    train(first, 3)
    second = single(tiny_model(), optim=settings)
    second.load_state_dict(first.state_dict())
    assert {group["lr"] for group in second.optimizer.param_groups} == {1e-2}
    train(second, 2)
    for name, weight in straight.export_weights():
        assert torch.equal(weight, dict(second.export_weights())[name]), name
