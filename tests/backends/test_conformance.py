"""What every training backend must do: those of strop.backends.BACKENDS, each in the kind of process it needs.

Where this file runs as one of several ranks (tests/backends/test_fsdp.py starts it so), the backends are those that need ranks,
and every rank goes through every test.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.backends import BACKENDS, backend_class
from strop.backends.base import Backend, MicroBatching, Outputs
from strop.backends.fsdp.sharded import whole
from strop.backends.micro_batches import NonFiniteLoss, suspects
from strop.backends.optimizer import make_optimizer
from strop.backends.single import SingleBackend
from strop.backends.updates import LossScale, StepSettings, overridden
from strop.config.schema.model import OptimConfig
from strop.models.checkpointing import Checkpointing, checkpoint_activations
from strop.models.heads import new_scalar_model
from strop.models.lora import add_adapters
from strop.runtime.local import is_rank
from strop.types import Batch
from tests.backends.make import make_backend, single
from tests.backends.megatron_cpu import without_cuda
from tests.backends.ranks import here
from tests.models.tiny import tiny_batch, tiny_model

HERE = [name for name in BACKENDS if backend_class(name).needs_ranks == is_rank()]
"""Backends for this kind of process: several ranks, or one process."""
ALL = MicroBatching(rows=100)


@pytest.fixture(params=HERE)
def make(request) -> Callable[..., Any]:
    kind = backend_class(request.param)
    if request.param == "megatron":
        without_cuda()
    if kind.needs_ranks:
        return functools.partial(make_backend, kind, ranks=here())
    return functools.partial(make_backend, kind)


def test_every_backend_follows_the_protocol():
    wanted = {name for name in vars(Backend) if not name.startswith("_")} | set(Backend.__annotations__)
    for name in BACKENDS:
        kind = backend_class(name)
        built_here = {"module", "temperature", "ranks"}
        assert [method for method in wanted - built_here if not hasattr(kind, method)] == [], name
        assert isinstance(kind.needs_ranks, bool), name


def optim(**changes: Any) -> OptimConfig:
    return OptimConfig(**{"lr": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.0, **changes})


def policy_loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Ratio-free policy gradient with a global denominator."""
    per_token = -(outputs.log_probs * batch.advantages) * batch.mask
    return per_token.sum() / 20.0, {"loss": per_token.detach().sum() / 20.0, "tokens": batch.mask.sum()}


def flat_gradient(backend: Any) -> Tensor:
    gradients = [master.grad for master in backend.weights.masters.values() if master.grad is not None]
    return torch.cat([whole(gradient).flatten() for gradient in gradients])


def flat_weights(backend: Any) -> Tensor:
    return torch.cat([w.float().flatten().clone() for _, w in backend.export_weights()])


def train(backend: Any, steps: int, batch: Batch | None = None) -> None:
    for _ in range(steps):
        backend.forward_backward(batch or tiny_batch(), ["log_probs"], policy_loss, MicroBatching(rows=2))
        backend.step()
        backend.advance_schedule()


