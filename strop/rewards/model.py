"""A reward model in the loop: the whole conversation goes in, one number per response comes out.

Anything with `score(list of token-id lists) -> list of numbers` can be the model; `HeadModel` is the one made of a module.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from strop.config.schema.reward import RewardModel
from strop.rewards.sample import Sample, response_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_PER_FORWARD = 8
logger = logging.getLogger(__name__)


class TokenScorer(Protocol):
    def score(self, sequences: list[list[int]]) -> Sequence[float]:
        """The score of each sequence of token ids."""
        ...


class ModelScores:
    """Scores of a reward model, as a reward manager gives them.

    If the model shares the policy's tokenizer it reads the policy's tokens as they are. Otherwise prompt messages and the
    decoded response are rendered with the model's own chat template and tokenizer. Inputs beyond `max_length` lose their end.
    """

    def __init__(
        self,
        model: TokenScorer,
        tokenizer: PreTrainedTokenizerBase,
        own_tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_length: int | None = None,
        mean: float = 0.0,
        std: float = 1.0,
    ):
        """`own_tokenizer` is the model's, None when it is the policy's; scores become (score - mean) / std."""
        if std <= 0:
            raise ValueError(f"Scores cannot be normalised with a deviation of {std}.")
        self.model, self.tokenizer = model, tokenizer
        self.own_tokenizer = None if own_tokenizer is None or same_language(tokenizer, own_tokenizer) else own_tokenizer
        if self.own_tokenizer is not None and not self.own_tokenizer.chat_template:
            raise ValueError(
                "The reward model's tokenizer has no chat template, so conversations cannot be rendered for it. Set "
                "reward_model.model.custom_chat_template, or reward_model.model.input_tokenizer=null if it shares the policy's "
                "tokens."
            )
        self.max_length, self.mean, self.std = max_length, mean, std

    def score(self, samples: Sequence[Sample]) -> list[Any]:
        sequences = self._sequences(samples)
        if self.max_length is not None:
            long = sum(len(ids) > self.max_length for ids in sequences)
            if long:
                logger.warning(
                    "%d of %d inputs of the reward model were cut to max_length=%d.", long, len(sequences), self.max_length
                )
            sequences = [ids[: self.max_length] for ids in sequences]
        scores = self.model.score(sequences)
        if len(scores) != len(sequences):
            raise ValueError(f"The reward model was given {len(sequences)} sequences and returned {len(scores)} scores.")
        return [(float(score) - self.mean) / self.std for score in scores]

    def _sequences(self, samples: Sequence[Sample]) -> list[list[int]]:
        if self.own_tokenizer is None:
            return [sample.trajectory.prompt.ids + sample.trajectory.response for sample in samples]
        texts = response_texts([sample.trajectory for sample in samples], self.tokenizer, whole_transcript=True)
        rendered = [
            self.own_tokenizer.apply_chat_template(
                [*sample.trajectory.prompt.messages, {"role": "assistant", "content": text}],
                tokenize=False,
                add_generation_prompt=False,
            )
            for sample, text in zip(samples, texts, strict=True)
        ]
        return [list(ids) for ids in self.own_tokenizer(rendered, add_special_tokens=False)["input_ids"]]


def same_language(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give the same ids to the same conversation."""
    return one is other or (one.chat_template == other.chat_template and one.get_vocab() == other.get_vocab())


class HeadModel:
    """A module with a scalar head, in micro-batches of at most `rows` sequences, or of at most `max_tokens` tokens."""

    def __init__(self, module: Any, *, rows: int = ROWS_PER_FORWARD, max_tokens: int | None = None, packed: bool = True):
        self.module, self.rows, self.max_tokens, self.packed = module.eval(), rows, max_tokens, packed

    def score(self, sequences: list[list[int]]) -> list[float]:
        import torch

        from strop.models.forward import sequence_scores

        scores = [0.0] * len(sequences)
        with torch.no_grad():
            for rows in self._micro_batches([len(ids) for ids in sequences]):
                inputs = [torch.tensor(sequences[row], dtype=torch.long) for row in rows]
                found = sequence_scores(self.module, inputs, packed=self.packed)
                for row, score in zip(rows, found.float().cpu().tolist(), strict=True):
                    scores[row] = score
        return scores

    def _micro_batches(self, lengths: list[int]) -> list[list[int]]:
        if self.max_tokens is None:
            by_length = sorted(range(len(lengths)), key=lambda row: lengths[row])  # neighbours of one length waste no padding
            return [by_length[start : start + self.rows] for start in range(0, len(lengths), self.rows)]
        from strop.data.balance import micro_batches

        return micro_batches(lengths, max(self.max_tokens, *lengths), light_ends=False) if lengths else []


def load_model(settings: RewardModel, *, device: Any = "cpu", dtype: Any = None) -> HeadModel:
    """The frozen model of `reward_model.model`, with the micro-batches that the section asks for."""
    import torch

    from strop.models.build import build_reward_model

    module = build_reward_model(settings.model, dtype=dtype or torch.float32).to(device)
    rows = settings.micro_batch_size_per_gpu or settings.micro_batch_size or ROWS_PER_FORWARD
    budget = settings.forward_max_token_len_per_gpu if settings.use_dynamic_bsz else None
    return HeadModel(module, rows=rows, max_tokens=budget, packed=settings.model.use_remove_padding)


def model_scores(settings: RewardModel, tokenizer: PreTrainedTokenizerBase, model: TokenScorer | None = None) -> ModelScores:
    """The model as the section describes it; `model` is one that is loaded already, else it is loaded on the CPU.

    Its tokenizer is `model.tokenizer` if there is one, else the one beside its weights.
    """
    own = None
    if settings.model.input_tokenizer is not None:
        own = getattr(model, "tokenizer", None)
        if own is None and settings.model.path is not None:
            from strop.models.build import build_tokenizer

            own = build_tokenizer(settings.model)
    model = model if model is not None else load_model(settings)
    mean, std = stored_statistics(settings, model) if settings.normalize else (0.0, 1.0)
    return ModelScores(model, tokenizer, own, max_length=settings.max_length, mean=mean, std=std)


def stored_statistics(settings: RewardModel, model: TokenScorer) -> tuple[float, float]:
    """Mean and deviation that the training of the reward model left in its config.json."""
    config = getattr(getattr(model, "module", model), "config", None)
    if config is None and settings.model.path is not None:
        from strop.models.load import load_config, resolve

        config = load_config(resolve(settings.model.path), trust_remote_code=settings.model.trust_remote_code)
    mean, std = getattr(config, "mean", None), getattr(config, "std", None)
    if mean is None or std is None:
        raise ValueError(
            f"reward_model.normalize=true, but the config.json of {settings.model.path or 'the reward model'} holds no mean "
            "and std of its scores. Train it with a reward trainer that writes them, or set reward_model.normalize=false."
        )
    return float(mean), max(float(std), 1e-8)
