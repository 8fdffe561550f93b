"""A reward model in the loop: what it reads, how its scores are normalised, and that micro-batches change nothing."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strop.config.schema.reward import RewardModelWeightsConfig
from strop.data.chat import Chat
from strop.data.examples import PreferencePair
from strop.models.heads import new_scalar_model
from strop.rewards.base import build_samples
from strop.rewards.model import HeadModel, RewardModelScorer, same_tokenization
from strop.supervised.tasks import pair_batch
from tests.data.tokens import CHATML, UNENDING
from tests.models.test_families import longrope
from tests.rewards.scene import TOKENIZER, ids, reading_tokenizer, scorer, trajectory


class Lengths:
    """Scores a sequence with its length, and remembers what it read."""

    def __init__(self, **more: Any):
        self.read: list[list[int]] = []
        self.__dict__.update(more)

    def score(self, sequences: list[list[int]]) -> list[float]:
        self.read += sequences
        return [float(len(sequence)) for sequence in sequences]


def samples(*texts: str) -> Any:
    return build_samples([trajectory(text) for text in texts], TOKENIZER)


def test_tokens_as_they_are_where_the_language_is_shared() -> None:
    for own in (None, TOKENIZER, reading_tokenizer()):
        model = Lengths()
        assert RewardModelScorer(model, TOKENIZER, own).score(samples("a", "abc")) == [6.0, 8.0]
        assert model.read[1] == [*ids("2+2?abc"), TOKENIZER.eos_token_id]


def test_rendered_anew_for_another_language() -> None:
    own = reading_tokenizer(template=UNENDING)
    assert not same_tokenization(TOKENIZER, own)
    model = Lengths()
    RewardModelScorer(model, TOKENIZER, own).score(samples("abc", ""))
    assert [own.decode(read) for read in model.read] == [
        "user: 2+2?\nassistant: abc\n",
        "user: 2+2?\nassistant: \n",
    ]
    with pytest.raises(ValueError, match="tokenizer has no chat template"):
        RewardModelScorer(model, TOKENIZER, reading_tokenizer(template=None))


def test_messages_are_given_in_the_forms_that_its_template_reads() -> None:
    """A prompt with contents as parts, and a template that would write Python's notation of them."""
    own = reading_tokenizer(template=UNENDING)
    conversation = trajectory("abc")
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    prompt = dataclasses.replace(conversation.prompt, messages=parts)
    model = Lengths()
    sample = build_samples([dataclasses.replace(conversation, prompt=prompt)], TOKENIZER)
    RewardModelScorer(model, TOKENIZER, own).score(sample)
    assert [own.decode(read) for read in model.read] == ["user: 2+2?\nassistant: abc\n"]


def test_a_model_of_our_trainer_reads_what_it_was_trained_on() -> None:
    """It learned its score at the end token of the answer; its template writes a newline after that."""
    own = reading_tokenizer(template=CHATML + "{# of another family #}")
    conversation = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "abc"}]
    trained = pair_batch(
        [PreferencePair(Chat(own).conversation(conversation), Chat(own).conversation(conversation))]
    )
    for more in ({}, {"config": SimpleNamespace(mean=4.0, std=2.0)}):
        model = Lengths(tokenizer=own, **more)
        scorer(enable=True, model=model).score([trajectory("abc")])
        [read] = model.read
        if more:
            assert read == trained.sequences[0].tolist() and read[-1] == own.eos_token_id
        else:  # a model of somebody else reads the conversation as its template writes it
            assert read == own(own.apply_chat_template(conversation, tokenize=False))["input_ids"]
            assert own.decode(read).endswith("<|im_end|>\n")


def test_long_inputs_are_cut_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert RewardModelScorer(Lengths(), TOKENIZER, max_length=7).score(samples("a", "abcdef")) == [6.0, 7.0]
    assert "1 of 2 inputs of the reward model were cut to max_length=7" in caplog.text


