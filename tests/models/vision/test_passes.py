"""Images in forward passes: every layout computes what transformers computes for one sequence, each image once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from strop.data.chat import Chat
from strop.data.images import ImageProcessor
from strop.models.forward import response_outputs, sequence_scores
from strop.models.heads import new_scalar_model
from strop.models.layouts.check import layouts_of
from strop.models.packing import rectangle
from strop.models.vision import passes
from strop.models.vision.arguments import image_arguments
from strop.models.vision.feature_cache import FeatureCache
from strop.models.vision.passes import freeze_tower, images_in, lay_out_images, vision_part
from strop.quickstart.tiny_model import tiny_model
from strop.rewards.model import HeadModel
from strop.rollout.base import Request
from strop.rollout.native.images import image_problem
from strop.types import Batch, ImageInput, Images
from tests.models.vision.tiny_vlm import (
    FAMILIES,
    SIGLIP,
    TEXT,
    config_of,
    picture,
    processor_of,
    set_window,
    tiny_vlm,
    tokenizer_of,
)

Row = tuple[list[int], Images, list[int]]
"""Prompt, its images, response."""


def part(kind: str, text: str = "") -> dict[str, str]:
    return {"type": kind, "text": text} if text else {"type": kind}


def cropped(seed: int, crops: int) -> ImageInput:
    """An image of Idefics3, made by hand."""
    pixels = torch.randn(1, crops, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(1, crops, 16, 16, dtype=torch.long)
    digest = hashlib.sha256(str(seed).encode()).hexdigest()
    return ImageInput(digest, {"pixel_values": pixels, "pixel_attention_mask": mask}, 4 * crops)


def cropped_rows() -> list[Row]:
    one, other, large = cropped(1, 1), cropped(2, 1), cropped(3, 2)
    short = [7, 3, 3, 3, 3, 4, 8]
    long = [7, 3, 3, 3, 3, 5, 3, 3, 3, 3, 4, 8, 9]
    group: list[Row] = [(short, (one,), [9, 10, 3, 8]), (short, (one,), [8, 8]), (short, (one,), [9, 10, 11])]
    others: list[Row] = [(short, (other,), [9, 10]), (short, (other,), [6]), (long, (large,), [6, 7, 8, 9])]
    return [*group, *others, ([*long, *short], (large, one), [9, 10]), ([7, 8], (), [10, 11])]


def rows_of(family: str) -> list[Row]:
    """A group of three samples, another picture under the same text, two pictures, and text alone."""
    if FAMILIES[family]["images"]["image_processor_type"] == "Idefics3ImageProcessor":
        return cropped_rows()
    chat = Chat(tokenizer_of(family), images=ImageProcessor(lambda: processor_of(family)))
    red = picture()
    wide = picture((0, 0, 255), 24, 16)
    one = [{"role": "user", "content": [part("text", "what "), part("image"), part("text", "colour12+")]}]
    two = [
        {"role": "user", "content": [part("image"), part("text", "what3"), part("image"), part("text", "=")]}
    ]
    found: list[Row] = []
    generator = torch.Generator().manual_seed(0)
    cases = (
        (one, [red], 3),
        (one, [wide], 2),
        (two, [wide, red], 2),
        ([{"role": "user", "content": "12+4="}], [], 1),
    )
    for messages, pictures, samples in cases:
        shown, images = chat.with_images(pictures, where="row 0") if pictures else (chat, ())
        for _ in range(samples):
            length = int(torch.randint(3, 9, (), generator=generator))
            response = torch.randint(0, len(chat.tokenizer), (length,), generator=generator).tolist()
            found.append((shown.ids(messages), images, response))
    token = chat.images.token_id if chat.images is not None else 0
    found[1][2][1] = token  # a sampled image token stands for no image
    return found


def batch_of_rows(rows: Sequence[Row]) -> Batch:
    width = max(len(response) for _, _, response in rows)
    mask = torch.zeros(len(rows), width)
    for line, (_, _, response) in zip(mask, rows):
        line[: len(response)] = 1
    return Batch(
        sequences=[torch.tensor(prompt + response) for prompt, _, response in rows],
        prompt_lengths=torch.tensor([len(prompt) for prompt, _, _ in rows]),
        mask=mask,
        groups=torch.arange(len(rows)),
        images=[images for _, images, _ in rows],
    )


def reference(model: Any, row: Row) -> Tensor:
    """Log-probs of a response by a plain call of transformers on one sequence."""
    prompt, images, response = row
    found = vision_part(model)
    ids = torch.tensor([prompt + response])
    given: dict[str, Tensor] = {}
    for name in images[0].tensors if images else ():
        dim = 1 if "pixel_attention_mask" in images[0].tensors else 0
        given[name] = torch.cat([image.tensors[name] for image in images], dim)
    types = (ids == found.token_id).int()
    types[:, len(prompt) :] = 0
    if images and found.has_axes:
        given["mm_token_type_ids"] = types
    if found.looks_both_ways:
        given["token_type_ids"] = types
    # transformers counts every image token; a sampled one is shown to it as the vector that it is.
    embedding = model.get_input_embeddings()
    stray = ids.clone()
    stray[:, : len(prompt)] = 0
    if bool((stray == found.token_id).any()) and images:
        spare = next(token for token in range(len(embedding.weight)) if token not in ids)
        with torch.no_grad():
            before = embedding.weight[spare].clone()
            embedding.weight[spare] = embedding.weight[found.token_id]
        shown = ids.where(stray != found.token_id, spare)
        logits = model(input_ids=shown, use_cache=False, **given).logits
        with torch.no_grad():
            embedding.weight[spare] = before
    else:
        logits = model(input_ids=ids, use_cache=False, **given).logits
    own = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return own.gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_padded_and_alone_agree(family: str) -> None:
    model = tiny_vlm(family)
    rows = rows_of(family)
    with torch.no_grad():
        expected = [reference(model, row) for row in rows]
        batch = batch_of_rows(rows)
        packed = response_outputs(model, batch, ["log_probs"])["log_probs"]
        padded = response_outputs(model, batch, ["log_probs"], packed=False)["log_probs"]
        alone = [
            response_outputs(model, batch.select([i]), ["log_probs"])["log_probs"] for i in range(len(rows))
        ]
    for row, wanted in enumerate(expected):
        length = len(wanted)
        assert (packed[row, :length] - wanted).abs().max() < 1e-5
        assert (padded[row, :length] - wanted).abs().max() < 1e-5
        assert (alone[row][0, :length] - wanted).abs().max() < 1e-5


def test_each_image_is_computed_once_and_matters() -> None:
    model = tiny_vlm("qwen2_5_vl")
    rows = rows_of("qwen2_5_vl")
    batch = batch_of_rows(rows)
    tower = vision_part(model).module.visual
    patches = []
    hook = tower.register_forward_pre_hook(lambda _, given: patches.append(len(given[0])))
    with torch.no_grad():
        shown = response_outputs(model, batch, ["log_probs"])["log_probs"]
        hook.remove()
        assert patches == [16 + 24], "two pictures for eight sequences"
        assert layouts_of(model).packed.right
        other = Chat(tokenizer_of("qwen2_5_vl"), images=ImageProcessor(lambda: processor_of("qwen2_5_vl")))
        images = other.with_images([picture((10, 200, 0))], where="x")[1]
        changed = batch.replace(images=[images, *batch.images[1:]])  # type: ignore[misc]
        different = response_outputs(model, changed, ["log_probs"])["log_probs"]
    length = len(rows[0][2])
    assert (shown[0, :length] - different[0, :length]).abs().max() > 1e-2
    assert (shown[1:] - different[1:]).abs().max() < 1e-5


@pytest.mark.parametrize("window", [2, 3, 8, 100])
def test_tokens_of_an_image_see_later_ones_in_packed_rows(window: int) -> None:
    """Windows smaller and larger than an image of 4 tokens; samples of a prompt share its tokens."""
    model = tiny_vlm("gemma3")
    set_window(model, window)
    rows = rows_of("gemma3")
    batch = batch_of_rows(rows)
    inputs = lay_out_images(model, rectangle(batch.sequences), batch.images or [], packed=True)
    assert inputs.packing is not None and inputs.packing.reach is not None
    prompt = len(rows[0][0])
    assert inputs.ids.numel() <= sum(batch.lengths) - 2 * prompt, "three samples of the first prompt"
    with torch.no_grad():
        expected = [reference(model, row) for row in rows]
        found = response_outputs(model, batch, ["log_probs"], packed=True)["log_probs"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(passes, "last_seen", lambda shown: torch.arange(shown.shape[-1]).expand_as(shown))
            causal = response_outputs(model, batch, ["log_probs"], packed=True)["log_probs"]
    for row, wanted in enumerate(expected):
        assert (found[row, : len(wanted)] - wanted).abs().max() < 1e-5
    assert (found[0] - causal[0]).abs().max() > 1e-3


def test_models_with_masks_of_their_own_are_refused() -> None:
    """PaliGemma: all tokens of a prompt see each other."""
    text = {**TEXT, "model_type": "gemma", "vocab_size": 64}
    vision = {**SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
    config = AutoConfig.for_model(
        "paligemma", text_config=text, vision_config=vision, projection_dim=32, image_token_index=3
    )
    model = AutoModelForImageTextToText.from_config(config)
    with pytest.raises(ValueError, match="PaliGemmaForConditionalGeneration decides by the kinds of tokens"):
        vision_part(model)
    image = ImageInput("0" * 64, {"pixel_values": torch.zeros(1, 3, 16, 16)}, 4)
    problem = image_problem(model, Request([3, 3, 3, 3, 5], images=(image,)))
    assert problem is not None and "known for gemma3 only" in problem


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava", "gemma3"])
def test_gradients_reach_the_tower(family: str) -> None:
    rows = rows_of(family)
    batch = batch_of_rows(rows)
    found = []
    for parts in ([list(range(len(rows)))], [[row] for row in range(len(rows))]):
        model = tiny_vlm(family)
        for part in parts:
            piece = batch.select(part)
            (response_outputs(model, piece, ["log_probs"])["log_probs"] * piece.mask).sum().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    packed, alone = found
    towers = ("visual", "vision_tower")
    reached = [name for name, grad in packed.items() if grad is not None and any(t in name for t in towers)]
    assert len(reached) > 10
    for name, grad in alone.items():
        if grad is None:
            assert packed[name] is None
            continue
        scale = grad.abs().max().clamp(min=1.0)
        assert (packed[name] - grad).abs().max() / scale < 1e-4, name


def test_a_frozen_tower_has_no_gradients() -> None:
    model = tiny_vlm("qwen2_5_vl").train()
    freeze_tower(model)
    response_outputs(model, batch_of_rows(rows_of("qwen2_5_vl")), ["log_probs"])["log_probs"].sum().backward()
    for name, weight in model.named_parameters():
        assert (weight.grad is None) == ("visual" in name), name
    with pytest.raises(
        ValueError, match="freeze_vision_tower=true, but LlamaForCausalLM has no vision tower"
    ):
        freeze_tower(tiny_model(tokenizer_of("qwen2_5_vl"), hidden=16, layers=1))


def test_a_text_model_is_given_images() -> None:
    model = tiny_model(tokenizer_of("qwen2_5_vl"), hidden=16, layers=1)
    with pytest.raises(ValueError, match="LlamaForCausalLM takes no images"):
        response_outputs(model, batch_of_rows(rows_of("qwen2_5_vl")), ["log_probs"])


def test_a_cut_prompt_is_named() -> None:
    prompt, images, response = rows_of("qwen2_5_vl")[0]
    with pytest.raises(ValueError, match="has 2 image tokens and images with 4"):
        response_outputs(
            tiny_vlm("qwen2_5_vl"), batch_of_rows([(prompt[5:], images, response)]), ["log_probs"]
        )


def test_a_pass_with_more_images_than_the_cache_holds() -> None:
    model = tiny_vlm("qwen2_5_vl")
    rows = rows_of("qwen2_5_vl")
    cache = FeatureCache(limit=1)
    found = []
    with torch.no_grad():
        for pair in ([rows[0]], [rows[3], rows[0]], [rows[0], rows[3]]):
            batch = batch_of_rows(pair)
            inputs = lay_out_images(model, rectangle(batch.sequences), batch.images or [], packed=False)
            with images_in(model, inputs, cache) as (ids, given):
                found.append(
                    model(ids, position_ids=inputs.positions, attention_mask=inputs.mask, **given).logits
                )
    assert (found[1].flip(0) - found[2]).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_scores_of_a_model_that_sees(family: str) -> None:
    """Packed, padded and a plain call of the body with its head; the value of a token depends on the image."""
    model = new_scalar_model(config_of(family, tokenizer_of(family))).eval()
    model.model.load_state_dict(tiny_vlm(family).model.state_dict())  # louder than a new model
    with torch.no_grad():
        model.score.weight.mul_(10)
    part_of = vision_part(model)
    rows: list[Row] = []
    for prompt, images, response in [rows_of(family)[index] for index in (0, 3, 5, 7)]:
        # a plain call takes every image token for an image
        rows.append((prompt, images, [token if token != part_of.token_id else 9 for token in response]))
    batch = batch_of_rows(rows)
    with torch.no_grad():
        plain = []
        for prompt, images, response in rows:
            ids = torch.tensor([prompt + response])
            given = image_arguments(model, prompt + response, images, 1)
            if part_of.looks_both_ways:
                given["token_type_ids"] = (ids == part_of.token_id).int()
            plain.append(model(input_ids=ids, use_cache=False, **given).logits[0, :, 0])
        packed = response_outputs(model, batch, ["values"])["values"]
        padded = response_outputs(model, batch, ["values"], packed=False)["values"]
        scores = sequence_scores(model, batch.sequences, batch.images)
        for line, (prompt, _, response) in enumerate(rows):
            own = plain[line][len(prompt) - 1 : -1]
            assert (packed[line, : len(response)] - own).abs().max() < 1e-5
            assert (padded[line, : len(response)] - own).abs().max() < 1e-5
            assert abs(float(scores[line] - plain[line][-1])) < 1e-5
        assert batch.images is not None
        if len(rows[0][0]) == len(rows[1][0]):
            swapped = batch.replace(images=[batch.images[1], *batch.images[1:]])
            other = response_outputs(model, swapped, ["values"])["values"]
            assert (other[0] - packed[0]).abs().max() > 1e-4


@pytest.mark.parametrize("limits", [{"rows": 4}, {"max_tokens": 80}], ids=str)
def test_a_reward_model_computes_the_image_of_a_group_once(limits: dict[str, int]) -> None:
    family = "qwen2_5_vl"
    model = new_scalar_model(config_of(family, tokenizer_of(family))).eval()
    first, second = rows_of(family)[0], rows_of(family)[3]
    sequences = []
    images = []
    for prompt, shown, _ in (first, second):
        for length in (1, 9, 2, 8):
            sequences.append([*prompt, *range(10, 10 + length)])
            images.append(shown)
    patches = []
    hook = vision_part(model).module.visual.register_forward_pre_hook(
        lambda _, given: patches.append(len(given[0]))
    )
    scores = HeadModel(model, **limits).score(sequences, images)
    hook.remove()
    assert sum(patches) == 16 + 24, patches
    for sequence, shown, score in zip(sequences, images, scores, strict=True):
        [alone] = HeadModel(model).score([sequence], [shown])
        assert score == pytest.approx(alone, abs=1e-5)
