"""The model of the quickstart: about a million parameters and one token per character, trained in seconds."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from strop.algorithms.aggregation import Totals
from strop.algorithms.losses import sft_loss
from strop.backends.base import BackendSettings, MicroBatching, Outputs
from strop.backends.single import SingleBackend
from strop.config.schema.model import OptimConfig
from strop.data.files import open_rows
from strop.rollout.base import Request, Sampling, build_engine
from strop.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

CHARACTERS = "0123456789+-*="
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% "
    "endfor %}"
)
Pair = tuple[str, str]
"""A question and its answer."""


def tiny_tokenizer(words: Sequence[str] = (), template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    """One token per character of CHARACTERS, and one for each of `words`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = dict.fromkeys(["<pad>", "<eos>", "<unk>", *words, *CHARACTERS])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*map(re.escape, words), "."])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template = template
    return made


def tiny_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden: int = 192,
    layers: int = 2,
    seed: int = 0,
    max_model_len: int = 64,
) -> PreTrainedModel:
    """A Llama model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_model_len,
        initializer_range=0.06,  # the usual 0.02 is for wide models; a narrow model learns slowly with it
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: list[Pair],
    held_out: list[Pair],
    *,
    until: float,
    seed: int = 0,
    max_steps: int = 3000,
    rows: int = 64,
    lr: float = 2e-3,
) -> float:
    """Supervised training until the sampled accuracy is `until`; returns the accuracy that was reached."""
    right = 0.0
    for step in teach(model, tokenizer, train, seed=seed, rows=rows, lr=lr):
        if step % 10 == 0:
            right = accuracy(model, tokenizer, held_out, temperature=1.0)
            if right >= until or step >= max_steps:
                break
    return right


def teach(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[Pair],
    *,
    seed: int = 0,
    rows: int = 64,
    lr: float = 2e-3,
) -> Iterator[int]:
    """Supervised training: yields the number of updates so far, and makes one more before the next yield."""
    optim = OptimConfig(lr=lr, betas=[0.9, 0.98], weight_decay=0.0, lr_warmup_steps=20)
    backend = SingleBackend(model, BackendSettings(optim=optim))
    for step, batch in enumerate(_batches(pairs, tokenizer, rows, seed)):
        yield step
        totals = Totals.of(batch.mask)

        def loss(
            outputs: Outputs, micro: Batch, totals: Totals = totals
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            assert outputs.log_probs is not None
            return sft_loss(outputs.log_probs, micro.mask, totals), {}

        backend.forward_backward(batch, ["log_probs"], loss, MicroBatching(rows=rows))
        backend.step()
        backend.advance_schedule()


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[Pair],
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> float:
    """The share of right answers; greedy by default."""
    engine = build_engine("native", model, max_model_len=64)
    requests: list[Request] = []
    for question, _ in pairs:
        requests.append(Request(tokenizer.encode(question), seed=seed + len(requests)))
    sampling = Sampling(temperature=temperature, max_tokens=8, stop_ids=(tokenizer.eos_token_id,))
    answers = engine.generate(requests, sampling)
    engine.close()
    right = 0
    for answer, (_, expected) in zip(answers, pairs):
        right += tokenizer.decode(answer[0].ids, skip_special_tokens=True) == expected
    return right / len(pairs)


def pairs_of(file: str | Path) -> list[Pair]:
    """(question, answer) of the rows of a data set in the usual columns."""
    pairs: list[Pair] = []
    for row in open_rows(str(file)):
        pairs.append((row["prompt"][-1]["content"], str(row["reward_model"]["ground_truth"])))
    return pairs


def _batches(pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, size: int, seed: int) -> Iterator[Batch]:
    """Random batches of pairs without end; the loss mask covers the answers."""
    generator = torch.Generator().manual_seed(seed)
    encoded: list[tuple[list[int], list[int]]] = []
    for question_text, answer_text in pairs:
        answer_ids = [*tokenizer.encode(answer_text), tokenizer.eos_token_id]
        encoded.append((tokenizer.encode(question_text), answer_ids))
    while True:
        chosen = [encoded[int(i)] for i in torch.randint(len(encoded), (size,), generator=generator)]
        width = max(len(answer) for _, answer in chosen)
        mask = torch.zeros(size, width)
        sequences: list[torch.Tensor] = []
        prompt_lengths: list[int] = []
        for row, (question, answer) in enumerate(chosen):
            mask[row, : len(answer)] = 1.0
            sequences.append(torch.tensor(question + answer))
            prompt_lengths.append(len(question))
        yield Batch(
            sequences=sequences,
            prompt_lengths=torch.tensor(prompt_lengths),
            mask=mask,
            groups=torch.arange(size),
        )
