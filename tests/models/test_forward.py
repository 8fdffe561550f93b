"""Packed, padded and plain Hugging Face: the same numbers and the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strop.algorithms import logprobs, logprobs_of_logits
from strop.algorithms.distillation import forward_kl_topk
from strop.models.attention import PACKED, set_attention
from strop.models.forward import head_is_plain, own_logits, response_outputs, sequence_scores
from strop.models.heads import new_scalar_model
from tests.models.tiny import FAMILIES, tiny_batch, tiny_model

WANT = ("log_probs", "entropy", "sum_pi_squared")


def plain_outputs(model, batch, temperature: float = 1.0) -> dict[str, Tensor]:
    """One sequence at a time, full logits, eager attention."""
    model.set_attn_implementation("eager")
    found = {name: torch.zeros(batch.mask.shape) for name in WANT}
    for row, (sequence, prompt) in enumerate(zip(batch.sequences, batch.prompt_lengths.tolist())):
        logits = model(input_ids=sequence[None], use_cache=False).logits[0].float() / temperature
        log_p = logits[prompt - 1 : -1].log_softmax(-1)
        n = len(sequence) - prompt
        found["log_probs"][row, :n] = log_p.gather(-1, sequence[prompt:, None]).squeeze(-1)
        found["entropy"][row, :n] = -(log_p.exp() * log_p).sum(-1)
        found["sum_pi_squared"][row, :n] = log_p.exp().square().sum(-1)
    return found


def gradient(model) -> Tensor:
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("chunk", [7, None], ids=["chunks", "whole"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_equal_a_plain_forward(family, chunk, packed):
    model, batch = tiny_model(family), tiny_batch()
    expected = plain_outputs(model, batch, temperature=0.7)
    (expected["log_probs"] * batch.advantages + 0.1 * expected["entropy"]).sum().backward()
    expected_gradient = gradient(model)
    found = response_outputs(model, batch, WANT, temperature=0.7, packed=packed, chunk=chunk)
    for name in WANT:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert not found["sum_pi_squared"].requires_grad
    (found["log_probs"] * batch.advantages + 0.1 * found["entropy"]).sum().backward()
    scale = expected_gradient.abs().max()
    torch.testing.assert_close(gradient(model) / scale, expected_gradient / scale, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("chunk", [7, None], ids=["chunks", "whole"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the second caps its logits
def test_log_probs_of_the_likeliest_tokens_equal_a_plain_forward(family, chunk, packed):
    """What a teacher gives: ids and log-probs. What a student gives for the same ids: log-probs with
    gradients."""
    model, batch = tiny_model(family), tiny_batch()
    model.set_attn_implementation("eager")  # sdpa leaves caps of attention out
    rows = []
    for sequence, prompt in zip(batch.sequences, batch.prompt_lengths.tolist(), strict=True):
        logits = model(input_ids=sequence[None]).logits[0, prompt - 1 : -1] / 0.7
        rows.append(logits.log_softmax(-1).topk(3, dim=-1))
    torch.cat([row.values for row in rows]).sum().backward()
    expected_gradient = gradient(model)

    options = {"temperature": 0.7, "packed": packed, "chunk": chunk}
    found = response_outputs(model, batch, ["log_probs", "top_ids", "top_log_probs"], topk=3, **options)
    for row, expected in enumerate(rows):
        length = len(expected.values)
        assert torch.equal(found["top_ids"][row, :length].long(), expected.indices)
        torch.testing.assert_close(found["top_log_probs"][row, :length], expected.values)
        assert not found["top_log_probs"][row, length:].any()

    given = batch.replace(teacher_top_ids=found["top_ids"], teacher_top_log_probs=found["top_log_probs"])
    student = response_outputs(model, given, ["log_probs", "student_top_log_probs"], **options)
    torch.testing.assert_close(student["student_top_log_probs"], found["top_log_probs"])
    student["student_top_log_probs"].sum().backward()
    scale = expected_gradient.abs().max()
    torch.testing.assert_close(gradient(model) / scale, expected_gradient / scale, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the second caps its logits
@pytest.mark.parametrize("more", [(), ("top_ids", "top_log_probs"), ("student_top_log_probs",)], ids=str)
def test_rows_without_a_response_have_columns_of_zeros(family, more):
    """All samples of a micro-batch may have failed before their first token."""
    batch = tiny_batch([(3, 0), (5, 0)])
    batch = batch.replace(mask=torch.zeros(2, 4), teacher_top_ids=torch.zeros(2, 4, 3, dtype=torch.int32))
    found = response_outputs(tiny_model(family), batch, ["log_probs", *more], topk=3)
    assert found["log_probs"].shape == (2, 4)
    for name in more:
        assert found[name].shape == (2, 4, 3)
    for table in found.values():
        assert not table.any()
    found["log_probs"].sum().backward()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_token_that_only_the_teacher_has_is_left_out(family):
    """Models of one family are padded to vocabularies of different sizes."""
    model, batch = tiny_model(family), tiny_batch()
    ids = torch.randint(0, 61, (*batch.mask.shape, 3), generator=torch.Generator().manual_seed(0))
    ids[:, :, 1] = 61  # the first one beyond the vocabulary
    want = ["log_probs", "student_top_log_probs"]
    found = response_outputs(model, batch.replace(teacher_top_ids=ids), want)["student_top_log_probs"]
    kept = batch.replace(teacher_top_ids=ids[:, :, ::2].contiguous())
    expected = response_outputs(model, kept, want)["student_top_log_probs"]
    assert found[:, :, 1].isneginf().all()
    torch.testing.assert_close(found[:, :, ::2], expected)

    teacher = torch.tensor([0.5, 0.3, 0.2]).log().expand(found.shape)
    gradients = []
    for own, theirs in ((found, teacher), (expected, teacher[:, :, ::2])):
        model.zero_grad()
        (forward_kl_topk(own, theirs) * batch.mask).sum().backward(retain_graph=True)
        gradients.append(gradient(model))
    assert gradients[0].abs().max() > 0.1
    torch.testing.assert_close(gradients[0], gradients[1])

    ids[2, 4] = 100
    with pytest.raises(ValueError, match=r"\[100, 100, 100\], is one of the policy's 61"):
        response_outputs(model, batch.replace(teacher_top_ids=ids), want)


@pytest.mark.parametrize("want", [("log_probs", "observed_entropy"), ("log_probs", "entropy")])
def test_a_frozen_head_in_chunks_gives_the_same_gradients(want):
    """Only entropies that are asked for with a gradient have one."""
    found = []
    for chunk in (7, None):
        model, batch = tiny_model("llama", tie_word_embeddings=False), tiny_batch()
        model.get_output_embeddings().requires_grad_(False)
        outputs = response_outputs(model, batch, want, chunk=chunk)
        loss = (outputs["log_probs"] * batch.advantages).sum()
        if outputs[want[1]].requires_grad:
            loss = loss + 0.1 * outputs[want[1]].sum()
        loss.backward()
        found.append((outputs[want[1]].requires_grad, gradient(model)))
    assert found[0][0] == found[1][0] == (want[1] == "entropy")
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


def test_long_and_short_sequences_are_grouped_without_changing_anything():
    model = tiny_model("mistral", max_position_embeddings=256, sliding_window=40)
    batch = tiny_batch([(100, 9), (2, 3), (60, 4), (5, 30), (90, 12), (1, 1)])
    expected = plain_outputs(model, batch)["log_probs"]
    found = response_outputs(model, batch, ["log_probs"])["log_probs"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_packed_sequences_do_not_see_each_other():
    model, batch = tiny_model(), tiny_batch()
    before = response_outputs(model, batch, ["log_probs"])["log_probs"].detach()
    other = batch.replace(sequences=[s.clone() for s in batch.sequences])
    other.sequences[1][:] = 5
    after = response_outputs(model, other, ["log_probs"])["log_probs"].detach()
    kept = [0, 2, 3, 4]
    assert torch.equal(before[kept], after[kept])
    assert not torch.allclose(before[1], after[1])


def test_heads_that_change_logits_are_recognised_even_when_logits_are_small():
    assert head_is_plain(tiny_model("llama"))
    assert head_is_plain(tiny_model("gemma"))
    capped = tiny_model("gemma2", final_logit_softcapping=30.0)
    assert not head_is_plain(capped)
    assert not head_is_plain(tiny_model("granite"))
    hidden = torch.randn(3, 32) * 50
    logits = own_logits(capped, hidden)
    torch.testing.assert_close(logits, 30 * torch.tanh(hidden @ capped.lm_head.weight.T / 30))


def test_the_head_and_the_attention_function_are_given_back():
    model, batch = tiny_model(), tiny_batch()
    ids = batch.sequences[4][None]
    set_attention(model, "sdpa")
    before = model(input_ids=ids).logits
    response_outputs(model, batch, ["log_probs"])
    assert model.config._attn_implementation == PACKED
    set_attention(model, "sdpa")
    assert torch.equal(model(input_ids=ids).logits, before)
    assert "forward" not in model.lm_head.__dict__


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_values_come_from_the_state_before_the_token_and_scores_from_the_last_token(packed):
    language, batch = tiny_model("qwen3"), tiny_batch()
    model = new_scalar_model(language.config, seed=3).eval()
    values = response_outputs(model, batch, ["values"], packed=packed)["values"]
    scores = sequence_scores(model, batch.sequences, packed=packed)
    model.set_attn_implementation("eager")
    for row, (sequence, prompt) in enumerate(zip(batch.sequences, batch.prompt_lengths.tolist())):
        whole = model(input_ids=sequence[None], use_cache=False).logits[0, :, 0]
        n = len(sequence) - prompt
        torch.testing.assert_close(values[row, :n], whole[prompt - 1 : -1], rtol=1e-5, atol=1e-6)
        assert not values[row, n:].any()
        torch.testing.assert_close(scores[row], whole[-1], rtol=1e-5, atol=1e-6)


def test_a_mixture_of_experts_reports_its_balancing_loss():
    found = response_outputs(tiny_model("mixtral"), tiny_batch(), ["log_probs", "auxiliary"])
    assert found["auxiliary"].item() > 1.0 and found["auxiliary"].requires_grad
    with pytest.raises(ValueError, match="not a mixture of experts"):
        response_outputs(tiny_model("llama"), tiny_batch(), ["log_probs", "auxiliary"])


def test_bad_requests_are_explained():
    model, batch = tiny_model(), tiny_batch()
    with pytest.raises(ValueError, match=r"cannot answer \['logits'\]"):
        response_outputs(model, batch, ["logits"])
    with pytest.raises(ValueError, match=r"cannot answer \['auxiliary'\]"):
        response_outputs(model, batch, ["auxiliary"])
    with pytest.raises(ValueError, match="no head 'score'"):
        response_outputs(model, batch, ["values"])
    with pytest.raises(ValueError, match="Row 2 has an empty prompt"):
        response_outputs(model, batch.replace(prompt_lengths=torch.tensor([3, 7, 0, 4, 12])), ["log_probs"])
    with pytest.raises(ValueError, match="temperature must be positive"):
        response_outputs(model, batch, ["log_probs"], temperature=0.0)
    assert "forward" not in model.lm_head.__dict__, "the head was not given back after an error"
    with pytest.raises(ValueError, match=r"attn_implementation='sdpaa'.*Did you mean 'sdpa'"):
        response_outputs(model, batch, ["log_probs"], packed=False, attention="sdpaa")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_entropy_that_is_only_observed_has_the_same_numbers_and_no_slope(family, monkeypatch):
    """A gemma2 caps its logits, so its head is asked in another way."""
    model, batch = tiny_model(family), tiny_batch()
    slope, asked = logprobs.slope_of_rows, []

    def watched(*numbers):
        asked.append(numbers[-1] is not None)
        return slope(*numbers)

    monkeypatch.setattr(logprobs, "slope_of_rows", watched)
    monkeypatch.setattr(logprobs_of_logits, "slope_of_rows", watched)
    outputs = {
        name: response_outputs(model, batch, ["log_probs", name]) for name in ("entropy", "observed_entropy")
    }
    gradients = {}
    for name, found in outputs.items():
        asked.clear()
        (found["log_probs"] * batch.advantages).sum().backward()
        gradients[name] = gradient(model)
        assert asked and all(asked) == (name == "entropy") == any(asked), name
    assert torch.equal(outputs["entropy"]["entropy"], outputs["observed_entropy"]["observed_entropy"])
    assert not outputs["observed_entropy"]["observed_entropy"].requires_grad
    scale = gradients["entropy"].abs().max()
    torch.testing.assert_close(
        gradients["observed_entropy"] / scale, gradients["entropy"] / scale, rtol=1e-5, atol=1e-6
    )
