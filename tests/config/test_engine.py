"""Which engine a configuration gets."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from strop.config.compose import load
from strop.config.derived import engine_name, holds_weights
from strop.config.rules import check

NAME = "actor_rollout_ref.rollout.name"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Libraries that can be imported, among those that matter here."""
    found: set[str] = set()
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return (
            (SimpleNamespace() if name in found else None)
            if name in ("vllm", "sglang")
            else real(name, package)
        )

    monkeypatch.setattr(importlib.util, "find_spec", find)
    return found


def rollout(name: str, **own: Any) -> Any:
    return SimpleNamespace(name=name, nnodes=0, engine_kwargs={name: own})


def test_an_engine_that_is_not_installed_gives_way_to_the_native_one(installed: set[str]) -> None:
    assert [engine_name(rollout(name)) for name in ("native", "hf", "vllm", "sglang")] == [
        "native",
        "hf",
        "native",
        "native",
    ]
    installed |= {"vllm"}
    assert [engine_name(rollout(name)) for name in ("vllm", "sglang")] == ["vllm", "native"]


def test_an_engine_may_be_installed_elsewhere(installed: set[str]) -> None:
    assert engine_name(rollout("vllm", python="/opt/vllm/bin/python")) == "vllm"
    assert engine_name(rollout("sglang", url="http://127.0.0.1:30000")) == "sglang"
    assert engine_name(rollout("vllm", enforce_eager=True)) == "native"


def test_only_engines_with_a_copy_of_the_weights_are_given_them(installed: set[str]) -> None:
    installed |= {"vllm"}
    assert [holds_weights(rollout(name)) for name in ("native", "hf", "vllm", "sglang")] == [
        False,
        False,
        True,
        False,
    ]


def test_a_notice_or_a_refusal_says_what_to_do(installed: set[str]) -> None:
    def findings(*overrides: str) -> list[Any]:
        data = ["data.train_files=x.parquet", "actor_rollout_ref.model.path=x"]
        return [f for f in check(load("ppo_trainer", [*data, *overrides])) if f.key == NAME]

    (notice,) = findings(f"{NAME}=vllm")
    assert notice.level == "warning" and "the native engine samples instead" in notice.message
    (refusal,) = findings(f"{NAME}=vllm", "actor_rollout_ref.rollout.strict=true")
    assert refusal.level == "error" and "rollout.engine_kwargs.vllm.python" in refusal.message
    assert (
        findings(f"{NAME}=vllm", "actor_rollout_ref.rollout.engine_kwargs.vllm.python=/opt/vllm/bin/python")
        == []
    )
    with pytest.raises(ValueError, match=r"Did you mean .?vllm"):
        load("ppo_trainer", [f"{NAME}=vlm"])
