"""Compiled passes over rows of logits: the numbers of float64, for every size, special value and thread count,
and the training step uses them."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms import logprob_kernels_cpu as kernels
from strop.algorithms.frozen_head import frozen_head_logprobs
from strop.algorithms.logprobs import LARGE_VOCABULARY, token_logprobs_from_hidden

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=["float32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if not kernels.is_available(request.param):
        pytest.skip("no compiler, or a CPU without AVX-512")
    found: torch.dtype = request.param
    return found


def exact(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits.double() / temperature).log_softmax(-1)
    chosen = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels < 0, 0.0)
    return chosen, torch.special.entr(log_p.exp()).sum(-1)


def rows_of(dtype: torch.dtype, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(vocabulary)
    logits = (4 * torch.randn(9, vocabulary)).to(dtype)
    logits[2, vocabulary // 2] = 60.0  # nearly all of the probability
    logits[3, 1::2] = float("-inf")
    logits[4] = 2.5
    labels = torch.randint(vocabulary, (9,))
    labels[3] = 0
    labels[5:8] = torch.tensor([-100, vocabulary - 1, 0])
    return logits, labels


@pytest.mark.parametrize("vocabulary", [2, 15, 16, 513, 9001])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_numbers_and_derivatives_equal_those_of_float64(
    dtype: torch.dtype, vocabulary: int, temperature: float
) -> None:
    logits, labels = rows_of(dtype, vocabulary)
    up, up_entropy = torch.randn(2, 9)
    leaf = logits.double().requires_grad_()
    log_probs, entropy = exact(leaf, labels, temperature)
    # The derivative of an entropy with tokens of probability 0 is no number in float64.
    finite = logits.isfinite().all(-1)
    (of_both,) = torch.autograd.grad(
        (up * log_probs + torch.where(finite, up_entropy * entropy, 0.0)).sum(), leaf, retain_graph=True
    )
    (of_log_probs,) = torch.autograd.grad((up * log_probs).sum(), leaf)

    found = kernels.statistics(logits, labels, temperature=temperature, want_entropy=True)
    assert found[2] is not None
    torch.testing.assert_close(found[0].double(), log_probs.detach(), rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(found[2].double(), entropy.detach(), rtol=1e-6, atol=3e-6)
    without = kernels.statistics(logits, labels, temperature=temperature, want_entropy=False)
    assert torch.equal(without[0], found[0]) and torch.equal(without[1], found[1]) and without[2] is None

    loose = {"rtol": 1e-5, "atol": 3e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-5}
    for of_entropy, expected in ((up_entropy, of_both), (None, of_log_probs)):
        slopes = kernels.slopes(
            logits.clone(), labels, *found[1:], up, of_entropy, temperature=temperature, dtype=dtype
        )
        assert slopes.isfinite().all()
        torch.testing.assert_close(slopes[finite].double(), expected[finite], **loose)
    only_entropy = kernels.slopes(
        logits.clone(), labels, *found[1:], None, up_entropy, temperature=temperature, dtype=dtype
    )
    torch.testing.assert_close(
        only_entropy[finite].double(), (of_both - of_log_probs)[finite], rtol=2**-7, atol=2e-5
    )


def test_a_row_does_not_depend_on_others_or_on_threads(dtype: torch.dtype) -> None:
    logits, labels = rows_of(dtype, 9001)
    up = torch.randn(9)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            numbers = kernels.statistics(logits, labels, temperature=0.9, want_entropy=True)
            slopes = kernels.slopes(
                logits.clone(), labels, *numbers[1:], up, up, temperature=0.9, dtype=dtype
            )
            found.append([*numbers, slopes])
    finally:
        torch.set_num_threads(threads)
    alone = kernels.statistics(logits[6:7], labels[6:7], temperature=0.9, want_entropy=True)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    assert all(torch.equal(a[6:7], b) for a, b in zip(found[0], alone, strict=False))


def test_logits_that_are_no_numbers_stay_visible(dtype: torch.dtype) -> None:
    logits, labels = rows_of(dtype, 700)
    logits[0, 333] = float("nan")
    logits[1, 17] = float("inf")
    log_probs, _, entropies = kernels.statistics(logits, labels, temperature=1.0, want_entropy=True)
    assert entropies is not None
    assert log_probs[:2].isnan().all() and entropies[:2].isnan().all()
    assert log_probs[2:].isfinite().all() and entropies[2:].isfinite().all()


@pytest.mark.parametrize("chunk", [4, 100], ids=["logits computed again", "logits kept"])
@pytest.mark.parametrize("compute", [token_logprobs_from_hidden, frozen_head_logprobs])
def test_an_output_head_uses_them_and_may_be_differentiated_twice(
    dtype: torch.dtype, chunk: int, compute: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(compute)
    torch.manual_seed(0)
    hidden = torch.randn(11, 24).to(dtype).requires_grad_()
    weight = torch.randn(LARGE_VOCABULARY, 24).to(dtype)
    labels = torch.randint(LARGE_VOCABULARY, (11,))
    labels[3] = -100
    up = torch.randn(11)
    compute(hidden, weight, labels, chunk=chunk)  # tries the kernels
    rows = 0
    of_library = kernels.statistics

    def counted(logits: torch.Tensor, *more: object, **options: object) -> object:
        nonlocal rows
        rows += len(logits)
        return of_library(logits, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "statistics", counted)
    found = compute(hidden, weight, labels, temperature=0.8, chunk=chunk, want_entropy=True)
    assert rows == 11
    gradients = [
        torch.autograd.grad((up * found.log_probs).sum(), hidden, retain_graph=True)[0] for _ in "ab"
    ]
    assert torch.equal(*gradients)

    leaf = hidden.detach().double().requires_grad_()
    logits = leaf @ weight.double().T
    if dtype == torch.bfloat16:
        logits = logits + (logits.detach().bfloat16().double() - logits.detach())  # rounded as the head does
    log_probs, entropy = exact(logits, labels, 0.8)
    (expected,) = torch.autograd.grad((up * log_probs).sum(), leaf)
    loose = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.log_probs.double(), log_probs.detach(), rtol=loose, atol=loose)
    torch.testing.assert_close(found.entropy.double(), entropy.detach(), rtol=loose, atol=loose)
    error = (gradients[0].double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)
