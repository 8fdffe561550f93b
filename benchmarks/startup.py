"""How long the front door takes: `strop --help`, a typo, a configuration error. The goal is half a second
each.

    python benchmarks/startup.py [--repeats 11]

Prints one JSON line per command: median and spread of the wall time, and the ratio to the bare interpreter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

STROP = [sys.executable, "-m", "strop.cli"]
COMMANDS = {
    "interpreter": [sys.executable, "-c", "pass"],
    "help": [*STROP, "--help"],
    "typo": [*STROP, "check", "ppo", "data.trian_files=x"],
    "clash": [
        *STROP,
        "check",
        "ppo",
        "actor_rollout_ref.model.path=m",
        "data.train_files=f",
        "data.train_batch_size=100",
    ],
    "clash, through Hydra": [*STROP, "check", "ppo", "data.train_files=['a b']", "data.train_batch_size=100"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=11)
    repeats = parser.parse_args().repeats
    base = None
    for name, command in COMMANDS.items():
        seconds(command)  # the first run reads the files from the disk
        times = sorted(seconds(command) for _ in range(repeats))
        median = statistics.median(times)
        base = base or median
        print(
            json.dumps(
                {
                    "command": name,
                    "median_s": round(median, 3),
                    "min_s": round(times[0], 3),
                    "max_s": round(times[-1], 3),
                    "times_the_interpreter": round(median / base, 1),
                }
            )
        )


if __name__ == "__main__":
    main()
