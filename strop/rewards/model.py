"""A reward model in the training loop: it reads the whole conversation and returns one number per response.

Anything with `score(list of token-id lists) -> list of numbers` can be the model. Images of prompts are its
second argument. `HeadModel` wraps a torch module.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from strop.config.schema.reward import RewardModelConfig
from strop.data.chat import Chat
from strop.rewards.base import RewardSample, response_texts
from strop.types import Images

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS_PER_FORWARD = 8
MIN_STD = 1e-8
logger = logging.getLogger(__name__)


class TokenScorer(Protocol):
    """A model that scores token ids."""

    def score(self, sequences: list[list[int]], images: Sequence[Images] | None = None) -> Sequence[float]:
        """Return the score of each sequence of token ids. `images` are given where a sequence has some."""
        ...


class RewardModelScorer:
    """Scores samples with a reward model; it is used like a reward manager.

    A model that shares the policy's tokenizer reads the policy's token ids. For any other model, the prompt
    messages and the decoded response are rendered with the model's chat template and tokenizer. Inputs longer
    than `max_length` are cut at the end.
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
        ends_with_answer: bool = False,
    ):
        """`own_tokenizer` is the model's, None if it is the policy's; scores become (score - mean) / std.
        `ends_with_answer`: the model learned to score at the last token of the answer, not at white space
        that its chat template writes after it."""
        if std <= 0:
            raise ValueError(f"Scores cannot be normalised with a standard deviation of {std}.")
        if own_tokenizer is not None and same_tokenization(tokenizer, own_tokenizer):
            own_tokenizer = None
        if own_tokenizer is not None and not own_tokenizer.chat_template:
            raise ValueError(
                "The reward model's tokenizer has no chat template, so conversations cannot be rendered for "
                "it. Set reward_model.model.custom_chat_template, or reward_model.model.input_tokenizer=null "
                "if it shares the policy's tokens."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.own_tokenizer = own_tokenizer
        self.max_length = max_length
        self.mean = mean
        self.std = std
        self.ends_with_answer = ends_with_answer

    def score(self, samples: Sequence[RewardSample]) -> Sequence[float | Exception]:
        images = [sample.trajectory.prompt.images for sample in samples]
        sequences = self._encode(samples)
        if any(images):
            return self._score_images(sequences, images)
        return self._scores(self._truncate(sequences))

    def _score_images(self, sequences: list[list[int]], images: Sequence[Images]) -> list[float | Exception]:
        """Scores where some sequences have images, which are never cut: a sequence that is too long has no
        score."""
        if self.own_tokenizer is not None:
            raise ValueError(
                "The prompt has images, and the tokenizer or chat template of the reward model is not that "
                "of the policy, so its image tokens are not known. Set reward_model.model.input_tokenizer="
                "null if both are of one family."
            )
        fits = [self.max_length is None or len(ids) <= self.max_length for ids in sequences]
        chosen = [row for row, fit in enumerate(fits) if fit]
        scores = iter(self._scores([sequences[row] for row in chosen], [images[row] for row in chosen]))
        found: list[float | Exception] = []
        for ids, fit in zip(sequences, fits, strict=True):
            if fit:
                found.append(next(scores))
            else:
                found.append(
                    ValueError(
                        f"A conversation with images has {len(ids)} tokens, over "
                        f"reward_model.max_length={self.max_length}."
                    )
                )
        return found

    def _scores(self, sequences: list[list[int]], images: Sequence[Images] | None = None) -> list[float]:
        scores = self.model.score(sequences) if images is None else self.model.score(sequences, images)
        if len(scores) != len(sequences):
            raise ValueError(
                f"The reward model was given {len(sequences)} sequences and returned {len(scores)} scores."
            )
        return [(float(score) - self.mean) / self.std for score in scores]

    def _truncate(self, sequences: list[list[int]]) -> list[list[int]]:
        if self.max_length is None:
            return sequences
        too_long = sum(len(ids) > self.max_length for ids in sequences)
        if too_long:
            logger.warning(
                "%d of %d inputs of the reward model were cut to max_length=%d.",
                too_long,
                len(sequences),
                self.max_length,
            )
        return [ids[: self.max_length] for ids in sequences]

    def _encode(self, samples: Sequence[RewardSample]) -> list[list[int]]:
        trajectories = [sample.trajectory for sample in samples]
        if self.own_tokenizer is None:
            return [trajectory.prompt.ids + trajectory.response for trajectory in trajectories]
        chat = Chat(self.own_tokenizer)
        conversations = []
        texts = response_texts(trajectories, self.tokenizer, whole_transcript=True)
        for trajectory, text in zip(trajectories, texts, strict=True):
            messages = [*trajectory.prompt.messages, {"role": "assistant", "content": text}]
            conversations.append(chat.text(messages))
        encoded = self.own_tokenizer(conversations, add_special_tokens=False)["input_ids"]
        return [self._up_to_answer(list(ids)) if self.ends_with_answer else list(ids) for ids in encoded]

    def _up_to_answer(self, ids: list[int]) -> list[int]:
        assert self.own_tokenizer is not None
        end = len(ids)
        while end > 1 and not str(self.own_tokenizer.decode(ids[end - 1 : end])).strip():
            end -= 1
        return ids[:end]


def same_tokenization(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give the same ids to the same conversation."""
    return one is other or (one.chat_template == other.chat_template and one.get_vocab() == other.get_vocab())


class HeadModel:
    """A module with a scalar head; its micro-batches have at most `rows` sequences, or `max_tokens`
    tokens. With `onload_to` the module is on that device only while it scores, else in host memory."""

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        rows: int = ROWS_PER_FORWARD,
        max_tokens: int | None = None,
        packed: bool = True,
        onload_to: str | torch.device | None = None,
    ):
        self.module = module.eval()
        self.onload_to = onload_to
        self.rows = rows
        self.max_tokens = max_tokens
        self.packed = packed

    def score(self, sequences: list[list[int]], images: Sequence[Images] | None = None) -> list[float]:
        """Return the score of each sequence."""
        if self.onload_to is None:
            return self._score(sequences, images)
        self.module.to(self.onload_to)
        try:
            return self._score(sequences, images)
        finally:
            self.module.to("cpu")

    def _score(self, sequences: list[list[int]], images: Sequence[Images] | None) -> list[float]:
        import torch

        from strop.models.forward import sequence_scores
        from strop.models.layouts.check import runs_packed

        packed = runs_packed(self.module, self.packed)
        scores = [0.0] * len(sequences)
        with torch.no_grad():
            for rows in self._passes([len(ids) for ids in sequences], images is not None):
                inputs = [torch.tensor(sequences[row], dtype=torch.long) for row in rows]
                shown = None if images is None else [images[row] for row in rows]
                row_scores = sequence_scores(self.module, inputs, shown, packed=packed)
                for row, score in zip(rows, row_scores.float().cpu().tolist(), strict=True):
                    scores[row] = score
        return scores

    def _passes(self, lengths: list[int], with_images: bool) -> Iterator[list[int]]:
        """The rows of each pass. Those for which longrope has other angles are apart."""
        from strop.models.packing import longrope_limit

        limit = longrope_limit(self.module.config) or max(lengths, default=0)
        for longer in (False, True):
            part = [row for row, length in enumerate(lengths) if (length > limit) == longer]
            for rows in self._micro_batches([lengths[row] for row in part], with_images):
                yield [part[row] for row in rows]

    def _micro_batches(self, lengths: list[int], with_images: bool) -> list[list[int]]:
        if not lengths:
            return []
        # Samples of a prompt are neighbours: in this order a pass computes its images once.
        order = list(range(len(lengths)))
        if self.max_tokens is None:
            if not with_images:
                order.sort(key=lambda row: lengths[row])  # equal lengths need no padding
            return [order[start : start + self.rows] for start in range(0, len(lengths), self.rows)]
        from strop.data.balance import micro_batches, neighbour_micro_batches

        if with_images:
            return neighbour_micro_batches(lengths, order, max(self.max_tokens, *lengths))
        return micro_batches(lengths, max(self.max_tokens, *lengths), light_ends=False)


def load_model(
    settings: RewardModelConfig,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    offload: bool = False,
) -> HeadModel:
    """Load the frozen model of `reward_model.model`, with the micro-batch settings of the section. With
    `offload` its weights are in host memory between passes."""
    import torch

    from strop.models.build import build_reward_model
    from strop.models.patches import patch_for_device

    module = build_reward_model(settings.model, dtype=dtype or torch.float32).to(device)
    patch_for_device(module, only=["flash_attention"])
    rows, max_tokens = pass_sizes(settings)
    onload_to = device if offload else None
    if offload:
        module = module.to("cpu")
    return HeadModel(
        module,
        rows=rows,
        max_tokens=max_tokens,
        packed=settings.model.use_remove_padding,
        onload_to=onload_to,
    )


def pass_sizes(settings: RewardModelConfig) -> tuple[int, int | None]:
    """Sequences of a forward pass, and its tokens if it is filled by them."""
    rows = settings.micro_batch_size_per_gpu or settings.micro_batch_size or ROWS_PER_FORWARD
    return rows, settings.forward_max_token_len_per_gpu if settings.use_dynamic_bsz else None


def build_reward_model_scorer(
    settings: RewardModelConfig, tokenizer: PreTrainedTokenizerBase, model: TokenScorer | None = None
) -> RewardModelScorer:
    """Build the scorer of the section; `model` is used if given, else the model is loaded on the CPU.

    Its tokenizer is `model.tokenizer` if there is one, else the one in the folder of its weights.
    """
    own_tokenizer: PreTrainedTokenizerBase | None = None
    if settings.model.input_tokenizer is not None:
        own_tokenizer = getattr(model, "tokenizer", None)
        if own_tokenizer is None and settings.model.path is not None:
            from strop.models.build import build_tokenizer

            own_tokenizer = build_tokenizer(settings.model)
    if model is None:
        model = load_model(settings)
    mean, std = 0.0, 1.0
    if settings.normalize:
        mean, std = stored_statistics(settings, model)
    return RewardModelScorer(
        model,
        tokenizer,
        own_tokenizer,
        max_length=settings.max_length,
        mean=mean,
        std=std,
        ends_with_answer=saved_statistics(settings, model) is not None,
    )


def saved_statistics(settings: RewardModelConfig, model: TokenScorer) -> tuple[float, float] | None:
    """The mean and standard deviation of scores in config.json; None if they are not there. Those trainers
    that save them (`strop rm` and OpenRLHF) train on conversations up to the last token of the answer.

    Lists of several numbers are about something else, such as the colors of images.
    """
    mean, std = (_one_number(value) for value in _named_statistics(settings, model))
    if mean is None or std is None or std < 0:
        return None
    return mean, std


def _named_statistics(settings: RewardModelConfig, model: TokenScorer) -> tuple[object, object]:
    config = getattr(getattr(model, "module", model), "config", None)
    if config is None and settings.model.path is not None:
        from strop.models.load import load_config, resolve

        config = load_config(resolve(settings.model.path), trust_remote_code=settings.model.trust_remote_code)
    return getattr(config, "mean", None), getattr(config, "std", None)


def _one_number(value: object) -> float | None:
    """A finite number, also as the only one of a list."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def stored_statistics(
    settings: RewardModelConfig, model: TokenScorer, *, key: str = "reward_model.normalize"
) -> tuple[float, float]:
    """Return the mean and standard deviation of scores that reward model training saved in config.json.
    `key` asks for them."""
    saved = saved_statistics(settings, model)
    if saved is None:
        mean, std = _named_statistics(settings, model)
        problem = "holds no mean and std of its scores"
        if mean is not None or std is not None:
            problem = f"holds mean={mean!r} and std={std!r}, and each must be one number (std not below 0)"
        raise ValueError(
            f"{key}=true, but the config.json of {settings.model.path or 'the reward model'} {problem}. "
            "Write the numbers of its scores into it, train it with a reward trainer that writes them, or "
            f"set {key}=false."
        )
    return saved[0], max(saved[1], MIN_STD)
