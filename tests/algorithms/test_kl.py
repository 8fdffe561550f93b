from __future__ import annotations

import pytest
import torch

from strop.algorithms.kl import AdaptiveKL, FixedKL, absolute, full, k1, k2, k3, kl_controller, kl_penalty

LOG_PROBS = torch.tensor([[-0.7, -1.3, -2.0, -0.1]])
REF = torch.tensor([[-1.0, -1.0, -2.1, -1.6]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl", [0.3, -0.3, 0.1, 1.5]),
        ("abs", [0.3, 0.3, 0.1, 1.5]),
        ("mse", [0.045, 0.045, 0.005, 1.125]),
        ("low_var_kl", [0.04082, 0.04986, 0.00484, 0.72313]),
    ],
)
@pytest.mark.parametrize("suffix", ["", "+"])
def test_values_by_hand(name: str, expected: list[float], suffix: str) -> None:
    made = kl_penalty(LOG_PROBS, REF, estimator=name + suffix)
    torch.testing.assert_close(made, torch.tensor([expected]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_plus_takes_the_gradient_of_k2(name: str) -> None:
    ours = LOG_PROBS.clone().requires_grad_()
    kl_penalty(ours, REF, estimator=f"{name}+").sum().backward()
    torch.testing.assert_close(ours.grad, LOG_PROBS - REF)


@pytest.mark.parametrize(("name", "restrains"), [("k1", False), ("k1+", True), ("k2", True)])
def test_the_mean_gradient_over_samples_of_the_policy(name: str, restrains: bool) -> None:
    """That of k2 is the gradient of the KL; that of k1 is 0, whatever the reference."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    per_token = kl_penalty(log_probs, reference, estimator=name)
    (mean,) = torch.autograd.grad((log_probs.exp().detach() * per_token).sum(), logits, retain_graph=True)
    (meant,) = torch.autograd.grad(full(logits, reference), logits)
    torch.testing.assert_close(mean, meant * restrains)
    assert meant.abs().max() > 0.1


def test_plus_weighs_the_gradient_by_how_likely_the_sampler_was() -> None:
    ours = LOG_PROBS.clone().requires_grad_()
    old = LOG_PROBS - torch.tensor([[0.5, -0.5, 0.0, 9.0]])
    kl_penalty(ours, REF, estimator="k1+", old_log_probs=old).sum().backward()
    ratio = torch.tensor([[1.6487213, 0.6065307, 1.0, 10.0]])
    torch.testing.assert_close(ours.grad, (LOG_PROBS - REF) * ratio)


def test_k3_is_bounded_and_never_negative() -> None:
    gap = torch.tensor([[-1e4, -30.0, 0.0, 30.0, 1e4]])
    made = k3(torch.zeros_like(gap), gap)
    assert torch.isfinite(made).all() and (made >= 0).all() and (made <= 10).all()


def test_limits_cut_outliers_and_their_gradient_is_zero() -> None:
    for function, expected in (
        (k1, [-10.0, -10.0, 0.0, 10.0, 10.0]),
        (absolute, [10.0, 10.0, 0.0, 10.0, 10.0]),
        (k2, [10.0, 10.0, 0.0, 10.0, 10.0]),
        (k3, [10.0, 10.0, 0.0, 10.0, 10.0]),
    ):
        gap = torch.tensor([[-1e4, -30.0, 0.0, 30.0, 1e4]], requires_grad=True)
        made = function(gap, torch.zeros_like(gap), limit=10.0)
        assert made.tolist() == [expected], function
        made.sum().backward()
        assert gap.grad is not None and gap.grad[0, [0, 1, 3, 4]].tolist() == [0.0] * 4, function


def test_full_is_the_expectation_of_k1() -> None:
    torch.manual_seed(0)
    logits, ref = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    log_p, log_q = logits.log_softmax(-1), ref.log_softmax(-1)
    torch.testing.assert_close(full(logits, ref), (log_p.exp() * (log_p - log_q)).sum(-1))
    torch.testing.assert_close(full(logits, logits + 3.0), torch.zeros(2, 3), rtol=0, atol=1e-6)
    half = full(logits.bfloat16(), ref.bfloat16())
    torch.testing.assert_close(half, full(logits.bfloat16().float(), ref.bfloat16().float()))
    logits[..., 0] = -torch.inf
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(full(logits, ref), (log_p.exp() * (log_p - log_q))[..., 1:].sum(-1))


def test_bad_input_is_explained() -> None:
    with pytest.raises(ValueError, match=r"log_probs \(1, 4\) and ref_log_probs \(1, 3\)"):
        kl_penalty(LOG_PROBS, REF[:, :3])
    for name in ("full", "full+", " full "):
        with pytest.raises(ValueError, match="needs the logits of both models"):
            kl_penalty(LOG_PROBS, REF, estimator=name)
    with pytest.raises(ValueError, match="Unknown KL estimator 'k4'"):
        kl_penalty(LOG_PROBS, REF, estimator="k4")
    with pytest.raises(ValueError, match=r"\(1, 4\) and ref_logits \(1, 3\)"):
        full(LOG_PROBS, REF[:, :3])
    with pytest.raises(ValueError, match="'fixed' or 'adaptive', got 'linear'"):
        kl_controller("linear", coef=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"horizon=100 with 512 samples per step.*more than 102\.4"):
        AdaptiveKL(0.1, target=0.1, horizon=100).update(0.0, 512)
    with pytest.raises(ValueError, match=r"horizon > 0, got 0\.1 and 0"):
        AdaptiveKL(0.1, target=0.1, horizon=0)
    with pytest.raises(ValueError, match=r"target_kl > 0 .* got 0\.0 and 10"):
        AdaptiveKL(0.1, target=0.0, horizon=10)
    with pytest.raises(ValueError, match="make the coefficient 0"):
        AdaptiveKL(0.1, target=0.1, horizon=100).update(0.0, 500)
    AdaptiveKL(0.1, target=0.1, horizon=100).update(0.0, 499)


def test_adaptive_controller_by_hand_and_after_a_restart() -> None:
    control = kl_controller("adaptive", coef=0.1, target=0.1, horizon=10_000)
    control.update(0.3, 256)
    assert control.value == pytest.approx(0.100512)
    again = AdaptiveKL(0.1, target=0.1, horizon=10_000)
    again.load_state_dict(control.state_dict())
    for each in (control, again):
        each.update(0.05, 256)
        assert each.value == pytest.approx(0.09999738, rel=1e-6)
    near = AdaptiveKL(0.1, target=0.1, horizon=10_000)
    near.update(0.105, 1000)  # 5 % above the target, less than the most that counts
    assert near.value == pytest.approx(0.1005)


def test_a_coefficient_that_was_changed_before_a_resume_takes_effect() -> None:
    for kind in ("fixed", "adaptive"):
        control = kl_controller(kind, coef=0.1, target=0.1, horizon=10_000)
        control.update(0.3, 256)
        changed = kl_controller(kind, coef=0.5, target=0.1, horizon=10_000)
        changed.load_state_dict(control.state_dict())
        assert changed.value == 0.5, kind
    same = AdaptiveKL(0.1, target=0.1, horizon=10_000)
    same.load_state_dict({"value": 0.2})  # of an earlier version
    assert same.value == 0.2


def test_fixed_controller_stays() -> None:
    control = FixedKL(0.01)
    control.update(100.0, 1000)
    assert control.state_dict() == {"value": 0.01}