def test_normalised_with_what_its_training_left() -> None:
    model = Lengths(config=SimpleNamespace(mean=4.0, std=2.0))
    weights = RewardModelWeightsConfig(input_tokenizer=None)
    answers = [trajectory("a"), trajectory("abc")]
    report = scorer(enable=True, model=model, normalize=True, clip_range=[-1.5, 1.5], weights=weights).score(
        answers
    )
    assert [t.score for t in answers] == [1.0, 1.5] and report.metrics[
        "reward/score/mean"
    ] == 1.5  # (6-4)/2, (8-4)/2 clipped
    with pytest.raises(ValueError, match="holds no mean and std"):
        scorer(enable=True, model=Lengths(config=SimpleNamespace()), normalize=True, weights=weights)


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ([0.48, 0.46, 0.41], [0.27, 0.26, 0.28]),
        ("4", 2.0),
        (float("nan"), 2.0),
        (4.0, -2.0),
        (4.0, None),
        (True, 2.0),
    ],
)
def test_statistics_that_are_not_a_number_each_are_refused_where_they_are_used(
    mean: object, std: object
) -> None:
    """Some configurations have those of image colors under these names: they were a bare TypeError, also
    without normalisation."""
    weights = RewardModelWeightsConfig(input_tokenizer=None, path="some/model")
    model = Lengths(config=SimpleNamespace(mean=mean, std=std))
    shown = re.escape(f"config.json of some/model holds mean={mean!r} and std={std!r}")
    with pytest.raises(
        ValueError, match=rf"reward_model\.normalize=true, but the {shown}.*reward_model\.normalize=false"
    ):
        scorer(enable=True, model=model, normalize=True, weights=weights)
    answer = trajectory("abc")
    scorer(enable=True, model=model, weights=weights).score([answer])
    assert answer.score == 8.0


def test_statistics_in_lists_of_one_number() -> None:
    weights = RewardModelWeightsConfig(input_tokenizer=None)
    answer = trajectory("a")
    model = Lengths(config=SimpleNamespace(mean=[4.0], std=[2]))
    scorer(enable=True, model=model, normalize=True, weights=weights).score([answer])
    assert answer.score == 1.0


def test_not_a_number_masks_and_a_wrong_count_stops() -> None:
    class Odd:
        tokenizer = TOKENIZER

        def __init__(self, scores: list[float]):
            self.scores = scores

        def score(self, sequences: list[list[int]]) -> list[float]:
            return self.scores

    answers = [trajectory(), trajectory()]
    report = scorer(enable=True, model=Odd([float("nan"), 2.0])).score(answers)
    assert [t.score for t in answers] == [None, 2.0] and report.failed == 1
    with pytest.raises(ValueError, match="given 2 sequences and returned 1 scores"):
        scorer(enable=True, model=Odd([1.0])).score([trajectory(), trajectory()])


def test_a_function_reads_the_models_score(tmp_path: Path) -> None:
    code = "def compute_score(solution_str, extra_info): return extra_info['rm_score'] - 100\n"
    answer = trajectory("abc")
    scorer(tmp_path, code, enable=True, model=Lengths(tokenizer=TOKENIZER)).score([answer])
    assert answer.score == -92.0 and answer.extras == {"rm_score": 8.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model as a trainer leaves it, with its tokenizer and the statistics of its scores."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_labels=1,
        pad_token_id=0,
    )
    path = tmp_path_factory.mktemp("reward-model")
    Qwen2ForSequenceClassification(config).save_pretrained(path)
    reading_tokenizer(template=UNENDING).save_pretrained(path)
    settings = json.loads((path / "config.json").read_text()) | {"mean": 0.25, "std": 0.5}
    (path / "config.json").write_text(json.dumps(settings))
    return path


