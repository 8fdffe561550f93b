"""GAE, GRPO and the vanilla policy loss beside a per-token (per-sample) Python loop, and beside verl where it is installed.

    python benchmarks/algorithms.py --batch 4096 --length 4096 --repeats 5

Prints one JSON line per function: median and spread (min, max) of the seconds of each system over the repeats, which take turns
so that a noisy moment hits all of them, and the ratio of each to ours. `worst_error` is the largest relative difference between
our result and the loop's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.advantages.gae import gae
from strop.algorithms.advantages.outcome import grpo
from strop.algorithms.aggregation import Totals, aggregate
from strop.algorithms.masked import masked_mean, masked_whiten
from strop.algorithms.policy_losses.clipped import vanilla

Inputs = dict[str, Any]
System = Callable[[Inputs], Tensor]


def make_inputs(batch: int, length: int, *, holes: bool, group: int = 8) -> Inputs:
    """Responses of random length with a score on the last valid token; with `holes`, a tool span inside each."""
    torch.manual_seed(0)
    lengths = torch.randint(length // 2, length + 1, (batch, 1))
    columns = torch.arange(length)
    mask = columns < lengths
    if holes:
        start = lengths // 4
        mask = mask & ~((columns >= start) & (columns < start + length // 8))
    rewards = torch.zeros(batch, length)
    rewards.scatter_(1, lengths - 1, torch.randn(batch, 1))
    old = -torch.rand(batch, length)
    uids = [f"prompt-{i // group}" for i in range(batch)]
    return {
        "rewards": rewards,
        "mask": mask.long(),
        "values": torch.randn(batch, length),
        "groups": torch.arange(batch) // group,
        "uids": uids,
        "old": old,
        "new": old + 0.1 * torch.randn(batch, length),
        "advantages": torch.randn(batch, length),
    }


def gae_ours(x: Inputs) -> Tensor:
    return gae(x["rewards"], x["mask"], values=x["values"], gamma=0.99, lam=0.95).advantages


def gae_loop(x: Inputs) -> Tensor:
    """The definition, one column at a time."""
    rewards, mask, values = x["rewards"], x["mask"], x["values"]
    next_value, running = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + 0.99 * next_value - values[:, t]
        valid = mask[:, t].bool()
        running = torch.where(valid, delta + 0.99 * 0.95 * running, running)
        next_value = torch.where(valid, values[:, t], next_value)
        columns.append(running)
    return masked_whiten(torch.stack(columns[::-1], dim=1), mask)


def gae_verl(x: Inputs) -> Tensor:
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    return core.compute_gae_advantage_return(x["rewards"], x["values"], x["mask"], 0.99, 0.95)[0] * x["mask"]


def grpo_ours(x: Inputs) -> Tensor:
    return grpo(x["rewards"], x["mask"], groups=x["groups"]).advantages


def grpo_loop(x: Inputs) -> Tensor:
    """Groups gathered in a dictionary, one sample at a time."""
    scores = x["rewards"].sum(-1)
    members = defaultdict(list)
    for uid, score in zip(x["uids"], scores):
        members[uid].append(score)
    statistics_of = {uid: (torch.stack(group).mean(), torch.stack(group).std()) for uid, group in members.items()}
    for i, uid in enumerate(x["uids"]):
        mean, std = statistics_of[uid]
        scores[i] = (scores[i] - mean) / (std + 1e-6)
    return scores[:, None] * x["mask"]


def grpo_verl(x: Inputs) -> Tensor:
    core, np = importlib.import_module("verl.trainer.ppo.core_algos"), importlib.import_module("numpy")
    return core.compute_grpo_outcome_advantage(x["rewards"], x["mask"], np.array(x["uids"], dtype=object))[0]


def loss_ours(x: Inputs) -> Tensor:
    log_probs = x["new"].detach().requires_grad_()
    result = vanilla(log_probs, x["old"], x["advantages"], x["mask"])
    loss = aggregate(result.per_token, x["mask"], "token-mean", Totals.of(x["mask"]))
    loss.backward()
    for metric in result.metrics.values():
        masked_mean(metric, x["mask"])
    return log_probs.grad * len(x["mask"])


def loss_loop(x: Inputs) -> Tensor:
    """The textbook form, one row at a time."""
    count = x["mask"].sum()
    grads = []
    for new, old, advantage, mask in zip(x["new"], x["old"], x["advantages"], x["mask"]):
        log_probs = new.detach().requires_grad_()
        ratio = (log_probs - old).exp()
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * 3.0), loss)
        ((loss * mask).sum() / count).backward()
        grads.append(log_probs.grad)
    return torch.stack(grads) * len(x["mask"])


def loss_verl(x: Inputs) -> Tensor:
    core, configs = importlib.import_module("verl.trainer.ppo.core_algos"), importlib.import_module("verl.workers.config")
    config = configs.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    log_probs = x["new"].detach().requires_grad_()
    core.compute_policy_loss_vanilla(x["old"], log_probs, x["advantages"], x["mask"], config=config)[0].backward()
    assert log_probs.grad is not None
    return log_probs.grad * len(x["mask"])


FUNCTIONS: dict[str, tuple[bool, dict[str, System]]] = {
    "gae": (False, {"ours": gae_ours, "loop": gae_loop, "verl": gae_verl}),
    "gae_with_holes": (True, {"ours": gae_ours, "loop": gae_loop, "verl": gae_verl}),
    "grpo": (False, {"ours": grpo_ours, "loop": grpo_loop, "verl": grpo_verl}),
    "vanilla_loss": (False, {"ours": loss_ours, "loop": loss_loop, "verl": loss_verl}),
}


def has_verl() -> bool:
    try:
        importlib.import_module("verl.trainer.ppo.core_algos")
    except ImportError:
        return False
    return True


def measure(systems: dict[str, System], inputs: Inputs, repeats: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of every repeat by system, after one warm-up whose results are compared."""
    first = {name: system(inputs) for name, system in systems.items()}
    scale = first["loop"].abs().max().clamp(min=1e-12)
    error = float((first["ours"] - first["loop"]).abs().max() / scale)
    del first
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, system in systems.items():
            start = time.perf_counter()
            system(inputs)
            seconds[name].append(time.perf_counter() - start)
    return seconds, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=sorted(FUNCTIONS), nargs="*", default=list(FUNCTIONS))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    with_verl = has_verl()
    for name in chosen.only:
        holes, systems = FUNCTIONS[name]
        inputs = make_inputs(chosen.batch, chosen.length, holes=holes)
        present = {key: system for key, system in systems.items() if key != "verl" or with_verl}
        seconds, error = measure(present, inputs, chosen.repeats)
        medians = {key: statistics.median(times) for key, times in seconds.items()}
        line = {
            "function": name,
            "shape": [chosen.batch, chosen.length],
            "threads": chosen.threads,
            "repeats": chosen.repeats,
            "worst_error": error,
            **{key: {"median_s": medians[key], "min_s": min(times), "max_s": max(times)} for key, times in seconds.items()},
            **{f"{key}_over_ours": medians[key] / medians["ours"] for key in medians if key != "ours"},
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
