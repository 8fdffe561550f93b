"""How one value changes on its way from OpenRLHF to here, and back. Pure functions in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SAVED = ["model", "optimizer", "extra"]


class NoEquivalentError(ValueError):
    """This one value cannot be said in the other language; the message is the reason."""


@dataclass(frozen=True)
class Transform:
    there_to_here: Callable[[Any], Any]
    here_to_there: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _named(table: Mapping[Any, Any], what: str) -> Transform:
    """Names on both sides; where several names there mean one here, the first is the way back."""
    back: dict[Any, Any] = {}
    for there, here in table.items():
        back.setdefault(here, there)
    return Transform(lambda value: _pick(table, value, what), lambda value: _pick(back, value, what))


def _pick(table: Mapping[Any, Any], value: Any, what: str) -> Any:
    if not isinstance(value, str | bool | int | float | None) or value not in table:
        known = ", ".join(map(str, table))
        raise NoEquivalentError(f"{what} {value!r} has no equivalent; convertible are {known}")
    return table[value]


def split_commas(text: str) -> Any:
    """One name, or a list of them."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return parts[0] if len(parts) == 1 else parts


def join_commas(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)


def _floats(text: str) -> list[float]:
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if not weights or not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"Mixture weights must be numbers of at least 0 with commas between them, but got {text[:60]!r}.")
    return weights


def _from_freezing(steps: int) -> int:
    return 0 if steps < 0 else steps + 2


def _to_freezing(first_update: int) -> int:
    return -1 if first_update < 2 else first_update - 2


def _modules(names: list[str]) -> Any:
    return names[0] if len(names) == 1 else names


def _only(wanted: Any) -> Callable[[Any], Any]:
    def to_switch(value: Any) -> bool:
        if value != wanted:
            raise NoEquivalentError(f"the switch only says {wanted!r}")
        return True

    return to_switch


def _export(on: bool) -> list[str]:
    return [*SAVED, "hf_model"] if on else SAVED


def _best_metric(name: str) -> str | None:
    if not name:
        raise NoEquivalentError("an empty name lets OpenRLHF pick its first pass1 metric; give the metric's name here")
    return None if name == "none" else name


SCHEDULES = _named(
    {
        "cosine_with_min_lr": "cosine",
        "cosine": "cosine",
        "constant_with_warmup": "constant",
        "constant": "constant",
        "linear": "linear",
        "warmup_stable_decay": "wsd",
    },
    "the schedule",
)
ESTIMATORS = _named(
    {
        "gae": "gae",
        "reinforce": "reinforce_plus_plus",
        "reinforce_baseline": "reinforce_plus_plus_baseline",
        "rloo": "rloo",
        "group_norm": "grpo",
        "dr_grpo": "grpo",
    },
    "the estimator",
)
KL_ESTIMATORS = _named({"k1": "kl", "k2": "mse", "k3": "low_var_kl"}, "the KL estimator")
POLICY_LOSSES = _named({"ppo": "vanilla", "gspo": "gspo"}, "the policy loss")

TRANSFORMS: dict[str, Transform] = {
    "same": Transform(_same, _same),
    "files": Transform(split_commas, join_commas),
    "floats": Transform(_floats, join_commas),
    "samples": Transform(_same, lambda count: count if count > 0 else None),  # -1, all of them, needs no flag
    "negate": Transform(lambda on: not on, lambda value: not value),
    "zero_stage": Transform(lambda stage: stage >= 3, lambda reshard: 3 if reshard else 2),
    "dtype": _named({"bf16": "bfloat16", "fp16": "float16"}, "the precision"),
    "bf16": Transform(lambda on: "bfloat16" if on else "float32", _only("bfloat16")),
    "flash_attn": Transform(lambda on: "flash_attention_2" if on else "eager", _only("flash_attention_2")),
    "shard_group": Transform(lambda size: size if size > 1 else -1, lambda size: max(size, 1)),
    "freeze": Transform(_from_freezing, _to_freezing),
    "modules": Transform(_modules, lambda value: [value] if isinstance(value, str) else list(value)),
    "resume": _named({False: "disable", True: "auto"}, "the resume mode"),
    "best_metric": Transform(_best_metric, lambda name: name or "none"),
    "export": Transform(_export, lambda contents: "hf_model" in contents),
    "rm_loss": Transform(
        lambda name: "logsigmoid" if name == "sigmoid" else "logexp", lambda here: {"logsigmoid": "sigmoid"}.get(here, here)
    ),
    "dpo_loss": _named({False: "dpo", True: "ipo"}, "the loss"),
    "epoch_freq": Transform(
        lambda steps: "after_each_epoch" if steps < 0 else steps, lambda freq: -1 if freq == "after_each_epoch" else freq
    ),
    "optimizer": _named({"adam": "AdamW"}, "the optimizer"),
}
