"""fsdp_config.full_determinism reaches torch, and a run with it is still a run."""

from __future__ import annotations

import os

import pytest
import torch

from strop.config.schema.model import FsdpConfig, ModelConfig, OptimConfig
from strop.shared.build import BackendMaker
from tests.backends.test_conformance import ALL, policy_loss
from tests.models.tiny import tiny_batch, tiny_model


@pytest.fixture
def kernels_as_before(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    flags = torch.backends.cudnn
    monkeypatch.setattr(flags, "deterministic", flags.deterministic)
    monkeypatch.setattr(flags, "benchmark", flags.benchmark)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("asked", [False, True])
def test_a_model_that_asks_for_it_gets_deterministic_kernels(asked, kernels_as_before):
    settings = FsdpConfig(full_determinism=asked, dtype="float32")
    make = BackendMaker(torch.device("cpu"), total_steps=2)
    backend = make(lambda _: tiny_model(), ModelConfig(), settings, "fsdp2", OptimConfig(lr=0.1), 1.0)
    assert torch.are_deterministic_algorithms_enabled() == asked
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if asked else None)
    assert torch.backends.cudnn.deterministic >= asked
    backend.forward_backward(tiny_batch(), ["log_probs", "entropy"], policy_loss, ALL)
    assert not backend.step().skipped