def test_a_real_model_from_a_folder(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    keys: dict[str, Any] = {
        "enable": True,
        "normalize": True,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
    }
    weights = RewardModelWeightsConfig(
        path=str(folder), trust_remote_code=False, external_lib=None, value_head_prefix="score"
    )
    texts = ["a", "abcdefgh", "", "xyz", "12"]
    answers = [trajectory(text) for text in texts]
    scorer(weights=weights, **keys).score(answers)

    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, answer in zip(texts, answers):
        read = tokenizer(
            f"user: 2+2?\nassistant: {text}".rstrip(), add_special_tokens=False, return_tensors="pt"
        )["input_ids"]
        with torch.no_grad():
            meant = (plain(read).logits.item() - 0.25) / 0.5
        assert answer.score == pytest.approx(meant, abs=1e-4)


def test_micro_batches_change_nothing(folder: Path) -> None:
    from strop.models.build import build_reward_model

    weights = RewardModelWeightsConfig(
        path=str(folder), trust_remote_code=False, external_lib=None, value_head_prefix="score"
    )
    module = build_reward_model(weights)
    sequences = [ids("abcdefghij"[: 1 + i % 7]) for i in range(11)]
    meant = HeadModel(module, rows=1).score(sequences)
    for other in (
        {"rows": 4},
        {"rows": 100},
        {"max_tokens": 9},
        {"max_tokens": 2},
        {"rows": 3, "packed": False},
    ):
        assert HeadModel(module, **other).score(sequences) == pytest.approx(meant, abs=1e-5)
    assert HeadModel(module, max_tokens=9).score([]) == []


@torch.no_grad()
def test_sequences_for_which_longrope_has_other_angles_are_scored_apart() -> None:
    module = new_scalar_model(longrope(24).config).eval()
    sequences = [list(range(3, 3 + length)) for length in (9, 40, 24, 33, 25, 2)]
    meant = [float(module(input_ids=torch.tensor([one])).logits[0, -1, 0]) for one in sequences]
    for how in ({"rows": 8}, {"rows": 2}, {"max_tokens": 4096}, {"max_tokens": 9}):
        assert HeadModel(module, **how).score(sequences) == pytest.approx(meant, abs=1e-5)


def test_every_live_key_of_the_weights_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers test goes by classes, which the reward model shares with trained models; this one records
    what building and scoring read."""
    from strop.config.compose import load
    from strop.config.schema.reflect import keys
    from strop.config.schema.reward import RewardModelFsdpConfig
    from strop.ppo.roles import make_reward_model
    from strop.rewards.model import build_reward_model_scorer

    words = [f"reward_model.model.path={folder}", "reward_model.enable=true", "trainer.device=cpu"]
    words.append(f"actor_rollout_ref.model.path={folder}")  # the policy's tokenizer
    config = load("ppo_trainer", words).config
    read: dict[type, set[str]] = {RewardModelWeightsConfig: set(), RewardModelFsdpConfig: set()}

    def recorded(self: object, name: str) -> object:
        read[type(self)].add(name)
        return object.__getattribute__(self, name)

    for kind in read:
        monkeypatch.setattr(kind, "__getattribute__", recorded, raising=False)
    build_reward_model_scorer(config.reward_model, TOKENIZER, make_reward_model(config))
    monkeypatch.undo()
    unread = []
    for key in keys(config.reward_model.model):
        if not key.inert and key.owner in read and key.name not in read[key.owner]:
            unread.append(key.path)
    assert unread == []


def test_adapters_are_merged_into_the_weights(folder: Path, tmp_path: Path) -> None:
    from strop.models.build import build_reward_model
    from strop.models.lora import add_adapters

    weights = RewardModelWeightsConfig(
        path=str(folder), trust_remote_code=False, external_lib=None, value_head_prefix="score"
    )
    sequences = [ids("abc"), ids("abcdef")]
    plain = HeadModel(build_reward_model(weights)).score(sequences)
    adapted = add_adapters(build_reward_model(weights), rank=2, alpha=8)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.3)
    meant = HeadModel(adapted).score(sequences)
    adapted.save_pretrained(tmp_path)
    weights.lora_adapter_path = str(tmp_path)
    merged = HeadModel(build_reward_model(weights)).score(sequences)
    assert merged == pytest.approx(meant, abs=1e-4) and merged != pytest.approx(plain, abs=1e-3)


def test_an_offloaded_model_is_on_its_device_only_while_it_scores() -> None:
    places: list[str] = []

    class Module(torch.nn.Module):
        def to(self, device: Any) -> Any:  # type: ignore[override]
            places.append(str(device))
            return self

    class Model(HeadModel):
        def _score(self, sequences: list[list[int]], images: object = None) -> list[float]:
            places.append("score")
            if not sequences:
                raise ValueError("nothing to score")
            return [0.0]

    model = Model(Module(), onload_to="cuda")  # type: ignore[arg-type]
    model.score([[1]])
    with pytest.raises(ValueError, match="nothing"):
        model.score([])
    assert places == ["cuda", "score", "cpu"] * 2
