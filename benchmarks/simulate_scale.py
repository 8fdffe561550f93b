"""Steps of real models on clusters that are not here, from times measured on one H200.

    python benchmarks/simulate_scale.py --save benchmarks/results/simulate_scale.jsonl

The decode step and the update of a device are formulas with measured rates (MEASURED); the first lines
compare them with recorded runs on one H200. What cannot be measured on one device is assumed (ASSUMED, each
with its reason) or published by others. The Python of a rank is what `simulate_cluster.py` measured. Two ways
to use a cluster: `shared`, where all GPUs sample and then train, synchronously, and `apart`, where some
sample all the time and the others train on samples of earlier weights (trainer.async_training with
partial_rollout). For `apart` the best division is searched. One JSON line per model, size and way; the last
ones simulate workloads whose step others have published.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from simulate_cluster import BYTES_PER_TOKEN, Cluster, Service

RESULTS = Path(__file__).resolve().parent / "results"
SAMPLES = 8
Line = dict[str, object]


@dataclass(frozen=True)
class Measured:
    """On one H200 (docs/performance/rollouts.md)."""

    bandwidth: float = 4.3e12
    """Bytes per second that decode steps reach."""
    decode_flops: float = 617e12
    """Matrix products of a decode step with many rows, the slowest layer."""
    launch: float = 45e-6
    """Seconds per layer and decode step for small kernels."""
    prefill_flops: float = 350e12
    """45% of the rate of a large product."""
    update_flops: float = 325e12
    """Operations per second of an update: 8B with LoRA, 8,192 tokens, selective checkpointing, 8,639 "
    "tok/s."""
    memory: float = 139.8 * 2**30 * 0.9


@dataclass(frozen=True)
class Assumed:
    """What one device does not show."""

    node: int = 8
    node_link: float = 350e9
    """Bytes per second and GPU inside a machine (NVLink)."""
    link: float = 40e9
    """Bytes per second and GPU between machines (400 Gbit/s)."""
    sync: float = 8.25e9
    """Bytes per second at which all replicas get new weights; published for verl's NCCL on 32 H100."""
    hidden: float = 0.5
    """Share of the communication of an update that overlaps with computation."""
    rows: int = 256
    """Samples that one GPU decodes at a time."""


MEASURED = Measured()
ASSUMED = Assumed()


@dataclass(frozen=True)
class Device:
    """Rates in relation to the H200, by the data sheets."""

    flops: float = 1.0
    bandwidth: float = 1.0
    memory: float = 1.0


H200 = Device()
H100 = Device(1.0, 3.35 / 4.8, 80 / 141)
H20 = Device(148 / 989, 4.0 / 4.8, 96 / 141)


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    active: float
    """Weights that a token is multiplied with."""
    stored: float
    """Bytes of the weights of one engine."""
    cache: float
    """Bytes of the KV cache per token, all layers."""
    attention: float
    """Numbers per token and layer that queries are compared with, summed over heads: operations of attention
    are 4 x this x context."""
    width: int = 2
    """Bytes of a weight in the engine."""
    engine: int = 1
    """GPUs that share one copy of the engine's weights."""
    exchange: float = 0.0
    """Seconds per layer of a decode step that GPUs of one engine exchange activations."""
    decode_factor: float = 1.0
    """Seconds of a decode step in relation to the formula."""
    update_share: float = 1.0
    """Update rate in relation to the measured one."""
    sync_seconds: float | None = None
    """Weight sync, where a published time is better than a rate."""


