"""A step of reinforcement learning on prompts with images: seconds by phase, and sampled against recomputed
log-probs.

    python benchmarks/vision_step.py                       # Qwen2.5-VL-3B, 64 prompts x 8 samples, 448 x 448
    python benchmarks/vision_step.py --shape tiny --device cpu    # a trial

The weights and the pixels are random; every prompt has an image of its own, whose samples share it. No
tokenizer, processor or file is read. `features` is the vision tower over all images alone, `prefill` a
rollout of one token (features included), `rollout` the whole one and `decode` the difference. `log_probs`
recomputes what was sampled, `update` is forward, backward and optimizer step. Prints a JSON line per step
and the best of each phase last.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from strop.backends.base import BackendSettings, MicroBatching, Outputs
from strop.backends.single import SingleBackend
from strop.config.schema.model import ModelConfig, OptimConfig
from strop.models.build import adopt_policy
from strop.models.vision.passes import freeze_tower, joined_tensors, vision_part
from strop.rollout.base import Completion, Engine, Request, Sampling, build_engine
from strop.types import Batch, ImageInput, rows_of

GIB = 1 << 30
CHANNELS = 3
SHAPES: dict[str, dict[str, Any]] = {
    "3b": {
        "text": {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "tokens": {
            "vision_start_token_id": 151652,
            "vision_end_token_id": 151653,
            "image_token_id": 151655,
            "video_token_id": 151656,
        },
    },
    "tiny": {
        "text": {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        "vision": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        "tokens": {
            "vision_start_token_id": 508,
            "vision_end_token_id": 509,
            "image_token_id": 510,
            "video_token_id": 511,
        },
    },
}
TINY_WORK = {"prompts": 4, "samples": 2, "side": 56, "tokens": 8, "text": 6}
"""Defaults of `--shape tiny`."""
WORK = {"prompts": 64, "samples": 8, "side": 448, "tokens": 256, "text": 64}


def model_of(shape: str, device: torch.device) -> PreTrainedModel:
    facts = SHAPES[shape]
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={**facts["text"], "bos_token_id": None, "eos_token_id": None},
        vision_config=facts["vision"],
        tie_word_embeddings=True,
        **facts["tokens"],
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return cast(PreTrainedModel, model)


def image_of(number: int, shape: str, side: int) -> ImageInput:
    """Random pixels, as the processor of the family returns them: one row per patch."""
    vision = SHAPES[shape]["vision"]
    unit = vision["patch_size"] * vision["spatial_merge_size"]
    if side % unit:
        raise SystemExit(f"--side {side} is not a multiple of {unit}, the side of an image token.")
    patches = side // vision["patch_size"]
    width = CHANNELS * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    draw = torch.Generator().manual_seed(number)
    tensors = {
        "pixel_values": torch.randn(patches * patches, width, generator=draw),
        "image_grid_thw": torch.tensor([[1, patches, patches]]),
    }
    return ImageInput(f"{number:064x}", tensors, (side // unit) ** 2, (side, side))


def requests_of(asked: argparse.Namespace) -> list[Request]:
    tokens = SHAPES[asked.shape]["tokens"]
    draw = random.Random(0)
    ordinary = min(tokens.values())
    found = []
    for number in range(asked.prompts):
        image = image_of(number, asked.shape, asked.side)
        words = [draw.randrange(3, ordinary) for _ in range(asked.text)]
        shown = [tokens["image_token_id"]] * image.num_tokens
        begin, end = tokens["vision_start_token_id"], tokens["vision_end_token_id"]
        ids = [*words[:4], begin, *shown, end, *words[4:]]
        found.append(Request(ids, asked.samples, seed=number, images=(image,)))
    return found


def batch_of(requests: list[Request], answers: list[list[Completion]]) -> Batch:
    rows = [(request, answer) for request, own in zip(requests, answers, strict=True) for answer in own]
    for _, answer in rows:
        if answer.error is not None:
            raise SystemExit(f"A request failed: {answer.error}")
    width = max(len(answer.ids) for _, answer in rows)
    draw = torch.Generator().manual_seed(0)
    return Batch(
        sequences=[torch.tensor([*request.ids, *answer.ids]) for request, answer in rows],
        prompt_lengths=torch.tensor([len(request.ids) for request, _ in rows]),
        mask=rows_of([[1.0] * len(answer.ids) for _, answer in rows], width),
        rollout_log_probs=rows_of([answer.log_probs for _, answer in rows], width),
        advantages=torch.randn(len(rows), 1, generator=draw).expand(-1, width).contiguous(),
        images=[request.images for request, _ in rows],
    )


def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    assert outputs.log_probs is not None and batch.advantages is not None
    value = -(outputs.log_probs * batch.advantages * batch.mask).sum() / 1e5
    return value, {"loss": value.detach()}


class Clock:
    """Seconds of each phase."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.seconds: dict[str, float] = {}

    def run(self, phase: str, call: Callable[[], Any]) -> Any:
        self._finish()
        start = time.perf_counter()
        found = call()
        self._finish()
        self.seconds[phase] = time.perf_counter() - start
        return found

    def _finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def features(backend: SingleBackend, requests: list[Request], at_once: int) -> None:
    """The vision tower over the images of all prompts."""
    part = vision_part(backend.module)
    images = [image for request in requests for image in request.images]
    weight = next(part.module.parameters())
    compute = cast("Callable[..., object]", part.module.get_image_features)
    with torch.no_grad():
        for first in range(0, len(images), at_once):
            compute(**joined_tensors(images[first : first + at_once], weight.device, weight.dtype))


