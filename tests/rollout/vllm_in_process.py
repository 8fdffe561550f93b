"""Run in the environment of vLLM by test_vllm.py: engine and module in one process."""

from __future__ import annotations

import torch

from strop.rollout.base import Request, Sampling, build_engine
from strop.rollout.external import named_weights
from tests.rollout import tiny


def main() -> None:
    model = tiny.make("smollm", wide=True)
    engine = build_engine("vllm", model, enforce_eager=True, max_num_seqs=8)
    for version in range(3):
        if version:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight) * 0.3)
            engine.update_weights(named_weights(model), version)
        (one,) = engine.generate([Request([5, 9, 2])], Sampling(temperature=0, max_tokens=6))[0]
        assert (one.ids, one.version) == (tiny.plain_greedy(model, [5, 9, 2], 6), version)
    engine.close()
    print("as it should be")


if __name__ == "__main__":
    main()
