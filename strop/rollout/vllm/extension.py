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
        if hasattr(sampler, _PREPARED):  # a server outlives its clients
            return str(getattr(sampler, _PREPARED))
        if not hasattr(sampler, "compute_logprobs"):
            sampler.logprobs_mode = "processed_logprobs"
            setattr(sampler, _PREPARED, "filtered")
            return "filtered"
        plain, forward = sampler.compute_logprobs, sampler.forward
        divisor: list[Tensor | None] = [None]

        def at_temperature(logits: Tensor) -> Tensor:
            return plain(logits if divisor[0] is None else logits.float() / divisor[0])

        def remembering(logits: Tensor, sampling_metadata: Any, *rest: Any, **more: Any) -> Any:
            temperature = sampling_metadata.temperature
            divisor[0] = None if temperature is None else torch.where(temperature < 1e-5, 1.0, temperature)[:, None]
            return forward(logits, sampling_metadata, *rest, **more)

        sampler.compute_logprobs, sampler.forward = at_temperature, remembering
        setattr(sampler, _PREPARED, "exact")
        return "exact"

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


def _refresh_tied_heads(model: Any) -> None:
    """On a CPU vLLM packs a copy of the head's weight, and a reload renews it only where the head has a weight of its own."""
    layers = list(model.modules())
    heads = [layer for layer in layers if type(layer).__name__ == "ParallelLMHead"]
    for head in heads:
        if any(layer is not head and getattr(layer, "weight", None) is head.weight for layer in layers):
            head.quant_method.process_weights_after_loading(head)
