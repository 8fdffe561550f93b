"""How fast the board is with many samples on the disk, and how much memory many readers cost it.

    python benchmarks/board.py --samples 1000000 --readers 50 [--work DIR] [--browser]

Prints one JSON line: seconds of each request to a server of its own (after a first one that warms nothing but
the operating system's cache), what a fresh browser waits for when the server was just started and when it was
not, and how long `--readers` readers wait for searches and for everything else while a run writes, with the
server's memory every ten seconds. Files are those of a run with trainer.samples_to_keep=128: 128 samples a
step in groups of 8.

A reader does what the pages do: asks for the list of runs and for what is on its screen every four seconds,
opens something after a pause of `--pause` seconds on average, and types searches, most of them its own, some
for what is nowhere.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop.run.sample_table import FOLDER, SampleJob, TokenTexts, file_name, sample_table, write_samples
from strop.types import Prompt, Trajectory

PER_STEP, GROUP, TOKENS, VARIANTS = 128, 8, 48, 24
LOOK = 10.0
"""Seconds from one look at the server's memory to the next."""
POLL, WRITE = 4.0, 1.0
"""Seconds from one time that a page asks by itself to the next; from one step of the run that writes to the
next."""
MOST_ANSWERS = 8
"""After which a reader gives up a search that has found nothing."""
TEXT = "so we add both numbers and carry the one then check that result twice before we answer it with care"
WORDS = TEXT.split()


def step_table(seed: int) -> Any:
    rng = np.random.default_rng(seed)

    def trajectory(row: int) -> Trajectory:
        group = row // GROUP
        ids = rng.integers(0, len(WORDS), TOKENS).tolist()
        prompt = Prompt(1000 * seed + group, rng.integers(0, len(WORDS), 40).tolist(), [], "sums", str(seed))
        score = float(rng.random() < 0.6) if group else 1.0
        failed = seed == 3 and row == 77
        log_probs = (-rng.exponential(0.5, TOKENS)).tolist()
        return Trajectory(
            prompt,
            group,
            ids,
            [1] * TOKENS,
            log_probs,
            score=None if failed else score,
            extras={"acc": score},
        )

    rows = [trajectory(row) for row in range(PER_STEP)]
    noise = torch.rand(PER_STEP, TOKENS, generator=torch.Generator().manual_seed(seed))
    tables = {
        "mask": torch.ones(PER_STEP, TOKENS),
        "advantages": noise - 0.5,
        "entropy": noise,
        "trained_log_probs": -noise,
    }
    return sample_table(
        SampleJob("train", seed, rows, tables), TokenTexts(lambda ids: " ".join(WORDS[i] for i in ids))
    )


