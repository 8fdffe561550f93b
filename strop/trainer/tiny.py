"""A model small enough to learn while you watch: one token per character, about a million parameters."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from strop.algorithms.aggregation import Totals
from strop.algorithms.sft import sft_loss
from strop.backends.base import MicroBatching, Outputs
from strop.backends.single import SingleBackend
from strop.config.schema.model import Optim
from strop.data.files import open_rows
from strop.rollout.base import Request, Sampling
from strop.rollout.build import build_engine
from strop.types import Batch

log = logging.getLogger(__name__)

CHARACTERS = "0123456789+-*="
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
Pair = tuple[str, str]


def tiny_tokenizer(words: Sequence[str] = (), template: str = TEMPLATE) -> Any:
    """One token per character of CHARACTERS, and one for each of `words`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = dict.fromkeys(["<pad>", "<eos>", "<unk>", *words, *CHARACTERS])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*map(re.escape, words), "."])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.chat_template = template
    return made


def tiny_model(tokenizer: Any, *, hidden: int = 192, layers: int = 2, seed: int = 0, longest: int = 64) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=longest,
        initializer_range=0.06,  # the usual 0.02 is for wide models; a narrow one starts too quietly and learns late
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def warm_start(
    model: Any,
    tokenizer: Any,
    train: list[Pair],
    held_out: list[Pair],
    *,
    until: float,
    seed: int = 0,
    most: int = 3000,
    rows: int = 64,
    lr: float = 2e-3,
) -> float:
    """Teach the model by example until it is right about `until` of the time; returns how often it is."""
    right = 0.0
    for step in teach(model, tokenizer, train, seed=seed, rows=rows, lr=lr):
        if step % 10 == 0:
            right = accuracy(model, tokenizer, held_out, temperature=1.0)
            if right >= until or step >= most:
                break
    return right


def teach(model: Any, tokenizer: Any, pairs: list[Pair], *, seed: int = 0, rows: int = 64, lr: float = 2e-3) -> Iterator[int]:
    """Teach answers by example, an update each time the next number of updates so far is asked for."""
    backend = SingleBackend(model, optim=Optim(lr=lr, betas=[0.9, 0.98], weight_decay=0.0, lr_warmup_steps=20))
    for step, batch in enumerate(_batches(pairs, tokenizer, rows, seed)):
        yield step
        totals = Totals.of(batch.mask)

        def loss(outputs: Outputs, micro: Batch, totals: Totals = totals) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            assert outputs.log_probs is not None
            return sft_loss(outputs.log_probs, micro.mask, totals), {}

        backend.forward_backward(batch, ["log_probs"], loss, MicroBatching(rows=rows))
        backend.step()
        backend.advance_schedule()


def accuracy(model: Any, tokenizer: Any, pairs: list[Pair], *, temperature: float = 0.0, seed: int = 0) -> float:
    """How often an answer is right, greedy unless told."""
    engine = build_engine("native", model, max_model_len=64)
    requests = [Request(tokenizer.encode(question), seed=seed + i) for i, (question, _) in enumerate(pairs)]
    sampling = Sampling(temperature=temperature, max_tokens=8, stop_ids=(tokenizer.eos_token_id,))
    answers = engine.generate(requests, sampling)
    engine.close()
    texts = [tokenizer.decode(answer[0].ids, skip_special_tokens=True) for answer in answers]
    return sum(text == expected for text, (_, expected) in zip(texts, pairs)) / len(pairs)


def pairs_of(file: str | Path) -> list[Pair]:
    """(question, answer) of the rows of a data set in the ordinary schema."""
    return [(row["prompt"][-1]["content"], str(row["reward_model"]["ground_truth"])) for row in open_rows(str(file))]


def _batches(pairs: list[Pair], tokenizer: Any, size: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    encoded = [(tokenizer.encode(q), [*tokenizer.encode(a), tokenizer.eos_token_id]) for q, a in pairs]
    while True:
        chosen = [encoded[int(i)] for i in torch.randint(len(encoded), (size,), generator=generator)]
        width = max(len(answer) for _, answer in chosen)
        mask = torch.zeros(size, width)
        for row, (_, answer) in enumerate(chosen):
            mask[row, : len(answer)] = 1.0
        yield Batch(
            sequences=[torch.tensor(question + answer) for question, answer in chosen],
            prompt_lengths=torch.tensor([len(question) for question, _ in chosen]),
            mask=mask,
            groups=torch.arange(size),
        )
