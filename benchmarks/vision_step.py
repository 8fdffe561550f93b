"""A step of reinforcement learning on prompts with images: seconds by phase, sampled against recomputed
log-probs, and the rollout beside vLLM.

    python benchmarks/vision_step.py                       # Qwen2.5-VL-3B, 32 prompts x 8 samples, 448 x 448
    python benchmarks/vision_step.py --prompts 64 --steps 2
    python benchmarks/vision_step.py --vllm                # vLLM is in the same environment
    python benchmarks/vision_step.py --vllm --vllm-python ENVIRONMENT/bin/python
    python benchmarks/vision_step.py --shape tiny --device cpu    # a trial

The weights are random; every prompt has a picture of its own, whose samples share it. `features` is the
vision tower over all images alone, `prefill` a rollout of one token (features included), `rollout` the whole
one and `decode` the difference. `log_probs` recomputes what was sampled, `update` is forward, backward and
optimizer step. Prints a JSON line when a phase ends and the best of each phase last.

With `--vllm`, vLLM's offline interface runs in a process of its own (rollout_vllm.py), with random weights of
the same shape, the same token ids, the same pictures as multi_modal_data, the end of the text ignored, and
log-probs. It starts while this process warms up. Then the two take turns: the GPU has one rollout at a time.
vLLM prepares the pictures in its warm-up round and keeps them; as after an update of the weights, both
compute features and prompts in every round. vLLM has ended before training is measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from rollout import DidNotStart, Vllm
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, Qwen2VLImageProcessorPil
from vision_pictures import image_settings, picture, write_folder

from strop.backends.base import BackendSettings, MicroBatching, Outputs
from strop.backends.single import SingleBackend
from strop.config.schema.model import ModelConfig, OptimConfig
from strop.models.build import adopt_policy
from strop.models.vision.passes import freeze_tower, joined_tensors, vision_part
from strop.rollout.base import Completion, Engine, Request, Sampling, build_engine
from strop.types import Batch, ImageInput, rows_of

GIB = 1 << 30
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
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        },
        "vision": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 128,
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
GRAPHS = (1, 2, 4, 8, 16, 32, *range(64, 512, 64))
"""Batch sizes of vLLM's CUDA graphs besides the number of rows: fewer than its own choice, which starts
later; decoding runs at the number of rows."""
TINY_WORK = {"prompts": 4, "samples": 2, "side": 56, "tokens": 8, "text": 6}
"""Defaults of `--shape tiny`."""
WORK = {"prompts": 32, "samples": 8, "side": 448, "tokens": 256, "text": 64}


def config_of(shape: str) -> Any:
    facts = SHAPES[shape]
    return AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={**facts["text"], "bos_token_id": None, "eos_token_id": None},
        vision_config=facts["vision"],
        tie_word_embeddings=True,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **facts["tokens"],
    )


def model_of(shape: str, device: torch.device) -> PreTrainedModel:
    """Random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config_of(shape), dtype=torch.float32)
    return cast(PreTrainedModel, model)


