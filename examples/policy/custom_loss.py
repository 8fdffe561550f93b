"""A loss of one's own: preferences (DPO) between pairs of answers. An adapter is trained; the model without
it is the reference. The function sees the whole batch. Start: python examples/policy/custom_loss.py MODEL"""

import functools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from strop import Datum, Policy
from strop.backends.base import Outputs
from strop.types import Batch

Pair = tuple[str, str, str]  # prompt, chosen answer, rejected answer


def preference_loss(outputs: Outputs, batch: Batch, *, reference: Tensor, beta: float) -> Tensor:
    """Rows are chosen, rejected, chosen, rejected ...; `reference` has their log-probs before training."""
    assert outputs.log_probs is not None
    gains = beta * ((outputs.log_probs * batch.mask).sum(-1) - reference.to(outputs.log_probs.device))
    return -torch.nn.functional.logsigmoid(gains[0::2] - gains[1::2]).mean()


def train(policy: Policy, pairs: list[Pair], steps: int, *, beta: float = 0.1) -> Iterator[float]:
    """Yields the loss of each step; log 2 at the beginning."""
    rows = []
    for prompt, chosen, rejected in pairs:
        ids = policy.prompt(prompt).ids
        for answer in (chosen, rejected):
            rows.append(Datum(ids, policy.tokenizer(answer, add_special_tokens=False)["input_ids"]))
    reference = torch.stack([row.sum() for row in policy.log_probs(rows, reference=True)])
    loss = functools.partial(preference_loss, reference=reference, beta=beta)
    for _ in range(steps):
        yield policy.forward_backward(rows, loss).loss
        policy.optim_step()


if __name__ == "__main__":
    opinions = [("The best drink is ", "tea", "coffee"), ("The best season is ", "spring", "winter")]
    with Policy(sys.argv[1], lora_rank=16, lr=1e-4) as model:
        for number, value in enumerate(train(model, opinions, steps=30)):
            print(f"step {number + 1}: loss {value:.4f}")
