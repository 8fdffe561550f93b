"""What passes keep for their backward pass, by arithmetic, against what torch saves."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strop.models.checkpointing import checkpoint_activations
from strop.models.forward import response_outputs
from strop.models.residual import widen_residual
from strop.planning.activations import LOSS_BYTES, Numbers, Tokens, end_kept, layers_kept
from strop.planning.shape import read_shape
from strop.types import Batch

SIZE = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
ROWS, PROMPT, LENGTH = 4, 8, 33


def saved_bytes(model, batch: Batch) -> int:
    """Storage that the graph of a pass keeps, without weights and buffers."""
    fixed = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = response_outputs(model, batch, ["log_probs", "entropy"])
    assert outputs["log_probs"].requires_grad
    return sum(size for size, _ in kept.values())


def batch_of() -> Batch:
    draw = torch.Generator().manual_seed(0)
    return Batch(
        sequences=list(torch.randint(3, SIZE["vocab_size"], (ROWS, LENGTH), generator=draw)),
        prompt_lengths=torch.full((ROWS,), PROMPT),
        mask=torch.ones(ROWS, LENGTH - PROMPT),
    )


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:mkldnn")
def test_kept_activations_are_those_that_torch_saves(kind, dtype, mode):
    experts = (
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        if kind == "qwen3_moe"
        else {}
    )
    config = AutoConfig.for_model(kind, **{**SIZE, **experts})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    widen_residual(model)
    checkpoint_activations(model, mode)
    shape, numbers = read_shape(config.to_dict()), Numbers(dtype.itemsize, 4, residual=4)
    tokens, answered = ROWS * (LENGTH - 1), ROWS * (LENGTH - PROMPT)
    # What losses keep is not part of this pass; the numbers per answer are less than a hundredth of it.
    expected = layers_kept(shape, tokens, numbers, checkpointing=mode)
    expected += end_kept(shape, Tokens(tokens, answered), numbers) - LOSS_BYTES * answered
    tolerance = 0.12 if kind == "qwen3_moe" else 0.04
    assert saved_bytes(model, batch_of()) == pytest.approx(expected, rel=tolerance)
