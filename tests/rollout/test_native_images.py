"""Images in the native engine: sampled log-probs are those that training recomputes, prefixes are shared only
under the same pictures."""

from __future__ import annotations

import pytest
import torch

from strop.data.chat import Chat
from strop.data.images import ImageProcessor
from strop.models.forward import response_outputs
from strop.quickstart.tiny_model import tiny_model
from strop.rollout.base import Request, Sampling, build_engine
from tests.models.vision.test_passes import batch_of_rows, rows_of
from tests.models.vision.tiny_vlm import FAMILIES, picture, processor_of, tiny_vlm, tokenizer_of

NATIVE = [family for family in FAMILIES if family != "gemma3"]


def gap(model: object, requests: list[Request], name: str, **settings: object) -> float:
    """The largest difference between sampled and recomputed log-probs."""
    engine = build_engine(name, model, **settings)
    sampling = Sampling(max_tokens=7, temperature=0.8)
    answers = engine.generate(requests, sampling)
    rows = []
    found = []
    for request, completions in zip(requests, answers, strict=True):
        for completion in completions:
            assert completion.error is None, completion.error
            rows.append((list(request.ids), request.images, completion.ids))
            found.append(torch.tensor(completion.log_probs))
    batch = batch_of_rows(rows)
    with torch.no_grad():
        outputs = response_outputs(model, batch, ["log_probs"], temperature=0.8)["log_probs"]
    return max(float((line[: len(own)] - own).abs().max()) for line, own in zip(outputs, found, strict=True))


def requests_of(family: str, n: int = 3) -> list[Request]:
    rows = rows_of(family)
    return [Request(rows[i][0], n, seed=i, images=rows[i][1]) for i in (0, 3, 5, 7)]


@pytest.mark.parametrize("family", NATIVE)
def test_sampled_log_probs_are_recomputed(family: str) -> None:
    model = tiny_vlm(family)
    requests = requests_of(family)
    assert gap(model, requests, "native", max_model_len=128) < 1e-5
    small = {"max_num_batched_tokens": 5, "max_num_seqs": 4}
    assert gap(model, requests, "native", max_model_len=128, **small) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_engine_takes_images(family: str) -> None:
    assert gap(tiny_vlm(family), requests_of(family, 2), "hf", max_model_len=128) < 1e-5


def test_the_same_text_under_another_picture_is_computed_anew() -> None:
    """Prompts of more than a block of the prefix cache, one after the other in one engine."""
    model = tiny_vlm("qwen2_5_vl")
    chat = Chat(tokenizer_of("qwen2_5_vl"), images=ImageProcessor(lambda: processor_of("qwen2_5_vl")))
    parts = [
        {"type": "text", "text": "1234567890123456"},
        {"type": "image"},
        {"type": "text", "text": "12345678"},
    ]
    engine = build_engine("native", model, max_model_len=128, enable_prefix_caching=True)
    sampling = Sampling(max_tokens=4)
    computed = []
    for colour in ((255, 0, 0), (255, 0, 0), (0, 255, 0)):
        shown, images = chat.with_images([picture(colour)], where="x")
        request = Request(shown.ids([{"role": "user", "content": parts}]), seed=1, images=images)
        engine.stats()
        [answer] = engine.generate([request], sampling)[0]
        computed.append(engine.stats()["prompt_tokens"])
        batch = batch_of_rows([(list(request.ids), images, answer.ids)])
        with torch.no_grad():
            expected = response_outputs(model, batch, ["log_probs"])["log_probs"][0]
        assert (torch.tensor(answer.log_probs) - expected).abs().max() < 1e-5
    whole, again, other = computed
    assert other == whole - 17, "the text before the picture is reused"
    assert again == 1, "the same picture is reused"


def test_an_update_of_the_tower_changes_the_features_of_a_known_picture() -> None:
    """Optimizers write to `.data`, which the version counter of a parameter does not see."""
    model = tiny_vlm("qwen2_5_vl")
    prompt, images, _ = rows_of("qwen2_5_vl")[0]
    engine = build_engine("native", model, max_model_len=64)
    for version in (1, 2):
        [[answer]] = engine.generate([Request(prompt, seed=1, images=images)], Sampling(max_tokens=4))
        batch = batch_of_rows([(prompt, images, answer.ids)])
        with torch.no_grad():
            expected = response_outputs(model, batch, ["log_probs"])["log_probs"][0]
        assert (torch.tensor(answer.log_probs) - expected).abs().max() < 1e-5, version
        for weight in model.model.visual.parameters():
            weight.data.mul_(1.3)
        engine.update_weights((), version)


def test_images_that_cannot_be_used_are_answered_with_an_error() -> None:
    family = "qwen2_5_vl"
    prompt, images, _ = rows_of(family)[0]
    engine = build_engine("native", tiny_vlm(family), max_model_len=64)
    [[cut]] = engine.generate([Request(prompt[5:], images=images)], Sampling(max_tokens=2))
    assert cut.finish == "error" and "2 image tokens" in str(cut.error)
    text = build_engine("native", tiny_model(tokenizer_of(family), hidden=16, layers=1), max_model_len=64)
    [[refused]] = text.generate([Request(prompt, images=images)], Sampling(max_tokens=2))
    assert "takes none" in str(refused.error)
    both_ways = build_engine("native", tiny_vlm("gemma3"), max_model_len=64)
    prompt, images, _ = rows_of("gemma3")[0]
    [[refused]] = both_ways.generate([Request(prompt, images=images)], Sampling(max_tokens=2))
    assert "set rollout.name=hf" in str(refused.error)
