"""What router replay must do on every backend."""

from __future__ import annotations

import torch

from strop.backends.base import MicroBatching
from strop.models.attention import padded_attention, set_attention
from strop.models.layouts.routing import end_routing, routing_of
from tests.backends.test_conformance import optim
from tests.models.tiny import tiny_batch, tiny_model

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")


def moved(model, seed):
    """Weights after a large update: routers choose other experts."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.5 * parameter.std() * torch.randn(parameter.shape, generator=draw))
    return model


def chosen(model, ids):
    """The experts that the routers choose in a plain pass over all tokens but the last, [n, layers, k]."""
    set_attention(model, padded_attention(model))
    layers = routing_of(model).layers
    for layer in layers:
        layer.records = True
    with torch.no_grad():
        model(torch.tensor([ids[:-1]], device=model.device))
    found = torch.stack([layer.noted for layer in layers], 1).cpu().numpy()
    end_routing(model)
    return found


def by_hand(model, batch, experts):
    """Log-probs of a Hugging Face model whose routers are told the experts, one sequence at a time, and the
    gradient of the routers."""
    from torch import nn

    given = {}

    def told(router, row):
        own = type(router).forward

        def forward(*args, **kwargs):
            keep = torch.topk

            def topk(scores, k, dim=-1, sorted=True):
                if scores.dim() == 2 and scores.shape[1] == row[0].experts and k == router.top_k:
                    return scores.gather(-1, given["experts"][:, row[1]]), given["experts"][:, row[1]]
                return keep(scores, k=k, dim=dim, sorted=sorted)

            torch.topk = topk
            try:
                return own(router, *args, **kwargs)
            finally:
                torch.topk = keep

        return forward

    class Size:
        experts = (
            getattr(model.config, "num_experts", None)
            or getattr(model.config, "num_local_experts", None)
            or model.config.n_routed_experts
        )

    routers = [
        part
        for part in model.modules()
        if isinstance(getattr(part, "top_k", None), int) and hasattr(part, "weight")
    ]
    for number, router in enumerate(routers):
        assert isinstance(router, nn.Module)
        router.forward = told(router, (Size, number))
    total, rows = 0.0, []
    for row, sequence in enumerate(batch.sequences):
        given["experts"] = experts[row, : len(sequence) - 1].long()
        logits = model(sequence[None, :-1]).logits[0]
        prompt = int(batch.prompt_lengths[row])
        log_probs = logits.log_softmax(-1).gather(-1, sequence[1:, None])[prompt - 1 :, 0]
        total = total + log_probs.sum()
        rows.append(log_probs)
    total.backward()
    return rows, [router.weight.grad for router in routers]


def assert_replays(make, backend_class, family, **settings):
    """Experts of one set of weights, replayed under other weights: log-probs and gradients of the routers are
    those of a model that is told the experts."""
    batch = tiny_batch([(3, 5), (7, 2), (4, 3), (12, 6)])
    plain = optim(optimizer="SGD", lr=0.1)
    first = make(backend_class, tiny_model(family), optim=plain, router_replay="R2", **settings)
    micro = MicroBatching(rows=2)
    experts = first.forward(batch, ["log_probs", "experts"], micro).experts
    again = first.forward(batch, ["log_probs", "experts"], MicroBatching(rows=4)).experts
    assert torch.equal(experts, again)
    second = make(backend_class, moved(tiny_model(family), 1), optim=plain, router_replay="R2", **settings)
    free = second.forward(batch, ["log_probs", "experts"], micro)
    assert not torch.equal(free.experts, experts), "other weights choose other experts"
    expected, gates = by_hand(moved(tiny_model(family), 1), batch, experts)
    seen = {}

    def loss(outputs, piece):
        for row, number in enumerate(piece.row_ids.tolist()):
            seen[number] = outputs.log_probs[row].detach().cpu()
        width = torch.arange(outputs.log_probs.shape[1]) < piece.response_lengths[:, None]
        return (outputs.log_probs * width).sum(), {}

    second.forward_backward(batch.replace(experts=experts), ["log_probs"], loss, micro)
    for row, log_probs in seen.items():
        assert (log_probs[: len(expected[row])] - expected[row]).abs().max() <= 1e-5
        assert (free.log_probs[row, : len(expected[row])] - expected[row]).abs().max() > 1e-3
    found = [name for name in second.weights.masters if name.endswith("gate.weight")]
    for name, gate in zip(found, gates_here(second, found, gates), strict=True):
        gradient = second.weights.masters[name].grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert gate.abs().max() > 0
        assert (gradient - gate).abs().max() <= 1e-5 * gate.abs().max(), name


def gates_here(backend, names, gates):
    """The expected gradients of the routers that this rank has."""
    every = [name for name, _ in backend.module.named_parameters() if name.endswith("gate.weight")]
    return [gates[every.index(name)] for name in names]
