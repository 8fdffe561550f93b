"""The peak of an update of real sizes, against the storage that the same code takes on the meta device, where nothing is computed.

Two things are as on a GPU and not as on the meta device: attention is one operation that keeps its inputs, output and a number
per head, and the head's products are float32.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

from strop.algorithms import logprobs
from strop.backends.optimizer import MasterWeights
from strop.models import forward
from strop.models.attention import PACKED, packed_attention
from strop.models.build import checkpoint_activations
from strop.models.layout import lay_out, rectangle
from strop.models.precision import widen_residual
from strop.planning.activations import Numbers, Tokens
from strop.planning.known import KNOWN
from strop.planning.shape import read_shape
from strop.planning.training import TrainedModel
from strop.types import Batch

from .test_training import Live

ROW, PROMPT = 1024, 256


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out, normaliser = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, normaliser)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def attention(module, query, key, value, mask, *, packing, **others):
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    return Attention.apply(q, k, v)[None], None


def wide_logits(hidden, weight, bias=None):
    return torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device)


class Kernels:
    """Takes the memory of algorithms/row_kernels.py."""

    @staticmethod
    def statistics(logits, labels, *, temperature, want_entropy):
        rows = len(logits)
        return torch.empty(rows, device="meta"), torch.empty(rows, 2, device="meta"), torch.empty(rows, device="meta")

    @staticmethod
    def slopes(logits, *numbers, temperature, dtype):
        return torch.empty_like(logits, dtype=dtype)


@pytest.fixture
def as_on_a_gpu(monkeypatch, kernels):
    monkeypatch.setattr(logprobs, "head_logits", wide_logits)
    monkeypatch.setattr(logprobs, "_kernels", lambda hidden: Kernels if kernels else None)
    AttentionInterface.register(PACKED, attention)
    yield
    AttentionInterface.register(PACKED, packed_attention)


def peak_of_update(config: dict, *, checkpointed: bool, rows: int, micro_batches: int) -> int:
    settings = {key: value for key, value in config.items() if key not in ("model_type", "head_dim")}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**settings)).train()
    widen_residual(model)
    if checkpointed:
        checkpoint_activations(model)
    forward._plain[model.get_output_embeddings()] = True
    weights = MasterWeights(model, compute=torch.bfloat16, master=torch.float32)
    sequences = list(torch.randint(config["vocab_size"], (rows, ROW), generator=torch.Generator().manual_seed(0)))
    batch = Batch(sequences=sequences, prompt_lengths=torch.full((rows,), PROMPT), mask=torch.ones(rows, ROW - PROMPT))
    table = rectangle(sequences)
    inputs = lay_out(forward.without_last(table), packed=True, device="meta")
    here = lay_out(forward.without_last(table), packed=True)
    states, labels, _ = (part.to("meta") for part in forward._response_states(batch, table, here.places))
    inputs = dataclasses.replace(inputs, packing=here.packing)
    with Live(*model.parameters(), *model.buffers(), *weights.masters.values()) as live:
        for _ in range(micro_batches):
            head = forward._LanguageAnswer(model, states, labels, ["log_probs", "entropy"], 1.0, None)
            found, _ = forward._run(model, inputs, head, None, {})
            found[..., 0].mean().backward()
            del found
    return live.peak


@pytest.mark.parametrize(
    "name, checkpointed, rows, micro_batches, kernels",
    [
        ("qwen2.5-0.5b", True, 16, 1, False),
        ("qwen2.5-0.5b", False, 8, 2, True),
        ("qwen2.5-1.5b", True, 8, 1, True),
        ("qwen2.5-7b", True, 8, 2, True),
    ],
)
def test_updates_of_real_sizes_are_foretold(as_on_a_gpu, name, checkpointed, rows, micro_batches, kernels):
    peak = peak_of_update(KNOWN[name], checkpointed=checkpointed, rows=rows, micro_batches=micro_batches)
    numbers = Numbers(2, 4, residual=4)
    model = TrainedModel(read_shape(KNOWN[name]), numbers, checkpointed=checkpointed, kernels=kernels)
    tokens = Tokens(rows * (ROW - 1), rows * (ROW - PROMPT))
    parts = model.update(tokens, accumulated=micro_batches > 1, entropy=True)
    assert sum(parts.values()) == pytest.approx(peak, rel=0.06)
