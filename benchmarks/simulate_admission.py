"""A rollout with a full KV cache on paper: what headroom, order of admission and preemption cost.

    python benchmarks/simulate_admission.py
    python benchmarks/simulate_admission.py --cache-gib 30 --bytes-per-token 73728      # an 8-bit cache

The scheduler is the engine's own, with the lengths of benchmarks/rollout.py (`--lengths-lognormal`). Instead
of a GPU there is a formula: a decode step takes --step-seconds (weights, norms, launches), and reads the keys
and values of all rows at --bandwidth; a prefill takes --prefill-seconds and its tokens at --prefill-rate. The
defaults are a Qwen3-8B in bf16 on one H200. One JSON line per policy; `rows` and `use` are means over the
steps, `tail_seconds` are those in which nothing waits and at most 64 rows run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from strop.rollout.native.pages import PAGE, pages_for
from strop.rollout.native.requests import ScheduledSample
from strop.rollout.native.scheduler import Scheduler
from strop.rollout.native.step_loop import HEADROOM, MIN_ADMIT_SHARE, STEPS_PER_SYNC

TAIL_ROWS = 64


@dataclass(frozen=True)
class Work:
    """A prompt and the length of its answers."""

    prompt: int
    answer: int


def work_of(options: argparse.Namespace) -> list[Work]:
    draw = random.Random(1)
    median, sigma, most = options.lengths_lognormal
    lengths = [draw.lognormvariate(math.log(median), sigma) for _ in range(options.prompts)]
    prompts = random.Random(0)
    return [Work(prompts.randint(70, 170), max(1, min(int(most), round(length)))) for length in lengths]


@dataclass
class Counters:
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    tail_seconds: float = 0.0
    steps: int = 0
    row_steps: int = 0
    token_steps: float = 0.0
    preemptions: int = 0
    recomputed_tokens: int = 0


class Rollout:
    """Samples in the scheduler, and the time that they take."""

    def __init__(self, work: Sequence[Work], headroom: int, options: argparse.Namespace) -> None:
        self.options = options
        self.pages = int(options.cache_gib * 2**30 / options.bytes_per_token) // PAGE
        self.scheduler = Scheduler(
            max_num_seqs=options.max_num_seqs,
            budget=self.pages * PAGE,
            headroom=headroom,
            min_admit_share=MIN_ADMIT_SHARE["cuda"],
        )
        self.scheduler.add(
            ScheduledSample(number, index, range(one.prompt), one.prompt + one.answer)
            for number, one in enumerate(work)
            for index in range(options.samples)
        )
        self.counted = Counters()

    def run(self) -> Counters:
        while not self.scheduler.idle:
            self._admit()
            self._decode()
        return self.counted

    def _used(self, more: int = 0) -> int:
        """Pages of the running rows with so many more tokens. Samples of a prompt share its full pages."""
        seen: set[int] = set()
        used = 0
        for sample, length in zip(self.scheduler.running, self.scheduler.lengths):
            used += pages_for(min(sample.limit, length + more))
            if sample.request in seen:
                used -= len(sample.prompt) // PAGE
            seen.add(sample.request)
        return used

    def _admit(self) -> None:
        scheduler = self.scheduler
        computed = {sample.request for sample in scheduler.running}
        admitted = scheduler.admit(self.pages - self._used()) if scheduler.may_admit() else []
        tokens = 0
        for sample in admitted:
            if sample.preempted:
                self.counted.recomputed_tokens += sample.length
                tokens += sample.length
            elif sample.request not in computed:
                tokens += len(sample.prompt)
                computed.add(sample.request)
            sample.preempted = False
        if admitted:
            seconds = self.options.prefill_seconds + tokens / self.options.prefill_rate
            self.counted.prefill_seconds += seconds
            self.counted.seconds += seconds

    def _decode(self) -> None:
        scheduler = self.scheduler
        lengths = scheduler.lengths
        left = max(sample.limit - length for sample, length in zip(scheduler.running, lengths))
        steps = min(STEPS_PER_SYNC["cuda"], left)
        while self._used(steps) > self.pages:
            row = scheduler.newest()
            sample = scheduler.running[row]
            sample.tokens = [0] * (lengths[row] - len(sample.prompt))
            scheduler.send_back(row)
            self.counted.preemptions += 1
        rows = len(scheduler.running)
        tokens = sum(lengths) + rows * steps / 2
        seconds = steps * (
            self.options.step_seconds + tokens * self.options.bytes_per_token / self.options.bandwidth
        )
        self.counted.seconds += seconds
        self.counted.steps += steps
        self.counted.row_steps += steps * rows
        self.counted.token_steps += steps * tokens
        if not scheduler.waiting and rows <= TAIL_ROWS:
            self.counted.tail_seconds += seconds
        for row, sample in enumerate(scheduler.running):
            lengths[row] = min(sample.limit, lengths[row] + steps)
        done = [row for row, sample in enumerate(scheduler.running) if lengths[row] == sample.limit]
        if done:
            scheduler.remove_finished(done)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--lengths-lognormal", type=float, nargs=3, default=(1500, 0.8, 8192))
    parser.add_argument("--cache-gib", type=float, default=30)
    parser.add_argument("--bytes-per-token", type=int, default=147456, help="of keys and values")
    parser.add_argument("--bandwidth", type=float, default=4.05e12, help="bytes per second")
    parser.add_argument("--step-seconds", type=float, default=0.005)
    parser.add_argument("--prefill-seconds", type=float, default=0.02)
    parser.add_argument("--prefill-rate", type=float, default=30_000, help="tokens per second")
    parser.add_argument("--headroom", type=int, nargs="+", default=[64, 128, HEADROOM, 1024])
    options = parser.parse_args()
    work = work_of(options)
    orders = {"fcfs": work, "longest_first": sorted(work, key=lambda one: -one.answer)}
    for order, sequence in orders.items():
        for headroom in options.headroom:
            found = Rollout(sequence, headroom, options).run()
            cached = found.token_steps / found.steps * options.bytes_per_token
            line = {
                "admission_order": order,
                "headroom": headroom,
                "seconds": round(found.seconds, 1),
                "tail_seconds": round(found.tail_seconds, 1),
                "prefill_seconds": round(found.prefill_seconds, 1),
                "steps": found.steps,
                "rows": round(found.row_steps / found.steps, 1),
                "use": round(cached / (options.cache_gib * 2**30), 3),
                "preemptions": found.preemptions,
                "recomputed_tokens": found.recomputed_tokens,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