def images_of(asked: argparse.Namespace) -> list[ImageInput]:
    """The pictures of all prompts, as the processor of the family prepares them."""
    vision = SHAPES[asked.shape]["vision"]
    unit = vision["patch_size"] * vision["spatial_merge_size"]
    if asked.side % unit:
        raise SystemExit(f"--side {asked.side} is not a multiple of {unit}, the side of an image token.")
    settings = image_settings(vision, asked.side)
    for name in ("image_processor_type", "processor_class"):
        settings.pop(name)
    processor = Qwen2VLImageProcessorPil(**settings)
    found = []
    for number in range(asked.prompts):
        made = processor([picture(number, asked.side)], return_tensors="pt")
        tensors = {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        tokens = (asked.side // unit) ** 2
        found.append(ImageInput(f"{number:064x}", tensors, tokens, (asked.side, asked.side)))
    return found


def requests_of(asked: argparse.Namespace) -> list[Request]:
    tokens = SHAPES[asked.shape]["tokens"]
    draw = random.Random(0)
    ordinary = min(tokens.values())
    found = []
    for number, image in enumerate(images_of(asked)):
        words = [draw.randrange(3, ordinary) for _ in range(asked.text)]
        shown = [tokens["image_token_id"]] * image.num_tokens
        begin, end = tokens["vision_start_token_id"], tokens["vision_end_token_id"]
        ids = [*words[:4], begin, *shown, end, *words[4:]]
        found.append(Request(ids, asked.samples, seed=number, images=(image,)))
    return found


def start_vllm(asked: argparse.Namespace, requests: list[Request], folder: str) -> Vllm:
    """vLLM with the same work; returns when it is ready."""
    facts = SHAPES[asked.shape]
    write_folder(
        Path(folder), config_of(asked.shape), image_settings(facts["vision"], asked.side), facts["tokens"]
    )
    token = facts["tokens"]["image_token_id"]
    prompts = []
    for request in requests:  # vLLM expects one token for an image
        ids = list(request.ids)
        first = ids.index(token)
        prompts.append([*ids[:first], *ids[first + ids.count(token) - 1 :]])
    rows = asked.prompts * asked.samples
    sizes = sorted({rows, *(size for size in GRAPHS if size < rows)})
    settings = {
        "load_format": "dummy",
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        **({} if asked.vllm_eager else {"compilation_config": {"cudagraph_capture_sizes": sizes}}),
        **json.loads(asked.vllm_settings),
    }
    options = argparse.Namespace(
        vllm_python=asked.vllm_python,
        samples=asked.samples,
        tokens=asked.tokens,
        ragged=None,
        lengths_lognormal=None,
        dtype="bfloat16" if asked.device == "cuda" else "float32",
        max_num_seqs=rows,
        vllm_memory=asked.vllm_memory,
        cache_gib=asked.cache_gib,
        warm_up_tokens=None,
        vllm_settings=json.dumps(settings),
    )
    name = "vllm-eager" if asked.vllm_eager else "vllm"
    more = {
        "picture_side": asked.side,
        "max_model_len": max(len(request.ids) for request in requests) + asked.tokens,
    }
    return Vllm(name, folder, prompts, (), options, more)


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
    """Seconds of each phase, printed when it ends."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.seconds: dict[str, float] = {}

    def run(self, phase: str, call: Callable[[], Any]) -> Any:
        self._finish()
        start = time.perf_counter()
        found = call()
        self._finish()
        self.seconds[phase] = time.perf_counter() - start
        print(json.dumps({"phase": phase, "seconds": round(self.seconds[phase], 4)}), flush=True)
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


def rollouts(
    engine: Engine, requests: list[Request], asked: argparse.Namespace, peer: Vllm | None
) -> tuple[dict[str, list[float]], list[list[Completion]]]:
    """Seconds of each rollout, in turns, and the last answers."""
    device = torch.device(asked.device)
    seconds: dict[str, list[float]] = {"prefill": [], "rollout": [], "vllm": []}
    answers: list[list[Completion]] = []
    for number in range(1, 1 + asked.steps):
        clock = Clock(device)
        clock.run("prefill", lambda: rollout(engine, requests, 1, 2 * number))  # noqa: B023 - called at once
        answers = clock.run("rollout", lambda: rollout(engine, requests, asked.tokens, 2 * number + 1))  # noqa: B023
        for name, value in clock.seconds.items():
            seconds[name].append(value)
        if peer is not None:
            tokens, spent = peer()
            wanted = asked.prompts * asked.samples * asked.tokens
            if tokens != wanted:
                raise SystemExit(f"vLLM made {tokens} tokens, not {wanted}.")
            seconds["vllm"].append(spent)
            print(json.dumps({"phase": "vllm", "seconds": round(spent, 4)}), flush=True)
    return seconds, answers


def train(
    backend: SingleBackend, requests: list[Request], batch: Batch, asked: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of each phase of training, and how far sampled log-probs are from recomputed ones."""
    micro = MicroBatching(max_tokens=asked.micro_tokens)

    def update(rows: Batch) -> None:
        backend.forward_backward(rows, ["log_probs"], loss, micro)
        backend.step()

    clock = Clock(backend.device)
    few = batch.select(range(min(len(batch), 4 * asked.samples)))
    found = clock.run("log_probs warm-up", lambda: backend.forward(few, ["log_probs"], micro))
    assert few.rollout_log_probs is not None
    gap = (few.rollout_log_probs - found.log_probs)[few.mask > 0].abs()  # before any update
    facts: dict[str, Any] = {
        "gap_max": float(gap.max()),
        "gap_mean": float(gap.mean()),
        "same_bits": float((gap == 0).float().mean()),
    }
    clock.run("update warm-up", lambda: update(few))
    seconds: dict[str, list[float]] = {"features": [], "log_probs": [], "update": []}
    for _ in range(asked.steps):
        clock = Clock(backend.device)
        clock.run("features", lambda: features(backend, requests, asked.images_at_once))
        clock.run("log_probs", lambda: backend.forward(batch, ["log_probs"], micro))
        clock.run("update", lambda: update(batch))
        for name, value in clock.seconds.items():
            seconds[name].append(value)
    facts["update_tokens_per_second"] = round(sum(batch.lengths) / min(seconds["update"]))
    if backend.device.type == "cuda":
        facts["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    return seconds, facts


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="3b")
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--side", type=int, help="of an image, in pixels")
    parser.add_argument("--tokens", type=int, help="of every answer")
    parser.add_argument("--text", type=int, help="tokens of a prompt besides its image")
    parser.add_argument("--steps", type=int, default=1, help="measured, after a warm-up")
    parser.add_argument("--micro-tokens", type=int, default=32768, help="tokens of a training micro-batch")
    parser.add_argument("--images-at-once", type=int, default=16, help="in the phase `features`")
    parser.add_argument("--cache-gib", type=float, default=16, help="KV cache of each engine")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--freeze-tower", action="store_true")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM's rollout too")
    parser.add_argument("--vllm-python", default=sys.executable, help="of an environment with vLLM")
    parser.add_argument("--vllm-memory", type=float, default=0.4, help="its share of the device")
    parser.add_argument("--vllm-eager", action="store_true", help="without compilation and CUDA graphs")
    parser.add_argument("--vllm-settings", default="{}", help="more arguments of vllm.LLM as JSON")
    parser.add_argument("--save", help="JSON-lines file to which the last line is added")
    asked = parser.parse_args()
    for name, value in (TINY_WORK if asked.shape == "tiny" else WORK).items():
        if getattr(asked, name) is None:
            setattr(asked, name, value)
    return asked


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def ready(starting: Future[Vllm] | None) -> Vllm | None:
    """vLLM after a first round, in which it prepares the pictures; None if it is not asked for or failed."""
    if starting is None:
        return None
    try:
        peer = starting.result()
        peer()
        return peer
    except DidNotStart as error:
        print(json.dumps({"engine": "vllm", "error": str(error)}), flush=True)
        return None


def measure(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    device = torch.device(asked.device)
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    requests = requests_of(asked)
    starting = None
    if asked.vllm:
        starting = ThreadPoolExecutor(1).submit(start_vllm, asked, requests, folder)
    clock = Clock(device)
    settings = ModelConfig(enable_gradient_checkpointing=not asked.no_checkpointing)
    model = adopt_policy(model_of(asked.shape, device), settings)
    if asked.freeze_tower:
        freeze_tower(model)
    optim = OptimConfig(lr=1e-6, lr_scheduler_type="constant")
    backend = SingleBackend(model.train(), BackendSettings(optim=optim, device=device, compute=compute))
    longest = max(len(request.ids) for request in requests) + asked.tokens
    engine = build_engine(
        "native",
        backend.module,
        max_model_len=longest,
        cache_bytes=int(asked.cache_gib * GIB),
        max_num_seqs=asked.prompts * asked.samples,
    )
    clock.run("rollout warm-up", lambda: rollout(engine, requests, asked.tokens, 1))
    peer = ready(starting)
    sampled, answers = rollouts(engine, requests, asked, peer)
    engine.release_memory()
    if peer is not None:
        peer.close()
    trained, facts = train(backend, requests, batch_of(requests, answers), asked)
    engine.close()
    best = {name: min(values) for name, values in {**sampled, **trained}.items() if values}
    theirs = best.pop("vllm", None)
    best["decode"] = best["rollout"] - best["prefill"]
    best["step"] = best["rollout"] + best["log_probs"] + best["update"]
    tokens = asked.prompts * asked.samples * asked.tokens
    found: dict[str, Any] = {
        "shape": asked.shape,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        **{name: getattr(asked, name) for name in WORK},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "best_seconds": {name: round(value, 4) for name, value in best.items()},
        "rollout_tokens_per_second": round(tokens / best["rollout"]),
        **facts,
    }
    if peer is not None and theirs is not None:
        middle = statistics.median(sampled["vllm"]) / statistics.median(sampled["rollout"])
        found |= {**peer.facts, "vllm_eager": asked.vllm_eager, "vllm_rollout_seconds": round(theirs, 4)}
        found |= {"vllm_tokens_per_second": round(tokens / theirs), "native/vllm": round(middle, 2)}
    return found


def main() -> None:
    asked = options()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked, folder)
    print(json.dumps(found), flush=True)
    if asked.save:
        with Path(asked.save).open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
