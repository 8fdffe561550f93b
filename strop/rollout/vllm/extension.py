"""What runs inside vLLM's own workers, wherever they are: new weights in place, and log-probs at the sampling temperature.

vLLM mixes this class into its worker (`worker_extension_cls`); its methods are called by name, with texts only, so that they
can also be called over HTTP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strop.rollout.buckets import read_bucket

_PREPARED = "_strop_log_probs"
_GREEDY = 1e-5


class Extension:
    device: torch.device
    model_runner: Any
    vllm_config: Any

    def strop_prepare(self) -> str:
        """Report log-probs of the distribution after temperature, before top-k, top-p and penalties.

        vLLM offers those before temperature or those after everything. Returns "exact", or "filtered" where only the latter can
        be had.
        """
        sampler: Any = self.model_runner.sampler
        if not hasattr(sampler, _PREPARED):  # a server outlives its clients
            setattr(sampler, _PREPARED, _at_temperature(sampler))
        return str(getattr(sampler, _PREPARED))

    def strop_load(self, contents: str) -> int:
        """Take over a bucket of weights (see buckets.py). Layers are converted to vLLM's own layout as they complete."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        weights, first, last = read_bucket(contents)
        model = self.model_runner.model
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            if first:
                initialize_layerwise_reload(model)
            # vLLM keeps what it is given until a layer is complete, and the next bucket overwrites this one.
            model.load_weights((name, weight.to(self.device, copy=True)) for name, weight in weights)
            if last:
                finalize_layerwise_reload(model, self.vllm_config.model_config)
                _refresh_tied_heads(model)
        return len(weights)


def _at_temperature(sampler: Any) -> str:
    """vLLM has two samplers: one is told the temperatures with the logits, the other keeps them by row of its state."""
    if hasattr(sampler, "compute_logprobs"):
        plain, forward = sampler.compute_logprobs, sampler.forward
        divisor: list[Tensor | None] = [None]

        def scaled(logits: Tensor) -> Tensor:
            return plain(logits if divisor[0] is None else logits.float() / divisor[0])

        def remembering(logits: Tensor, sampling_metadata: Any, *rest: Any, **more: Any) -> Any:
            temperature = sampling_metadata.temperature
            divisor[0] = None if temperature is None else _divisor(temperature)
            return forward(logits, sampling_metadata, *rest, **more)

        sampler.compute_logprobs, sampler.forward = scaled, remembering
        return "exact"
    sampler.logprobs_mode = "processed_logprobs"
    if not hasattr(sampler, "sampling_states"):
        return "filtered"
    draw = sampler.sample

    def unfiltered(logits: Tensor, rows: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        sampled, _ = draw(logits, rows, *rest, **more)
        return sampled, logits.float() / _divisor(sampler.sampling_states.temperature.gpu[rows])

    sampler.sample = unfiltered
    return "exact"


def _divisor(temperature: Tensor) -> Tensor:
    """Greedy rows are reported at temperature 1."""
    return torch.where(temperature < _GREEDY, 1.0, temperature)[:, None]


def _refresh_tied_heads(model: Any) -> None:
    """On a CPU vLLM packs a copy of the head's weight, and a reload renews it only where the head has a weight of its own."""
    layers = list(model.modules())
    heads = [layer for layer in layers if type(layer).__name__ == "ParallelLMHead"]
    for head in heads:
        if any(layer is not head and getattr(layer, "weight", None) is head.weight for layer in layers):
            head.quant_method.process_weights_after_loading(head)
