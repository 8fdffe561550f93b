"""Alerts: right on recorded runs, silent on healthy ones, told once per episode, remembered over a resume."""

from __future__ import annotations

import ast
import gzip
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys
from strop.run.health.history import COURSE, FIRST, LAST, Series
from strop.run.health.monitor import QUIET_STEPS, HealthMonitor, RuleMonitor, read_metrics, replay_alerts
from strop.run.health.rules import RULES
from strop.run.profile import report as profile_report
from tests.run.health_runs.make import HERE, RECIPES


def alerts_of(name: str, tmp_path: Path) -> list[Any]:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(gzip.decompress((HERE / f"{name}.jsonl.gz").read_bytes()))
    return replay_alerts(path)


GAP = "training/rollout_probs_diff_mean"
SPAN = {"critic/score/min": 0.0, "critic/score/max": 1.0}
HEALTHY = [name for name, recipe in RECIPES.items() if recipe.expected is None]
CALCULATOR = (
    [0.878, 0.808, 0.587, 0.441, 0.285, 0.217, 0.177, 0.119, 0.109, 0.086, 0.072, 0.074, 0.05, 0.057, 0.06],
    [0.129, 0.156, 0.211, 0.289, 0.473, 0.605, 0.648, 0.77, 0.738, 0.828, 0.773, 0.852, 0.926, 0.883, 0.863],
)
"""Entropy and score of examples/tool_calculator: certain before it is done, because it has found out how."""
BROKEN = {name: recipe.expected for name, recipe in RECIPES.items() if recipe.expected is not None}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_gives_no_alert(name: str, tmp_path: Path) -> None:
    assert [(alert.step, alert.name, alert.message) for alert in alerts_of(name, tmp_path)] == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_named(name: str, tmp_path: Path) -> None:
    found = alerts_of(name, tmp_path)
    assert BROKEN[name] in {alert.name for alert in found}, [(alert.step, alert.name) for alert in found]


def test_there_are_ten_of_each() -> None:
    assert len(HEALTHY) >= 10 and len(BROKEN) >= 10


def step(**metrics: float) -> dict[str, float]:
    return {
        "timing_s/step": 1.0,
        "timing_s/gen": 0.9,
        **{key.replace("__", "/"): value for key, value in metrics.items()},
    }


def test_an_episode_is_told_once_and_ends_after_a_calm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    health = HealthMonitor(tmp_path)
    shares = [0.9] * 12 + [0.0] * (QUIET_STEPS + 4) + [0.9] * 6
    with caplog.at_level(logging.WARNING):
        states = [
            health.examine(step(response_length__clip_ratio=share), i + 1) for i, share in enumerate(shares)
        ]
    told = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [(alert["name"], alert["step"]) for alert in told] == [("truncation", 5), ("truncation", 29)]
    assert set(told[0]) == {"step", "time", "name", "severity", "message", "advice", "values"}
    assert told[0]["values"] == {"response_length/clip_ratio": 0.9} and "90%" in told[0]["message"]
    assert (
        caplog.text.count("truncation:") == 2 and "What to try: Raise data.max_response_length" in caplog.text
    )
    assert states[4] == {"health/alerts": 1.0, "health/truncation": 1.0} and states[26] == {
        "health/alerts": 0.0
    }


def test_a_resumed_run_remembers_what_it_saw(tmp_path: Path) -> None:
    first = HealthMonitor(tmp_path)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for number in range(1, 9):
            metrics = step(response_length__clip_ratio=0.9)
            first.examine(metrics, number)
            file.write(json.dumps({"step": number, "data": metrics}) + "\n")
        file.write('{"step": 9, "da')  # a killed process
    going_on = HealthMonitor(tmp_path, resumed_from=7)
    assert going_on.examine(step(response_length__clip_ratio=0.9), 8)["health/truncation"] == 1.0
    assert len((tmp_path / "alerts.jsonl").read_text().splitlines()) == 1
    earlier = HealthMonitor(tmp_path, resumed_from=3)  # the alert of step 5 has not happened yet
    assert (tmp_path / "alerts.jsonl").read_text() == ""
    for number in (4, 5):
        earlier.examine(step(response_length__clip_ratio=0.9), number)
    assert len((tmp_path / "alerts.jsonl").read_text().splitlines()) == 1


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    health = HealthMonitor(tmp_path)
    health.path = tmp_path / "gone" / "alerts.jsonl"
    for number in range(1, 8):
        health.examine(step(response_length__clip_ratio=0.9), number)
    assert "alerts cannot be written" in caplog.text and "truncation" in caplog.text


