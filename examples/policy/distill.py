"""On-policy distillation: the student samples, and a token is rewarded by how much likelier the teacher finds
it. The mean reward is minus the reverse KL divergence. Start: python distill.py STUDENT TEACHER"""

import itertools
import sys
from collections.abc import Iterator

from strop import Datum, Policy


def distill(
    student: Policy, teacher: Policy, prompts: list[str], steps: int, *, n: int = 8
) -> Iterator[float]:
    """Yields an estimate of KL(student, teacher) per token after each step."""
    for _ in range(steps):
        samples = list(itertools.chain(*student.sample(prompts, n, max_tokens=8)))
        wanted = teacher.log_probs(samples)
        data = []
        for sample, log_probs in zip(samples, wanted, strict=True):
            gains = [float(there) - here for there, here in zip(log_probs, sample.log_probs, strict=True)]
            data.append(
                Datum(sample.prompt.ids, sample.response, advantages=gains, log_probs=sample.log_probs)
            )
        student.forward_backward(data, "importance_sampling")
        student.optim_step()
        tokens = sum(len(datum.response) for datum in data)
        yield -sum(sum(datum.advantages or []) for datum in data) / tokens


if __name__ == "__main__":
    questions = ["What is the capital of France?", "Name a prime number.", "Why is the sky blue?"]
    with Policy(sys.argv[1], lora_rank=16, lr=1e-4) as learner, Policy(sys.argv[2]) as expert:
        for number, divergence in enumerate(distill(learner, expert, questions, steps=50)):
            print(f"step {number + 1}: KL {divergence:.4f}")
