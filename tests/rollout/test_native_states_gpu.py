"""Models with states in the native engine on a CUDA device: conversations continue from kept states, in pages,
with several steps between two reads of the device and with CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from strop.models.forward import response_outputs
from strop.rollout.native.engine import NativeEngine
from strop.types import Batch
from tests.models.hybrids import hybrid
from tests.rollout.test_native_snapshots import turns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def sampled_and_trained(family: str, dtype: torch.dtype, device: str, eager: bool) -> float:
    """The largest difference of sampled and recomputed log-probs over all turns of conversations."""
    model = hybrid(family)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(0.25)
    model = model.to(device, dtype)
    engine = NativeEngine(model, enforce_eager=eager)
    found = [turn for talk in turns(engine, 3, talks=5) for turn in talk]
    assert engine.stats()["continued_tokens"] > 100
    width = max(len(answer.ids) for _, answer in found)
    mask = torch.zeros(len(found), width)
    log_probs = torch.zeros(len(found), width)
    for row, (_, answer) in enumerate(found):
        mask[row, : len(answer.ids)] = 1
        log_probs[row, : len(answer.ids)] = torch.tensor(answer.log_probs)
    batch = Batch(
        sequences=[torch.tensor([*ids, *answer.ids]) for ids, answer in found],
        prompt_lengths=torch.tensor([len(ids) for ids, _ in found]),
        mask=mask,
    )
    with torch.no_grad():
        trained = response_outputs(model, batch, ["log_probs"], temperature=0.8)["log_probs"].cpu()
    return float(((trained - log_probs) * mask).abs().max())


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "falcon_h1", "mamba2"])
def test_conversations_have_the_log_probs_of_training(family: str, dtype: torch.dtype, eager: bool) -> None:
    assert sampled_and_trained(family, dtype, "cuda", eager) < 1e-3