def test_a_stalled_phase_is_named() -> None:
    monitor = RuleMonitor()
    for number in range(1, 15):
        assert monitor.add(step(timing_s__reward=1.0), number) == []
    (alert,) = monitor.add({**step(timing_s__reward=100.0), "timing_s/step": 101.0}, 15)
    assert alert.name == "stalled_phase" and "reward took 100 s" in alert.message


def test_missing_and_strange_values_are_no_news() -> None:
    monitor = RuleMonitor()
    for number in range(1, 30):
        odd = {
            "actor/entropy": float("nan"),
            "critic/score/mean": "NaN",
            "actor/grad_norm": float("inf"),
            "note": "text",
        }
        assert monitor.add({**step(), **odd}, number) == []
    assert RuleMonitor().add({"val-core/x/acc/mean@1": 0.5}, 0) == []


def test_every_rule_says_what_to_try() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.advice.endswith(".") and rule.severity in ("warning", "error") for rule in RULES)


def test_a_long_history_stays_small() -> None:
    series = Series()
    for number in range(100_000):
        series.add(float(number % 1000))
    assert len(series.course) <= COURSE and len(series.last) == LAST and len(series.first) == FIRST
    assert (series.low, series.high, series.best) == (0.0, 999.0, 997.0) and series.recent(5) == 997.0
    assert series.course[0] == 0.0 and series.course[1] == float(series._stride % 1000)


def test_lines_that_are_not_ours_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "data": {"a": 1}}\n[]\n{"step": "x"}\n{"step": 2}\n\x00\n{"step": 3, "data": {"a": 2}}\n{"st'
    )
    assert list(read_metrics(path)) == [({"a": 1}, 1), ({"a": 2}, 3)] and list(read_metrics(path, 2)) == [
        ({"a": 1}, 1)
    ]
    assert list(read_metrics(tmp_path / "nothing")) == []


