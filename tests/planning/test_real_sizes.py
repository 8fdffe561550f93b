"""The peak of an update of real sizes, against the storage that the same code takes on the meta device, where nothing is computed.

Some things are as on a GPU and not as on the meta device: attention is one operation that keeps its inputs, output and a number
per head, the head's products are float32 and add to its gradient by themselves, and with kernels norms, rotations and gates keep
what they are given.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from strop.algorithms import logprobs
from strop.backends.optimizer import MasterWeights
from strop.models import forward, fused_modules
from strop.models.attention import PACKED, packed_attention
from strop.models.checkpointing import checkpoint_activations
from strop.models.packing import lay_out, rectangle, response_states, without_last
from strop.models.patches import choose_patches, patch_for_device
from strop.models.residual import widen_residual
from strop.planning.activations import Numbers, Tokens
from strop.planning.shape import KNOWN, read_shape
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
        return (
            torch.empty(rows, device="meta"),
            torch.empty(rows, 2, device="meta"),
            torch.empty(rows, device="meta"),
        )

    @staticmethod
    def slopes(logits, *numbers, temperature, dtype):
        return torch.empty_like(logits, dtype=dtype)


class Keeping(torch.autograd.Function):
    """Takes the memory of a kernel of models/kernels.py: keeps some of its inputs, and gives outputs like others of them."""

    @staticmethod
    def forward(ctx, kept, like, dtype, *inputs):
        ctx.save_for_backward(*(inputs[i] for i in kept))
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        outputs = tuple(
            torch.empty(inputs[i].shape, dtype=dtype or inputs[i].dtype, device="meta") for i in like
        )
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx, *gradients):
        return (
            None,
            None,
            None,
            *(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.shapes),
        )


def summed(total, a, b, dtype):
    return torch.empty(len(a), b.shape[1], dtype=dtype, device="meta") if total is None else total


PARTS = SimpleNamespace(
    rms_norm=lambda x, weight, eps, out=None: Keeping.apply((0, 1), (0,), out, x, weight),
    gated_silu=lambda gate, up: Keeping.apply((0, 1), (0,), None, gate, up),
    rotary=lambda q, k, cos, sin: Keeping.apply((), (0, 1), None, q, k),
)


@pytest.fixture
def as_on_a_gpu(monkeypatch, kernels):
    monkeypatch.setitem(forward._LOGITS, "meta", forward._LOGITS["cuda"])
    monkeypatch.setattr(logprobs, "add_product", summed)
    monkeypatch.setattr(fused_modules, "DEVICES", ("meta",) if kernels else ())
    monkeypatch.setattr(fused_modules, "_checked", {})
    monkeypatch.setattr(fused_modules, "_kernels", lambda: PARTS)
    monkeypatch.setattr(fused_modules, "same", lambda plain, quick: True)
    monkeypatch.setattr(
        modeling_qwen2, "apply_rotary_pos_emb", modeling_qwen2.apply_rotary_pos_emb
    )  # put back afterwards
    monkeypatch.setattr(logprobs, "head_logits", wide_logits)
    monkeypatch.setattr(logprobs, "compiled_for", lambda *_: Kernels if kernels else None)
    AttentionInterface.register(PACKED, attention)
    yield
    AttentionInterface.register(PACKED, packed_attention)


def peak_of_update(config: dict, *, checkpointing: str, rows: int, micro_batches: int) -> int:
    settings = {key: value for key, value in config.items() if key not in ("model_type", "head_dim")}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**settings)).train()
    widen_residual(model)
    checkpoint_activations(model, checkpointing)
    forward._plain[model.get_output_embeddings()] = True
    weights = MasterWeights(model, compute=torch.bfloat16, master=torch.float32)
    choose_patches(
        model, ["rms_norm", "gated_mlp", "rotary"]
    )  # sums inside products take the place of others
    patch_for_device(model)
    sequences = list(
        torch.randint(config["vocab_size"], (rows, ROW), generator=torch.Generator().manual_seed(0))
    )
    batch = Batch(
        sequences=sequences, prompt_lengths=torch.full((rows,), PROMPT), mask=torch.ones(rows, ROW - PROMPT)
    )
    table = rectangle(sequences)
    inputs = lay_out(without_last(table), packed=True, device="meta")
    here = lay_out(without_last(table), packed=True)
    states, labels, _ = (part.to("meta") for part in response_states(batch, table, here.places))
    inputs = dataclasses.replace(inputs, packing=here.packing)
    with Live(*model.parameters(), *model.buffers(), *weights.masters.values()) as live:
        for _ in range(micro_batches):
            head = forward._LanguageHead(model, states, labels, ["log_probs", "entropy"], 1.0, None)
            found, _ = forward._run(model, inputs, head, None, {})
            found[..., 0].mean().backward()
            del found
    return live.peak


@pytest.mark.parametrize(
    "name, checkpointing, rows, micro_batches, kernels",
    [
        ("qwen2.5-0.5b", "full", 16, 1, False),
        ("qwen2.5-0.5b", "none", 8, 2, True),
        ("qwen2.5-1.5b", "full", 8, 1, True),
        ("qwen2.5-7b", "full", 8, 2, True),
        ("qwen2.5-0.5b", "selective", 8, 1, False),
        ("qwen2.5-1.5b", "selective", 16, 1, True),
        ("qwen2.5-7b", "selective", 8, 2, True),
    ],
)
def test_updates_of_real_sizes_are_foretold(as_on_a_gpu, name, checkpointing, rows, micro_batches, kernels):
    peak = peak_of_update(KNOWN[name], checkpointing=checkpointing, rows=rows, micro_batches=micro_batches)
    numbers = Numbers(2, 4, residual=4)
    model = TrainedModel(read_shape(KNOWN[name]), numbers, checkpointing=checkpointing, kernels=kernels)
    tokens = Tokens(rows * (ROW - 1), rows * (ROW - PROMPT))
    moment = model.update(tokens, accumulated=micro_batches > 1, entropy=True)
    assert sum(moment.values()) == pytest.approx(peak, rel=0.06)