@pytest.mark.parametrize(
    "micro",
    [
        MicroBatching(rows=1),
        MicroBatching(rows=2),
        MicroBatching(max_tokens=20),
        MicroBatching(max_tokens=40),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_micro_batching_and_packing_change_nothing(make, micro, packed):
    batch = tiny_batch()
    whole, pieces = make(tiny_model(), optim=optim()), make(tiny_model(), optim=optim(), packed=packed)
    expected = whole.forward_backward(batch, ["log_probs", "entropy"], policy_loss, ALL)
    found = pieces.forward_backward(batch, ["log_probs", "entropy"], policy_loss, micro)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found["tokens"] == batch.mask.sum().item()
    scale = flat_gradient(whole).abs().max()
    assert ((flat_gradient(pieces) - flat_gradient(whole)).abs().max() / scale).item() < 1e-6
    ours, theirs = (
        b.forward(batch, ["log_probs", "entropy", "sum_pi_squared"], m)
        for b, m in ((pieces, micro), (whole, ALL))
    )
    for name in ("log_probs", "entropy", "sum_pi_squared"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=2e-6)
        assert getattr(ours, name).shape == batch.mask.shape and not getattr(ours, name).requires_grad


def test_forward_and_training_pass_agree_to_the_bit(make):
    """An on-policy step's first ratio is exactly one."""
    batch, backend = tiny_batch(), make(tiny_model(), optim=optim())
    old = backend.forward(batch, ["log_probs"], MicroBatching(rows=2)).log_probs
    seen: list[float] = []

    def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        width = outputs.log_probs.shape[1]
        seen.append((outputs.log_probs - old[piece.row_ids][:, :width]).abs().max().item())
        return outputs.log_probs.sum(), {}

    backend.forward_backward(batch, ["log_probs"], loss, MicroBatching(rows=2))
    assert seen and not any(seen)


def test_temperature_divides_the_logits(make):
    batch = tiny_batch()
    hot, cold = (
        make(tiny_model(), temperature=t).forward(batch, ["entropy"], ALL).entropy for t in (2.0, 0.5)
    )
    inside = hot > 0
    assert (hot[inside] > cold[inside]).all()


def test_training_raises_the_log_probs_of_good_tokens(make):
    batch, backend = tiny_batch(), make(tiny_model(), optim=optim())
    before = backend.forward(batch, ["log_probs"], ALL).log_probs
    train(backend, 10, batch)
    after = backend.forward(batch, ["log_probs"], ALL).log_probs
    assert ((after - before) * batch.advantages * batch.mask).sum() > 1.0


def test_gradients_are_clipped_by_their_global_norm_and_cleared(make):
    batch = tiny_batch()
    backend = make(tiny_model(), optim=optim(optimizer="SGD", lr=1.0), grad_clip=0.01)
    before = flat_weights(backend).clone()
    backend.forward_backward(batch, ["log_probs"], policy_loss, ALL)
    gradient = flat_gradient(backend)
    info = backend.step()
    assert (
        info.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-5)
        and not info.skipped
        and info.lr == 1.0
    )
    assert (before - flat_weights(backend)).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert not backend.weights.gradients
    for limit, length in ((0.02, 0.02), (0, gradient.norm().item())):  # of this update alone; 0: not clipped
        backend = make(tiny_model(), optim=optim(optimizer="SGD", lr=1.0), grad_clip=0.01)
        backend.forward_backward(batch, ["log_probs"], policy_loss, ALL)
        backend.step(StepSettings(grad_clip=limit))
        assert (before - flat_weights(backend)).norm().item() == pytest.approx(length, rel=1e-3)


def test_dropout_is_active_in_updates_only(make):
    backend = make(tiny_model(), optim=optim())
    modes = []
    backend.module.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    for _ in range(2):
        backend.forward(tiny_batch(), ["log_probs"], ALL)
        backend.forward_backward(tiny_batch(), ["log_probs"], policy_loss, ALL)
    assert modes == [False, True] * 2


def test_a_gradient_that_is_not_finite_skips_the_step(make):
    backend = make(tiny_model(), optim=optim())
    before = flat_weights(backend).clone()
    backend.forward_backward(tiny_batch(), ["log_probs"], policy_loss, ALL)
    backend.weights.gradients[0][0] = float("inf")
    info = backend.step()
    assert info.skipped and info.grad_norm == float("inf")
    assert torch.equal(flat_weights(backend), before) and not backend.weights.gradients


def test_a_loss_that_is_not_finite_names_its_rows_before_any_step(make):
    batch = tiny_batch()
    batch.advantages[3, 0] = float("nan")
    batch.row_ids = torch.tensor([10, 11, 12, 13, 14])
    backend = make(tiny_model(), optim=optim())
    with pytest.raises(
        NonFiniteLoss, match=r"rows 13\. Not finite in them: advantages\. This update was not made"
    ) as caught:
        backend.forward_backward(batch, ["log_probs"], policy_loss, MicroBatching(rows=2))
    assert caught.value.rows == [13] and not backend.weights.gradients


def test_weights_that_are_not_finite_are_traced_to_the_models_outputs(make):
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    batch = tiny_batch()
    batch.sequences = [s.masked_fill(s == 7, 8) for s in batch.sequences]
    batch.sequences[1][0] = 7
    with pytest.raises(NonFiniteLoss, match="log_probs") as caught:
        make(model, optim=optim()).forward_backward(batch, ["log_probs"], policy_loss, MicroBatching(rows=2))
    assert caught.value.rows == [1]


def test_one_token_that_a_model_does_not_have_makes_no_row_suspect():
    """Its log-prob is -inf, and losses leave it out."""
    batch = tiny_batch()
    top = torch.zeros(*batch.mask.shape, 2)
    top[1, 0, 0] = -torch.inf
    top[2, 0] = torch.nan
    assert suspects(batch, {"student_top_log_probs": top}) == ([2], ["student_top_log_probs"])


def test_norms_and_biases_are_not_decayed(make):
    model = tiny_model("qwen2")  # has biases
    backend = make(model, optim=optim(weight_decay=0.1, lr=0.1))
    before = {name: weight.clone() for name, weight in backend.export_weights()}
    zero = lambda outputs, piece: (outputs.log_probs.sum() * 0.0, {})  # noqa: E731
    backend.forward_backward(tiny_batch(), ["log_probs"], zero, ALL)
    backend.step()
    for name, weight in backend.export_weights():
        factor = 0.99 if weight.dim() > 1 else 1.0
        torch.testing.assert_close(weight, before[name] * factor, rtol=1e-6, atol=1e-7, msg=name)


def test_hyperparameters_of_one_update_decay_no_vectors_and_are_gone_afterwards():
    named = {"matrix": torch.zeros(2, 2), "bias": torch.zeros(2)}
    optimizer = make_optimizer(named, optim(weight_decay=0.1))
    before = [dict(group) for group in optimizer.param_groups]
    with overridden(optimizer, StepSettings(lr=2.0, betas=(0.0, 0.5), weight_decay=0.3)):
        found = [(g["weight_decay"], g["lr"], g["betas"]) for g in optimizer.param_groups]
        assert found == [(0.3, 2.0, (0.0, 0.5)), (0.0, 2.0, (0.0, 0.5))]
    assert [dict(group) for group in optimizer.param_groups] == before
    plain = make_optimizer(named, optim(weight_decay=0.0))
    with (
        pytest.raises(ValueError, match="matrices and vectors"),
        overridden(plain, StepSettings(weight_decay=1)),
    ):
        pass
    for betas in ((-0.1, 0.9), (0.9, 1.0)):
        with pytest.raises(ValueError, match="must lie in"):
            StepSettings(betas=betas)
    with pytest.raises(ValueError, match=r"grad_clip=-1 must not be negative"):
        StepSettings(grad_clip=-1)


def test_the_loss_scale_halves_to_one_and_doubles_after_a_hundred_updates():
    scale = LossScale(3.0)
    for _ in range(99):
        scale.stepped()
    assert scale.shrink() and scale.value == 1.5
    for _ in range(99):
        scale.stepped()
    assert scale.value == 1.5, "counted from the change"
    scale.stepped()
    assert scale.value == 3.0 and scale.state()["quiet"] == 0
    assert scale.shrink() and scale.shrink() and scale.value == 1.0 and not scale.shrink()


def test_small_updates_survive_in_fp32_masters(make):
    """A step far below bf16's resolution moves nothing at first, and is not lost: many of them do."""
    backend = make(tiny_model(), optim=optim(lr=2e-5), compute=torch.bfloat16)
    assert {weight.dtype for _, weight in backend.export_weights()} == {torch.bfloat16}
    assert {m.dtype for m in backend.weights.masters.values()} == {torch.float32}
    assert all(buffer.dtype == torch.float32 for buffer in backend.module.buffers()), (
        "rotary frequencies were rounded"
    )
    name = "model.layers.0.mlp.up_proj.weight"

    def rounded() -> Tensor:
        return {name: weight.clone() for name, weight in backend.export_weights()}[name]

    start, master = rounded(), whole(backend.weights.masters[name]).detach().clone()
    train(backend, 1)
    after_one = (rounded() != start).float().mean().item()
    train(backend, 40)
    assert after_one < 0.1 < (rounded() != start).float().mean().item()
    assert (whole(backend.weights.masters[name]) - master).abs().mean() > 2e-4
    assert torch.equal(rounded(), whole(backend.weights.masters[name]).to(torch.bfloat16))
    states = backend.state_dict()["optimizer"].values()
    assert {t.dtype for s in states for t in s.values()} == {torch.float32}


def test_bf16_gradients_are_summed_in_fp32(make):
    """Many micro-batches in bf16 are as good as one; summed in bf16 the small ones would be swallowed."""
    batch = tiny_batch([(3, 4)] * 24)
    one, many = (make(tiny_model(), optim=optim(), compute=torch.bfloat16) for _ in range(2))
    one.forward_backward(batch, ["log_probs"], policy_loss, ALL)
    many.forward_backward(batch, ["log_probs"], policy_loss, MicroBatching(rows=1))
    assert {g.dtype for g in many.weights.gradients} == {torch.float32}
    assert (flat_gradient(one) - flat_gradient(many)).norm() / flat_gradient(one).norm() < 0.02


def test_bf16_log_probs_are_near_fp32(make):
    batch = tiny_batch()
    narrow, wide = (
        make(tiny_model(), compute=d).forward(batch, ["log_probs"], ALL)
        for d in (torch.bfloat16, torch.float32)
    )
    assert (narrow.log_probs - wide.log_probs).abs().mean() < 0.05 and narrow.log_probs.dtype == torch.float32


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Muon"])
def test_a_run_resumes_with_masters_of_another_precision(make, name):
    settings = optim(optimizer=name)
    wide = make(tiny_model(), optim=settings)
    narrow = make(tiny_model(), optim=settings, compute=torch.bfloat16, master=torch.bfloat16)
    train(wide, 2)
    narrow.load_state_dict(copy.deepcopy(wide.state_dict()))
    for (key, weight), own in zip(wide.module.named_parameters(), narrow.module.parameters()):
        torch.testing.assert_close(own.float(), weight, rtol=2**-8, atol=0, msg=key)
    before = {key: weight.detach().clone() for key, weight in narrow.module.named_parameters()}
    train(narrow, 1)
    wide.load_state_dict(copy.deepcopy(narrow.state_dict()))
    train(wide, 1)
    for key, weight in wide.module.named_parameters():
        assert weight.isfinite().all() and not torch.equal(weight, before[key].float()), key


WIDE_STATE = """
import torch

class WideAverage(torch.optim.Optimizer):
    def __init__(self, params, lr, **_):
        super().__init__(params, {"lr": lr, "amsgrad": True})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight, dtype=torch.float32))
                average.lerp_(weight.grad.float(), 0.1)
                weight.sub_(group["lr"] * average)
"""


def test_another_optimizer_keeps_the_precision_of_its_state(tmp_path):
    (tmp_path / "wide.py").write_text(WIDE_STATE)
    settings = optim(optimizer="WideAverage", optimizer_impl=str(tmp_path / "wide.py"))
    narrow = {"optim": settings, "compute": torch.bfloat16, "master": torch.bfloat16}
    first, second = single(tiny_model(), **narrow), single(tiny_model(), **narrow)
    train(first, 2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    states = (backend.state_dict()["optimizer"] for backend in (first, second))
    for expected, found in zip(*(state.values() for state in states), strict=True):
        assert found["average"].dtype == torch.float32 and torch.equal(found["average"], expected["average"])


def test_a_state_without_what_amsgrad_needs_is_refused(make):
    plain = make(tiny_model(), optim=optim())
    train(plain, 1)
    other = make(tiny_model(), optim=optim(override_optimizer_config={"amsgrad": True}))
    with pytest.raises(ValueError, match="amsgrad=false"):
        other.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_resuming_is_exact(make, compute):
    settings = optim(lr_scheduler_type="cosine", total_training_steps=8, lr_warmup_steps=2, weight_decay=0.01)
    unbroken, first, second = (make(tiny_model(), optim=settings, compute=compute) for _ in range(3))
    train(unbroken, 5)
    train(first, 3)
    state = copy.deepcopy(first.state_dict())
    assert all(
        isinstance(v, Tensor | int | float)
        for part in (state["model"], state["schedule"])
        for v in part.values()
    )
    train(second, 1)  # whatever it was before, loading overwrites it
    second.load_state_dict(state)
    assert second.learning_rate == first.learning_rate
    train(second, 2)
    assert torch.equal(flat_weights(second), flat_weights(unbroken))
    for name, master in unbroken.state_dict()["model"].items():
        assert torch.equal(whole(second.state_dict()["model"][name]), whole(master)), name
    assert second.learning_rate == unbroken.learning_rate


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_numbers_of_an_optimizer_resume_in_their_own_precision(name):
    """Beside moments in the precision of the weights, they keep products and rates in float32."""
    narrow = {"optim": optim(optimizer=name), "compute": torch.bfloat16, "master": torch.bfloat16}
    first, second = single(tiny_model(), **narrow), single(tiny_model(), **narrow)
    train(first, 3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    states = (backend.state_dict()["optimizer"] for backend in (first, second))
    for expected, found in zip(*(state.values() for state in states), strict=True):
        for key, value in expected.items():
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


def test_the_state_of_a_partly_frozen_model_has_all_of_its_weights(make):
    frozen = tiny_model()
    frozen.get_input_embeddings().requires_grad_(False)
    backend = make(frozen, optim=optim())
    expected = whole(backend.state_dict()["model"]["model.embed_tokens.weight"]).clone()
    train(backend, 1)
    state = backend.state_dict()["model"]
    assert state.keys() == {name for name, _ in tiny_model().named_parameters()}
    assert torch.equal(whole(state["model.embed_tokens.weight"]), expected)


def test_a_state_of_another_model_is_refused(make):
    backend = make(tiny_model(), optim=optim())
    with pytest.raises(ValueError, match="saved weights are not those of this model"):
        backend.load_state_dict(make(tiny_model(num_hidden_layers=1), optim=optim()).state_dict())
    with pytest.raises(ValueError, match=r"was saved with shape \(71, 32\) and is \(61, 32\)"):
        backend.load_state_dict(make(tiny_model(vocab_size=71), optim=optim()).state_dict())


def test_the_schedule_moves_once_per_trainer_step(make):
    backend = make(
        tiny_model(),
        optim=optim(lr=1.0, lr_scheduler_type="linear", total_training_steps=4, lr_warmup_steps=2),
    )
    rates = []
    for _ in range(4):
        rates.append(backend.learning_rate)
        backend.advance_schedule()
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5])
    with pytest.raises(ValueError, match="total_training_steps, which is not known"):
        make(tiny_model(), optim=optim(lr_warmup_steps_ratio=0.1))


def checkpointed_model(kind: str, mode: Checkpointing) -> Any:
    model = tiny_model("mixtral" if kind == "experts" else "qwen3")
    torch.manual_seed(1)
    if kind == "critic":
        model = new_scalar_model(model.config)
    if kind == "lora":
        model = add_adapters(model, rank=4, alpha=8)
    checkpoint_activations(model, mode)
    return model


def value_loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    error = ((outputs.values - batch.advantages) * batch.mask).square().sum() / 20
    return error, {"error": error}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["policy", "lora", "critic", "experts"])
