"""What every rollout engine must do, run over all of them: vLLM in its own environment, SGLang by a double of its server."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from typing import Any

import pytest
import torch

from strop.catalog import ENGINES
from strop.rollout.base import Completion, Engine, Request, Sampling, build_engine
from tests.rollout import engines, tiny

PROMPTS = [[5, 9, 2], [7, 1, 1, 4, 30, 12, 8, 77, 3, 2, 6], [11], [3, 4, 5, 6, 7, 8]]


@pytest.fixture(params=engines.ALL)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def everything(answers: list[list[Completion]]) -> list[Completion]:
    return [completion for group in answers for completion in group]


@pytest.mark.parametrize(("name", "kind"), engines.kinds())
def test_greedy_is_a_plain_forward_token_by_token(name: str, kind: str) -> None:
    model = engines.model(name, kind)
    engine = engines.build(name, model)
    answers = engine.generate(
        [Request(prompt, n=2) for prompt in PROMPTS], Sampling(temperature=0, max_tokens=9)
    )
    for prompt, group in zip(PROMPTS, answers):
        expected = tiny.plain_greedy(model, prompt, 9)
        assert [c.ids for c in group] == [expected, expected]
        assert {c.finish for c in group} == {"length"}


@pytest.mark.parametrize(("name", "kind"), engines.kinds())
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_log_probs_are_those_of_a_recomputation(name: str, kind: str, temperature: float) -> None:
    model = engines.model(name, kind)
    engine = engines.build(name, model)
    sampling = Sampling(temperature=temperature, top_k=20, top_p=0.95, max_tokens=12)
    for prompt, group in zip(PROMPTS, engine.generate([Request(p, n=3) for p in PROMPTS], sampling)):
        assert len(group) == 3
        for completion in group:
            assert len(completion.log_probs) == 12
            tiny.assert_log_probs(model, prompt, completion.ids, completion.log_probs, temperature)


def test_samples_differ_and_come_in_the_order_of_the_requests(name: str) -> None:
    engine = engines.build(name, engines.model(name))
    requests = [Request([3 + i] * (1 + i % 5), n=1 + i % 4, max_tokens=1 + i % 7) for i in range(20)]
    answers = engine.generate(requests, Sampling(max_tokens=99))
    assert [len(group) for group in answers] == [r.n for r in requests]
    assert [len(group[0].ids) for group in answers] == [r.max_tokens for r in requests]
    many = engine.generate([Request([5], n=16)], Sampling(max_tokens=8))[0]
    assert len({tuple(c.ids) for c in many}) == 16


def test_a_stop_token_ends_and_belongs_to_the_completion(name: str) -> None:
    model = engines.model(name)
    engine = engines.build(name, model)
    path = tiny.plain_greedy(model, PROMPTS[0], 12)
    stop = path[5]
    end = path.index(stop) + 1
    greedy = Sampling(temperature=0, max_tokens=12, stop_ids=(95, stop))
    (one,) = engine.generate([Request(PROMPTS[0])], greedy)[0]
    assert (one.ids, one.finish, len(one.log_probs)) == (path[:end], "stop", end)
    (one,) = engine.generate(
        [Request(PROMPTS[0])], Sampling(temperature=0, max_tokens=12, stop_ids=(stop,), ignore_eos=True)
    )[0]
    assert (one.ids, one.finish) == (path, "length")
    (one,) = engine.generate([Request(PROMPTS[0], max_tokens=end)], greedy)[0]
    assert one.finish == "stop", "a stop token in the last place is a stop"


def test_a_sequence_ends_at_the_longest_length(name: str) -> None:
    engine = engines.build(name, engines.model(name), max_model_len=16)
    answers = engine.generate(
        [Request([1] * 10), Request([1] * 15), Request([1] * 3)], Sampling(max_tokens=500)
    )
    assert [len(group[0].ids) for group in answers] == [6, 1, 13]
    assert {c.finish for c in everything(answers)} == {"length"}


def test_closing_twice_is_closing(name: str) -> None:
    if name == "vllm":
        pytest.skip("its engine is shared by all tests")
    engine = engines.build(name, engines.model(name))
    engine.close()
    engine.close()


def test_a_repetition_penalty_counts_the_tokens_of_the_prompt_alone(name: str) -> None:
    """Token 0, which engines may fill batches with, is the likeliest one, and not in the prompts."""
    logits = torch.full((tiny.VOCABULARY,), -1.0)
    logits[0], logits[1] = 2.0, 1.5
    engine = engines.build(name, tiny.fixed(logits, wide=name == "vllm"))
    greedy = Sampling(temperature=0, max_tokens=1, repetition_penalty=1.8)
    answers = engine.generate([Request([5]), Request([5, 9, 9, 9]), Request([5, 0])], greedy)
    assert [c.ids for c in everything(answers)] == [[0], [0], [1]]


@pytest.mark.parametrize(
    "setting",
    [
        *("temperature=-1", "temperature=nan", "temperature=1e-40"),
        *("top_p=0", "top_p=1.5", "min_p=-0.1", "min_p=2", "top_k=2.5", "top_k=inf"),
        *("repetition_penalty=0", "repetition_penalty=1e-50"),
    ],
)
def test_settings_that_no_distribution_has_are_refused(setting: str) -> None:
    key, _, value = setting.partition("=")
    with pytest.raises(ValueError, match=f"{key}={float(value)} must be"):
        Sampling(**{key: float(value)})  # type: ignore[arg-type] # all of these are numbers


@pytest.mark.parametrize("name", engines.ALL)
def test_whole_numbers_are_settings_too(name: str) -> None:
    engine = engines.build(name, engines.model(name))
    whole = Sampling(temperature=2, repetition_penalty=3, top_p=1, min_p=0, max_tokens=5)
    same = Sampling(temperature=2.0, repetition_penalty=3.0, max_tokens=5)
    request = Request([5, 9, 2], n=2, seed=4)
    found = [[c.ids for c in everything(engine.generate([request], s))] for s in (whole, same)]
    assert found[0] == found[1]


def test_a_stop_token_that_no_engine_can_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop_ids=\(3, 9223372036854775808\) must be token ids"):
        Sampling(stop_ids=(3, 1 << 63))


FILTERS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.5),
    "hot": Sampling(temperature=2.0),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.7),
    "min_p": Sampling(min_p=0.25),
    "all": Sampling(temperature=1.3, top_k=9, top_p=0.8, min_p=0.05),
    "penalty": Sampling(repetition_penalty=1.8),
}


def allowed(logits: torch.Tensor, s: Sampling) -> torch.Tensor:
    """The distribution to draw from, by the definitions: top-k, then top-p of the rest, then min-p."""
    probs = torch.softmax(logits.double() / s.temperature, -1)
    ranked, order = probs.sort(descending=True)
    if s.top_k > 0:
        ranked[s.top_k :] = 0
    ranked = ranked / ranked.sum()
    kept = [float(ranked[:i].sum()) < s.top_p for i in range(len(ranked))]
    ranked = torch.where(torch.tensor(kept) & (ranked >= s.min_p * ranked[0]), ranked, 0)
    return torch.zeros_like(probs).scatter(0, order, ranked / ranked.sum())


@pytest.mark.parametrize("case", FILTERS)
def test_tokens_are_drawn_from_the_right_distribution(name: str, case: str) -> None:
    """Chi-square against the definition; the bound is the mean of the statistic and five standard deviations."""
    sampling = FILTERS[case]
    torch.manual_seed(3)
    logits = torch.randn(tiny.VOCABULARY) * 2
    model = tiny.fixed(logits, wide=name == "vllm")
    prompt, draws = [5, 9], 4000
    if case == "penalty":
        seen = logits[prompt]
        logits = logits.clone()
        logits[prompt] = torch.where(seen < 0, seen * 1.8, seen / 1.8)
    expected = allowed(logits, sampling)
    engine = engines.build(name, model, max_num_seqs=1024)
    group = engine.generate(
        [Request(prompt, n=draws // 8) for _ in range(8)], Sampling(**{**vars(sampling), "max_tokens": 1})
    )
    counts = Counter(c.ids[0] for c in everything(group))
    observed = torch.tensor([counts[i] for i in range(tiny.VOCABULARY)], dtype=torch.float64)
    assert observed[expected == 0].sum() == 0
    often = expected * draws >= 5
    rest_seen, rest_due = observed[~often].sum(), expected[~often].sum() * draws
    chi = float((((observed - expected * draws) ** 2) / (expected * draws))[often].sum())
    freedom = int(often.sum()) - 1
    if rest_due >= 5:
        chi, freedom = chi + float((rest_seen - rest_due) ** 2 / rest_due), freedom + 1
    assert chi < freedom + 5 * math.sqrt(2 * max(1, freedom)), (chi, freedom)


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(name: str) -> None:
    engine = engines.build(name, engines.model(name))
    sampling = Sampling(max_tokens=10, temperature=1.2)
    mine = Request(PROMPTS[1], n=3, seed=42)
    alone = engine.generate([mine], sampling)[0]
    crowd = engine.generate(
        [Request([9] * 7, n=5), Request([1, 2], seed=7), mine, Request([4], n=2)], sampling
    )[2]
    assert [c.ids for c in alone] == [c.ids for c in crowd]
    assert len({tuple(c.ids) for c in alone}) == 3
    other = engine.generate([Request(PROMPTS[1], n=3, seed=43)], sampling)[0]
    assert [c.ids for c in other] != [c.ids for c in alone]
    unseeded = [engine.generate([Request(PROMPTS[1])], sampling)[0][0].ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_bad_requests_fail_alone(name: str) -> None:
    model = engines.model(name)
    engine = engines.build(name, model, max_model_len=32)
    engine.update_weights([], version=4)
    bad = [Request([]), Request([1] * 32), Request([1, 96]), Request([-1], n=3), Request([1], max_tokens=0)]
    good = Request(PROMPTS[0])
    answers = engine.generate([bad[0], good, *bad[1:]], Sampling(temperature=0, max_tokens=5))
    assert (answers[1][0].ids, answers[1][0].version) == (tiny.plain_greedy(model, PROMPTS[0], 5), 4)
    errors = [answers[0], *answers[2:]]
    assert [len(group) for group in errors] == [1, 1, 1, 3, 1]
    assert all((c.ids, c.finish, c.version) == ([], "error", 4) for c in everything(errors))
    words = ["the prompt is empty", "max_model_len=32", "token id 96", "token id -1", "max_tokens=0"]
    for group, part in zip(errors, words):
        assert part in (group[0].error or "")


def test_an_adapter_that_the_engine_does_not_have_fails_its_request_alone(name: str) -> None:
    model = engines.model(name)
    engine = engines.build(name, model)
    requests = [Request([1, 2], n=2, adapter="poet"), Request(PROMPTS[0])]
    answers = engine.generate(requests, Sampling(temperature=0, max_tokens=5))
    assert [(c.ids, c.finish) for c in answers[0]] == [([], "error")] * 2
    reason = "no adapter 'poet' is loaded" if name == "native" else "set rollout.name=native"
    assert reason in (answers[0][0].error or "") and "'poet'" in (answers[0][0].error or "")
    assert answers[1][0].ids == tiny.plain_greedy(model, PROMPTS[0], 5)


def test_new_weights_take_effect_and_stamp_their_version(name: str) -> None:
    model = engines.model(name)
    engine = engines.build(name, model)
    greedy = Sampling(temperature=0, max_tokens=6)
    first = engine.generate([Request(PROMPTS[0])], greedy)[0][0]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    engine.update_weights(model.named_parameters(), version=1)
    second = engine.generate([Request(PROMPTS[0])], greedy)[0][0]
    assert (first.version, second.version) == (0, 1)
    assert second.ids == tiny.plain_greedy(model, PROMPTS[0], 6) != first.ids


def test_weights_of_another_module_are_copied_in_by_name(name: str) -> None:
    model, other = engines.model(name), engines.model(name)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    engine = engines.build(name, model)
    engine.update_weights(other.state_dict().items(), version=2)
    answer = engine.generate([Request(PROMPTS[0])], Sampling(temperature=0, max_tokens=6))[0][0]
    assert answer.ids == tiny.plain_greedy(other, PROMPTS[0], 6)
    with pytest.raises(ValueError, match=r"no weight 'model.norm.wait'.*Did you mean 'model.norm.weight'"):
        engine.update_weights([("model.norm.wait", torch.zeros(32))], version=3)
    with pytest.raises(ValueError, match=r"\(\d+,\) in the engine and \(3,\) here"):
        engine.update_weights([("model.norm.weight", torch.zeros(3))], version=3)
    assert engine.version == 2


def test_training_is_the_same_before_and_after_a_rollout(name: str) -> None:
    model = engines.model(name)
    model.train()
    model.model.layers[0].eval()  # a frozen part stays frozen
    ids = torch.tensor([PROMPTS[1]])

    def gradients() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), torch.cat([w.grad.flatten() for w in model.parameters()])

    before, settings = gradients(), model.config.to_dict()
    flags = [part.training for part in model.modules()]
    attention, defaults = model.config._attn_implementation, model.generation_config
    engine = engines.build(name, model)
    engine.generate([Request(p, n=2) for p in PROMPTS], Sampling(max_tokens=4))
    after = gradients()
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert model.config.to_dict() == settings
    assert [part.training for part in model.modules()] == flags
    assert model.config._attn_implementation == attention and model.generation_config is defaults


def aborting(model: Any, engine: Engine, after: int) -> None:
    """Have the module itself call abort in its forward pass number `after`."""
    calls = 0

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            engine.abort()

    model.register_forward_pre_hook(hook)


def test_abort_returns_what_there_is(name: str) -> None:
    model = engines.model(name)
    engine = engines.build(name, model)
    engine.abort()  # nothing runs: nothing happens
    short = engine.generate([Request(PROMPTS[0], max_tokens=2)], Sampling(temperature=0))[0][0]
    assert short.finish == "length"
    if name in engines.OUTSIDE:
        if name == "sglang":
            aborting(engines.doubles[engine].module, engine, after=6)
        else:
            threading.Timer(0.05, engine.abort).start()
    else:
        aborting(model, engine, after=6)
    requests = [Request(PROMPTS[0]), Request(PROMPTS[1]), Request(PROMPTS[0], n=2)]
    answers = everything(engine.generate(requests, Sampling(temperature=0, max_tokens=100)))
    assert "abort" in {c.finish for c in answers} <= {"abort", "length"}
    stopped = [c for c in answers if c.finish == "abort"]
    assert all(len(c.ids) < 100 and len(c.ids) == len(c.log_probs) for c in stopped)
    again = engine.generate([Request(PROMPTS[0], max_tokens=3)], Sampling(temperature=0))[0][0]
    assert again.finish == "length"


def test_coroutines_get_what_a_batch_would_get(name: str) -> None:
    model = engines.model(name)
    engine = engines.build(name, model)
    requests = [Request(PROMPTS[i % 4], n=1 + i % 3, seed=i) for i in range(12)]
    sampling = Sampling(max_tokens=7)
    expected = engine.generate(requests, sampling)

    async def ask(i: int) -> list[Completion]:
        await asyncio.sleep(0.001 * i)
        return await engine.agenerate(requests[i], sampling)

    async def crowd() -> list[list[Completion]]:
        return await asyncio.gather(*(ask(i) for i in range(12)))

    for _ in range(2):  # a second event loop finds the engine alive
        found = asyncio.run(crowd())
        assert [[c.ids for c in group] for group in found] == [[c.ids for c in group] for group in expected]
    bad = asyncio.run(engine.agenerate(Request([]), sampling))
    assert bad[0].finish == "error"
    assert model.config._attn_implementation == "sdpa"
    engine.close()


def test_sleep_wake_and_stats(name: str) -> None:
    engine = engines.build(name, engines.model(name))
    sampling = Sampling(temperature=0, max_tokens=5)
    first = engine.generate([Request(PROMPTS[0], n=2)], sampling)
    engine.sleep()
    engine.wake()
    assert [c.ids for c in engine.generate([Request(PROMPTS[0], n=2)], sampling)[0]] == [
        c.ids for c in first[0]
    ]
    numbers = engine.stats()
    assert numbers["tokens"] == 20 and numbers["tokens_per_second"] > 0
    assert engine.stats()["tokens"] == 0


def test_settings_of_other_engines_are_left_out_and_unknown_ones_refused(name: str) -> None:
    if name not in engines.OUTSIDE:
        assert build_engine(name, tiny.make(), enforce_eager=True, max_num_seqs=None).version == 0
    with pytest.raises(ValueError, match=r"'max_num_seq'.*Did you mean 'max_num_seqs'"):
        build_engine(name, tiny.make(), max_num_seq=3)
    with pytest.raises(ValueError, match="max_model_len=500"):
        build_engine(name, tiny.make(), max_model_len=500)


@pytest.mark.parametrize("name", engines.NOT_NUMBERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_end_that_row_only(name: str, temperature: float) -> None:
    logits = torch.linspace(0, 3, tiny.VOCABULARY)
    logits[90] = -50  # never sampled, so only prompts hold it
    model = tiny.fixed(logits, wide=name == "vllm")
    with torch.no_grad():
        model.model.embed_tokens.weight[90] = math.nan
    engine = engines.build(name, model)
    requests = [Request([5, 90, 2], n=2), Request(PROMPTS[1], n=2), Request([90])]
    sampling = Sampling(temperature=temperature, max_tokens=6)
    for _ in range(2):  # the second time, rows are taken that held what is not a number
        answers = engine.generate(requests, sampling)
        for broken in [*answers[0], *answers[2]]:
            assert (broken.finish, broken.ids) == ("error", [])
            assert "not numbers" in (broken.error or "")
        assert all(c.finish == "length" and not any(map(math.isnan, c.log_probs)) for c in answers[1])
        if temperature == 0:
            assert answers[1][0].ids == [tiny.VOCABULARY - 1] * 6
    engines.forget(model)  # vLLM reads what is not a number again where it left it


def test_requests_that_come_during_generate_are_answered_or_refused(name: str) -> None:
    """The catalog says which engines take them; the collector relies on it."""
    model = engines.model(name)
    engine = engines.build(name, model)
    sampling = Sampling(temperature=0, max_tokens=4)
    later = [Request(PROMPTS[1]), Request(PROMPTS[2], n=2)]

    def more(free: int) -> list[Request]:
        assert free > 0
        return [later.pop(0)] if later else []

    if not ENGINES.entry(name).facts["fed"]:
        with pytest.raises(ValueError, match="cannot take further requests while it generates"):
            engine.generate([Request(PROMPTS[0])], sampling, more)
        assert len(later) == 2
    else:
        answers = engine.generate([Request(PROMPTS[0])], sampling, more)
        assert [len(group) for group in answers] == [1, 1, 2] and not later
        for prompt, group in zip(PROMPTS, answers):
            assert {tuple(c.ids) for c in group} == {tuple(tiny.plain_greedy(model, prompt, 4))}
    engine.close()


def test_every_engine_has_the_whole_protocol(name: str) -> None:
    engine = engines.build(name, engines.model(name))
    for member in [*Engine.__annotations__, *(key for key in vars(Engine) if not key.startswith("_"))]:
        assert hasattr(engine, member), member
    assert engine.same_stream in (True, False)
    engine.use_stream(None)
    engine.sleep()
    assert engine.release_memory() in (True, False)
    assert engine.release_memory() is False, "nothing is left after the first call"
    engine.wake()
    [[completion]] = engine.generate([Request([5, 9])], Sampling(temperature=0, max_tokens=2))
    assert len(completion.ids) == 2
    engine.close()
