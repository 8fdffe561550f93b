"""Runs inside vLLM's workers: loads new weights in place, and reports log-probs at the sampling temperature.

vLLM mixes this class into its worker (`worker_extension_cls`). Its methods are called by name and take only
strings, so that they can also be called over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strop.rollout.buckets import read_bucket

_PREPARED = "_strop_log_probs"
_GREEDY = 1e-5

VllmObject = Any
"""An object of vLLM, whose attributes differ between its versions."""


class Extension:
    device: torch.device
    model_runner: VllmObject
    vllm_config: VllmObject
    strop_head_is_tied: bool
    """Before the reload that is under way."""

    def strop_prepare(self) -> str:
        """Report log-probs of the distribution after temperature, before top-k, top-p and penalties.

        vLLM offers those before temperature or those after everything. Returns "exact", or "filtered" if only
        the latter are available.
        """
        sampler = self.model_runner.sampler
        if not hasattr(sampler, _PREPARED):  # a server outlives its clients
            setattr(sampler, _PREPARED, _patch_sampler(sampler))
        return str(getattr(sampler, _PREPARED))

    def strop_load(self, contents: str) -> int:
        """Load a bucket of weights (see buckets.py) and return their number. vLLM converts each layer to its
        own layout once all weights of the layer have arrived."""
        weights, first, last = read_bucket(contents)
        model = self.model_runner.model
        if first:
            self.strop_head_is_tied = _head_is_tied(model)
        if self.strop_head_is_tied and any(name.endswith("lm_head.weight") for name, _ in weights):
            raise ValueError(
                "the policy has an output head of its own, but vLLM was started with "
                "tie_word_embeddings=true and would sample without it. Start vLLM with "
                "--hf-overrides '{\"tie_word_embeddings\": false}'."
            )
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            if first:
                initialize_layerwise_reload(model)
            # A copy: vLLM keeps the tensors until a layer is complete, and the next bucket overwrites them.
            model.load_weights((name, weight.to(self.device, copy=True)) for name, weight in weights)
            if last:
                finalize_layerwise_reload(model, self.vllm_config.model_config)
                _refresh_tied_heads(model)
        return len(weights)


def _patch_sampler(sampler: VllmObject) -> str:
    """vLLM has two samplers: one gets the temperatures with the logits, the other keeps them per row."""
    if hasattr(sampler, "compute_logprobs"):
        _patch_logprobs(sampler)
        return "exact"
    sampler.logprobs_mode = "processed_logprobs"
    if not hasattr(sampler, "sampling_states"):
        return "filtered"
    sample: Callable[..., tuple[Tensor, Tensor]] = sampler.sample

    def unfiltered(logits: Tensor, rows: Tensor, *rest: object, **more: object) -> tuple[Tensor, Tensor]:
        sampled, _ = sample(logits, rows, *rest, **more)
        return sampled, logits.float() / _divisor(sampler.sampling_states.temperature.gpu[rows])

    sampler.sample = unfiltered
    return "exact"


def _patch_logprobs(sampler: VllmObject) -> None:
    """Remember the temperatures of each forward pass and divide the logits by them."""
    compute_logprobs: Callable[[Tensor], Tensor] = sampler.compute_logprobs
    forward: Callable[..., VllmObject] = sampler.forward
    divisor: list[Tensor | None] = [None]

    def scaled(logits: Tensor) -> Tensor:
        if divisor[0] is not None:
            logits = logits.float() / divisor[0]
        return compute_logprobs(logits)

    def remembering(
        logits: Tensor, sampling_metadata: VllmObject, *rest: object, **more: object
    ) -> VllmObject:
        temperature = sampling_metadata.temperature
        divisor[0] = None if temperature is None else _divisor(temperature)
        return forward(logits, sampling_metadata, *rest, **more)

    sampler.compute_logprobs = scaled
    sampler.forward = remembering


def _divisor(temperature: Tensor) -> Tensor:
    """Greedy rows are reported at temperature 1."""
    return torch.where(temperature < _GREEDY, 1.0, temperature)[:, None]


def _head_is_tied(model: VllmObject) -> bool:
    """Whether the output head shares the weight of the embedding: vLLM then skips the head's weight, or loads
    it into both."""
    layers = dict(model.named_modules(remove_duplicate=False))
    for name, head in layers.items():
        weight = getattr(head, "weight", None)
        if name.rpartition(".")[2] == "lm_head" and weight is not None:
            sharing = [other for other in layers if getattr(layers[other], "weight", None) is weight]
            return len(sharing) > 1
    return False


def _refresh_tied_heads(model: VllmObject) -> None:
    """On a CPU vLLM keeps a packed copy of the head's weight, and a reload refreshes it only if the head's
    weight is not tied."""
    layers = list(model.modules())
    heads = [layer for layer in layers if type(layer).__name__ == "ParallelLMHead"]
    for head in heads:
        if any(layer is not head and getattr(layer, "weight", None) is head.weight for layer in layers):
            head.quant_method.process_weights_after_loading(head)
