"""Images on a GPU in bf16, at the widths of published models: a sampled token has the log-prob that training
recomputes, however many rows and images a pass has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from strop.backends.base import BackendSettings, MicroBatching
from strop.backends.single import SingleBackend
from strop.config.schema.model import ModelConfig, OptimConfig
from strop.models.build import adopt_policy
from strop.rollout.base import Request, Sampling, build_engine
from strop.types import Batch, ImageInput, rows_of

pytestmark = pytest.mark.gpu

IMAGE, BEGIN, END = 1000, 1001, 1002
VOCABULARY = 151936
"""That of the published models, because cuBLAS divides the sums of a narrow head by the number of rows."""
SHAPES: dict[str, tuple[str, int, int, int, int, dict[str, Any]]] = {
    "Qwen2-VL-2B": (
        *("qwen2_vl", 1536, 8960, 12, 2),
        {"embed_dim": 1280, "hidden_size": 1536, "depth": 2, "num_heads": 16},
    ),
    "Qwen2.5-VL-3B": (
        *("qwen2_5_vl", 2048, 11008, 16, 2),
        {
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": 2048,
            "depth": 2,
            "num_heads": 16,
        },
    ),
    "Qwen2.5-VL-7B": (
        *("qwen2_5_vl", 3584, 18944, 28, 4),
        {
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
            "depth": 2,
            "num_heads": 16,
        },
    ),
    "Qwen3-VL-4B": (
        *("qwen3_vl", 2560, 9728, 32, 8),
        {
            **{"hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560, "depth": 2},
            **{"num_heads": 16, "patch_size": 14, "deepstack_visual_indexes": [0]},
        },
    ),
}
"""Family, width, inner width, heads and key heads of the language part, and the tower, two layers each."""


def model_of(shape: str) -> Any:
    family, width, inner, heads, key_heads, vision = SHAPES[shape]
    size = 128
    config = AutoConfig.for_model(
        family,
        text_config={
            **{
                "vocab_size": VOCABULARY,
                "hidden_size": width,
                "intermediate_size": inner,
                "num_hidden_layers": 2,
            },
            **{"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": size},
            **{"max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 1e6},
                "mrope_section": [size // 8, 3 * size // 16, 3 * size // 16],
            },
        },
        vision_config={"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision},
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        video_token_id=1003,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def requests_of(count: int, samples: int) -> list[Request]:
    """Prompts with a picture of 8 x 8 or 12 x 8 image tokens each."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        grid = (1, 16 + 8 * (number % 2), 16)
        tokens = grid[1] * grid[2] // 4
        pixels = torch.randn(grid[1] * grid[2], 3 * 2 * 14 * 14, generator=draw)
        tensors = {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}
        words = torch.randint(0, 900, (24 + number,), generator=draw).tolist()
        ids = [*words[:4], BEGIN, *[IMAGE] * tokens, END, *words[4:]]
        image = ImageInput(f"{number:064x}", tensors, tokens, (grid[2] * 14, grid[1] * 14))
        found.append(Request(ids, samples, seed=number, images=(image,)))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_and_recomputed_log_probs_agree(shape: str) -> None:
    cuda = torch.device("cuda")
    model = adopt_policy(model_of(shape), ModelConfig())
    optim = OptimConfig(lr=1e-6, lr_scheduler_type="constant")
    backend = SingleBackend(model, BackendSettings(optim=optim, device=cuda, compute=torch.bfloat16))
    requests = requests_of(6, 5)
    engine = build_engine("native", backend.module, max_model_len=512, cache_bytes=1 << 30, max_num_seqs=20)
    answers = engine.generate(requests, Sampling(max_tokens=12, ignore_eos=True))
    engine.close()
    rows = [(request, answer) for request, own in zip(requests, answers, strict=True) for answer in own]
    batch = Batch(
        sequences=[torch.tensor([*request.ids, *answer.ids]) for request, answer in rows],
        prompt_lengths=torch.tensor([len(request.ids) for request, _ in rows]),
        mask=torch.ones(len(rows), 12),
        rollout_log_probs=rows_of([answer.log_probs for _, answer in rows], 12),
        images=[request.images for request, _ in rows],
    )
    assert batch.rollout_log_probs is not None
    for tokens in (700, 32768):
        found = backend.forward(batch, ["log_probs"], MicroBatching(max_tokens=tokens))
        assert found.log_probs is not None
        gap = (found.log_probs - batch.rollout_log_probs).abs()
        assert gap.max() < 1e-5, (tokens, float(gap.max()), float(gap.mean()))