QWEN3_8B = Model("qwen3-8b", 36, 7.57e9, 16.4e9, 36 * 2 * 8 * 128 * 2, 4096)
# The engine: fp8 weights on the 8 GPUs of a machine, attention data-parallel, experts divided, 60 us for the
# two exchanges of a layer. With the factor, 256 rows per GPU at 2,000 tokens give the 22,300 tok/s per 8 H100
# that SGLang publishes. Updates: 188 of the measured 325 TFLOP/s, the 19% of the peak that verl publishes.
# The weight sync is that of checkpoint-engine on 256 H20.
DEEPSEEK_V3 = Model(
    "deepseek-v3",
    61,
    37e9,
    671e9,
    61 * 576 * 2,
    128 * 160,
    width=1,
    engine=8,
    exchange=60e-6,
    decode_factor=1.87,
    update_share=188 / 325,
    sync_seconds=13.9,
)
KNOWN = {
    "qwen2.5-1.5b": Model("qwen2.5-1.5b", 28, 1.54e9, 3.1e9, 28 * 2 * 2 * 128 * 2, 1536),
    "qwen2.5-7b": Model("qwen2.5-7b", 28, 7.07e9, 15.2e9, 28 * 2 * 4 * 128 * 2, 3584),
    "qwen3-8b": QWEN3_8B,
    "deepseek-v3": DEEPSEEK_V3,
}


