"""The native engine on a CUDA device: graphs change the speed and nothing else."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strop.config.schema.rollout import SpeculationConfig
from strop.models.forward import response_outputs
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine
from strop.types import Batch
from tests.rollout import tiny
from tests.rollout.test_native_adapters import weights_of, with_peft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[5, 9, 2], [7, 1, 1, 4, 30, 12, 8, 77, 3, 2, 6], [11], [3, 4, 5, 6, 7, 8]]


def on_device(kind: str) -> Any:
    return tiny.make(kind).cuda()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", [kind for kind in tiny.MODELS if kind not in tiny.EXPERTS])
def test_greedy_is_a_plain_forward(kind: str, eager: bool) -> None:
    engine = NativeEngine(on_device(kind), enforce_eager=eager)
    plain = tiny.make(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = engine.generate([Request(p, n=2) for p in PROMPTS], Sampling(temperature=0, max_tokens=40))
    for prompt, group in zip(PROMPTS, answers):
        expected = tiny.plain_greedy(plain, prompt, 40)
        assert [c.ids for c in group] == [expected, expected]


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_moe", "mixtral"])
def test_graphs_give_the_samples_of_single_steps(kind: str) -> None:
    model = on_device(kind)
    requests = [Request(PROMPTS[i % 4], n=1 + i % 5, seed=i, max_tokens=5 + 7 * (i % 9)) for i in range(40)]
    ways = [
        Sampling(),
        Sampling(temperature=0.7, top_p=0.9, stop_ids=(3, 4)),
        Sampling(top_k=7, repetition_penalty=1.2),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experts that ask the device cannot be recorded, and say so
        graphs, single = NativeEngine(model, max_num_seqs=24), NativeEngine(model, enforce_eager=True)
        for sampling in ways:
            with_graphs, without = graphs.generate(requests, sampling), single.generate(requests, sampling)
            assert [[c.ids for c in g] for g in with_graphs] == [[c.ids for c in g] for g in without]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", ["qwen2", "mistral_window"])
def test_guessed_tokens_are_those_of_single_steps(kind: str, eager: bool) -> None:
    model = on_device(kind)
    requests = [Request(PROMPTS[i % 4], n=1 + i % 3, seed=i, max_tokens=5 + 7 * (i % 9)) for i in range(12)]
    ways = [
        Sampling(),
        Sampling(temperature=0),
        Sampling(temperature=0.7, top_p=0.9, stop_ids=(3, 4)),
        Sampling(top_k=7, repetition_penalty=1.2),
    ]
    speculation = SpeculationConfig(enable=True, num_tokens=3, max_rows=24, memory_tokens=8192)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experts that ask the device cannot be recorded, and say so
        for sampling in ways:
            single = NativeEngine(model, speculation=SpeculationConfig(enable=False)).generate(
                requests, sampling
            )
            engine = NativeEngine(model, enforce_eager=eager, speculation=speculation)
            for _ in range(2):
                guessed = engine.generate(requests, sampling)
                assert [[c.ids for c in g] for g in guessed] == [[c.ids for c in g] for g in single]
                found = engine.stats()
            assert found["speculation/acceptance"] > 0.7


def test_guesses_for_attention_sinks_are_refused() -> None:
    engine = NativeEngine(on_device("gpt_oss_sinks"), speculation=SpeculationConfig(enable=True))
    with pytest.raises(ValueError, match=r"speculation\.enable=true.*attention sinks"):
        engine.generate([Request(PROMPTS[0], max_tokens=2)], Sampling())


def test_weights_that_changed_or_moved_are_seen_by_graphs() -> None:
    model = on_device("llama")
    engine = NativeEngine(model)
    greedy = Sampling(temperature=0, max_tokens=12)
    plain = tiny.make("llama")
    for round_number in range(3):
        assert engine.generate([Request(PROMPTS[0])], greedy)[0][0].ids == tiny.plain_greedy(
            plain, PROMPTS[0], 12
        )
        with torch.no_grad():
            for mine, its in zip(plain.parameters(), model.parameters()):
                mine.add_(torch.randn_like(mine) * 0.2)
                if round_number == 0:
                    its.copy_(mine)
                else:
                    its.data = mine.data.cuda()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_what_ended_is_reused_though_recorded_steps_run_over_more_rows_than_are_needed(eager: bool) -> None:
    model = on_device("llama")
    engine, plain = (
        NativeEngine(model, enforce_eager=eager),
        NativeEngine(model, enforce_eager=True, enable_prefix_caching=False),
    )
    talks = [[5 + i, *range(1, 30 + i)] for i in range(5)]
    sampling = Sampling(max_tokens=7)
    engine.generate([Request(talk, n=2) for talk in talks], sampling)  # rows of all sizes are left behind
    for turn in range(3):
        answers = engine.generate([Request(talk, seed=turn) for talk in talks[: 5 - turn]], sampling)
        expected = plain.generate([Request(talk, seed=turn) for talk in talks[: 5 - turn]], sampling)
        assert [c.ids for (c,) in answers] == [c.ids for (c,) in expected]
        for talk, (answer,) in zip(talks, answers):
            talk += [*answer.ids, 3, 4]
    assert engine.stats()["prefix_reuse"] > 0.6


def test_recorded_steps_survive_a_sleep_when_the_cache_is_small() -> None:
    engine = NativeEngine(on_device("llama"))
    first = engine.generate([Request(PROMPTS[1], seed=1)], Sampling(max_tokens=30))
    assert engine._step_loop is not None and engine._step_loop.runner.num_recorded > 0
    engine.sleep()
    engine.wake()
    assert engine._step_loop.runner.num_recorded > 0
    assert (
        engine.generate([Request(PROMPTS[1], seed=1)], Sampling(max_tokens=30))[0][0].ids == first[0][0].ids
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sixteen_bits_are_sampled_and_trained_with_the_same_log_probs(dtype: torch.dtype) -> None:
    """Every rounding of the two passes falls the same way, also where a talk goes on from what the engine remembers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=512,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data *= 2 if weight.dim() > 1 else 1  # so that the model has opinions
    model = model.to("cuda", dtype).eval()
    engine = NativeEngine(model, max_num_seqs=64)
    draw = torch.Generator().manual_seed(0)
    # The last ones have several segments of keys, or begin their second one while they are sampled.
    lengths = [*(5 + 17 * i for i in range(12)), 1000, 2500]
    talks = [torch.randint(512, (length,), generator=draw).tolist() for length in lengths]
    for turn in range(2):
        answers = engine.generate([Request(talk, n=4, seed=turn) for talk in talks], Sampling(max_tokens=90))
        sampled = [(talk, c) for talk, group in zip(talks, answers) for c in group]
        batch = Batch(
            sequences=[torch.tensor([*talk, *c.ids]) for talk, c in sampled],
            prompt_lengths=torch.tensor([len(talk) for talk, _ in sampled]),
            mask=torch.ones(len(sampled), 90),
        )
        with torch.no_grad():
            trained = response_outputs(model, batch, ["log_probs"])["log_probs"].cpu()
        difference = (torch.tensor([c.log_probs for _, c in sampled]) - trained).abs()
        assert trained.mean() < -1 and difference.max() < 1e-4
        talks = [[*talk, *group[0].ids, 7, 8, 9] for talk, group in zip(talks, answers)]
    assert engine.stats()["prefix_reuse"] > 0.5