def test_gradient_checkpointing_changes_no_bit(make, kind, packed):
    want = ["values"] if kind == "critic" else ["log_probs"]
    gradients = {}
    for mode in ("none", "full", "selective"):
        backend = make(checkpointed_model(kind, mode), optim=optim(), packed=packed)
        backend.forward_backward(tiny_batch(), want, value_loss if want == ["values"] else policy_loss, ALL)
        gradients[mode] = flat_gradient(backend)
    assert gradients["none"].abs().sum() > 0
    assert torch.equal(gradients["full"], gradients["none"])
    assert torch.equal(gradients["selective"], gradients["none"])


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_lora_trains_adapters_only_exports_them_merged_and_is_its_own_reference(make, family):
    """Experts and routers have adapters too."""
    batch = tiny_batch()
    original = {name: weight.clone() for name, weight in make(tiny_model(family)).export_weights()}
    before = make(tiny_model(family)).forward(batch, ["log_probs"], ALL).log_probs
    backend = make(add_adapters(tiny_model(family), rank=2, alpha=8), optim=optim())
    assert all("lora_" in name for name in backend.weights.masters)
    train(backend, 4)
    trained = backend.forward(batch, ["log_probs"], ALL).log_probs
    assert (trained - before).abs().max() > 0.01
    with backend.reference():
        torch.testing.assert_close(
            backend.forward(batch, ["log_probs"], ALL).log_probs, before, rtol=1e-6, atol=1e-6
        )
    merged = dict(backend.export_weights())
    assert merged.keys() == original.keys()
    plain = tiny_model(family)
    plain.load_state_dict(merged)
    torch.testing.assert_close(
        make(plain).forward(batch, ["log_probs"], ALL).log_probs, trained, rtol=1e-5, atol=1e-5
    )
    assert all("lora_" in name for name in backend.state_dict()["model"])


