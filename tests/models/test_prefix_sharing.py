"""Samples of one prompt share its tokens in a packed row: less work, the same numbers and gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from strop.models.forward import lay_out, response_outputs
from strop.types import Batch

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def batch_of_groups(prompts: int = 3, samples: int = 4) -> Batch:
    """Prompts of several lengths, each with samples of several lengths, in mixed order."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for p in range(prompts):
        prompt = torch.randint(40, (3 + 2 * p,), generator=generator)
        for s in range(samples):
            rows.append((prompt, torch.randint(40, (1 + (s * 3 + p) % 6,), generator=generator)))
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator)]
    width = max(len(r) for _, r in rows)
    mask = torch.stack([(torch.arange(width) < len(r)).float() for _, r in rows])
    return Batch(
        sequences=[torch.cat(row) for row in rows],
        prompt_lengths=torch.tensor([len(p) for p, _ in rows]),
        mask=mask,
        groups=torch.zeros(len(rows), dtype=torch.long),
    )


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    ],
    ids=["llama", "mistral with a window"],
)
def test_shared_prompts_change_neither_values_nor_gradients(model):
    batch = batch_of_groups()
    found = {}
    for packed in (True, False):  # only a packed row shares
        model.zero_grad()
        outputs = response_outputs(model, batch, ["log_probs", "entropy"], packed=packed)
        ((outputs["log_probs"] + 0.3 * outputs["entropy"]) * batch.mask).sum().backward()
        found[packed] = outputs, {name: p.grad.clone() for name, p in model.named_parameters()}
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(found[True][0][name], found[False][0][name], rtol=1e-5, atol=1e-6)
    for name, gradient in found[True][1].items():
        torch.testing.assert_close(gradient, found[False][1][name], rtol=1e-4, atol=1e-6)


def test_a_prompt_stands_once_in_the_row():
    batch = batch_of_groups()
    lengths = batch.prompt_lengths.tolist()
    shared = lay_out(batch.sequences, packed=True, prompt_lengths=lengths)
    apart = lay_out(batch.sequences, packed=True)
    assert apart.ids.numel() == sum(batch.lengths)
    assert shared.ids.numel() == sum(batch.response_lengths.tolist()) + sum(
        {tuple(s[:p].tolist()): p for s, p in zip(batch.sequences, lengths)}.values()
    )
    for sequence, place in zip(batch.sequences, shared.places):
        assert torch.equal(shared.ids.flatten()[place], sequence)
        assert shared.positions.flatten()[place].tolist() == list(range(len(sequence)))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_shared_prompts_on_a_gpu(dtype, tolerance):
    """bf16 takes the variable-length kernel, which must gather what is shared; fp32 takes the padded way."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 64})).to("cuda", dtype)
    batch = batch_of_groups()
    found = {}
    for packed in (True, False):
        model.zero_grad()
        outputs = response_outputs(model, batch, ["log_probs"], packed=packed)
        (outputs["log_probs"] * batch.mask.cuda()).sum().backward()
        gradient = torch.cat([p.grad.float().flatten() for p in model.parameters()])
        found[packed] = outputs["log_probs"].detach(), gradient
    torch.testing.assert_close(found[True][0], found[False][0], rtol=tolerance, atol=tolerance)
    assert (found[True][1] - found[False][1]).norm() <= tolerance * found[False][1].norm()
