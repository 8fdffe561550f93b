"""What only a GPU can show: the variable-length kernel, offloading, parked activations."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator

import pytest
import torch

from strop.backends.base import MicroBatching
from strop.backends.single import ModuleBackend
from strop.models.checkpointing import checkpoint_activations
from strop.models.forward import response_outputs
from strop.models.residual import widen_residual
from strop.models.varlen import plain_kernel
from strop.ranks import Ranks
from strop.runtime.local import joined
from tests.backends.make import make_backend, sharded, single
from tests.backends.test_conformance import ALL, flat_gradient, flat_weights, optim, policy_loss, train
from tests.models.tiny import tiny_batch, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_packed_equals_padded(family, dtype):
    batch = tiny_batch([(100, 9), (2, 3), (60, 4), (5, 30), (90, 12), (1, 1)])
    model = tiny_model(family, max_position_embeddings=256).cuda().to(dtype)
    packed, padded = (
        response_outputs(model, batch, ["log_probs"], packed=p)["log_probs"].detach() for p in (True, False)
    )
    exact = response_outputs(tiny_model(family, max_position_embeddings=256).cuda(), batch, ["log_probs"])[
        "log_probs"
    ].detach()
    assert (packed - padded).abs().mean() < (1e-5 if dtype == torch.float32 else 0.1)
    assert (packed - exact).abs().mean() < 1.2 * (padded - exact).abs().mean() + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_log_probs_of_several_tokens_are_those_of_each_of_them(dtype):
    """The kernels of one token per position, and the distillation's function for several, with gradients."""
    batch = tiny_batch()
    model = tiny_model().cuda().to(dtype)
    labels = torch.zeros(*batch.mask.shape, 1, dtype=torch.int32)
    for row, (sequence, prompt) in enumerate(zip(batch.sequences, batch.prompt_lengths.tolist())):
        labels[row, : len(sequence) - prompt, 0] = sequence[prompt:]
    found = response_outputs(
        model, batch.replace(teacher_top_ids=labels), ["log_probs", "student_top_log_probs"], chunk=5
    )
    own, several = found["log_probs"], found["student_top_log_probs"][..., 0]
    torch.testing.assert_close(several, own, rtol=1e-5, atol=1e-5)
    gradients = []
    for table in (own, several):
        model.zero_grad()
        table.sum().backward(retain_graph=True)
        gradients.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
    difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert difference < (1e-5 if dtype == torch.float32 else 0.02)


def test_the_variable_length_kernel_is_used():
    assert plain_kernel() is not None, "this torch has no kernel that knows windows"


def test_the_gpu_agrees_with_the_cpu():
    batch = tiny_batch()
    gpu, cpu = (single(tiny_model(), optim=optim(), device=device) for device in ("cuda", "cpu"))
    for backend in (gpu, cpu):
        backend.forward_backward(batch, ["log_probs"], policy_loss, MicroBatching(rows=2))
    torch.testing.assert_close(flat_gradient(gpu).cpu(), flat_gradient(cpu), rtol=1e-3, atol=1e-4)
    train(gpu, 2)
    assert gpu.forward(batch, ["log_probs"], ALL).log_probs.device.type == "cpu"


