"""Chunked log-probs and the fused head: the same numbers as the plain computation, in value and gradient."""

from __future__ import annotations

import math
import sys
from asyncio import CancelledError
from subprocess import CalledProcessError
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import _StopRecomputationError

from strop.algorithms import frozen_head, logprob_trial
from strop.algorithms.frozen_head import frozen_head_logprobs
from strop.algorithms.logprob_trial import functions_agree
from strop.algorithms.logprobs import _PlainRows, token_logprobs_from_hidden
from strop.algorithms.logprobs_of_logits import (
    sum_pi_squared,
    token_entropy,
    token_logprobs,
    token_statistics,
)
from tests.algorithms.reference.distillation import forward_kl_topk


def plain(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def problem(
    rows: int = 7, hidden: int = 5, vocabulary: int = 11, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(vocabulary, (rows,), generator=generator)
    return {
        "hidden": normal(rows, hidden),
        "weight": normal(vocabulary, hidden),
        "bias": normal(vocabulary),
        "labels": labels,
    }


@given(chunk=st.integers(1, 9), temperature=st.sampled_from([0.5, 1.0, 1.7]), rows=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_any_chunk_gives_the_plain_value_and_gradient(chunk: int, temperature: float, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = (4 * torch.randn(rows, 3, 13, generator=generator)).requires_grad_()
    labels = torch.randint(13, (rows, 3), generator=generator)
    up = torch.randn(2, rows, 3, generator=generator)
    ours = token_statistics(logits, labels, temperature=temperature, chunk=chunk, want_entropy=True)
    theirs = plain(logits, labels, temperature)
    torch.testing.assert_close(ours.log_probs, theirs[0])
    torch.testing.assert_close(ours.entropy, theirs[1])
    assert ours.entropy is not None
    (a,) = torch.autograd.grad((ours.log_probs * up[0] + ours.entropy * up[1]).sum(), logits)
    (b,) = torch.autograd.grad((theirs[0] * up[0] + theirs[1] * up[1]).sum(), logits)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_fused_head_passes_gradcheck(chunk: int, with_bias: bool) -> None:
    p = problem()

    def both(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        found = token_logprobs_from_hidden(
            hidden, weight, p["labels"], bias=bias, temperature=0.8, chunk=chunk, want_entropy=True
        )
        assert found.entropy is not None
        return found.log_probs, found.entropy

    assert torch.autograd.gradcheck(both, (p["hidden"], p["weight"], p["bias"] if with_bias else None))


@pytest.mark.parametrize("cached_rows", [2, 1000])
@pytest.mark.parametrize("use", ["log_probs", "entropy", "both", "entropy detached"])
def test_fused_head_equals_the_plain_head(
    use: str, cached_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a chunk is computed in parts, as a CPU computes a large vocabulary."""
    monkeypatch.setattr("strop.algorithms.logprobs.CACHED", 11 * cached_rows)
    p = problem(rows=9, dtype=torch.float32)
    leaves = [p["hidden"], p["weight"], p["bias"]]
    found = token_logprobs_from_hidden(*leaves[:2], p["labels"], bias=leaves[2], chunk=4, want_entropy=True)
    log_probs, entropy = plain(torch.nn.functional.linear(*leaves), p["labels"])
    assert found.entropy is not None
    torch.testing.assert_close(found.log_probs, log_probs)
    torch.testing.assert_close(found.entropy, entropy)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        weight = torch.linspace(-1, 1, 9)
        if use == "log_probs":
            return (a * weight).sum()
        if use == "entropy":
            return (b * weight).sum()
        return (a * weight).sum() + (b.detach() if "detached" in use else b).square().sum()

    ours = torch.autograd.grad(loss(found.log_probs, found.entropy), leaves)
    theirs = torch.autograd.grad(loss(log_probs, entropy), leaves)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_fused_head_in_bfloat16_equals_a_bfloat16_head_with_float32_softmax() -> None:
    p = problem(rows=16, hidden=32, vocabulary=50, dtype=torch.bfloat16)
    found = token_logprobs_from_hidden(p["hidden"], p["weight"], p["labels"], chunk=5, want_entropy=True)
    log_probs, entropy = plain(p["hidden"] @ p["weight"].T, p["labels"])
    assert found.log_probs.dtype == torch.float32
    torch.testing.assert_close(found.log_probs, log_probs)
    torch.testing.assert_close(found.entropy, entropy)
    ours = torch.autograd.grad(found.log_probs.sum(), [p["hidden"], p["weight"]])
    theirs = torch.autograd.grad(log_probs.sum(), [p["hidden"], p["weight"]])
    for a, b in zip(ours, theirs):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_a_frozen_head_gets_no_gradient_and_a_float32_head_serves_bfloat16_states() -> None:
    p = problem(dtype=torch.float32)
    frozen = p["weight"].detach()
    hidden = p["hidden"].detach().bfloat16().requires_grad_()
    token_logprobs_from_hidden(hidden, frozen, p["labels"]).log_probs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16 and frozen.grad is None


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("want_entropy", [False, True])
def test_a_frozen_head_computes_logits_once(
    monkeypatch: pytest.MonkeyPatch, with_bias: bool, want_entropy: bool
) -> None:
    """The same log-probs, entropies and gradient as the plain head, with one product of each chunk."""
    p = problem(rows=9, dtype=torch.float32)
    p["labels"][3] = -100
    hidden, weight = p["hidden"], p["weight"].detach()
    bias = p["bias"].detach() if with_bias else None
    calls = []
    product = frozen_head._logits

    def counted(rows: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return product(rows, *more)

    monkeypatch.setattr(frozen_head, "_logits", counted)
    found = frozen_head_logprobs(
        hidden, weight, p["labels"], bias=bias, temperature=0.7, chunk=4, want_entropy=want_entropy
    )
    logits = torch.nn.functional.linear(hidden, weight, bias)
    log_probs, entropy = plain(logits, p["labels"].clamp(min=0), 0.7)
    log_probs = log_probs.masked_fill(p["labels"] < 0, 0.0)
    torch.testing.assert_close(found.log_probs, log_probs)
    up = torch.linspace(-1, 1, 9)
    (ours,) = torch.autograd.grad((found.log_probs * up).sum(), hidden)
    (theirs,) = torch.autograd.grad((log_probs * up).sum(), hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert calls == [4, 4, 1]
    assert (found.entropy is not None) == want_entropy
    if found.entropy is not None:
        torch.testing.assert_close(found.entropy, entropy)
        assert not found.entropy.requires_grad


def test_leading_dimensions_are_kept_and_zero_rows_are_fine() -> None:
    p = problem(rows=8)
    flat = token_logprobs_from_hidden(p["hidden"], p["weight"], p["labels"]).log_probs
    shaped = token_logprobs_from_hidden(
        p["hidden"].view(2, 4, -1), p["weight"], p["labels"].view(2, 4)
    ).log_probs
    torch.testing.assert_close(shaped, flat.view(2, 4))
    nothing = token_logprobs_from_hidden(p["hidden"][:0], p["weight"], p["labels"][:0], want_entropy=True)
    assert nothing.log_probs.shape == (0,) and nothing.entropy is not None and nothing.entropy.shape == (0,)


def test_ignored_labels_cost_nothing() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    log_probs = token_logprobs(logits, torch.tensor([2, -100, 4]))
    log_probs.sum().backward()
    assert (
        log_probs[1] == 0
        and logits.grad is not None
        and (logits.grad[1] == 0).all()
        and (logits.grad[0] != 0).all()
    )


def test_forbidden_tokens_leave_entropy_and_gradients_finite() -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0], [0.0, -math.inf, -math.inf]], requires_grad=True)
    entropy = token_entropy(logits)
    expected = torch.distributions.Categorical(logits=torch.tensor([1.0, 2.0])).entropy()
    torch.testing.assert_close(entropy, torch.stack([expected, torch.tensor(0.0)]))
    entropy.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and (logits.grad[:, 1] == 0).all()


def test_small_entropies_are_accurate_for_large_logits() -> None:
    logits = torch.tensor([[300.0, 292.0, 290.0]])
    exact = torch.distributions.Categorical(logits=logits.double()).entropy().item()
    assert token_entropy(logits).item() == pytest.approx(exact, rel=1e-4)


def test_sum_pi_squared_of_a_uniform_row_is_one_over_the_vocabulary() -> None:
    assert sum_pi_squared(torch.zeros(2, 3, 8)).tolist() == [[0.125] * 3] * 2


def test_only_one_chunk_of_logits_is_alive() -> None:
    """The largest tensor the fused head makes, forward or backward, is one chunk by the vocabulary."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    rows, vocabulary, hidden = 64, 400, 4
    states, weight = (
        torch.randn(rows, hidden, requires_grad=True),
        torch.randn(vocabulary, hidden, requires_grad=True),
    )
    with Watch():
        found = token_logprobs_from_hidden(
            states, weight, torch.zeros(rows, dtype=torch.long), chunk=8, want_entropy=True
        )
        assert found.entropy is not None
        (found.log_probs + found.entropy).sum().backward()
    assert largest == 8 * vocabulary


def test_errors_name_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"labels has shape \(3,\) but logits has shape \(2, 5\)"):
        token_logprobs(torch.zeros(2, 5), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"weight has shape \(7, 3\).*must be \[V, 5\]"):
        token_logprobs_from_hidden(torch.zeros(2, 5), torch.zeros(7, 3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        token_logprobs(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long), temperature=0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        token_logprobs(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long), chunk=0)


def test_distilling_a_student_equal_to_its_teacher_costs_nothing() -> None:
    logits = torch.randn(4, 9)
    top = logits.log_softmax(-1).topk(3)
    found = forward_kl_topk(logits, top.values, top.indices)
    torch.testing.assert_close(found.per_token, torch.zeros(4))
    assert found.overlap_count.tolist() == [3] * 4
    torch.testing.assert_close(found.student_mass, found.teacher_mass)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_head_on_a_gpu_equals_the_plain_head_in_a_fraction_of_its_memory(dtype: torch.dtype) -> None:
    rows, hidden, vocabulary = 4096, 256, 32_000
    leaves = [
        (0.3 * torch.randn(shape, device="cuda")).to(dtype).requires_grad_()
        for shape in ((rows, hidden), (vocabulary, hidden))
    ]
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    up = torch.randn(rows, device="cuda")

    def measured(fused: bool) -> tuple[list[torch.Tensor], int]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if fused:
            found = token_logprobs_from_hidden(leaves[0], leaves[1], labels, chunk=256, want_entropy=True)
            assert found.entropy is not None
            log_probs, entropy = found.log_probs, found.entropy
        else:
            log_probs, entropy = plain(leaves[0] @ leaves[1].T, labels)
        grads = torch.autograd.grad((log_probs * up).sum() + 0.1 * entropy.sum(), leaves)
        return [log_probs.detach(), entropy.detach(), *grads], torch.cuda.max_memory_allocated() - before

    ours, our_memory = measured(True)
    theirs, their_memory = measured(False)
    loose = 2e-2 if dtype == torch.bfloat16 else 1e-3
    for a, b in zip(ours, theirs):
        assert (a.float() - b.float()).norm() <= loose * b.float().norm()
    assert our_memory < their_memory / 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_of_the_head_agree_with_plain_torch() -> None:
    from strop.algorithms import logprob_kernels as row_kernels

    assert functions_agree(row_kernels, _PlainRows(), torch.device("cuda"), torch.float32)


def _try_kernels(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> object:
    """What is used for the output head where the check of its kernels raises `error`."""

    def refuse(*_: object) -> bool:
        raise error

    monkeypatch.setattr(logprob_trial, "require", lambda *_, **__: _PlainRows())
    monkeypatch.setattr(logprob_trial, "functions_agree", refuse)
    return logprob_trial.compiled_functions.__wrapped__(torch.device("cuda"), torch.float32, _PlainRows())


class TritonError(Exception):
    """The base of Triton's errors, which is no RuntimeError and need not say anything."""


@pytest.mark.parametrize(
    "error", [TritonError(), RuntimeError("no C compiler"), CalledProcessError(1, "ptxas"), KeyError("arch")]
)
def test_a_head_whose_kernels_do_not_compile_is_computed_by_plain_torch(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    triton = ModuleType("triton.errors")
    triton.TritonError = TritonError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.errors", triton)
    name = type(error).__name__
    with pytest.warns(UserWarning, match=f"kernels of the output head are off.*: {name}"):
        assert _try_kernels(monkeypatch, error) is None


@pytest.mark.parametrize("error", [_StopRecomputationError(), KeyboardInterrupt(), CancelledError()])
def test_an_exception_that_steers_a_pass_is_no_broken_kernel(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        _try_kernels(monkeypatch, error)
