"""A process that forks small training runs on request, so that a test can kill many without importing torch each time.

Each line on stdin is a JSON object {directory, steps, die_at}. The answer is the process id, then `saved N` whenever the run
knows that step N is safe, then `done`. With `die_at` the run kills itself before that many fsyncs and renames were made.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop.run.checkpoint.contents import capture_random_states, restore_random_states
from strop.run.checkpoint.resume import resume
from strop.run.checkpoint.retention import RetentionPolicy
from strop.run.checkpoint.store import Checkpoints, layout


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def train(directory: str, steps: int) -> None:
    """Weights that depend on every random number drawn so far and on the loader's position."""
    weight, position = torch.zeros(300_000), 0
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    start = resume(directory, mode="auto")
    if start is not None:
        weight, position = start.parts["actor/model"]["weight"], start.parts["data"]["position"]
        restore_random_states(start.parts["trainer"]["random"])
    first = 1 if start is None else start.step + 1
    with Checkpoints(directory, keep=RetentionPolicy(newest=2)) as checkpoints:
        for step in range(first, steps + 1):
            position += 3
            weight = 0.9 * weight + torch.randn_like(weight) * (random.random() + np.random.rand() + position)
            checkpoints.save(
                step,
                {
                    "data": {"position": position},
                    "trainer": {"random": capture_random_states()},
                    "actor/model": {"weight": weight},
                },
            )
            if step > first:
                say(f"saved {step - 1}")
    say(f"saved {steps}")


def die_at(count: int) -> None:
    """Count the calls after which the disk looks different, and die before the one with this number."""
    made = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    os.fsync = counted(os.fsync)
    Path.rename = counted(Path.rename)  # type: ignore[method-assign]
    Path.replace = counted(Path.replace)  # type: ignore[method-assign]
    layout.shutil.rmtree = counted(layout.shutil.rmtree)


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            if order.get("die_at"):
                die_at(order["die_at"])
            train(order["directory"], order["steps"])
            say("done")
            os._exit(0)
        say(str(child))
        os.waitpid(child, 0)
        say("ended")


if __name__ == "__main__":
    main()
