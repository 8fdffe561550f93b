"""A plugin of `ray_overhead.py`: two runs take turns, step by step, so that whatever else the machine does
meets both alike.

A run gives the turn away when its next step is about to begin, so a turn is a step with its report.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from strop.ppo.trainer import PpoTrainer

FOLDER, NAME = Path(os.environ["STROP_TURNS"]), os.environ["STROP_TURN_NAME"]
OTHER = {"ray": "local", "local": "ray"}
EITHER = "either"
step_alone = PpoTrainer.train_step


def give_turn_to(name: str) -> None:
    (FOLDER / f"{NAME}.next").write_text(name)
    os.replace(FOLDER / f"{NAME}.next", FOLDER / "turn")


def step_in_turn(self: PpoTrainer, record: Any) -> Any:
    if not self.roles.actor.ranks.is_rank0:
        return step_alone(self, record)  # it waits for rank 0 by itself
    if self.step > 1 and (FOLDER / "turn").read_text() != EITHER:
        give_turn_to(OTHER[NAME])
    while (FOLDER / "turn").read_text() not in (NAME, EITHER):
        time.sleep(0.01)
    wall, processor = time.perf_counter(), time.process_time()
    result = step_alone(self, record)
    seconds = {
        "step": self.step,
        "wall": time.perf_counter() - wall,
        "processor": time.process_time() - processor,
    }
    with (FOLDER / f"{NAME}.jsonl").open("a") as file:
        file.write(json.dumps(seconds) + "\n")
    if self.step == self.total_steps:
        give_turn_to(EITHER)
    return result


PpoTrainer.train_step = step_in_turn  # type: ignore[method-assign]
