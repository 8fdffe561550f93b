"""Plays a new user from the wheel to a trained model: every command is one of the documentation.

    python scripts/newcomer.py                                        # dependencies from the package index
    python scripts/newcomer.py --packages .venv/lib/python3.12/site-packages   # dependencies of this folder
    python scripts/newcomer.py --torch-wheels DIR   # torch of this folder instead of PyTorch's index

An empty environment, an empty home, pip's configuration ignored: build the wheel of the last commit, install
it, then quickstart, board (in Chromium, if it is installed), a reward function, SFT, GRPO from the SFT model,
merge, generate and evaluate. Prints the seconds of each part, and all of them at the end (--report writes
them as JSON); stops at the first command that fails. If the public index cannot be reached with pip's
configuration ignored, this machine's configuration is used, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import release

REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    correct = solution_str.strip() == str(ground_truth)
    return {"score": float(correct), "short": float(len(solution_str) < 4)}
"""
SIZES = ("rollout.prompt_length=12", "rollout.response_length=8", "rollout.top_k=-1", "rollout.top_p=1")


class Newcomer:
    """A user with a new environment and an empty home in `folder`."""

    def __init__(self, folder: Path, packages: Path | None, torch_wheels: Path | None) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.programs = release.make_environment(folder / "environment")
        self.strop = self.programs / "strop"
        self.packages = packages
        self.torch_wheels = torch_wheels
        self.env = {"PATH": f"{self.programs}:{os.environ['PATH']}", "HOME": str(self.home)}
        self.seconds: dict[str, float] = {}

    def part(self, name: str, work: Callable[[], object]) -> None:
        """Do one part and print its seconds."""
        start = time.monotonic()
        found = work()
        self.seconds[name] = round(time.monotonic() - start, 1)
        print(f"{name}: {self.seconds[name]} s{f' ({found})' if found else ''}", flush=True)

    def run(self, *words: str | Path) -> str:
        return str(release.run([self.strop, *words], cwd=self.home, env=self.env))

    def install(self, wheel: Path) -> str:
        """Install the wheel with its dependencies; returns where these came from."""
        pip = [self.programs / "pip", "install", "--quiet"]
        if self.packages is not None:
            site = release.run(
                [self.programs / "python", "-c", "import site; print(site.getsitepackages()[0])"]
            ).strip()
            Path(site, "packages.pth").write_text(f"{self.packages.resolve()}\n")
            release.run([*pip, "--no-deps", wheel])
            return f"dependencies of {self.packages}"
        env = {**self.env, "PIP_CONFIG_FILE": os.devnull}
        reached = subprocess.run(
            [self.programs / "pip", "index", "versions", "packaging"],
            env=env,
            capture_output=True,
            check=False,
        )
        where = "the public index, pip's configuration ignored"
        if reached.returncode:
            env = {**os.environ, **self.env}
            where = "this machine's pip configuration: the public index cannot be reached without it"
        pins = ["-c", str(release.ROOT / "constraints.txt")]
        if self.torch_wheels is not None:
            chosen = ["--find-links", str(self.torch_wheels.resolve())]
            where += f", torch of {self.torch_wheels}"
        else:
            words = [self.programs / "python", release.ROOT / "scripts" / "torch_build.py"]
            chosen = release.run(words).split()
        release.run([*pip, *pins, *chosen, "torch"], env=env)
        release.run([*pip, *pins, f"{wheel}[lora,plot]"], env=env)
        return where

    def board(self) -> str:
        """The board lists the runs; Chromium draws its first page."""
        release.board_answers(self.strop, self.home, self.env)
        chromium = (
            shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        )
        if chromium is None:
            return "no Chromium on this machine: pages and data were read over HTTP only"
        board = subprocess.Popen(
            [self.strop, "board", "runs", "--port", "0"],
            cwd=self.home,
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert board.stdout is not None
        try:
            url = board.stdout.readline().split()[-1]
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
            page = release.run([chromium, *options, "--dump-dom", url], cwd=self.home)
        finally:
            board.terminate()
            board.wait(release.BOARD_SECONDS)
        if "quickstart" not in page:
            raise ValueError(f"Chromium shows no run on the first page of the board: {page[:500]}")
        return "in Chromium"

    def own_reward(self) -> None:
        (self.home / "my_reward.py").write_text(REWARD)
        words = [
            self.example(),
            "custom_reward_function.path=my_reward.py",
            "trainer.default_local_dir=runs/own",
        ]
        words += ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=-1"]
        self.run("check", "ppo", *words)
        self.run("ppo", *words)
        lines = (self.home / "runs/own/metrics.jsonl").read_text().splitlines()
        if "reward/short/mean" not in json.loads(lines[-1])["data"]:
            raise ValueError("The second number of the reward function is no metric.")

    def example(self) -> str:
        """The configuration of the quickstart inside the installed package."""
        code = "import strop.quickstart.quickstart as q; print(q.EXAMPLE)"
        return str(release.run([self.programs / "python", "-c", code], cwd=self.home, env=self.env)).strip()

    def sft(self) -> None:
        rows = [{"prompt": f"{i:02}+{j:02}=", "response": str(i + j)} for i in range(8) for j in range(8)]
        (self.home / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["model.path=runs/quickstart/model", "data.train_files=sft.jsonl", "data.train_batch_size=16"]
        words += ["data.micro_batch_size_per_gpu=16", "data.max_length=24", "optim.lr=1e-4"]
        words += ["trainer.total_training_steps=4", "trainer.save_freq=4", "trainer.logger=file"]
        self.run("sft", *words, "trainer.default_local_dir=runs/sft")
        self.run("merge", "--local_dir", "runs/sft/global_step_4/model", "--target_dir", "sft_model")

    def grpo(self) -> None:
        words = ["actor_rollout_ref.model.path=sft_model", "custom_reward_function.path=my_reward.py"]
        words += ["trainer.total_training_steps=4", "trainer.save_freq=4", "trainer.test_freq=-1"]
        self.run("ppo", self.example(), *words, "trainer.default_local_dir=runs/grpo")

    def merge(self) -> None:
        self.run("merge", "--local_dir", "runs/grpo/global_step_4/actor", "--target_dir", "trained")

    def generate(self) -> str:
        words = ["model.path=trained", "data.path=runs/quickstart/data/test.parquet"]
        self.run("generate", *words, "data.output_path=trained.parquet", "data.n_samples=2", *SIZES)
        return self.run("eval", "data.path=trained.parquet").strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--packages", type=Path, help="folder with the dependencies, instead of an index")
    parser.add_argument("--torch-wheels", type=Path, help="folder with a wheel of torch")
    parser.add_argument("--report", type=Path, help="file for the seconds of each part, as JSON")
    parser.add_argument("--steps", type=int, default=320, help="of the quickstart")
    parser.add_argument("--largest", type=int, default=49, help="largest number to add in the quickstart")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        user = Newcomer(folder, arguments.packages, arguments.torch_wheels)
        release.export(folder / "tree", None)

        def wheel() -> str:
            isolated = [] if arguments.packages is None else ["--no-build-isolation"]
            python = user.programs / "python" if arguments.packages is None else Path(sys.executable)
            words = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolated, "-w", folder]
            release.run([*words, folder / "tree"])
            return next(folder.glob("*.whl")).name

        steps = f"trainer.total_training_steps={arguments.steps}"
        quickstart = ["quickstart", "--largest", str(arguments.largest), steps]
        quickstart += [f"trainer.save_freq={arguments.steps}"]
        user.part("wheel", wheel)
        user.part("install", lambda: user.install(next(folder.glob("*.whl"))))
        user.part("quickstart", lambda: user.run(*quickstart) and None)
        user.part("board", user.board)
        user.part("own reward", user.own_reward)
        user.part("sft", user.sft)
        user.part("grpo", user.grpo)
        user.part("merge", user.merge)
        user.part("generate, eval", user.generate)
    user.seconds["all"] = round(time.monotonic() - started, 1)
    print("".join(f"{seconds:8.1f} s  {name}\n" for name, seconds in user.seconds.items()), end="")
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(user.seconds, indent=1) + "\n")


if __name__ == "__main__":
    main()