def test_a_critic_learns_its_targets_and_keeps_its_head_in_full_precision(make):
    batch, language = tiny_batch(), tiny_model()
    backend = make(new_scalar_model(language.config), optim=optim(), compute=torch.bfloat16)
    assert {name: weight.dtype for name, weight in backend.export_weights()}["score.weight"] == torch.float32

    errors = []
    for _ in range(25):
        errors.append(backend.forward_backward(batch, ["values"], value_loss, MicroBatching(rows=3))["error"])
        backend.step()
    assert errors[-1] < 0.3 * errors[0]


def test_a_frozen_model_answers_and_remembers_nothing(make):
    backend = make(tiny_model())
    assert backend.forward(tiny_batch(), ["log_probs"], ALL).log_probs.abs().sum() > 0
    assert set(backend.state_dict()) == {"model"} and not any(
        p.requires_grad for p in backend.module.parameters()
    )
    with pytest.raises(ValueError, match="has no adapters"), backend.reference():
        pass


def test_offloaded_parts_are_onloaded_for_the_passes_that_need_them():
    """On a CPU nothing moves; what is asked to move, and when, is the same."""

    class Watched(SingleBackend):
        moves: list[tuple[str, bool, bool]]

        def _move(self, device, model, optimizer):
            self.__dict__.setdefault("moves", []).append((self._where.pop(0), model, optimizer))

        _where: list[str] = []

        def offload(self, *, model=True, optimizer=True):
            self._where.append("host")
            super().offload(model=model, optimizer=optimizer)

        def onload(self, *, model=True, optimizer=True):
            self._where.append("device")
            super().onload(model=model, optimizer=optimizer)

    plain = single(tiny_model(), optim=optim())
    offloaded = make_backend(Watched, tiny_model(), optim=optim(), offload_model=True, offload_optimizer=True)
    train(plain, 2)
    assert plain.offloading is None and single(tiny_model(), offload_optimizer=True).offloading is None
    assert offloaded.moves == [("host", True, True)]
    train(offloaded, 2)
    assert offloaded.moves[1:] == [("device", True, True), ("host", True, True)] * 2
    offloaded.forward(tiny_batch(), ["log_probs"], ALL)
    assert offloaded.moves[5:] == [("device", True, False), ("host", True, False)]
    assert torch.equal(flat_weights(offloaded), flat_weights(plain))


