"""`strop profile RUN`: where the time of a step goes, and what to turn first. Reads the metrics of a run; needs no trace."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from strop.run.health import recorded

WARM_UP = 2
"""Steps that compile and allocate, and are left out where there are others."""
OUTSIDE = ("testing", "save_checkpoint")
"""Phases between steps."""
PARTS_OF_OTHERS = ("step", "agent_loop")
ONE_ANSWER = 2
"""Turns of a prompt and its answer."""
WORTH_SAYING = 0.03
"""Share of the whole that a lever must be able to save."""


@dataclass(frozen=True)
class Lever:
    seconds: float
    """Of a step, that it could save at most."""
    what: str
    turn: str


@dataclass(frozen=True)
class Report:
    steps: int
    step_seconds: float
    phases: dict[str, float]
    """Mean seconds per step; those outside steps are spread over all of them."""
    levers: list[Lever]
    metrics: dict[str, float]


def report(run: Path) -> Report:
    rows = [(metrics, step) for metrics, step in recorded(run / "metrics.jsonl")]
    steps = [metrics for metrics, _ in rows if "timing_s/step" in metrics]
    if not steps:
        raise ValueError(f"{run / 'metrics.jsonl'} has no training steps: name the folder of a run with the logger `file`.")
    used = steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps
    means = {name: mean(values) for name in _names(used) if (values := _column(used, name))}
    phases = {
        name.removeprefix("timing_s/"): sum(_column(used, name)) / len(used)
        for name in means
        if name.startswith("timing_s/") and name.count("/") == 1 and name.split("/")[1] not in PARTS_OF_OTHERS
    }
    step = means["timing_s/step"]
    inside = sum(seconds for name, seconds in phases.items() if name not in OUTSIDE)
    phases["(between phases)"] = max(step - inside, 0.0)
    path = run / "metrics.config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    found = sorted(levers(phases, means, config), key=lambda lever: -lever.seconds)
    total = step + sum(phases.get(name, 0.0) for name in OUTSIDE)
    return Report(len(used), step, phases, [lever for lever in found if lever.seconds > WORTH_SAYING * total], means)


def _names(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    return {name for row in rows for name, value in row.items() if isinstance(value, int | float)}


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]


def levers(phases: Mapping[str, float], metrics: Mapping[str, float], config: Mapping[str, Any]) -> list[Lever]:
    """What could be saved, by phase. Each estimate is the most that its cause can account for."""
    return [*_sampling(phases, metrics, config), *_scoring(phases), *_passes(phases, metrics, config), *_around(phases, config)]


def _sampling(phases: Mapping[str, float], metrics: Mapping[str, float], config: Mapping[str, Any]) -> list[Lever]:
    seconds = phases.get("gen", 0.0)
    engine = min(metrics.get("rollout/seconds", seconds), seconds)
    found = []
    if seconds - engine > 0.1 * seconds:
        found.append(_around_the_engine(seconds - engine, metrics))
    occupancy = metrics.get("rollout/occupancy")
    if occupancy is not None and occupancy < 0.7:
        longest, usual = metrics.get("response_length/max", 0.0), metrics.get("response_length/mean", 1.0)
        tail = f"; the longest answer has {longest / max(usual, 1):.1f} times the usual length" if longest else ""
        found.append(
            Lever(
                engine * (1 - occupancy),
                f"the engine's batch is {occupancy:.0%} full on average{tail}",
                "more prompts per step (data.train_batch_size) or samples (rollout.n); "
                "for long tails trainer.async_training with partial_rollout, or a lower max_response_length",
            )
        )
    if metrics.get("rollout/preemptions", 0.0) > 0:
        found.append(
            Lever(
                0.2 * engine,
                f"{metrics['rollout/preemptions']:.0f} sequences per step were computed again because the cache was full",
                "raise rollout.gpu_memory_utilization or lower rollout.max_num_seqs",
            )
        )
    share = metrics.get("rollout/prefill_share", 0.0)
    if share > 0.3:
        cached = config.get("actor_rollout_ref", {}).get("rollout", {}).get("enable_prefix_caching")
        reused = (
            f", of which {metrics['rollout/prefix_reuse']:.0%} was known already" if "rollout/prefix_reuse" in metrics else ""
        )
        turn = "shorter prompts, more samples of each (rollout.n)"
        found.append(
            Lever(
                share * engine,
                f"{share:.0%} of sampling goes into prompts{reused}",
                turn if cached else f"rollout.enable_prefix_caching=true; {turn}",
            )
        )
    if engine and not found:
        found.append(
            Lever(
                0.3 * engine,
                "sampling itself",
                "a GPU with more memory bandwidth, rollout.dtype=bfloat16, rollout.name=vllm for large models, fewer or "
                "shorter samples",
            )
        )
    return found


def _around_the_engine(seconds: float, metrics: Mapping[str, float]) -> Lever:
    if metrics.get("num_turns/max", math.inf) > ONE_ANSWER:
        return Lever(
            seconds,
            "the engine waits during generation (tools, environments, preparing requests)",
            "make tools faster or give them a shorter time limit; more conversations at once; "
            "trainer.async_training.enable=true",
        )
    return Lever(
        seconds,
        "requests and answers are prepared while the engine waits",
        "trainer.async_training.enable=true does it while the model is trained; the larger the model, the less it matters",
    )


def _scoring(phases: Mapping[str, float]) -> list[Lever]:
    seconds = phases.get("reward", 0.0)
    turn = "reward_model.num_workers, a batched compute_score, a reward model served elsewhere (strop serve-rm)"
    return [Lever(0.8 * seconds, "scoring, while no model computes", turn)] if seconds else []


def _log_probs(phases: Mapping[str, float], config: Mapping[str, Any]) -> list[Lever]:
    """A pass that only reads does a third of the work of an update of the same tokens."""
    update, found = phases.get("update_actor", 0.0), []
    in_reward = config.get("algorithm", {}).get("use_kl_in_reward")
    without = {
        "old_log_prob": "a KL term in the loss (actor.use_kl_loss) instead of the reward needs no such pass on-policy"
        if in_reward
        else "one update per step (ppo_mini_batch_size=train_batch_size, ppo_epochs=1) needs no such pass; with several, "
        "actor.use_rollout_log_probs=true takes the engine's",
        "ref": "train without a KL term, or with LoRA, whose reference costs no memory",
    }
    for name, section in (("old_log_prob", "rollout"), ("ref", "ref")):
        seconds = phases.get(name, 0.0)
        slow = seconds - update / 3 if update and seconds > 2 / 3 * update else 0.0
        if slow:
            found.append(
                Lever(
                    slow,
                    f"{name} only reads the tokens, and takes {seconds / update:.1f} times as long as the update",
                    f"larger micro-batches: {section}.log_prob_micro_batch_size_per_gpu, or log_prob_use_dynamic_bsz=true",
                )
            )
        if seconds:
            found.append(Lever(seconds - slow, f"the pass {name}", without[name]))
    return found


def _passes(phases: Mapping[str, float], metrics: Mapping[str, float], config: Mapping[str, Any]) -> list[Lever]:
    actor = config.get("actor_rollout_ref", {}).get("actor", {})
    model = config.get("actor_rollout_ref", {}).get("model", {})
    found = _log_probs(phases, config)
    update = phases.get("update_actor", 0.0) + phases.get("update_critic", 0.0) + phases.get("update", 0.0)
    if update and model.get("enable_gradient_checkpointing"):
        found.append(
            Lever(
                update / 4,
                "updates compute every layer twice to save memory",
                "actor_rollout_ref.model.enable_gradient_checkpointing=false where memory allows (`strop plan`)",
            )
        )
    if update and actor and not actor.get("use_dynamic_bsz"):
        found.append(
            Lever(
                0.2 * update,
                "micro-batches have a fixed number of rows, whatever their length",
                "actor.use_dynamic_bsz=true with ppo_max_token_len_per_gpu as large as fits",
            )
        )
    waste = metrics.get("critic/zero_variance_groups", 0.0)
    if waste > 0.3 and (actor.get("use_kl_loss") or actor.get("entropy_coeff")):
        found.append(
            Lever(
                waste * update,
                f"{waste:.0%} of the groups teach nothing, and are computed because of a KL or entropy term",
                "algorithm.filter_groups.enable=true, or no such term (then they are skipped)",
            )
        )
    if critic := phases.get("values", 0.0) + phases.get("update_critic", 0.0):
        found.append(Lever(critic, "the critic", "an estimator without one (grpo, rloo) needs neither pass"))
    return found


def _around(phases: Mapping[str, float], config: Mapping[str, Any]) -> list[Lever]:
    trainer = config.get("trainer", {})
    advice = {
        "testing": f"validate less often (trainer.test_freq={trainer.get('test_freq', '?')}), on fewer rows or samples",
        "save_checkpoint": "actor.checkpoint.async_save=true, a larger trainer.save_freq, fewer save_contents",
        "update_weights": "an engine that samples from the trainer's own weights (rollout.name=native); larger buckets",
        "keep_samples": "a smaller trainer.samples_to_keep",
        "dump_rollout_generations": "no trainer.rollout_data_dir",
        "(between phases)": "drawing and reading data: data.dataloader_num_workers",
    }
    return [Lever(phases[name], name, turn) for name, turn in advice.items() if phases.get(name)]


def render(found: Report, run: Path) -> str:
    total = found.step_seconds + sum(found.phases.get(name, 0.0) for name in OUTSIDE)
    lines = [f"{run}: {found.steps} steps, {total:.3g} s each on average (checkpoints and validation spread over them)"]
    if "perf/throughput" in found.metrics:
        lines[0] += f", {found.metrics['perf/throughput']:.0f} tokens/s per device"
    for name, seconds in sorted(found.phases.items(), key=lambda item: -item[1]):
        if seconds > 0.001 * total:
            bar = "#" * round(40 * seconds / total)
            lines.append(f"  {name:<24} {seconds:>9.3f} s {seconds / total:>6.1%}  {bar}")
    lines.append("levers, the largest first (seconds per step that each could save at most):")
    for lever in found.levers:
        lines.append(f"  {lever.seconds:>8.3f} s  {lever.what}")
        lines.append(f"  {'':>8}    try: {lever.turn}")
    if not found.levers:
        lines.append("  none stands out")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="strop profile", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run (trainer.default_local_dir)")
    asked = parser.parse_args(list(arguments))
    sys.stdout.write(render(report(asked.run), asked.run))
    return 0