def write_set(run: Path, samples: int) -> int:
    """Samples of a long run: files repeat after VARIANTS steps, except that one step has a word of its
    own."""
    run.mkdir(parents=True)
    steps = max(VARIANTS, samples // PER_STEP)
    originals = [
        write_samples(run / "originals", "train", seed, step_table(seed)) for seed in range(VARIANTS)
    ]
    (run / FOLDER).mkdir()
    for step in range(1, steps + 1):
        shutil.copyfile(originals[step % VARIANTS], run / FOLDER / file_name("train", step))
    shutil.rmtree(run / "originals")
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(metric_line(step))
    return steps


def metric_line(step: int) -> str:
    data = {f"metric/{i}": random.random() for i in range(90)} | {"critic/score/mean": random.random()}
    return json.dumps({"step": step, "time": time.time(), "data": data}) + "\n"


class Server:
    def __init__(self, root: Path):
        command = [sys.executable, "-m", "strop.cli", "board", str(root), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split(": ")[-1].strip().rstrip("/")

    def get(self, path: str) -> tuple[float, Any]:
        start = time.perf_counter()
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            body = reply.read()
        return time.perf_counter() - start, body

    def megabytes(self, peak: bool = False) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) / 1024

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def one_reader(server: Server, steps: int) -> dict[str, float]:
    """Seconds of what a reader does, one after the other."""
    seconds, body = server.get("/api/runs")
    found = {"runs_first": seconds, "runs": server.get("/api/runs")[0]}
    run = f"/api/runs/{json.loads(body)['runs'][0]['id']}"
    found["steps"] = server.get(f"{run}/samples")[0]
    found["latest_step"] = server.get(f"{run}/samples/train?step={steps}&limit=30")[0]
    found["any_step"] = max(
        server.get(f"{run}/samples/train?step={random.randint(1, steps)}&sort=worst")[0] for _ in range(20)
    )
    found["group"] = server.get(f"{run}/samples/train/{steps}/3")[0]
    found["tokens"] = server.get(f"{run}/samples/train/{steps}/3/0/tokens")[0]
    found["curve"] = server.get(
        f"/api/curves?run={run.rsplit('/', 1)[1]}&metric=critic/score/mean&points=600"
    )[0]
    found["all_steps_zero_variance"] = server.get(f"{run}/samples/train?show=zero_variance")[0]
    found["all_steps_failed"] = server.get(f"{run}/samples/train?show=failed")[0]
    found["search_one_step"] = server.get(f"{run}/samples/train?step={steps}&search=carry%20the%20one")[0]
    seconds, body = server.get(f"{run}/samples/train?search=nowhere%20to%20be%20found")
    found["search_all_steps_one_answer"] = seconds
    found["search_steps_per_answer"] = steps - json.loads(body)["left"]
    start = time.perf_counter()
    while (place := json.loads(body)["next"]) is not None:
        text = {"search": "nowhere to be found", "from": place[0], "offset": place[1]}
        body = server.get(query(f"{run}/samples/train", **text))[1]
    found["search_all_steps_to_the_end"] = seconds + time.perf_counter() - start
    found["search_all_steps_again"] = server.get(
        f"{run}/samples/train?search=nowhere%20to%20be%20found%20either"
    )[0]
    return {name: round(value, 4) for name, value in found.items()}


class Reader:
    """One who looks at the board, and what it had to wait for: seconds by kind of request."""

    def __init__(self, server: Server, run: str, steps: int, seed: int, pause: float):
        self.server, self.run, self.steps, self.pause = server, run, steps, pause
        self.rng = random.Random(seed)
        self.name = f"reader {seed}"
        self.waited: dict[str, list[float]] = {"search": [], "other": []}
        self.errors: list[str] = []
        self.samples = f"/api/runs/{run}/samples"
        self.curves = f"/api/curves?run={run}&metric=critic/score/mean&metric=metric/1"
        self.screen = self.curves

    def live(self, until: float) -> None:
        polled = time.monotonic() - POLL * self.rng.random()
        act = time.monotonic() + self._pause()
        while (now := time.monotonic()) < until:
            if now >= polled + POLL:
                polled = now
                self.get("/api/runs")
                self.get(self.screen)
            elif now >= act:
                self.rng.choice(
                    [self.browse, self.browse, self.read_tokens, self.look_at_curves, self.search]
                )()
                act = time.monotonic() + self._pause()
            else:
                time.sleep(min(polled + POLL, act) - now)

    def _pause(self) -> float:
        return self.pause * (0.5 + self.rng.random())

    def browse(self) -> None:
        self.screen = self.samples
        step = self.rng.randint(1, self.steps)
        self.get(f"{self.samples}/train?step={step}&sort=worst")
        self.get(f"{self.samples}/train/{step}/{self.rng.randint(0, 15)}")

    def read_tokens(self) -> None:
        self.get(f"{self.samples}/train/{self.rng.randint(1, self.steps)}/1/0/tokens")

    def look_at_curves(self) -> None:
        self.screen = self.curves
        self.get(self.curves)

    def search(self) -> None:
        """Typed in two goes, and followed over the steps until something is found, or for MOST_ANSWERS."""
        text, show = self.rng.choice(
            [
                (" ".join(self.rng.sample(WORDS, 3)), "all"),
                (f"{self.rng.choice(WORDS)} nowhere {self.rng.randint(0, 9)}", "all"),
                (self.name, "all"),
                ("carry the one", "failed"),
            ]
        )
        self.get(query(f"{self.samples}/train", search=text[: len(text) // 2], show=show), "search")
        place: dict[str, Any] = {}
        for _ in range(MOST_ANSWERS):
            found = self.get(query(f"{self.samples}/train", search=text, show=show, **place), "search")
            if found is None or found["groups"] or found["next"] is None:
                return
            place = {"from": found["next"][0], "offset": found["next"][1]}

    def get(self, path: str, kind: str = "other") -> Any:
        try:
            seconds, body = self.server.get(path)
        except OSError as error:
            self.errors.append(f"{path}: {error}")
            return None
        self.waited[kind].append(seconds)
        return json.loads(body) if kind == "search" else None


def query(path: str, **values: Any) -> str:
    return f"{path}?{urllib.parse.urlencode(values)}"


def write(run_folder: Path, steps: int, until: float) -> None:
    """A run that writes a step every WRITE seconds."""
    original = (run_folder / FOLDER / file_name("train", 1)).read_bytes()
    step = steps
    while time.monotonic() < until:
        step += 1
        with (run_folder / "metrics.jsonl").open("a") as file:
            file.write(metric_line(step))
        aside = run_folder / FOLDER / ".new"
        aside.write_bytes(original)
        aside.rename(run_folder / FOLDER / file_name("train", step))
        time.sleep(WRITE)


def many_readers(server: Server, run_folder: Path, steps: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Latencies and memory while readers look around and a run writes."""
    run = json.loads(server.get("/api/runs")[1])["runs"][0]["id"]
    until = time.monotonic() + asked.seconds
    readers = [Reader(server, run, steps, seed, asked.pause) for seed in range(asked.readers)]
    before = server.megabytes()
    threads = [threading.Thread(target=reader.live, args=(until,)) for reader in readers]
    threads.append(threading.Thread(target=write, args=(run_folder, steps, until)))
    for thread in threads:
        thread.start()
    course = []
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(LOOK, left))
        course.append(round(server.megabytes()))
    for thread in threads:
        thread.join()
    kinds = {
        kind: [seconds for reader in readers for seconds in reader.waited[kind]]
        for kind in ("other", "search")
    }
    return {
        "readers": asked.readers,
        "pause_s": asked.pause,
        "errors": [error for reader in readers for error in reader.errors][:10],
        **{kind: waits(taken) for kind, taken in kinds.items()},
        "mb_before": round(before),
        "mb_every_10_s": course,
        "mb_after": round(server.megabytes()),
        "mb_peak": round(server.megabytes(peak=True)),
    }


def waits(taken: list[float]) -> dict[str, float]:
    twentieths = statistics.quantiles(taken, n=20)
    found = {"median_s": statistics.median(taken), "p95_s": twentieths[-1], "longest_s": max(taken)}
    return {"requests": len(taken)} | {name: round(value, 3) for name, value in found.items()}


def in_browser(server: Server, browser: Any) -> dict[str, float]:
    """Milliseconds until the first paint and until samples can be read, in a browser that has seen nothing
    yet."""
    page = browser.new_context().new_page()
    page.goto(f"{server.url}/#/rollouts")
    page.wait_for_selector(".samples .sample")
    shown = page.evaluate("performance.now()")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.context.close()
    return {"first_paint_ms": round(paint), "samples_shown_ms": round(shown)}


def in_browsers(root: Path, server: Server) -> dict[str, dict[str, float]]:
    """The browser is open before a new server is started, so the server gets no time that a reader would not
    give it."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        start = time.perf_counter()
        new = Server(root)
        up = {"server_up_ms": round(1000 * (time.perf_counter() - start))}
        try:
            return {"just_started": up | in_browser(new, browser), "later": in_browser(server, browser)}
        finally:
            new.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--readers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument(
        "--pause", type=float, default=3, help="seconds from one click of a reader to the next, on average"
    )
    parser.add_argument("--work", type=Path)
    parser.add_argument("--browser", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.work) as folder:
        run = Path(folder) / "run"
        steps = write_set(run, asked.samples)
        size = sum(path.stat().st_size for path in (run / FOLDER).iterdir())
        server = Server(Path(folder))
        try:
            told: dict[str, Any] = {"samples": steps * PER_STEP, "files": steps, "disk_mb": round(size / 1e6)}
            told["seconds"] = one_reader(server, steps)
            if asked.browser:
                told["browser"] = in_browsers(Path(folder), server)
            told["readers"] = many_readers(server, run, steps, asked)
        finally:
            server.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