def test_offloading_and_coming_back_changes_nothing(make):
    one, other = (make(tiny_model(), optim=optim(), compute=torch.bfloat16) for _ in range(2))
    train(one, 2)
    train(other, 1)
    other.offload()
    other.onload()
    train(other, 1)
    assert torch.equal(flat_weights(one), flat_weights(other))


def half_gradient(make, scale: float) -> tuple[Any, Tensor]:
    """Of a loss whose gradients are mostly too small for float16, with the loss multiplied by `scale`."""

    def small(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        value, sums = policy_loss(outputs, batch)
        return value * 1e-6, sums

    half = make(tiny_model(), optim=optim(), compute=torch.float16)
    half.scaling.value = scale
    half.forward_backward(tiny_batch(), ["log_probs"], small, MicroBatching(rows=2))
    return half, flat_gradient(half) / half.scaling.value * 1e6


def test_small_gradients_survive_in_float16(make):
    exact = make(tiny_model(), optim=optim())
    exact.forward_backward(tiny_batch(), ["log_probs"], policy_loss, MicroBatching(rows=2))
    expected = flat_gradient(exact)

    def error(scale: float) -> float:
        return ((half_gradient(make, scale)[1] - expected).norm() / expected.norm()).item()

    assert error(1.0) > 0.05 and error(2.0**16) < 0.005


def test_gradients_that_overflow_in_float16_are_made_again_with_a_smaller_scale(make):
    usual, expected = half_gradient(make, 2.0**16)
    other, found = half_gradient(make, 2.0**60)
    assert 2.0**16 < other.scaling.value < 2.0**60
    assert ((found - expected).norm() / expected.norm()).item() < 5e-3
    infos = [backend.step() for backend in (usual, other)]
    assert not infos[1].skipped and infos[1].loss_scale > infos[0].loss_scale == 2.0**16
    assert infos[1].grad_norm == pytest.approx(infos[0].grad_norm, rel=1e-3)
    # Behind gradients that are to be kept, a pass is not made again: the update is skipped.
    for scale in (2.0**16, 2.0**60):
        usual.scaling.value = scale
        usual.forward_backward(tiny_batch(), ["log_probs"], policy_loss, ALL)
    assert usual.scaling.value == 2.0**60 and usual.step().skipped


def test_float16_learns_as_float32_does_and_its_scale_is_saved(make):
    exact, half, later = (
        make(tiny_model(), optim=optim(lr=1e-3), compute=c) for c in (torch.float32, *[torch.float16] * 2)
    )
    half.scaling.load({"value": 2.0**8, "quiet": 98})
    for backend in (exact, half):
        train(backend, 4)
    assert half.scaling.value == 2.0**9 and half.scaling.quiet == 2
    assert ((flat_weights(half) - flat_weights(exact)).norm() / flat_weights(exact).norm()).item() < 2e-3
    later.load_state_dict(copy.deepcopy(half.state_dict()))
    assert later.scaling.state() == {"value": 2.0**9, "quiet": 2}
    for backend in (half, later):
        train(backend, 1)
    assert torch.equal(flat_weights(half), flat_weights(later))
    # A run may go on in another precision.
    exact.load_state_dict(copy.deepcopy(half.state_dict()))
    half.load_state_dict(copy.deepcopy(exact.state_dict()))
    assert exact.scaling is None and half.scaling.value == 2.0**9


def test_other_optimizers_and_bad_settings(make):
    train(make(tiny_model(), optim=optim(optimizer="SGD", override_optimizer_config={"momentum": 0.9})), 1)
    with pytest.raises(ValueError, match=r"no 'AdamWW'.*Did you mean 'AdamW'"):
        make(tiny_model(), optim=optim(optimizer="AdamWW"))
    train(make(tiny_model(), optim=optim(override_optimizer_config={"foreach": True})), 1)
    with pytest.raises(ValueError, match="override_optimizer_config"):
        make(tiny_model(), optim=optim(override_optimizer_config={"momentun": 0.9}))
    with pytest.raises(ValueError, match=r"vanish in fp16 masters.*model_dtype=fp32"):
        make(tiny_model(), optim=optim(), compute=torch.float16, master=torch.float16)
    backend = make(tiny_model())
    with pytest.raises(ValueError, match="over max_tokens=10"):
        backend.forward(tiny_batch(), ["log_probs"], MicroBatching(max_tokens=10))
    with pytest.raises(ValueError, match="at least one row"):
        backend.forward(tiny_batch(), ["log_probs"], MicroBatching(rows=0))


def preference_loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Even rows should score higher than the odd rows behind them."""
    per_pair = -torch.nn.functional.logsigmoid(outputs.scores[0::2] - outputs.scores[1::2])
    return per_pair.sum() / 2.0, {
        "loss": per_pair.detach().sum() / 2.0,
        "first rows": batch.row_ids[0::2].sum(),
    }


@pytest.mark.parametrize(
    "micro",
    [
        MicroBatching(rows=2, rows_per_item=2),
        MicroBatching(rows=5, rows_per_item=2),
        MicroBatching(max_tokens=30, rows_per_item=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_pairs_stay_together_and_scores_are_those_of_whole_sequences(make, micro, packed):
    def judge() -> Any:
        torch.manual_seed(0)
        return new_scalar_model(copy.deepcopy(tiny_model().config))

    batch = tiny_batch().select([0, 1, 2, 3]).replace(row_ids=torch.arange(4))
    whole, pieces = make(judge(), optim=optim()), make(judge(), optim=optim(), packed=packed)
    expected = whole.forward_backward(
        batch, ["scores"], preference_loss, MicroBatching(rows=4, rows_per_item=2)
    )
    found = pieces.forward_backward(batch, ["scores"], preference_loss, micro)
    assert found == pytest.approx(expected, rel=1e-6) and found["first rows"] == 0 + 2
    scale = flat_gradient(whole).abs().max()
    assert ((flat_gradient(pieces) - flat_gradient(whole)).abs().max() / scale).item() < 1e-6
    scores = pieces.forward(batch, ["scores"], micro).scores
    alone = [pieces.forward(batch.select([row]), ["scores"], ALL).scores.item() for row in range(4)]
    assert scores.tolist() == pytest.approx(alone, abs=1e-6)


def test_rows_that_cannot_be_kept_together_are_refused(make):
    backend = make(new_scalar_model(tiny_model().config))
    with pytest.raises(ValueError, match="cannot be kept together by 3"):
        backend.forward(tiny_batch().select([0, 1]), ["scores"], MicroBatching(rows=6, rows_per_item=3))
