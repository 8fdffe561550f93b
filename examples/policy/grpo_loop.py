"""GRPO in a loop of one's own, with the trainer's numbers. Start: python grpo_loop.py MODEL ROWS.parquet"""

import itertools
import sys
from collections.abc import Iterator

import pyarrow.parquet as pq

from strop import Policy


def reward(text: str, answer: str) -> float:
    """1 for the right answer, and a little for each digit of it."""
    return float(text.strip() == answer) + 0.1 * sum(digit in text for digit in answer)


def train(policy: Policy, rows: list[dict], steps: int, size: int = 8, n: int = 4) -> Iterator[dict]:
    """`size` prompts per step, `n` samples of each; yields the metrics of each step."""
    prompts = []
    for index, row in enumerate(rows):
        prompts.append(policy.prompt(row["prompt"], index=index, answer=row["reward_model"]["ground_truth"]))
    for step in range(steps):
        start = step * size % len(prompts)
        groups = policy.sample(prompts[start : start + size], n, max_tokens=4)
        trajectories = list(itertools.chain(*groups))
        for t in trajectories:
            t.score = reward(policy.text(t), t.prompt.extra_info["answer"])
        output = policy.forward_backward(policy.batch(groups, advantages="grpo"), "vanilla")
        score = sum(t.score for t in trajectories) / len(trajectories)
        yield {"score": score, **output.metrics, **policy.optim_step()}


if __name__ == "__main__":
    with Policy(sys.argv[1], lr=1e-3) as policy:
        for number, metrics in enumerate(train(policy, pq.read_table(sys.argv[2]).to_pylist(), steps=100)):
            print(f"step {number + 1}: score {metrics['score']:.3f}, entropy {metrics['actor/entropy']:.3f}")