def test_advice_names_keys_that_exist() -> None:
    known = {key.path for root in ("ppo_trainer", "sft_trainer") for key in keys(ROOTS[root])}
    code = ast.parse(Path(profile_report.__file__).read_text())
    texts = [
        node.value
        for node in ast.walk(code)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    sections = "actor|rollout|critic|trainer|data|algorithm|reward_model|actor_rollout_ref|ref"
    asked = set(
        re.findall(rf"\b(?:{sections})\.[a-z_.]*[a-z]", " ".join([*(rule.advice for rule in RULES), *texts]))
    )
    assert len(asked) > 25
    wrong = {key for key in asked if not any(f"{path}.".startswith(f"{key}.") for path in known)}
    assert not wrong


@pytest.mark.parametrize(
    ("precision", "gap", "correlation", "cause"),
    [
        ("fp32", 0.06, 0.97, "temperature"),
        ("float32", 0.15, 0.4, "other weights"),
        ("bfloat16", 0.15, 0.999, "quantization"),
        ("bf16", 0.11, None, "did not load"),
        ("fp32", 0.04, 0.97, None),
        ("bfloat16", 0.09, 0.97, None),
        ("float16", 0.09, 0.97, None),
        ("8 bits", 0.29, 0.97, None),
        ("8 bits", 0.31, 0.97, "temperature"),
    ],
)
def test_a_large_difference_in_the_first_step_names_its_likely_cause(
    precision: str, gap: float, correlation: float | None, cause: str | None
) -> None:
    metrics = {"training/rollout_logprobs_diff_mean": gap}
    if correlation is not None:
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    monitor = RuleMonitor(precision=precision)
    found = monitor.add({**step(), **metrics}, 1)
    assert [alert.name for alert in found] == ["first_step_mismatch"] * (cause is not None)
    if cause is not None:
        assert cause in found[0].message and f"{gap:.3g}" in found[0].message
    late = RuleMonitor(precision=precision)
    late.add(step(), 1)
    assert late.add({**step(), **metrics}, 2) == []


@pytest.mark.parametrize(("gap", "alerts"), [(0.012, 0), (0.029, 0), (0.031, 1)])
def test_samples_in_8_bits_may_differ_more(gap: float, alerts: int) -> None:
    """A 0.5B model in float32 with int8 weights in the engine differs by 0.012."""
    monitor = RuleMonitor(precision="8 bits")
    found = [alert for i in range(1, 6) for alert in monitor.add({**step(), GAP: gap}, i)]
    assert [alert.name for alert in found] == ["rollout_mismatch"] * alerts


@pytest.mark.parametrize(
    ("name", "course"),
    [
        ("clip_fraction", lambda i: {"actor/pg_clipfrac": 0.1 if i < 10 else 0.45}),
        ("reward_collapse", lambda i: {"critic/score/mean": 0.7 if i < 15 else 0.2, **SPAN}),
        (
            "reward_saturation",
            lambda i: {"critic/score/mean": 0.99, "critic/zero_variance_groups": 0.95, **SPAN},
        ),
        ("kl_runaway", lambda i: {"actor/ppo_kl": 0.5}),
        ("rollout_mismatch", lambda i: {GAP: 0.03}),
        ("rollout_mismatch", lambda i: {GAP: 0.03, "staleness/mean": float(i > 1)}),
        ("rollout_mismatch", lambda i: {GAP: 0.0 if i == 1 else 0.2, "staleness/mean": float(i > 1)}),
        ("gradient_spike", lambda i: {"actor/grad_norm": 40.0 if i == 15 else 1.0}),
        (
            "entropy_collapse",
            lambda i: {"actor/entropy": 1.0 / i, "critic/score/mean": min(0.6, 0.1 * i), **SPAN},
        ),
        ("gradient_spike", lambda i: {"actor/grad_norm": 1.0, "critic/skipped_updates": float(i == 12)}),
    ],
)
def test_courses_that_no_recorded_run_takes(name: str, course: Any) -> None:
    monitor = RuleMonitor()
    found = [alert for i in range(1, 25) for alert in monitor.add({**step(), **course(i)}, i)]
    assert [alert.name for alert in found] == [name]


@pytest.mark.parametrize(
    "course",
    [
        lambda i: {"actor/pg_clipfrac": 0.25},
        lambda i: {GAP: 0.0 if i == 1 else 0.05, "staleness/mean": float(i > 1)},
        lambda i: {GAP: 0.03 if i == 9 else 0.002},
        lambda i: {"critic/score/mean": 0.7 if i % 7 else 0.1, **SPAN},
        lambda i: {"actor/grad_norm": 1.0 + 3.0 * (i % 5 == 0)},
        lambda i: {"actor/entropy": 1.0 / i, "critic/score/mean": min(1.0, 0.4 + i / 20), **SPAN},
        lambda i: {
            "actor/entropy": CALCULATOR[0][min(i, 15) - 1],
            "critic/score/mean": CALCULATOR[1][min(i, 15) - 1],
            **SPAN,
        },
        lambda i: {
            "critic/score/mean": 0.02 * i,
            "reward/acc/mean": 0.02 * i,  # the score under another name
            "reward/no_program/mean": 0.1 / i,
            **SPAN,
        },
    ],
)
def test_ordinary_courses_are_no_news(course: Any) -> None:
    monitor = RuleMonitor()
    assert [alert for i in range(1, 40) for alert in monitor.add({**step(), **course(i)}, i)] == []
