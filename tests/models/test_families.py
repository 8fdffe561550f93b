"""What single families need: models whose classes differ from Llama's in more than sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strop.models.heads import load_scalar_model
from strop.models.load import load_config, resolve
from tests.models.hybrids import hybrid

IDS = torch.tensor([[5, 9, 3, 7, 11, 4]])


@pytest.fixture
def loud_memory():
    """Uninitialized memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@torch.no_grad()
def test_a_critic_of_falcon_h1_computes_with_its_multipliers(tmp_path: Path, loud_memory: None) -> None:
    """They are buffers that no file has: transformers computes them when it loads a model."""
    model = hybrid("falcon_h1")
    model.save_pretrained(tmp_path)
    critic = load_scalar_model(str(tmp_path), load_config(resolve(str(tmp_path))), new_head=True).eval()
    states = model.model(input_ids=IDS, use_cache=False).last_hidden_state
    values = critic(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(values, states @ critic.score.weight.t())
