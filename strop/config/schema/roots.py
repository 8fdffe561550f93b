"""The root of every configuration, by the name of its file. Only the one that is asked for is imported."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

_HOMES = {
    "ppo_trainer": "reinforcement:PpoTrainer",
    "ppo_megatron_trainer": "reinforcement:PpoTrainer",
    "sft_trainer": "supervised:SftTrainer",
    "rm_trainer": "supervised:RmTrainer",
    "dpo_trainer": "supervised:DpoTrainer",
    "generation": "inference:Generation",
    "evaluation": "inference:Evaluation",
    "reward_server": "inference:RewardServer",
}


class Roots(Mapping[str, type]):
    def __getitem__(self, name: str) -> type:
        module, _, attribute = _HOMES[name].partition(":")
        found: type = getattr(importlib.import_module(f"strop.config.schema.{module}"), attribute)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


ROOTS = Roots()
