"""Samples the next token of each row, exactly and with one random number per row.

The uniform number u of a row is a hash of its random stream and the position, so a sampled token does not
depend on the rest of the batch. The token is the first one whose cumulative weight exceeds u times the total
weight. Reported log-probs are those of the model at the temperature (1 for greedy rows): before repetition
penalty, top-k, top-p and min-p, which is what training recomputes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.rollout.base import Sampling
from strop.rollout.native.cpu import draw

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_BITS = (1 << 64) - 1
_BLOCK = 512
_CANDIDATES = 256
ALL = (1 << 31) - 1
_HOST_NUMBERS = 1 << 22
"""Weights of tokens that are computed at a time on a CPU. They stay in its cache, and memory for more would
be mapped anew in every step (shared/process_setup.py)."""


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling settings, one entry per row. A setting that no row uses is None and costs nothing."""

    temperature: Tensor | None = None
    """None: all 1. Greedy rows carry 1."""
    greedy: Tensor | None = None
    all_greedy: bool = False
    top_k: Tensor | None = None
    """Entries are at least 1; a row that takes all tokens carries ALL."""
    max_top_k: int = 0
    """The largest entry of top_k; 0 if top_k is None."""
    top_p: Tensor | None = None
    min_p: Tensor | None = None

    @property
    def filters(self) -> bool:
        """Whether tokens are left out."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    def rows(self, at: slice) -> SamplingTensors:
        """The settings of some rows."""
        found = {}
        for name in ("temperature", "greedy", "top_k", "top_p", "min_p"):
            setting = getattr(self, name)
            if setting is not None:
                found[name] = setting[at]
        return replace(self, **found)


@dataclass(frozen=True)
class SampledTokens:
    tokens: Tensor
    log_probs: Tensor
    valid: Tensor
    """False where the logits are not numbers."""


def stream(seed: int, sample: int) -> int:
    """The random stream of one sample, as a signed 64-bit number."""
    return _signed(_mix((_mix((seed + _GOLDEN) & _BITS) + (sample + 1) * _GOLDEN) & _BITS))


def uniforms(streams: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per row, by the splitmix64 generator at a counter; float64."""
    z = streams + (positions + 1) * _signed(_GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    z = z ^ _shifted(z, 31)
    return _shifted(z, 16).double() * 2.0**-48


def sample(
    logits: Tensor, uniform: Tensor, settings: SamplingTensors, penalised: Tensor | None = None
) -> SampledTokens:
    """One token per row of [rows, vocabulary]; `penalised`: the logits to sample from, if they differ."""
    rows, vocabulary = logits.shape
    plain = penalised is None and not settings.filters
    if plain and vocabulary >= draw.SMALLEST_VOCABULARY and draw.takes(logits):
        found = draw.draw(logits, uniform, settings.temperature, _greedy_rows(settings, rows))
        return SampledTokens(*found)
    at_a_time = max(1, _HOST_NUMBERS // vocabulary)
    if logits.device.type != "cpu" or rows <= at_a_time:
        return _sample(logits, uniform, settings, penalised)
    parts = []
    for start in range(0, rows, at_a_time):
        at = slice(start, start + at_a_time)
        source = None if penalised is None else penalised[at]
        parts.append(_sample(logits[at], uniform[at], settings.rows(at), source))
    columns = zip(*((part.tokens, part.log_probs, part.valid) for part in parts))
    return SampledTokens(*(torch.cat(column) for column in columns))


def _greedy_rows(settings: SamplingTensors, rows: int) -> Tensor | None:
    if settings.all_greedy:
        return torch.ones(rows, dtype=torch.bool)
    return settings.greedy


def _sample(
    logits: Tensor, uniform: Tensor, settings: SamplingTensors, penalised: Tensor | None
) -> SampledTokens:
    scaled = logits.float()
    if settings.temperature is not None:
        scaled = scaled / settings.temperature[:, None]
    weights, top, total = _weights(scaled)
    valid = torch.isfinite(total)
    if penalised is not None:
        source = penalised.float()
        if settings.temperature is not None:
            source = source / settings.temperature[:, None]
        weights, _, mass = _weights(source)
    else:
        source = scaled
        mass = total
    if settings.all_greedy:
        tokens = source.argmax(-1)
    else:
        # The cumulative weights are always in the order of the vocabulary.
        tokens = _inverse_cdf(_filtered(weights, mass, settings), uniform)
        if settings.greedy is not None:
            tokens = torch.where(settings.greedy, source.argmax(-1), tokens)
    tokens = torch.where(valid, tokens, 0)
    log_probs = scaled.gather(1, tokens[:, None])[:, 0] - top - total.log().to(scaled.dtype)
    return SampledTokens(tokens, log_probs, valid)


def probabilities(logits: Tensor, settings: SamplingTensors, penalised: Tensor | None = None) -> Tensor:
    """The distribution [rows, vocabulary] that `sample` draws from; greedy rows have one token."""
    source = (logits if penalised is None else penalised).float()
    if settings.temperature is not None:
        source = source / settings.temperature[:, None]
    if settings.all_greedy:
        return _certain(source)
    weights, _, total = _weights(source)
    weights = _filtered(weights, total, settings)[:, : logits.shape[1]]
    chances = weights / weights.sum(-1, keepdim=True)
    if settings.greedy is not None:
        chances = torch.where(settings.greedy[:, None], _certain(source), chances)
    return chances


def drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """One token per row, with probabilities in proportion to `weights` [rows, vocabulary]."""
    block = min(_BLOCK, weights.shape[1])
    return _inverse_cdf(F.pad(weights, (0, -weights.shape[1] % block)), uniform)


def scored(logits: Tensor, tokens: Tensor, settings: SamplingTensors) -> SampledTokens:
    """Tokens that were drawn already, with their log-probs."""
    scaled = logits.float()
    if settings.temperature is not None:
        scaled = scaled / settings.temperature[:, None]
    _, top, total = _weights(scaled)
    valid = torch.isfinite(total)
    tokens = torch.where(valid, tokens, 0)
    log_probs = scaled.gather(1, tokens[:, None])[:, 0] - top - total.log().to(scaled.dtype)
    return SampledTokens(tokens, log_probs, valid)


def _certain(scores: Tensor) -> Tensor:
    """Probability 1 for the highest score of each row."""
    return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)


def apply_penalty(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits with those of `seen` tokens [rows, any] divided by the penalty where positive, multiplied where
    negative."""
    logits = logits.float()
    scores = logits.gather(1, seen)
    factor = penalty[:, None]
    return logits.scatter(1, seen, torch.where(scores < 0, scores * factor, scores / factor))


def _weights(scaled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scaled - maximum) in whole blocks, the maximum and the total, per row."""
    rows, vocabulary = scaled.shape
    top = scaled.amax(-1)
    block = min(_BLOCK, vocabulary)
    weights = scaled.new_empty(rows, -(-vocabulary // block) * block)
    weights[:, vocabulary:] = 0
    torch.sub(scaled, top[:, None], out=weights[:, :vocabulary]).exp_()
    total = weights.view(rows, -1, block).sum(-1).double().sum(-1)
    return weights, top, total


def _filtered(weights: Tensor, total: Tensor, settings: SamplingTensors) -> Tensor:
    """Top-k, then top-p of what is left, then min-p."""
    if settings.top_k is not None or settings.top_p is not None:
        weights = _apply_top_k_top_p(weights, total, settings)
    if settings.min_p is not None:
        weights = weights.where(weights >= settings.min_p[:, None], 0)  # the heaviest token weighs 1
    return weights


def _apply_top_k_top_p(weights: Tensor, total: Tensor, settings: SamplingTensors) -> Tensor:
    """Weights with all tokens outside of top-k and top-p set to 0; rows without both stay whole."""
    rows, size = weights.shape
    top_k = settings.top_k
    if top_k is None:
        top_k = torch.full((rows,), ALL, device=weights.device)
    top_p = settings.top_p
    if top_p is None:
        top_p = torch.ones(rows, device=weights.device)
    bounded = settings.top_k is not None and settings.max_top_k < size
    whole = (top_p >= 1) & (top_k >= size)
    width = min(size, settings.max_top_k if bounded else _CANDIDATES)
    if not bounded and weights.is_cuda:
        width = size  # a sort is cheaper than a sync to check whether fewer are enough
    values, index = weights.topk(width, sorted=True)
    while not bounded and width < size:
        # A row with a top-k needs all of its k: top-p is a share of their weight.
        reached = whole | (top_k <= width) | ((top_k >= size) & (values.double().sum(-1) >= total * top_p))
        if bool(reached.all()):
            break
        width = min(size, width * 8)
        values, index = weights.topk(width, sorted=True)
    kept = values.where(torch.arange(width, device=weights.device) < top_k[:, None], 0)
    mass = kept.double()
    left = torch.where(top_k <= width, mass.sum(-1), total)
    kept = kept.where(mass.cumsum(-1) - mass < (top_p * left)[:, None], 0)
    return torch.where(whole[:, None], weights, torch.zeros_like(weights).scatter_(1, index, kept))


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first entry whose cumulative weight exceeds uniform · total; entries of weight 0 are never chosen.

    In two levels, blocks and entries of the chosen block, so that the long axis is only summed.
    """
    rows, size = weights.shape
    block = min(_BLOCK, size)
    blocks = weights.view(rows, -1, block)
    bounds = blocks.sum(-1).double().cumsum(-1)
    target = uniform.to(bounds.device)[:, None] * bounds[:, -1:]
    chosen = (bounds <= target).sum(-1, keepdim=True).clamp_(max=bounds.shape[1] - 1)
    below = torch.where(chosen > 0, bounds.gather(1, (chosen - 1).clamp_(min=0)), 0)
    inside = blocks.gather(1, chosen[..., None].expand(-1, -1, block))[:, 0].double().cumsum(-1)
    entry = (inside <= target - below).sum(-1)
    # Sums of blocks and of entries round differently: stay at the last entry that has any weight.
    last = (inside < inside[:, -1:]).sum(-1)
    return chosen[:, 0] * block + torch.minimum(entry, last)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FIRST) & _BITS
    z = ((z ^ (z >> 27)) * _SECOND) & _BITS
    return z ^ (z >> 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(z: Tensor, by: int) -> Tensor:
    """A shift to the right that brings in zeros; torch's brings in the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


class SharedSettings:
    """The settings that samples use. Most requests of a batch are given the same Sampling object; their
    samples share one object, so that few distinct ones are in a batch."""

    def __init__(self) -> None:
        self._newest: tuple[Sampling, Sampling] | None = None

    def of(self, sampling: Sampling) -> Sampling:
        """The settings of samples that this Sampling was given for."""
        if self._newest is None or self._newest[0] is not sampling:
            settings = replace(sampling, stop_ids=tuple(sampling.stop_ids), max_tokens=0)
            self._newest = (sampling, settings)
        return self._newest[1]
