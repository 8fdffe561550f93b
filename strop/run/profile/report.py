"""`strop profile RUN`: where the time of a step goes, and which setting to change first. Reads the metrics of
a run; needs no trace."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from strop.run.health.monitor import read_metrics

WARM_UP = 2
"""Steps that compile and allocate. They are skipped if the run is long enough."""
OUTSIDE = ("testing", "save_checkpoint")
"""Phases between steps."""
NOT_A_PHASE = ("step", "agent_loop")
"""Timers that contain, or are part of, the timers of phases."""
SINGLE_TURN = 2
"""`num_turns` of one prompt and one response."""
MINIMUM_SHARE = 0.03
"""A lever is reported if it could save this share of the total time."""
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Lever:
    """A setting to change, and the time that it could save."""

    seconds: float
    """Upper limit of the savings per step."""
    what: str
    turn: str


@dataclass(frozen=True)
class ProfileReport:
    """Mean times per phase and the levers, largest first."""

    steps: int
    step_seconds: float
    phases: dict[str, float]
    """Mean seconds per step; phases outside steps are averaged over all steps."""
    levers: list[Lever]
    metrics: dict[str, float]


def report(run: Path) -> ProfileReport:
    """Average the metrics of a run and list its levers."""
    steps = _training_steps(run / "metrics.jsonl")
    if len(steps) > 2 * WARM_UP:
        steps = steps[WARM_UP:]
    columns = _columns(steps)
    means = {name: mean(values) for name, values in columns.items()}
    step_seconds = means["timing_s/step"]
    phases: dict[str, float] = {}
    for name, values in columns.items():
        if _is_phase(name):
            phases[name.removeprefix("timing_s/")] = sum(values) / len(steps)
    inside = sum(seconds for name, seconds in phases.items() if name not in OUTSIDE)
    phases["(between phases)"] = max(step_seconds - inside, 0.0)
    threshold = MINIMUM_SHARE * _total_seconds(step_seconds, phases)
    found = levers(phases, means, _read_config(run / "metrics.config.json"))
    found.sort(key=lambda lever: -lever.seconds)
    large = [lever for lever in found if lever.seconds > threshold]
    return ProfileReport(len(steps), step_seconds, phases, large, means)


def _training_steps(path: Path) -> list[Mapping[str, object]]:
    steps: list[Mapping[str, object]] = []
    for metrics, _ in read_metrics(path):
        if isinstance(metrics.get("timing_s/step"), int | float):
            steps.append(metrics)
    if not steps:
        raise ValueError(
            f"{path} has no training steps. Name the folder of a run whose trainer.logger includes `file`, "
            "for instance [console,file]."
        )
    return steps


def _read_config(path: Path) -> dict[str, object]:
    """The configuration of the run, or an empty one if it was not written or cannot be read."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _columns(rows: Sequence[Mapping[str, object]]) -> dict[str, list[float]]:
    """The numbers of each metric, in the order of the steps."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float):
                columns.setdefault(name, []).append(float(value))
    return columns


def _is_phase(name: str) -> bool:
    if not name.startswith("timing_s/"):
        return False
    phase = name.removeprefix("timing_s/")
    return "/" not in phase and phase not in NOT_A_PHASE


def _total_seconds(step_seconds: float, phases: Mapping[str, float]) -> float:
    """Seconds per step including the phases between steps."""
    return step_seconds + sum(phases.get(name, 0.0) for name in OUTSIDE)


def _section(config: Mapping[str, object], *path: str) -> Mapping[str, object]:
    """A section of the configuration, or an empty one if it is missing."""
    section = config
    for name in path:
        inner = section.get(name)
        section = inner if isinstance(inner, Mapping) else {}
    return section


def levers(
    phases: Mapping[str, float], metrics: Mapping[str, float], config: Mapping[str, object]
) -> list[Lever]:
    """All levers, phase by phase. Each estimate is an upper limit of what its cause accounts for."""
    return [
        *_rollout_levers(phases, metrics, config),
        *_reward_levers(phases),
        *_model_levers(phases, metrics, config),
        *_other_levers(phases, config),
    ]


def _rollout_levers(
    phases: Mapping[str, float], metrics: Mapping[str, float], config: Mapping[str, object]
) -> list[Lever]:
    seconds = phases.get("gen", 0.0)
    engine = min(metrics.get("rollout/seconds", seconds), seconds)
    found: list[Lever] = []
    if seconds - engine > 0.1 * seconds:
        found.append(_idle_engine_lever(seconds - engine, metrics))
    occupancy = metrics.get("rollout/occupancy")
    if occupancy is not None and occupancy < 0.7:
        found.append(_occupancy_lever(engine, occupancy, metrics))
    if metrics.get("rollout/preemptions", 0.0) > 0:
        found.append(
            Lever(
                0.2 * engine,
                f"{metrics['rollout/preemptions']:.0f} sequences per step were computed again because the "
                "cache was full",
                f"raise {ROLLOUT}.gpu_memory_utilization or lower {ROLLOUT}.max_num_seqs",
            )
        )
    share = metrics.get("rollout/prefill_share", 0.0)
    if share > 0.3:
        found.append(_prefill_lever(engine, share, metrics, config))
    if engine and not found:
        found.append(
            Lever(
                0.3 * engine,
                "sampling itself",
                f"a GPU with more memory bandwidth, {ROLLOUT}.dtype=bfloat16, {ROLLOUT}.name=vllm for large "
                "models, fewer or shorter samples",
            )
        )
    return found


def _occupancy_lever(engine: float, occupancy: float, metrics: Mapping[str, float]) -> Lever:
    max_length = metrics.get("response_length/max", 0.0)
    mean_length = metrics.get("response_length/mean", 1.0)
    tail = ""
    if max_length:
        tail = f"; the longest response has {max_length / max(mean_length, 1):.1f} times the usual length"
    return Lever(
        engine * (1 - occupancy),
        f"the engine's batch is {occupancy:.0%} full on average{tail}",
        f"more prompts per step (data.train_batch_size) or samples ({ROLLOUT}.n); for long tails "
        "trainer.async_training.partial_rollout=true, or a lower data.max_response_length",
    )


def _prefill_lever(
    engine: float, share: float, metrics: Mapping[str, float], config: Mapping[str, object]
) -> Lever:
    reused = ""
    if "rollout/prefix_reuse" in metrics:
        reused = f", of which {metrics['rollout/prefix_reuse']:.0%} was known already"
    turn = f"shorter prompts, more samples of each ({ROLLOUT}.n)"
    if not _section(config, "actor_rollout_ref", "rollout").get("enable_prefix_caching"):
        turn = f"{ROLLOUT}.enable_prefix_caching=true; {turn}"
    return Lever(share * engine, f"{share:.0%} of sampling goes into prompts{reused}", turn)


def _idle_engine_lever(seconds: float, metrics: Mapping[str, float]) -> Lever:
    if metrics.get("num_turns/max", math.inf) > SINGLE_TURN:
        return Lever(
            seconds,
            "the engine waits during generation (tools, environments, preparing requests)",
            "make tools faster or give them a shorter time limit; more conversations at once; "
            "trainer.async_training.enable=true",
        )
    return Lever(
        seconds,
        "requests and responses are prepared while the engine waits",
        "trainer.async_training.enable=true does it while the model is trained; the larger the model, the "
        "less it matters",
    )


def _reward_levers(phases: Mapping[str, float]) -> list[Lever]:
    seconds = phases.get("reward", 0.0)
    if not seconds:
        return []
    turn = (
        "reward_model.num_workers, a batched compute_score, a reward model served elsewhere (strop serve-rm)"
    )
    return [Lever(0.8 * seconds, "scoring, while no model computes", turn)]


def _log_prob_levers(phases: Mapping[str, float], config: Mapping[str, object]) -> list[Lever]:
    """Forward passes: each does a third of the work of an update of the same tokens."""
    found: list[Lever] = []
    update = phases.get("update_actor", 0.0)
    for name, section in (("old_log_prob", ROLLOUT), ("ref", "actor_rollout_ref.ref")):
        seconds = phases.get(name, 0.0)
        excess = 0.0
        if update and seconds > 2 / 3 * update:
            excess = seconds - update / 3
        if excess:
            found.append(
                Lever(
                    excess,
                    f"{name} only reads the tokens, and takes {seconds / update:.1f} times as long as the "
                    "update",
                    f"larger micro-batches: {section}.log_prob_micro_batch_size_per_gpu, or "
                    f"{section}.log_prob_use_dynamic_bsz=true",
                )
            )
        if seconds:
            found.append(Lever(seconds - excess, f"the pass {name}", _how_to_skip(name, config)))
    return found


def _how_to_skip(name: str, config: Mapping[str, object]) -> str:
    """The settings with which a log-prob pass is not needed."""
    if name == "ref":
        return "train without a KL term, or with LoRA, whose reference costs no memory"
    if _section(config, "algorithm").get("use_kl_in_reward"):
        loss = f"{ACTOR}.use_kl_loss=true"
        return f"a KL term in the loss ({loss}) instead of the reward needs no such pass on-policy"
    return (
        f"one update per step ({ACTOR}.ppo_mini_batch_size as large as data.train_batch_size, "
        f"{ACTOR}.ppo_epochs=1) needs no such pass; with several, {ACTOR}.use_rollout_log_probs=true takes "
        "the engine's"
    )


def _model_levers(
    phases: Mapping[str, float], metrics: Mapping[str, float], config: Mapping[str, object]
) -> list[Lever]:
    actor = _section(config, "actor_rollout_ref", "actor")
    model = _section(config, "actor_rollout_ref", "model")
    found = _log_prob_levers(phases, config)
    update = phases.get("update_actor", 0.0) + phases.get("update_critic", 0.0) + phases.get("update", 0.0)
    mode = model.get("gradient_checkpointing")
    whole_layers = mode == "full" or (mode is None and model.get("enable_gradient_checkpointing"))
    if update and whole_layers:
        found.append(
            Lever(
                update / 4,
                "updates compute every layer twice to save memory",
                "actor_rollout_ref.model.enable_gradient_checkpointing=false or "
                "actor_rollout_ref.model.gradient_checkpointing=selective where memory allows (`strop plan`)",
            )
        )
    if update and actor and not actor.get("use_dynamic_bsz"):
        found.append(
            Lever(
                0.2 * update,
                "micro-batches have a fixed number of rows, whatever their length",
                f"{ACTOR}.use_dynamic_bsz=true with {ACTOR}.ppo_max_token_len_per_gpu as large as fits",
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


def _other_levers(phases: Mapping[str, float], config: Mapping[str, object]) -> list[Lever]:
    """Levers of validation, checkpoints, weight sync and data."""
    test_freq = _section(config, "trainer").get("test_freq", "?")
    checkpoint = f"{ACTOR}.checkpoint"
    if config and not _section(config, "actor_rollout_ref"):  # supervised training
        checkpoint = "trainer.checkpoint"
    advice = {
        "testing": f"validate less often (trainer.test_freq={test_freq}), on fewer rows or samples",
        "save_checkpoint": f"{checkpoint}.async_save=true, a larger trainer.save_freq, fewer "
        f"{checkpoint}.save_contents",
        "update_weights": f"an engine that samples from the trainer's own weights ({ROLLOUT}.name=native); "
        "larger buckets",
        "keep_samples": "a smaller trainer.samples_to_keep",
        "dump_rollout_generations": "no trainer.rollout_data_dir",
        "(between phases)": "drawing and reading data: data.dataloader_num_workers",
    }
    return [Lever(phases[name], name, turn) for name, turn in advice.items() if phases.get(name)]


def render(found: ProfileReport, run: Path) -> str:
    """The report as printed."""
    total = _total_seconds(found.step_seconds, found.phases)
    title = (
        f"{run}: {found.steps} steps, {total:.3g} s each on average (checkpoints and validation spread over "
        "them)"
    )
    if "perf/throughput" in found.metrics:
        title += f", {found.metrics['perf/throughput']:.0f} tokens/s per device"
    lines = [title]
    for name, seconds in sorted(found.phases.items(), key=lambda item: -item[1]):
        if seconds > 0.001 * total:
            bar = "#" * round(40 * seconds / total)
            lines.append(f"  {name:<24} {seconds:>9.3f} s {seconds / total:>6.1%}  {bar}")
    lines.append("what to change, the largest gain first (seconds per step that each could save at most):")
    for lever in found.levers:
        lines.append(f"  {lever.seconds:>8.3f} s  {lever.what}")
        lines.append(f"  {'':>8}    try: {lever.turn}")
    if not found.levers:
        lines.append("  none stands out")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Entry point of `strop profile`."""
    parser = argparse.ArgumentParser(prog="strop profile", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run (trainer.default_local_dir)")
    parsed = parser.parse_args(list(arguments))
    sys.stdout.write(render(report(parsed.run), parsed.run))
    return 0
