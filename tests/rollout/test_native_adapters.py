"""Rows of several LoRA adapters in one batch: each gets what the model with that adapter alone would give."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from strop.models.lora import adapted_layers
from strop.models.patches import PatchContext, _residual_add
from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.adapters import adaptable
from strop.rollout.native.borrowed_model import _fused_qkv
from tests.rollout import tiny

PROMPTS = [[5, 9, 2], [7, 1, 1, 4, 30, 12, 8, 77, 3, 2, 6]]
GREEDY = Sampling(temperature=0, max_tokens=5)
LONG = [3 + i % 40 for i in range(50)]
Weights = dict[str, Tensor]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def weights_of(model: Any, rank: int, seed: int, targets: tuple[str, ...] = ALL) -> Weights:
    """Random factors, large enough that other tokens are the most likely."""
    draw = torch.Generator().manual_seed(seed)
    made = {}
    for path, module in adaptable(model).items():
        if path.rsplit(".", 1)[-1] in targets:
            made[f"{path}.lora_A"] = torch.randn(rank, module.in_features, generator=draw) * 0.2
            made[f"{path}.lora_B"] = torch.randn(module.out_features, rank, generator=draw) * 0.2
    return made


def with_peft(model: Any, weights: Weights, scale: float) -> Any:
    """A copy of the model with these weights as its only adapter, by peft."""
    rank = len(next(iter(weights.values())))
    paths = sorted({key.rsplit(".", 1)[0] for key in weights})
    config = LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=paths)
    adapted: Any = get_peft_model(copy.deepcopy(model), config)
    state = adapted.state_dict()
    for key, weight in weights.items():
        state[f"base_model.model.{key}.default.weight"].copy_(weight)
    return adapted.eval()


SPECS: dict[str, tuple[int, float, tuple[str, ...]]] = {
    "small": (2, 2.0, ALL),
    "large": (11, 0.5, ALL),
    "attention": (4, 1.0, ("q_proj", "v_proj")),
    "head": (3, 1.0, (*ALL, "lm_head")),
}


def case(kind: str = "qwen2", model: Any = None) -> tuple[NativeEngine, dict[str | None, Any]]:
    """An engine with adapters of several ranks and modules, and the models that each must equal."""
    base = tiny.make(kind)
    model = copy.deepcopy(base) if model is None else model
    engine = NativeEngine(model)
    expected: dict[str | None, Any] = {None: copy.deepcopy(model)}
    for seed, (name, (rank, scale, targets)) in enumerate(SPECS.items()):
        weights = weights_of(base, rank, seed, targets)
        engine.load_adapter(name, weights, scale)
        expected[name] = with_peft(base, weights, scale)
    return engine, expected


def all_requests(**settings: Any) -> list[Request]:
    return [Request(prompt, adapter=name, **settings) for prompt in PROMPTS for name in (None, *SPECS)]


def error_of(engine: NativeEngine, name: str) -> str:
    (completion,) = engine.generate([Request([1, 2], adapter=name)], GREEDY)[0]
    assert (completion.finish, completion.ids) == ("error", [])
    return completion.error or ""


def check(model: Any, prompt: list[int], completion: Completion) -> None:
    """The completion is the greedy one of this model, with its log-probs: to 1e-6, or to what float32 is off
    in the model itself."""
    log_probs = tiny.plain_log_probs(model, prompt, completion.ids)
    assert completion.ids and log_probs.argmax(-1).tolist() == completion.ids
    exact = tiny.plain_log_probs(copy.deepcopy(model).double(), prompt, completion.ids)
    limit = max(1e-6, 4 * float((log_probs - exact).abs().max()))
    expected = exact.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
    assert float((torch.tensor(completion.log_probs) - expected).abs().max()) < limit


FORMS = pytest.mark.parametrize("dense", [False, True], ids=["cpu", "gpu"])
"""The products of a CPU and those of a GPU, which compute the same on both."""


@FORMS
@pytest.mark.parametrize("kind", ["qwen2", "smollm"])
def test_every_row_gets_what_its_adapter_alone_would_give(kind: str, dense: bool) -> None:
    engine, expected = case(kind)
    engine._lora.dense = dense
    requests = all_requests()
    seen = set()
    for request, (completion,) in zip(requests, engine.generate(requests, GREEDY)):
        check(expected[request.adapter], list(request.ids), completion)
        seen.add(tuple(completion.ids))
        assert completion.adapter_version == [None, *SPECS].index(request.adapter)
    assert len(seen) > 2 * len(PROMPTS), "adapters must make a difference"


@FORMS
def test_a_model_with_an_adapter_of_its_own_uses_it_for_rows_that_name_none(dense: bool) -> None:
    model = with_peft(tiny.make("qwen2"), weights_of(tiny.make("qwen2"), 5, 31, (*ALL, "lm_head")), 1.0)
    engine, expected = case(model=model)
    engine._lora.dense = dense
    for requests in (all_requests(), [Request(PROMPTS[1], adapter=name) for name in SPECS]):
        for request, (completion,) in zip(requests, engine.generate(requests, GREEDY)):
            check(expected[request.adapter], list(request.ids), completion)
    assert not any(layer.disable_adapters for layer in adapted_layers(model)), "left as it was"


@FORMS
def test_with_the_patches_of_a_gpu(dense: bool) -> None:
    """Joined q/k/v and gate/up products, and products that add to the residual stream."""
    model = tiny.make("qwen2")
    for layer in model.model.layers:
        own = type(layer.mlp)
        layer.mlp.__class__ = type(own.__name__, (own,), {"runs_as_kernel": True})
    _residual_add(model, PatchContext())
    changes = _fused_qkv(model, PatchContext())
    assert len(changes) == 7 * len(model.model.layers)
    engine, expected = case(model=model)
    expected[None] = tiny.make("qwen2")
    engine._lora.dense = dense
    requests = all_requests()
    for request, (completion,) in zip(requests, engine.generate(requests, GREEDY)):
        check(expected[request.adapter], list(request.ids), completion)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_gives_the_same_samples_alone_and_in_company(dtype: torch.dtype, dense: bool) -> None:
    engine, _ = case(model=tiny.make("qwen2").to(dtype))
    engine._lora.dense = dense
    sampling = Sampling(max_tokens=8)
    requests = all_requests(n=2, seed=4)
    together = engine.generate(requests, sampling)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for request, group in list(zip(requests, together))[1:4]:
        for one, same in zip(engine.generate([request], sampling)[0], group):
            if dtype == torch.float32:
                assert one.ids == same.ids
            # Up to the first token that differs by rounding the rows are the same.
            equal = next((i for i, (a, b) in enumerate(zip(one.ids, same.ids)) if a != b), len(one.ids))
            found = torch.tensor(one.log_probs[:equal])
            torch.testing.assert_close(
                found, torch.tensor(same.log_probs[:equal]), atol=tolerance, rtol=tolerance
            )


@FORMS
def test_adapters_that_come_and_go_keep_their_own_weights(dense: bool) -> None:
    """More adapters than a batch uses: they take the places of others."""
    base = tiny.make("qwen2")
    engine = NativeEngine(copy.deepcopy(base))
    engine._lora.dense = dense
    made = {}
    for i in range(12):
        weights = weights_of(base, 1 + i % 5, 50 + i)
        engine.load_adapter(f"a{i}", weights, 1.0)
        made[f"a{i}"] = with_peft(base, weights, 1.0)
    for chosen in ([0, 1, 2, 3, 4, 5, 6, 7], [8], [11, 3, 9], [0, 10], [5, 4, 3, 2, 1, 0, 11, 10]):
        requests = [Request(PROMPTS[i % 2], adapter=f"a{i}", n=1 + i % 2) for i in chosen]
        for request, group in zip(requests, engine.generate(requests, Sampling(temperature=0, max_tokens=3))):
            for completion in group:
                check(made[str(request.adapter)], list(request.ids), completion)


@FORMS
def test_an_adapter_that_overflows_fails_its_own_rows_only(dense: bool) -> None:
    engine, expected = case()
    engine._lora.dense = dense
    engine.load_adapter("huge", weights_of(tiny.make("qwen2"), 4, 9), 1e30)
    requests = [*all_requests(), Request(PROMPTS[0], adapter="huge")]
    *answers, (huge,) = engine.generate(requests, GREEDY)
    assert huge.finish == "error" and "NaN" in (huge.error or "")
    for request, (completion,) in zip(requests, answers):
        check(expected[request.adapter], list(request.ids), completion)


def test_prefixes_are_not_shared_between_adapters_and_loads() -> None:
    base = tiny.make("qwen2")
    engine = NativeEngine(copy.deepcopy(base))
    first, second = (weights_of(base, 3, seed) for seed in (1, 2))
    for name, weights in (("a", first), ("b", second)):
        engine.load_adapter(name, weights, 1.0)
    expected = {"a": with_peft(base, first, 1.0), "b": with_peft(base, second, 1.0), None: base}

    def run(names: list[str | None]) -> None:
        requests = [Request(LONG, adapter=name) for name in names]
        for request, (completion,) in zip(requests, engine.generate(requests, GREEDY)):
            check(expected[request.adapter], LONG, completion)

    run(["a", "b", None])  # admitted together
    run([None])
    engine.stats()
    run(["a", "b"])  # from the cache, each from its own row
    assert engine.stats()["prefix_reuse"] > 0.9
    engine.load_adapter("a", second, 1.0)
    expected["a"] = expected["b"]
    run(["a"])
    assert engine.stats()["prefix_reuse"] == 0.0, "another load has other keys and values"


def test_running_requests_finish_with_the_load_that_they_began_with() -> None:
    base = tiny.make("qwen2")
    engine = NativeEngine(copy.deepcopy(base))
    old, new = (weights_of(base, rank, rank) for rank in (3, 7))
    engine.load_adapter("a", old, 1.0)
    with engine.borrowed_model():
        running = engine.submit(Request(PROMPTS[0], adapter="a"), GREEDY)
        for _ in range(3):
            engine.step()
        engine.load_adapter("a", new, 1.0)
        engine.load_adapter("b", weights_of(base, 2, 5, ("o_proj", "lm_head")), 1.0)  # another module
        later = engine.submit(Request(PROMPTS[0], adapter="a"), GREEDY)
        engine.unload_adapter("a")
        refused = engine.submit(Request(PROMPTS[0], adapter="a"), GREEDY)
        while not (running.done and later.done):
            engine.step()
        engine.step()
    (before,) = running.result()
    (after,) = later.result()
    check(with_peft(base, old, 1.0), PROMPTS[0], before)
    check(with_peft(base, new, 1.0), PROMPTS[0], after)
    assert (before.adapter_version, after.adapter_version) == (1, 2)
    assert refused.result()[0].error == "no adapter 'a' is loaded; loaded are: b"
    assert list(engine.adapters.by_number) == [3], "weights that no request uses are freed"


def test_coroutines_of_several_adapters_share_a_batch_while_another_thread_loads() -> None:
    engine, expected = case()
    started = threading.Event()
    weights = weights_of(tiny.make("qwen2"), 5, 77)

    def load() -> None:
        assert started.wait(60)
        engine.load_adapter("late", weights, 1.0)

    async def everybody() -> list[list[Completion]]:
        def on_tokens(*_: object) -> None:
            started.set()

        requests = all_requests(on_tokens=on_tokens)
        return await asyncio.gather(*(engine.agenerate(request, GREEDY) for request in requests))

    thread = threading.Thread(target=load)
    thread.start()
    answers = asyncio.run(everybody())
    thread.join()
    for request, (completion,) in zip(all_requests(), answers):
        check(expected[request.adapter], list(request.ids), completion)
    (late,) = engine.generate([Request(PROMPTS[0], adapter="late")], GREEDY)[0]
    check(with_peft(tiny.make("qwen2"), weights, 1.0), PROMPTS[0], late)
    engine.close()


def test_new_weights_of_the_model_reach_rows_with_adapters() -> None:
    engine, _ = case()
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight.mul_(1.3)
    base = copy.deepcopy(engine.model)
    engine.update_weights((), version=3)
    weights = weights_of(base, *(SPECS["small"][0], 0))
    (completion,) = engine.generate([Request(LONG, adapter="small")], GREEDY)[0]
    check(with_peft(base, weights, 2.0), LONG, completion)
    assert (completion.version, completion.adapter_version) == (3, 1)


def test_the_model_has_no_hooks_without_adapters_and_after_sampling() -> None:
    model = tiny.make("qwen2")
    engine = NativeEngine(model)

    def hooks() -> int:
        return sum(len(part._forward_hooks) for part in model.modules())

    with engine.borrowed_model():
        assert hooks() == 0
        engine.load_adapter("a", weights_of(model, 2, 0), 1.0)
        assert hooks() == 7 * len(model.model.layers)
    assert hooks() == 0
    engine.generate([Request(PROMPTS[0], adapter="a")], GREEDY)
    assert hooks() == 0


def test_names_as_in_the_files_of_peft() -> None:
    base = tiny.make("qwen2")
    engine = NativeEngine(copy.deepcopy(base))
    weights = weights_of(base, 3, 1)
    engine.load_adapter("a", {f"base_model.model.{key}.weight": weights[key] for key in weights}, 1.0)
    weights["model.layers.0.self_attn.q_proj.lora_A"].zero_()  # the engine has copies
    (completion,) = engine.generate([Request(PROMPTS[0], adapter="a")], GREEDY)[0]
    check(with_peft(base, weights_of(base, 3, 1), 1.0), PROMPTS[0], completion)


Q = "model.layers.0.self_attn.q_proj"
A, B = torch.ones(2, 32), torch.ones(32, 2)
BAD: dict[str, tuple[str, dict[str, Tensor], float, str]] = {
    "no_name": ("", {f"{Q}.lora_A": A, f"{Q}.lora_B": B}, 1.0, "name"),
    "no_weights": ("a", {}, 1.0, "no weights"),
    "unknown_module": ("a", {"model.layers.0.self_attn.q_prj.lora_A": A}, 1.0, "q_proj"),
    "unknown_part": ("a", {f"{Q}.lora_C": A}, 1.0, "lora_C"),
    "half": ("a", {f"{Q}.lora_A": A}, 1.0, f"no {Q}.lora_B"),
    "shape": ("a", {f"{Q}.lora_A": A, f"{Q}.lora_B": B.t()}, 1.0, r"\[32, rank\]"),
    "rank": ("a", {f"{Q}.lora_A": A[:1], f"{Q}.lora_B": B}, 1.0, r"\[32, rank\]"),
    "no_rank": ("a", {f"{Q}.lora_A": A[:0], f"{Q}.lora_B": B[:, :0]}, 1.0, r"\[rank, 32\]"),
    "nan": ("a", {f"{Q}.lora_A": A * float("nan"), f"{Q}.lora_B": B}, 1.0, "not finite"),
    "scale": ("a", {f"{Q}.lora_A": A, f"{Q}.lora_B": B}, float("inf"), "scale=inf"),
    "experts": ("a", {"model.layers.0.mlp.experts.0.up_proj.lora_A": A}, 1.0, "target_modules"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_adapters_are_refused_and_nothing_changes(bad: str) -> None:
    name, weights, scale, reason = BAD[bad]
    engine = NativeEngine(tiny.make("qwen2"))
    engine.load_adapter("good", {f"{Q}.lora_A": A, f"{Q}.lora_B": B}, 1.0)
    with pytest.raises(ValueError, match=reason):
        engine.load_adapter(name, weights, scale)
    assert error_of(engine, "a") == "no adapter 'a' is loaded; loaded are: good"
    with pytest.raises(ValueError, match="Did you mean 'good'"):
        engine.unload_adapter("goot")


def test_models_that_rows_cannot_be_told_apart_in_are_refused() -> None:
    merged = tiny.with_lora()
    merged.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        NativeEngine(merged).load_adapter("a", {f"{Q}.lora_A": A, f"{Q}.lora_B": B}, 1.0)
    for reason, config in (
        ("use_dora", LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)),
        ("embedding", LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"])),
        ("modules_to_save", LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])),
    ):
        with pytest.raises(ValueError, match=reason):
            engine = NativeEngine(get_peft_model(tiny.make("qwen2"), config))
            engine.load_adapter("a", {f"{Q}.lora_A": A, f"{Q}.lora_B": B}, 1.0)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_adapters_on_the_embeddings(quantization: str | None) -> None:
    """peft wraps the embeddings; the engine asks them for the size of the vocabulary."""
    config = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny.make("llama"), config).eval()
    groups = NativeEngine(model, quantization=quantization).generate([Request(p) for p in PROMPTS], GREEDY)
    for prompt, (answer,) in zip(PROMPTS, groups, strict=True):
        expected = tiny.plain_log_probs(model, prompt, answer.ids)
        found = expected.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        close = 1e-5 if quantization is None else 0.3
        torch.testing.assert_close(torch.tensor(answer.log_probs), found, atol=close, rtol=0)