def test_float16_is_nearer_to_float32_than_bfloat16_and_learns():
    batch = tiny_batch()
    exact, half, brain = (
        single(tiny_model(), optim=optim(lr=1e-3), device="cuda", compute=dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    )
    expected, near, far = (b.forward(batch, ["log_probs"], ALL).log_probs for b in (exact, half, brain))
    assert (near - expected).abs().mean() < (far - expected).abs().mean() / 4
    for backend in (exact, half):
        train(backend, 4)
    assert ((flat_weights(half) - flat_weights(exact)).norm() / flat_weights(exact).norm()).item() < 2e-3


def test_offloading_frees_the_device_and_changes_nothing():
    one, other = (
        single(tiny_model(), optim=optim(), device="cuda", compute=torch.bfloat16) for _ in range(2)
    )
    train(one, 2)
    train(other, 1)
    other.offload()
    tensors = [*other.module.parameters(), *other.weights.masters.values()]
    tensors += [t for state in other.optimizer.state.values() for t in state.values()]
    assert {t.device.type for t in tensors} == {"cpu"}
    other.onload()
    train(other, 1)
    assert torch.equal(flat_weights(one), flat_weights(other))


def test_parked_optimizers_and_models_rest_in_host_memory():
    plain = single(tiny_model(), optim=optim(), device="cuda", compute=torch.bfloat16)
    parked = single(
        tiny_model(),
        optim=optim(),
        device="cuda",
        compute=torch.bfloat16,
        offload_model=True,
        offload_optimizer=True,
    )
    for _ in range(2):
        train(plain, 1)
        train(parked, 1)
        tensors = [*parked.module.parameters(), *parked.weights.masters.values()]
        tensors += [t for state in parked.optimizer.state.values() for t in state.values()]
        assert {t.device.type for t in tensors} == {"cpu"}
    ours, theirs = (b.forward(tiny_batch(), ["log_probs"], ALL).log_probs for b in (parked, plain))
    assert torch.equal(ours, theirs)
    assert {p.device.type for p in parked.module.parameters()} == {"cpu"}


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_checkpointed_and_parked_activations_give_the_same_gradient(mode, dtype):
    """Twice, so that memory of the first pass is used again by the second."""
    batch = tiny_batch([(40, 40)] * 4)
    made = []
    for checkpointing, park in (("none", False), (mode, False), (mode, True)):
        model = tiny_model(max_position_embeddings=256, num_hidden_layers=4)
        widen_residual(model)
        checkpoint_activations(model, checkpointing)
        backend = single(model, optim=optim(), device="cuda", compute=dtype, offload_activations=park)
        for _ in range(2):
            backend.forward_backward(batch, ["log_probs"], policy_loss, ALL)
        made.append(flat_gradient(backend))
    assert torch.equal(made[1], made[2])
    assert torch.equal(made[0], made[1])


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """A process group of this process alone, over NCCL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with joined(1, torch.device("cuda"), timeout=60) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_fsdp_trains_like_one_device(world_of_one, dtype):
    """With gradient checkpointing and packed rows, as by default; exported, saved and loaded in between."""
    pair = []
    for make, more in ((single, {}), (sharded, {"ranks": world_of_one})):
        model = tiny_model()
        checkpoint_activations(model)
        pair.append(make(model, optim=optim(lr=1e-3), device="cuda", compute=dtype, **more))
    one, many = pair
    before = exported(one)
    for backend in pair:
        train(backend, 2)
        backend.load_state_dict(backend.state_dict())
        train(backend, 1)
    expected, found = exported(one), exported(many)
    assert found.keys() == expected.keys()
    moved = distance(expected, before)
    # Adam makes full steps of gradients that are 0 but for rounding (biases of keys), the more so in half
    # precision.
    assert moved > 0
    assert distance(found, expected) < (0.01 if dtype == torch.float32 else 0.1) * moved


def exported(backend: ModuleBackend) -> dict[str, torch.Tensor]:
    return {name: weight.float().clone() for name, weight in backend.export_weights()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum((one[name] - other[name]).square().sum().item() for name in one))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_megatron_as_one_rank_trains_as_the_single_backend(family, dtype):
    """NCCL, our kernels in megatron-core's layers, grouped products of experts."""
    pytest.importorskip("megatron.core")
    from strop.backends.megatron.backend import MegatronBackend

    one = single(tiny_model(family), optim=optim(), device="cuda", compute=dtype)
    other = make_backend(
        MegatronBackend, tiny_model(family), optim=optim(), device="cuda", compute=dtype, ranks=Ranks()
    )
    answers = [b.forward(tiny_batch(), ["log_probs"], ALL).log_probs for b in (one, other)]
    near = 1e-4 if dtype == torch.float32 else 0.2
    assert (answers[0] - answers[1]).abs().mean() < near
    norms = []
    for backend in (one, other):
        backend.forward_backward(tiny_batch(), ["log_probs"], policy_loss, MicroBatching(rows=2))
        norms.append(backend.step().grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=100 * near if dtype == torch.float32 else near)
    assert {name: w.shape for name, w in other.export_weights()} == {
        name: w.shape for name, w in one.export_weights()
    }