def plain_answers(model: Any) -> dict[tuple[int, ...], list[int]]:
    """Computed once per adapter: on the CPU this is most of the time of the test."""
    return {tuple(prompt): tiny.plain_greedy(model, prompt, 24) for prompt in PROMPTS}


@pytest.mark.parametrize("own", [False, True], ids=["plain", "peft"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_rows_of_several_adapters(eager: bool, own: bool) -> None:
    """Also as adapters are loaded, change places and are loaded again between recorded steps."""
    base = tiny.make("qwen2")
    model = with_peft(base, weights_of(base, 4, 90), 1.0) if own else base
    engine = NativeEngine(copy.deepcopy(model).cuda(), enforce_eager=eager)
    expected: dict[str | None, Any] = {None: plain_answers(model)}
    greedy = Sampling(temperature=0, max_tokens=24)
    for seed, names in enumerate((["a"], ["b", "c", "d"], ["a"], ["e", "f", "g", "h", "i"])):
        for i, name in enumerate(names):
            weights = weights_of(base, 3 + 7 * i, 10 * seed + i)
            engine.load_adapter(name, weights, 1.0)
            expected[name] = plain_answers(with_peft(base, weights, 1.0))
        for chosen in ([None], names, [None, *names], [name for name in expected if name is not None]):
            requests = [Request(prompt, n=2, adapter=name) for prompt in PROMPTS for name in chosen]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                answers = engine.generate(requests, greedy)
            for request, group in zip(requests, answers):
                plain = expected[request.adapter][tuple(request.ids)]
                assert [c.ids for c in group] == [plain, plain]


def test_sixteen_bit_rows_of_several_adapters_are_those_of_one() -> None:
    base = tiny.make("qwen2")
    weights = {name: weights_of(base, 8, seed) for seed, name in enumerate("abc")}
    engine = NativeEngine(copy.deepcopy(base).cuda().bfloat16())
    for name, one in weights.items():
        engine.load_adapter(name, one, 1.0)
    requests = [Request(prompt, seed=1, adapter=name) for prompt in PROMPTS for name in weights]
    for request, (completion,) in zip(requests, engine.generate(requests, Sampling(max_tokens=16))):
        plain = with_peft(base, weights[str(request.adapter)], 1.0)
        log_probs = tiny.plain_log_probs(plain, request.ids, completion.ids)
        expected = log_probs.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert (torch.tensor(completion.log_probs) - expected).abs().mean() < 0.1
