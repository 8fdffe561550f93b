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
from tests.models.vision.tiny_vlm import (
    FAMILIES,
    picture,
    processor_of,
    set_window,
    tiny_vlm,
    tokenizer_of,
)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probs_are_recomputed(family: str) -> None:
    model = tiny_vlm(family)
    requests = requests_of(family)
    assert gap(model, requests, "native", max_model_len=128) < 1e-5
    small = {"max_num_batched_tokens": 5, "max_num_seqs": 4}
    assert gap(model, requests, "native", max_model_len=128, **small) < 1e-5


@pytest.mark.parametrize("window", [2, 100])
def test_tokens_of_an_image_see_later_ones(window: int) -> None:
    """Gemma-3: chunks that would end inside an image of 4 tokens, and windows smaller than it. A chunk may be
    longer than max_num_batched_tokens for an image."""
    model = tiny_vlm("gemma3")
    set_window(model, window)
    for tokens in (3, 7):
        settings = {"max_num_batched_tokens": tokens, "max_num_seqs": 4, "enable_prefix_caching": True}
        assert gap(model, requests_of("gemma3"), "native", max_model_len=128, **settings) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_engine_takes_images(family: str) -> None:
    assert gap(tiny_vlm(family), requests_of(family, 2), "hf", max_model_len=128) < 1e-5


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_the_same_text_under_another_picture_is_computed_anew(family: str) -> None:
    """Prompts of more than a block of the prefix cache, one after the other in one engine."""
    model = tiny_vlm(family)
    chat = Chat(tokenizer_of(family), images=ImageProcessor(lambda: processor_of(family)))
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
    text = {"qwen2_5_vl": 17, "gemma3": 18}[family]
    assert other == whole - text, "the text before the picture is reused"
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
