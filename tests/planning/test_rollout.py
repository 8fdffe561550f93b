"""The engine's memory by arithmetic, against the engine's own cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strop.planning.activations import Numbers
from strop.planning.rollout import PlannedSampler
from strop.planning.shape import read_shape, shape_of
from strop.rollout.base import Request, Sampling
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.pages import PagedKVCache
from strop.rollout.native.quantization.cache import ShortTensors

from .test_shape import SIZE

WHOLE = Numbers(compute=4, master=4, residual=4)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2"])
def test_the_cache_has_the_bytes_that_the_engine_takes(kind):
    config = AutoConfig.for_model(kind, **{**SIZE, "max_position_embeddings": 256})
    torch.manual_seed(0)
    engine = NativeEngine(AutoModelForCausalLM.from_config(config).eval(), max_num_seqs=16)
    engine.generate([Request(ids=[3, 4, 5], n=5)], Sampling(max_tokens=9, ignore_eos=True))
    cache = engine._step_loop.runner.cache
    sampler = PlannedSampler(
        read_shape(config.to_dict()),
        5,
        3,
        9,
        max_rows=16,
        batch_tokens=32768,
        share=0.5,
        samples=5,
        numbers=WHOLE,
    )
    assert sampler.per_token == cache.bytes_per_token
    assert (sampler.wanted_rows, sampler.capacity) == (cache.rows, cache.capacity)
    assert sampler.wanted == cache.bytes
    engine.close()


def test_a_cache_of_8_bits_takes_half_the_bytes():
    shape = shape_of("qwen2.5-7b")
    sizes = {"max_rows": 1024, "batch_tokens": 32768, "share": 0.5}
    wide, short = (PlannedSampler(shape, 64, 1024, 4096, fp8_cache=fp8, **sizes) for fp8 in (False, True))
    layers = dict.fromkeys(range(shape.layers), (shape.key_heads, shape.head_size, shape.head_size))
    cache = PagedKVCache(layers, dtype=torch.bfloat16, device=torch.device("cpu"), tensors=ShortTensors)
    assert short.per_token == cache.bytes_per_token
    assert short.wanted / wide.wanted == pytest.approx(0.5, abs=0.005)


def test_the_cache_is_what_the_share_leaves_beside_the_weights():
    sampler = PlannedSampler(
        shape_of("qwen2.5-7b"), 4096, 1024, 4096, max_rows=1024, batch_tokens=32768, share=0.5
    )
    memory = 80 * 2**30
    assert sampler.cache(memory, used=0) == memory // 2 - sampler.module
    assert sampler.cache(memory, used=memory) == 0
    assert (
        PlannedSampler(
            shape_of("qwen2.5-0.5b"), 8, 64, 64, max_rows=1024, batch_tokens=32768, share=0.5
        ).cache(memory, used=0)
        == 8 * 128 * 12288
    )


def test_caches_stay_where_there_is_plenty_of_memory_and_are_given_back_elsewhere():
    sampler = PlannedSampler(
        shape_of("qwen2.5-7b"), 4096, 1024, 4096, max_rows=1024, batch_tokens=32768, share=0.5
    )
    memory = 80 * 2**30
    assert sampler.kept(memory // 8, memory, memory // 8, frees=True) == memory // 8
    assert sampler.kept(memory // 8, memory, memory // 8 + 1, frees=True) == 0
    assert sampler.kept(memory // 4, memory, memory // 2, frees=False) == memory // 4


def test_quantised_copies_count_as_weights():
    arguments = {"max_rows": 1024, "batch_tokens": 32768, "share": 0.5}
    sampler = PlannedSampler(shape_of("qwen2.5-7b"), 4096, 1024, 4096, **arguments)
    quantised = dataclasses.replace(sampler, quantized=True)
    memory = 80 * 2**30
    assert quantised.weights == quantised.shape.body == sampler.weights + quantised.copies
    assert quantised.cache(memory, used=0) == sampler.cache(memory, used=0) - quantised.copies
