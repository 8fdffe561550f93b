"""Sequences that begin alike share tokens in a packed row: less work, the same numbers and gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from strop.models.forward import response_outputs
from strop.models.packing import NOTHING, lay_out, rectangle
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


def test_no_beginning_stands_twice_in_the_row():
    batch = batch_of_groups()
    sequences = [*batch.sequences, batch.sequences[0].clone(), batch.sequences[3][:2], batch.sequences[5][:1]]
    table = rectangle(sequences)
    shared, apart = lay_out(table, packed=True), lay_out(table, packed=True, share=False)
    assert apart.ids.numel() == sum(map(len, sequences))
    assert shared.ids.numel() == len({tuple(s[: i + 1].tolist()) for s in sequences for i in range(len(s))})
    for layout in (shared, apart, lay_out(table, packed=False)):
        for sequence, place in zip(sequences, layout.places):
            assert torch.equal(layout.ids.flatten()[place[: len(sequence)]], sequence)
            assert layout.positions.flatten()[place[: len(sequence)]].tolist() == list(range(len(sequence)))
            assert (place[len(sequence) :] == NOTHING).all()


def test_every_token_of_the_row_comes_back_from_the_kernels_order():
    """A variable-length kernel sees whole sequences one after the other; each token of the row has its place among them."""
    batch = batch_of_groups()
    found = lay_out(rectangle([*batch.sequences, batch.sequences[3][:4]]), packed=True)
    layout = found.packing
    assert layout is not None and layout.spread is not None and layout.first is not None
    assert torch.equal(layout.spread[layout.first], torch.arange(found.ids.numel()))
    starts, ends = layout.bounds[:-1].tolist(), layout.bounds[1:].tolist()
    whole = [found.ids.flatten()[layout.spread[a:b]].tolist() for a, b in zip(starts, ends)]
    assert sorted(whole) == sorted(
        s.tolist() for s in batch.sequences
    )  # the beginning of another needs no row of its own
    assert layout.longest == max(batch.lengths)


def test_tokens_nobody_asks_about_are_left_out():
    """What follows the last token is not asked, so it need not be read."""
    seen = []
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    batch = batch_of_groups(prompts=1, samples=3)
    response_outputs(model, batch, ["log_probs"])  # the first pass also examines the head
    model.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"]), with_kwargs=True
    )
    for packed in (True, False):
        response_outputs(model, batch, ["log_probs"], packed=packed)
    cut = [s[:-1].tolist() for s in batch.sequences]
    assert seen[0].numel() == len({tuple(s[: i + 1]) for s in cut for i in range(len(s))})
    assert seen[1].shape == (3, max(map(len, cut)))


def test_answers_that_begin_alike_share_states_and_add_gradients():
    """Samples that agree at first, agree wholly, or stop where another goes on: as if each had been computed alone."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    answers = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8], [5, 6, 7], [5], [11, 3]]
    width = max(map(len, answers))
    batch = Batch(
        sequences=[torch.tensor([1, 2, 3, *answer]) for answer in answers],
        prompt_lengths=torch.full((len(answers),), 3),
        mask=torch.tensor([[1.0] * len(a) + [0.0] * (width - len(a)) for a in answers]),
        groups=torch.zeros(len(answers), dtype=torch.long),
    )
    weights = torch.randn(len(answers), width)
    together = response_outputs(model, batch, ["log_probs", "entropy"])
    (together["log_probs"] * weights + together["entropy"]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for row in range(len(answers)):
        alone = response_outputs(model, batch.select([row]), ["log_probs", "entropy"])
        own = len(answers[row])
        for name, table in alone.items():
            torch.testing.assert_close(together[name][row, :own], table[0], rtol=1e-5, atol=1e-6)
        (alone["log_probs"] * weights[row, :own] + alone["entropy"]).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


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
