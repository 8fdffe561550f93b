"""vLLM on a GPU, in this process and in its own: log-probs beside the trainer's, weights in place, memory given back.

Needs an environment with vLLM and a CUDA device.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from strop.backends.base import BackendSettings, MicroBatching
from strop.backends.single import SingleBackend
from strop.models.forward import response_outputs
from strop.rollout.base import Completion, Request, Sampling, build_engine
from strop.rollout.external import named_weights
from strop.types import Batch
from tests.backends.replay_checks import chosen

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = [[(7 * i + 3 * j) % 4000 + 3 for j in range(20 + i)] for i in range(16)]
LONG = Sampling(max_tokens=64, ignore_eos=True)


@pytest.mark.parametrize("own_process", [False, True], ids=["this process", "its own process"])
def test_weights_are_replaced_and_memory_is_given_back(own_process: bool) -> None:
    pytest.importorskip("vllm")
    model = _model()
    engine = build_engine(
        "vllm",
        model,
        enforce_eager=True,
        max_num_seqs=64,
        max_model_len=128,
        gpu_memory_utilization=0.3 if DEVICE.type == "cuda" else None,
        free_cache_engine=True,
        engine_kwargs={"vllm": {"python": sys.executable}} if own_process else None,
    )
    requests = [Request(ids, n=4) for ids in PROMPTS]
    first = engine.generate(requests, LONG)
    assert _drift(model, first) < 0.1
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn_like(weight) * 0.3 * weight.std())
    assert _drift(model, first) > 0.3  # they say so when weights are not those of the trainer
    engine.update_weights(named_weights(model), 5)
    second = engine.generate(requests, LONG)
    assert _drift(model, second) < 0.1
    assert {completion.version for group in second for completion in group} == {5}
    if DEVICE.type == "cuda":
        awake, whole = torch.cuda.mem_get_info()
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] - awake > 0.2 * whole
        engine.wake()
    engine.update_weights(named_weights(model), 6)
    assert _drift(model, engine.generate(requests, LONG)) < 0.1
    engine.close()


@pytest.mark.parametrize("own_process", [False, True], ids=["this process", "its own process"])
def test_experts_of_vllm_are_replayed(own_process: bool) -> None:
    """router_replay.mode=R3: with the experts that vLLM returns, the trainer's log-probs are nearer to vLLM's.
    The prompts begin alike and the second call has them again, so part of the experts is of cached blocks."""
    pytest.importorskip("vllm")
    model = _mixture()
    engine = build_engine(
        "vllm",
        model,
        enforce_eager=not own_process,  # eager here, CUDA graphs there
        max_num_seqs=64,
        max_model_len=128,
        gpu_memory_utilization=0.3,
        record_experts=True,
        engine_kwargs={"vllm": {"python": sys.executable}} if own_process else None,
    )
    common = [(11 * j) % 4000 + 3 for j in range(40)]
    prompts = [[*common, *ids] for ids in PROMPTS]
    requests = [Request(ids, n=4) for ids in prompts]
    for version in range(2):
        answers = engine.generate(requests, Sampling(max_tokens=32, ignore_eos=True))
        rows = [(ids, completion) for ids, group in zip(prompts, answers) for completion in group]
        _check_experts(model, rows)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.add_(torch.randn_like(weight) * 0.3 * weight.std())
        engine.update_weights(named_weights(model), version + 1)
    engine.close()


def _check_experts(model: Any, rows: list[tuple[list[int], Completion]]) -> None:
    own = []
    for ids, completion in rows[::8]:
        assert completion.experts is not None
        expected = chosen(model, [*ids, *completion.ids])
        assert completion.experts.shape == expected.shape
        own.append(np.sort(completion.experts, -1) == np.sort(expected, -1))
    assert np.concatenate(own).mean() > 0.9, "attention rounds otherwise, so a few choices differ"
    longest = max(len(ids) + len(completion.ids) for ids, completion in rows)
    table = torch.arange(4).expand(len(rows), longest, 4, 4).clone()
    for row, (_, completion) in enumerate(rows):
        assert completion.experts is not None
        table[row, : len(completion.experts)] = torch.from_numpy(completion.experts.astype(np.int64))
    batch = Batch(
        sequences=[torch.tensor([*ids, *completion.ids]) for ids, completion in rows],
        prompt_lengths=torch.tensor([len(ids) for ids, _ in rows]),
        mask=torch.ones(len(rows), 32),
        experts=table,
    )
    sampled = torch.tensor([completion.log_probs for _, completion in rows])
    gaps = {}
    for mode in ("disabled", "R3"):
        settings = BackendSettings(device=DEVICE, compute=torch.bfloat16, router_replay=mode)
        found = SingleBackend(model, settings).forward(batch, ["log_probs"], MicroBatching(max_tokens=4096))
        assert found.log_probs is not None
        gaps[mode] = float((found.log_probs - sampled).abs().mean())
    print("mean difference of log-probs:", gaps)
    assert gaps["R3"] < 0.8 * gaps["disabled"] and gaps["R3"] < 0.1, gaps


def _mixture() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 4096},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32},
        **{"num_experts_per_tok": 4, "norm_topk_prob": True, "max_position_embeddings": 2048},
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)
    return model.to(DEVICE, torch.bfloat16).eval()


def _model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **sizes, **heads, tie_word_embeddings=True)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)  # far from uniform, so that a difference shows
    return model.to(DEVICE, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32).eval()


def _drift(model: Any, answers: list[list[Completion]]) -> float:
    """How far the log-probs of the engine are from those of the model, on average."""
    rows = [(ids, completion) for ids, group in zip(PROMPTS, answers) for completion in group]
    batch = Batch(
        sequences=[torch.tensor([*ids, *completion.ids]) for ids, completion in rows],
        prompt_lengths=torch.tensor([len(ids) for ids, _ in rows]),
        mask=torch.ones(len(rows), 64),
    )
    with torch.no_grad():
        trained: Tensor = response_outputs(model, batch, ["log_probs"])["log_probs"].cpu()
    return float((torch.tensor([completion.log_probs for _, completion in rows]) - trained).abs().mean())