@dataclass(frozen=True)
class Work:
    """Lengths are log-normal."""

    median: float = 1500.0
    spread: float = 0.8
    longest: int = 8192
    prompt: int = 256

    def lengths(self, draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        drawn = self.median * np.exp(self.spread * draw.standard_normal(shape))
        return np.minimum(self.longest, drawn.astype(np.int64) + 1)


def decode_seconds(model: Model, rows: np.ndarray, context: np.ndarray, device: Device = H200) -> np.ndarray:
    """Of one step in which each GPU has `rows` samples with `context` tokens in all."""
    bandwidth = MEASURED.bandwidth * device.bandwidth
    products = rows * 2 * model.active / (MEASURED.decode_flops * device.flops)
    # Few rows wait for weights, many rows for products; attention reads its cache in both cases.
    weights = np.maximum(model.stored / model.engine / bandwidth, products)
    fixed = model.layers * (MEASURED.launch + model.exchange)
    return model.decode_factor * (weights + context * model.cache / bandwidth + fixed)


def rollout_seconds(model: Model, work: Work, lengths: np.ndarray, device: Device = H200) -> np.ndarray:
    """How long each GPU decodes its samples (one row of `lengths` per GPU), all admitted at once."""
    seconds = np.zeros(len(lengths))
    prompts = lengths.shape[1] / SAMPLES * work.prompt
    prefill = prompts * 2 * model.active / (MEASURED.prefill_flops * device.flops)
    for start in range(0, work.longest, 64):  # blocks of 64 steps
        active = (lengths > start).sum(axis=1)
        context = (np.minimum(lengths, start + 32) * (lengths > start)).sum(axis=1) + active * work.prompt
        steps = np.clip(lengths.max(axis=1) - start, 0, 64)
        seconds += steps * decode_seconds(model, active, context, device) * (active > 0)
    return seconds + prefill


def waves(model: Model, work: Work, lengths: np.ndarray, device: Device) -> np.ndarray:
    """The same with at most ASSUMED.rows at a time: a new sample starts when one ends. Counted as a time with
    full rows and a last wave that runs empty."""
    per_gpu = lengths.shape[1]
    if per_gpu <= ASSUMED.rows:
        return rollout_seconds(model, work, lengths, device)
    full = lengths[:, : per_gpu - ASSUMED.rows].sum(axis=1)
    steady = steady_rows(model, work, device)
    return full / steady.rate + rollout_seconds(model, work, lengths[:, -ASSUMED.rows :], device)


@dataclass(frozen=True)
class Steady:
    """A GPU whose rows are always full."""

    rows: int
    context: float
    """Tokens of a row, on average."""
    rate: float
    """Tokens per second."""


@functools.cache
def mean_context(work: Work) -> float:
    """Of a row at any moment: a long answer is met more often than a short one."""
    sample = work.lengths(np.random.default_rng(1), (200_000,)).astype(float)
    return work.prompt + float((sample**2).mean() / (2 * sample.mean()))


def steady_rows(model: Model, work: Work, device: Device, at_most: int = ASSUMED.rows) -> Steady:
    context = mean_context(work)
    room = (MEASURED.memory * device.memory - model.stored / model.engine) / (model.cache * context)
    rows = max(1, min(at_most, int(room)))
    step = decode_seconds(model, np.array(rows), np.array(rows * context), device)
    return Steady(rows, context, rows / float(step))


@functools.lru_cache(maxsize=8)
def drawn_lengths(work: Work, gpus: int, per_gpu: int, step: int) -> np.ndarray:
    return work.lengths(np.random.default_rng(step), (gpus, per_gpu))


def update_seconds(
    model: Model, work: Work, lengths: np.ndarray, gpus: int, device: Device, forwards: int = 0
) -> float:
    """Updates on all samples, prompts of a group computed once; `forwards`: passes for log-probs besides."""
    tokens = lengths.sum() + lengths.size / SAMPLES * work.prompt
    attention = 3 * 2 * model.layers * model.attention * (lengths.astype(float) ** 2).sum()
    operations = (1 + forwards / 3) * (6 * model.active * tokens + attention)
    passes = operations / (gpus * MEASURED.update_flops * device.flops * model.update_share)
    # Gradients in float32 are summed over machines once; inside a machine they travel by NVLink.
    machines = math.ceil(gpus / ASSUMED.node)
    sums = 0.0
    if machines > 1:
        sums = 2 * 4 * weights_of(model) / min(gpus, ASSUMED.node * model.engine) / ASSUMED.link
    return passes + (1 - ASSUMED.hidden) * sums


def sync_seconds(model: Model, apart: bool) -> float:
    if not apart:
        return model.stored / model.engine / ASSUMED.node_link
    return model.sync_seconds or model.stored / ASSUMED.sync


def driver_seconds(service: Service, lengths: np.ndarray, ranks: int) -> float:
    cluster = Cluster(lengths.shape[0], ranks, lengths.shape[1], service, 0)
    tokens = int(lengths.sum())
    python, _ = cluster.driver_seconds(tokens)
    return python + tokens * BYTES_PER_TOKEN / ASSUMED.link


@dataclass(frozen=True)
class Case:
    """A model, its work and a cluster."""

    model: Model
    work: Work
    gpus: int
    samples: int
    """Of one step."""
    service: Service
    device: Device = H200
    forwards: int = 0
    """Passes for log-probs besides the update."""
    age: float = 4.0
    """apart: steps that may pass while an answer is decoded."""

    def lengths(self, step: int) -> np.ndarray:
        """One row per GPU."""
        return drawn_lengths(self.work, self.gpus, max(1, self.samples // self.gpus), step)


def shared(case: Case, steps: int = 5) -> Line:
    """All GPUs sample, then all train."""
    spent: list[dict[str, float]] = []
    for step in range(steps):
        lengths = case.lengths(step)
        each = waves(case.model, case.work, lengths, case.device)
        spent.append(
            {
                "tokens": float(lengths.sum()),
                "sampling": float(each.mean()),
                "waiting": float(each.max() - each.mean()),
                "update": update_seconds(
                    case.model, case.work, lengths, case.gpus, case.device, case.forwards
                ),
                "weight_sync": sync_seconds(case.model, False),
                "python": driver_seconds(case.service, lengths, case.gpus),
            }
        )
    return summary(case, "shared", spent, {"sampling_gpus": case.gpus, "training_gpus": case.gpus})


def apart(case: Case, sampling: int, rows: int, steps: int = 5) -> Line:
    """`sampling` GPUs decode up to `rows` samples each all the time, the others train on what was finished. A
    step takes as long as the slower side and as the age allows; both stand still during a weight sync."""
    training = case.gpus - sampling
    steady = steady_rows(case.model, case.work, case.device, rows)
    prefill = MEASURED.prefill_flops * case.device.flops
    again = steady.rows * steady.context * 2 * case.model.active / prefill
    longest = case.work.longest * steady.rows / steady.rate
    spent = []
    for step in range(steps):
        lengths = case.lengths(step)
        making = float(lengths.sum()) / (steady.rate * sampling) + again
        update = update_seconds(case.model, case.work, lengths, training, case.device, case.forwards)
        python = driver_seconds(case.service, lengths, training)
        spent.append(
            {
                "tokens": float(lengths.sum()),
                "update": update,
                "python": python,
                "waiting": max(0.0, max(making, longest / case.age) - update - python),
                "weight_sync": sync_seconds(case.model, True),
                "sampling": making,
            }
        )
    division = {"sampling_gpus": sampling, "training_gpus": training, "rows": steady.rows}
    line = summary(case, "apart", spent, division)
    return {**line, "longest_answer": rounded(longest)}


def best_apart(case: Case) -> Line:
    """The division with the shortest step."""
    model = case.model
    # Weights, masters, gradients and Adam's two states: 18 bytes per weight must fit into four fifths.
    room = 0.8 * MEASURED.memory * case.device.memory
    least = math.ceil(18 * weights_of(model) / room / model.engine) * model.engine
    divisions = range(model.engine, case.gpus - least + 1, max(model.engine, case.gpus // 32))
    found = []
    for sampling in divisions:
        for window in (0.5, 1, 2, 4):  # samples in flight, in steps
            rows = max(1, int(window * case.samples / sampling))
            found.append(apart(case, sampling, min(ASSUMED.rows, rows)))
    return min(found, key=lambda line: float(str(line["step_seconds"])))


def weights_of(model: Model) -> float:
    """Number of weights."""
    return model.stored / model.width


def summary(case: Case, way: str, spent: list[dict[str, float]], division: Line) -> Line:
    mean = {key: sum(step[key] for step in spent) / len(spent) for key in spent[0]}
    tokens = mean.pop("tokens")
    in_a_row = dict(mean)
    if way == "apart":  # sampling goes on beside the update
        in_a_row.pop("sampling")
    seconds = sum(in_a_row.values())
    compared = {key: mean[key] for key in ("sampling", "update", "weight_sync", "python")}
    if way == "shared":
        compared["waiting"] = mean["waiting"]
    return {
        "model": case.model.name,
        "gpus": case.gpus,
        "samples": case.gpus * max(1, case.samples // case.gpus),
        "way": way,
        **division,
        "step_seconds": rounded(seconds),
        **{key: rounded(value) for key, value in mean.items()},
        "tokens_per_second": rounded(tokens / seconds),
        "tokens_per_second_per_gpu": rounded(tokens / seconds / case.gpus),
        "longest_part": max(compared, key=lambda key: compared[key]),
    }


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


# --- The formulas beside records ----------------------------------------------------------------------------

SHORT = Work(256.0, 0.0, 256, 120)
RECORDED = (
    ("qwen3-8b", Work(), 64, 4, 7630.0),
    ("qwen2.5-1.5b", Work(), 64, 8, 38100.0),
    ("qwen2.5-7b", SHORT, 256, 4, 34600.0),
    ("qwen2.5-1.5b", SHORT, 256, 4, 121000.0),
)
"""Model, work, prompts, samples, tokens per second of the native engine (docs/performance/)."""


def checks() -> Iterator[Line]:
    for name, work, prompts, samples, recorded in RECORDED:
        draw = random.Random(1)  # the lengths that benchmarks/rollout.py draws, one per prompt
        drawn = (draw.lognormvariate(math.log(work.median), work.spread) for _ in range(prompts))
        lengths = np.repeat([min(work.longest, round(length)) for length in drawn], samples)[None]
        found = float(lengths.sum() / rollout_seconds(KNOWN[name], work, lengths)[0])
        yield {
            "check": f"decode {name}, {prompts} x {samples} of {work.median:g}",
            "formula": rounded(found),
            "recorded": recorded,
            "ratio": rounded(found / recorded),
        }
    full = np.array(256), np.array(256 * 2000)
    rate = 8 * 256 / float(decode_seconds(DEEPSEEK_V3, *full, H100))
    yield {
        "check": "decode deepseek-v3, 8 H100, 256 rows per GPU at 2,000 tokens",
        "formula": rounded(rate),
        "recorded": 22300.0,
        "ratio": rounded(rate / 22300),
    }


# --- Workloads of others ------------------------------------------------------------------------------------
# NeMo RL 0.4 publishes model, GPUs, samples, mean length and seconds (docs/about/performance-summary.md);
# Llama has four updates per step, so there is a pass for old log-probs. verl (docs/advance/fully_async.md)
# and AReaL (its paper) publish how much faster asynchronous training is; lengths are guessed from the limits.


def published(service: Service) -> Iterator[Line]:
    llama = replace(QWEN3_8B, name="llama-3.1-8b")
    on_policy = Case(llama, Work(900, 0.55, 4096), 16, 2048, service, H100, forwards=1)
    one_off = replace(on_policy, work=Work(960, 0.55, 4096), age=1.0)
    bf16 = replace(DEEPSEEK_V3, stored=2 * DEEPSEEK_V3.stored, width=2, engine=32)
    deepseek = Case(bf16, Work(680, 0.45, 1536), 512, 512, service, H100, age=1.0)
    steps = (
        ("NeMo RL 0.4, Llama-3.1-8B, 16 H100, on-policy", 97.7, shared(on_policy)),
        ("NeMo RL 0.4, Llama-3.1-8B, 16 H100, one step off", 74.6, best_apart(one_off)),
        ("NeMo RL 0.4, DeepSeek-V3, 512 H100, one step off", 77.9, best_apart(deepseek)),
    )
    kept = ("step_seconds", "sampling", "waiting", "update", "weight_sync", "longest_part")
    for name, seconds, line in steps:
        yield {"published": name, "published_seconds": seconds, **{key: line[key] for key in kept}}
    seven = replace(QWEN3_8B, name="qwen2.5-7b", cache=28 * 2 * 4 * 128 * 2, layers=28)
    verl = Case(seven, Work(1500, 1.0, 28672), 128, 8192, service, H20, forwards=1)
    areal = Case(seven, Work(6000, 0.8, 31744), 128, 8192, service, H100, forwards=1)
    ratios = (
        ("verl, Qwen2.5-Math-7B, 128 H20, up to 28k", 2.35, verl),
        ("AReaL, 7B, up to 31k (the largest ratio of its paper)", 2.77, areal),
    )
    for name, ratio, case in ratios:
        together = float(str(shared(case)["step_seconds"]))
        divided = float(str(best_apart(replace(case, forwards=0))["step_seconds"]))
        yield {
            "published": name,
            "published_ratio": ratio,
            "shared_seconds": together,
            "apart_seconds": divided,
            "ratio": rounded(together / divided),
        }


def recorded_service() -> Service:
    first = (RESULTS / "simulate_cluster.jsonl").read_text().splitlines()[0]
    return Service(**json.loads(first)["service_seconds"])


def lines() -> Iterator[Line]:
    service = recorded_service()
    yield {"measured": asdict(MEASURED), "assumed": asdict(ASSUMED), "python_of_a_rank": asdict(service)}
    yield from checks()
    for gpus in (8, 64, 512):
        case = Case(QWEN3_8B, Work(), gpus, 128 * gpus, service)
        yield shared(case)
        yield best_apart(case)
    same_batch = Case(QWEN3_8B, Work(), 512, 8192, service)
    yield {**shared(same_batch), "note": "the batch of 64 GPUs"}
    yield {**best_apart(same_batch), "note": "the batch of 64 GPUs"}
    large = Case(DEEPSEEK_V3, Work(), 512, 8192, service)
    yield best_apart(large)
    for share, why in ((0.5, "updates half as fast"), (250 / 188, "updates at 250 TFLOP/s")):
        changed = replace(DEEPSEEK_V3, update_share=DEEPSEEK_V3.update_share * share)
        yield {**best_apart(replace(large, model=changed)), "note": why}
    yield from published(service)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", type=Path, help="file for the lines")
    asked = parser.parse_args()
    made = []
    for line in lines():
        made.append(json.dumps(line))
        print(made[-1], flush=True)
    if asked.save:
        asked.save.write_text("\n".join(made) + "\n")


if __name__ == "__main__":
    main()
