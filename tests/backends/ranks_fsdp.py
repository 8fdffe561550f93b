"""The sharding backend beside the one of one device, as one of several ranks; started by test_fsdp.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from strop.algorithms.distillation import forward_kl_topk
from strop.backends.base import MicroBatching
from strop.backends.fsdp.backend import FsdpBackend
from strop.backends.offload import is_weight
from strop.backends.single import ModuleBackend
from strop.config.schema.model import FsdpConfig, WrapPolicyConfig
from strop.models.checkpointing import checkpoint_activations
from strop.models.residual import widen_residual
from tests.backends.make import make_backend, sharded, single
from tests.backends.ranks import here
from tests.backends.test_conformance import flat_gradient, optim, policy_loss, train
from tests.models.tiny import tiny_batch, tiny_model

WAYS: dict[str, dict[str, Any]] = {
    "layers": {},
    "kept": {"fsdp": FsdpConfig(reshard_after_forward=False)},
    "prefetched": {"fsdp": FsdpConfig(forward_prefetch=True)},
    "by size": {"fsdp": FsdpConfig(wrap_policy=WrapPolicyConfig(min_num_params=2000))},
    "offloaded": {"fsdp": FsdpConfig(offload_policy=True)},
    "shared rows": {"sequence_parallel": 2},
    "divided matrices": {"tensor_parallel": 2},
    "divided, by size": {
        "tensor_parallel": 2,
        "fsdp": FsdpConfig(wrap_policy=WrapPolicyConfig(min_num_params=2000)),
    },
}


def weights(backend: ModuleBackend) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in backend.export_weights()}


def assert_trained_alike(one: ModuleBackend, many: ModuleBackend) -> None:
    train(one, 3)
    train(many, 3)
    expected, found = weights(one), weights(many)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert (weight - found[name]).abs().max() <= 1e-5 * weight.abs().max(), name


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_shard_trains_alike(way):
    many = sharded(tiny_model(), ranks=here(), optim=optim(), **WAYS[way])
    assert_trained_alike(single(tiny_model(), optim=optim()), many)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma2", "granite", "mixtral"])
def test_families_train_alike(family):
    """Without AdamW, which makes full steps of gradients that are 0 but for rounding, as those of key biases are."""
    plain = optim(optimizer="SGD", lr=0.1)
    one = single(tiny_model(family), optim=plain)
    assert_trained_alike(one, sharded(tiny_model(family), ranks=here(), optim=plain))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_activations_change_nothing(mode):
    model = tiny_model()
    checkpoint_activations(model, mode)
    assert_trained_alike(single(tiny_model(), optim=optim()), sharded(model, ranks=here(), optim=optim()))


def test_a_residual_stream_in_float32_stays_so_in_bf16():
    """FSDP would cast what enters a layer; rounded there, log-probs would not be those of one device."""
    found = []
    for make in (single, partial(sharded, ranks=here())):
        model = tiny_model()
        assert widen_residual(model)
        backend = make(model, optim=optim(), compute=torch.bfloat16)
        log_probs = backend.forward(tiny_batch(), ["log_probs"], MicroBatching(rows=1)).log_probs
        backend.forward_backward(tiny_batch(), ["log_probs"], policy_loss, MicroBatching(rows=1))
        found.append((log_probs, flat_gradient(backend)))
    assert torch.equal(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).norm() / found[0][1].norm() < 0.02


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma2", "granite"])
def test_families_with_divided_matrices_train_alike(family):
    plain = optim(optimizer="SGD", lr=0.1)
    one = single(tiny_model(family), optim=plain)
    assert_trained_alike(one, sharded(tiny_model(family), ranks=here(), optim=plain, tensor_parallel=2))


def test_weights_are_told_from_activations_that_can_be_parked():
    """Else a gathered layer would be copied to the host together with its activations."""
    backend = sharded(tiny_model(intermediate_size=47), ranks=here(), optim=optim())
    seen: list[tuple[tuple[int, ...], bool]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(tensor.shape), is_weight(tensor)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = backend._outputs(tiny_batch(), ["log_probs"])
    found["log_probs"].sum().backward()
    matrices = [known for shape, known in seen if sorted(shape) == [32, 47]]
    states = [known for shape, known in seen if shape[-1] == 47 and 32 not in shape]
    assert matrices and all(matrices) and states and not any(states)


class SmallRank(FsdpBackend):
    """The last rank has room for so many tokens; the lack shows at `moment` of a pass."""

    room, moment = 1000, ""
    hooks: list[Any] = []

    def _outputs(self, piece, want):
        for hook in self.hooks:
            hook.remove()
        full = here().rank == here().world - 1 and sum(piece.lengths) > self.room
        hooks = []
        layers = self.module.model.layers
        if full and self.moment == "forward":
            hooks.append(layers[1].self_attn.register_forward_hook(lambda *_: _out_of_memory()))
        if full and self.moment == "backward" and torch.is_grad_enabled():
            hooks.append(layers[0].mlp.register_full_backward_hook(lambda *_: _out_of_memory()))
        try:
            found = super()._outputs(piece, want)
        finally:
            if self.moment == "forward":
                [hook.remove() for hook in hooks]
        self.hooks = hooks
        if full and self.moment == "between":
            _out_of_memory()
        return found


def _out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("moment", ["forward", "between", "backward"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_a_rank_without_memory_keeps_step_and_all_begin_anew(moment, checkpointed, caplog):
    batch, micro = (
        tiny_batch([(3, 5), (7, 2), (1, 9), (4, 1), (12, 6), (2, 8), (5, 5), (6, 3)]),
        MicroBatching(rows=4),
    )
    model = tiny_model()
    if checkpointed:
        checkpoint_activations(model)
    one, many = (
        single(tiny_model(), optim=optim()),
        make_backend(SmallRank, model, ranks=here(), optim=optim()),
    )
    many.room, many.moment = 18, moment
    for _ in range(2):
        with caplog.at_level("WARNING"):
            found = many.forward_backward(batch, ["log_probs"], policy_loss, micro)
        expected = one.forward_backward(batch, ["log_probs"], policy_loss, micro)
        assert found == pytest.approx(expected, rel=1e-5)
        gap = (flat_gradient(many) - flat_gradient(one)).abs().max()
        assert gap <= 1e-5 * flat_gradient(one).abs().max()
        one.step(), many.step()
    assert many.out_of_memory >= 1 and len(set(here().all_gather_object(many.out_of_memory))) == 1
    assert (
        f"Rank {here().world - 1} of {here().world} is out of memory with micro-batches of 4 rows"
        in caplog.text
    )
    assert "micro_batch_size_per_gpu" in caplog.text
    tries = many.out_of_memory
    ours, theirs = (b.forward(batch, ["log_probs"], micro).log_probs for b in (many, one))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert many.out_of_memory == tries, "a size that did not fit is not tried twice"


def test_muon_trains_alike():
    """Its products are in bf16, so that sums over shards may round differently."""
    settings = optim(optimizer="Muon", lr=1e-3)
    one = single(tiny_model(), optim=settings)
    many = sharded(tiny_model(), ranks=here(), optim=settings)
    train(one, 3)
    train(many, 3)
    found = weights(many)
    for name, weight in weights(one).items():
        assert (weight - found[name]).abs().max() <= 2e-4, name


@pytest.mark.parametrize("shares", [1, 2], ids=["own rows", "shared rows"])
def test_the_likeliest_tokens_of_a_teacher_reach_all_ranks(shares):
    """Ids and log-probs of a frozen model, and a loss on a student's log-probs of the same tokens."""
    want = ["log_probs", "top_ids", "top_log_probs"]
    micro = MicroBatching(rows=2)
    batch = tiny_batch()
    one = single(tiny_model(), optim=optim(), topk=3)
    many = sharded(tiny_model(), ranks=here(), optim=optim(), topk=3, sequence_parallel=shares)
    expected, found = (backend.forward(batch, want, micro) for backend in (one, many))
    assert torch.equal(found.top_ids, expected.top_ids)
    torch.testing.assert_close(found.top_log_probs, expected.top_log_probs, rtol=1e-4, atol=1e-5)
    taught = batch.replace(teacher_top_ids=expected.top_ids, teacher_top_log_probs=expected.top_log_probs)

    def loss(outputs, piece):
        weights = torch.arange(3) * piece.mask[..., None]
        return (outputs.student_top_log_probs * weights).sum(), {}

    for backend in (one, many):
        backend.forward_backward(taught, ["log_probs", "student_top_log_probs"], loss, micro)
    gap = (flat_gradient(many) - flat_gradient(one)).abs().max()
    assert gap <= 1e-5 * flat_gradient(one).abs().max()


@pytest.mark.parametrize("way", [{}, {"sequence_parallel": 2}, {"tensor_parallel": 2}], ids=str)
def test_a_token_that_only_the_teacher_has_is_left_out_on_all_ranks(way):
    ids = torch.randint(0, 61, (*tiny_batch().mask.shape, 3), generator=torch.Generator().manual_seed(0))
    ids[:, :, 1] = 61
    log_probs = torch.tensor([0.5, 0.3, 0.2]).log().expand(ids.shape)
    taught = tiny_batch().replace(teacher_top_ids=ids.int(), teacher_top_log_probs=log_probs)

    def loss(outputs, piece):
        divergence = forward_kl_topk(outputs.student_top_log_probs, piece.teacher_top_log_probs)
        return (divergence * piece.mask).sum(), {}

    one = single(tiny_model(), optim=optim())
    many = sharded(tiny_model(), ranks=here(), optim=optim(), **way)
    for backend in (one, many):
        backend.forward_backward(taught, ["log_probs", "student_top_log_probs"], loss, MicroBatching(rows=2))
    gap = (flat_gradient(many) - flat_gradient(one)).abs().max()
    assert flat_gradient(one).abs().max() > 0 and gap <= 1e-5 * flat_gradient(one).abs().max()
