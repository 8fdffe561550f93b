"""Do two commits compute the same numbers, bit for bit?

    python benchmarks/same_numbers.py record OUT.json --inputs DIR [--only NAME ...]
    python benchmarks/same_numbers.py compare BEFORE.json AFTER.json

`record` runs small jobs through the command line (GRPO, PPO with a critic, LoRA, agents, SFT, reward model,
DPO, two ranks, an asynchronous run, a resume) and writes every metric of every step and a digest of every
tensor of the last checkpoint. Metrics that measure time are left out. Record both files on one machine, with
the same `--inputs`: floating-point sums depend on the processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

CLOCKS = (
    "timing",
    "perf/",
    "seconds",
    "_per_second",
    "tokens_per",
    "throughput",
    "memory",
    "staleness/",
    "time",
    "prefill_share",  # of the time of a rollout
)
"""Parts of the names of metrics that depend on how long something took."""

STROP = [sys.executable, "-m", "strop.cli"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    record = verbs.add_parser("record")
    record.add_argument("out", type=Path)
    record.add_argument("--inputs", type=Path, required=True)
    record.add_argument("--runs", type=Path, default=None, help="folder of the runs; default: INPUTS/runs")
    record.add_argument("--only", nargs="*", default=None)
    compare = verbs.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    asked = parser.parse_args()
    if asked.verb == "record":
        runs = asked.runs or asked.inputs / "runs"
        return record_all(asked.out, asked.inputs.resolve(), runs.resolve(), asked.only)
    return compare_files(asked.before, asked.after)


def record_all(out: Path, inputs: Path, runs: Path, only: list[str] | None) -> int:
    prepare_inputs(inputs)
    found: dict[str, Any] = {}
    for name, commands in jobs(inputs).items():
        if only is not None and name not in only:
            continue
        folder = runs / name
        shutil.rmtree(folder, ignore_errors=True)
        for command in commands:
            subprocess.run([*STROP, *command, *output_keys(folder)], check=True, env=environment())
        found[name] = {"metrics": read_metrics(folder), "tensors": tensor_digests(folder)}
        print(
            f"{name}: {len(found[name]['metrics'])} rows of metrics, {len(found[name]['tensors'])} tensors",
            flush=True,
        )
    out.write_text(json.dumps(found, indent=1, sort_keys=True))
    return 0


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def output_keys(folder: Path) -> list[str]:
    return [f"trainer.default_local_dir={folder}", "trainer.logger=file"]


def prepare_inputs(inputs: Path) -> None:
    """Data and models, made once and without the package, so that both commits read the same bytes."""
    if (inputs / "ready").exists():
        return
    inputs.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    for split, count in (("train", 64), ("test", 16)):
        write_lines(inputs / f"{split}.jsonl", [prompt_row(chance, i) for i in range(count)])
        write_lines(inputs / f"pairs_{split}.jsonl", [pair_row(chance) for _ in range(count)])
        write_lines(inputs / f"games_{split}.jsonl", [game_row(i) for i in range(count)])
    guessing = Path("examples/guessing_game/guessing.py").resolve()
    (inputs / "guessing.py").write_text(guessing.read_text())
    player = f"{inputs}/guessing.py:GuessingInteraction"
    interaction = f"interaction: [{{name: guessing, class_name: {player}, config: {{numbers: 4}}}}]\n"
    (inputs / "interactions.yaml").write_text(interaction)
    save_tiny_model(inputs / "model", words=["higher", "lower", "?"])
    (inputs / "ready").touch()


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompt_row(chance: random.Random, index: int) -> dict[str, Any]:
    a, b = chance.randint(0, 9), chance.randint(0, 9)
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"index": index},
    }


def pair_row(chance: random.Random) -> dict[str, Any]:
    a, b = chance.randint(0, 9), chance.randint(0, 9)
    wrong = str(a + b + chance.choice([1, 2, 95]))
    right = str(a + b)
    return {"prompt": f"{a}+{b}=", "response": right, "chosen": right, "rejected": wrong}


def game_row(index: int) -> dict[str, Any]:
    return {
        "data_source": "guessing",
        "prompt": [{"role": "user", "content": "?"}],
        "agent_name": "tool_agent",
        "extra_info": {"index": index, "interaction_kwargs": {"name": "guessing", "secret": index % 4}},
    }


def save_tiny_model(folder: Path, words: list[str]) -> None:
    import re

    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    known = ["<pad>", "<eos>", "<unk>", *words, *"0123456789+-*="]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*map(re.escape, words), "."])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    assistant = "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}" + assistant + "{% endfor %}"
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.06,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def jobs(inputs: Path) -> dict[str, list[list[str]]]:
    """The command lines of each job, without the keys that say where its results go."""
    ppo = [
        "ppo",
        f"data.train_files={inputs}/train.jsonl",
        f"data.val_files={inputs}/test.jsonl",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={inputs}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=4",
        "critic.model.fsdp_config.dtype=float32",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.device=cpu",
    ]
    grpo = [*ppo, "algorithm.adv_estimator=grpo"]
    critic = [
        *ppo,
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.ref.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "critic.ppo_mini_batch_size=4",
    ]
    agents = [
        *grpo,
        f"data.train_files={inputs}/games_train.jsonl",
        f"data.val_files={inputs}/games_test.jsonl",
        "data.max_response_length=12",
        f"actor_rollout_ref.rollout.multi_turn.interaction_config_path={inputs}/interactions.yaml",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        "actor_rollout_ref.rollout.multi_turn.reward_weights={score: 0}",
    ]
    supervised = [
        f"model.path={inputs}/model",
        "model.fsdp_config.dtype=float32",
        f"data.train_files={inputs}/pairs_train.jsonl",
        f"data.val_files={inputs}/pairs_test.jsonl",
        "data.train_batch_size=16",
        "data.micro_batch_size_per_gpu=8",
        "optim.lr=1e-3",
        "trainer.total_epochs=2",
        "trainer.device=cpu",
    ]
    pairs = [*supervised, "data.prompt_key=prompt"]
    lora = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=true"]
    off_policy = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.shuffle=true"]
    variants = [
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
    ]
    record = ["trainer.record_steps=[2]"]
    half = ["trainer.total_training_steps=2"]
    return {
        "grpo": [[*grpo, *record]],
        "grpo_off_policy": [[*grpo, *off_policy, *variants]],
        "ppo_critic": [critic],
        "remax": [[*ppo, "algorithm.adv_estimator=remax"]],
        "lora": [[*grpo, *lora]],
        "agents": [agents],
        "two_ranks": [[*critic, "trainer.n_gpus_per_node=2"]],
        "resume": [[*critic, *half], critic],
        "sft": [["sft", *supervised]],
        "rm": [["rm", *pairs]],
        "dpo": [["dpo", *pairs]],
        "dpo_two_ranks": [["dpo", *pairs, "trainer.n_gpus_per_node=2"]],
    }


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        data = {name: value for name, value in row["data"].items() if not measures_time(name)}
        rows.append({"step": row["step"], "data": data})
    return rows


def measures_time(name: str) -> bool:
    return any(part in name for part in CLOCKS)


def tensor_digests(folder: Path) -> dict[str, str]:
    """A digest of each tensor in each safetensors file of the last checkpoint."""
    from safetensors import safe_open

    steps = sorted(folder.glob("global_step_*"), key=lambda path: int(path.name.rsplit("_", 1)[1]))
    found = {}
    for file in sorted(steps[-1].rglob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.endswith("random.numpy.key"):  # no run seeds or draws from it
                    continue
                content = (
                    tensors.get_tensor(name).contiguous().view(-1).view(dtype_of_bytes()).numpy().tobytes()
                )
                found[f"{file.relative_to(steps[-1])}:{name}"] = hashlib.sha256(content).hexdigest()
    return found


def dtype_of_bytes() -> Any:
    import torch

    return torch.uint8


def compare_files(before: Path, after: Path) -> int:
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    differences = 0
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            print(f"{name}: only in one of the files")
            differences += 1
            continue
        found = differences_of(old[name], new[name])
        print(f"{name}: {'equal' if not found else f'{len(found)} differences'}")
        for line in found[:10]:
            print(f"  {line}")
        differences += len(found)
    return 1 if differences else 0


def differences_of(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    found = []
    if len(old["metrics"]) != len(new["metrics"]):
        found.append(f"{len(old['metrics'])} rows of metrics before, {len(new['metrics'])} after")
    for before, after in zip(old["metrics"], new["metrics"]):
        for key in sorted(before["data"].keys() | after["data"].keys()):
            left, right = before["data"].get(key), after["data"].get(key)
            if left != right and not (left != left and right != right):  # NaN equals NaN here
                found.append(f"step {before['step']} {key}: {left} before, {right} after")
    for key in sorted(old["tensors"].keys() | new["tensors"].keys()):
        if old["tensors"].get(key) != new["tensors"].get(key):
            found.append(f"tensor {key} differs")
    return found


if __name__ == "__main__":
    sys.exit(main())