def rollout(engine: Engine, requests: list[Request], tokens: int, version: int) -> list[list[Completion]]:
    engine.update_weights((), version)  # the prompts are computed again, as after an update
    return engine.generate(requests, Sampling(max_tokens=tokens, ignore_eos=True))


def step(
    backend: SingleBackend, engine: Engine, requests: list[Request], asked: argparse.Namespace, number: int
) -> dict[str, Any]:
    clock = Clock(backend.device)
    micro = MicroBatching(max_tokens=asked.micro_tokens)
    clock.run("features", lambda: features(backend, requests, asked.images_at_once))
    clock.run("prefill", lambda: rollout(engine, requests, 1, 2 * number))
    answers = clock.run("rollout", lambda: rollout(engine, requests, asked.tokens, 2 * number + 1))
    engine.release_memory()
    batch = batch_of(requests, answers)
    again = clock.run("log_probs", lambda: backend.forward(batch, ["log_probs"], micro)).log_probs

    def update() -> None:
        backend.forward_backward(batch, ["log_probs"], loss, micro)
        backend.step()

    clock.run("update", update)
    assert batch.rollout_log_probs is not None
    sampled = batch.mask > 0
    gap = (batch.rollout_log_probs - again)[sampled].abs()
    seconds = dict(clock.seconds)
    seconds["decode"] = seconds["rollout"] - seconds["prefill"]
    seconds["step"] = seconds["rollout"] + seconds["log_probs"] + seconds["update"]
    rows = asked.prompts * asked.samples
    result: dict[str, Any] = {
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "rollout_tokens_per_second": round(rows * asked.tokens / seconds["rollout"]),
        "update_tokens_per_second": round(sum(batch.lengths) / seconds["update"]),
        "gap_max": float(gap.max()),
        "gap_mean": float(gap.mean()),
        "same_bits": float((gap == 0).float().mean()),
    }
    if backend.device.type == "cuda":
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    return result


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="3b")
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--side", type=int, help="of an image, in pixels")
    parser.add_argument("--tokens", type=int, help="of every answer")
    parser.add_argument("--text", type=int, help="tokens of a prompt besides its image")
    parser.add_argument("--steps", type=int, default=3, help="measured, after one of warm-up")
    parser.add_argument("--micro-tokens", type=int, default=32768, help="tokens of a training micro-batch")
    parser.add_argument("--images-at-once", type=int, default=16, help="in the phase `features`")
    parser.add_argument("--memory", type=float, default=0.5, help="gpu_memory_utilization of the engine")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--freeze-tower", action="store_true")
    asked = parser.parse_args()
    for name, value in (TINY_WORK if asked.shape == "tiny" else WORK).items():
        if getattr(asked, name) is None:
            setattr(asked, name, value)
    return asked


def main() -> None:
    asked = options()
    device = torch.device(asked.device)
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = ModelConfig(enable_gradient_checkpointing=not asked.no_checkpointing)
    model = adopt_policy(model_of(asked.shape, device), settings)
    if asked.freeze_tower:
        freeze_tower(model)
    optim = OptimConfig(lr=1e-6, lr_scheduler_type="constant")
    backend = SingleBackend(model.train(), BackendSettings(optim=optim, device=device, compute=compute))
    requests = requests_of(asked)
    longest = max(len(request.ids) for request in requests) + asked.tokens
    engine = build_engine(
        "native",
        backend.module,
        max_model_len=longest,
        gpu_memory_utilization=asked.memory,
        max_num_seqs=asked.prompts * asked.samples,
    )
    work = {name: getattr(asked, name) for name in WORK}
    parameters = sum(weight.numel() for weight in model.parameters())
    print(json.dumps({"shape": asked.shape, "parameters": parameters, **work}), flush=True)
    best: dict[str, float] = {}
    for number in range(1 + asked.steps):
        result = step(backend, engine, requests, asked, number)
        print(json.dumps({"step": number, "warm_up": number == 0, **result}), flush=True)
        if number:
            for name, value in result["seconds"].items():
                best[name] = min(value, best.get(name, value))
    print(json.dumps({"best_seconds": best}))
    engine.close()


if __name__ == "__main__":
    main()
