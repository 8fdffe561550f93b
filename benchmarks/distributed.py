"""A packed GRPO update by one rank of FSDP2 beside the single backend, on one device: what sharding costs
when there is nobody to share with, and how much of the device's arithmetic an update uses.

    python benchmarks/distributed.py --shape 0.5b          # on a GPU: NCCL; also 1.5b
    python benchmarks/distributed.py --shape tiny          # a dry run on the CPU: gloo

The model has the shape of Qwen2.5 with random weights: bf16 compute, fp32 masters, AdamW, entropy of every
token. Systems take turns for `--rounds` rounds, each time as a process of its own; a turn's first `--warm-up`
updates are left out. Counted are the operations that packed rows need (two per weight and token forward, four
backward, causal attention, the head where a token was sampled), not what is computed again; their share of
the rate of a large matrix product on that device, measured in the same process, is the MFU. Prints one JSON
line per turn, and the ratio of the best times last.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from supervised_mfu import matmul_peak, wait  # isort: skip - it stands beside this file

COMMON = {
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    },
}
SYSTEMS = ("single", "fsdp")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per update")
    parser.add_argument("--samples", type=int, default=8, help="answers per prompt")
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=256, help="shortest answer")
    parser.add_argument(
        "--longest", type=int, default=1024, help="longest answer; lengths are uniform in between"
    )
    parser.add_argument(
        "--tokens", type=int, default=32_768, help="tokens per micro-batch (ppo_max_token_len_per_gpu)"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="compute activations again in the backward pass"
    )
    parser.add_argument("--keep", action="store_true", help="reshard_after_forward=false")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--updates", type=int, default=5, help="updates that count, per turn")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turn", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args(words)


# --- one turn, in a process of its own ----------------------------------------------------------------------


def backend_of(asked: argparse.Namespace, device: torch.device) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from strop.backends.base import BackendSettings
    from strop.backends.fsdp.backend import FsdpBackend
    from strop.backends.single import SingleBackend
    from strop.config.schema.model import FsdpConfig, OptimConfig
    from strop.models.build import compute_dtype
    from strop.models.checkpointing import checkpoint_activations
    from strop.models.residual import widen_residual
    from strop.ranks import Ranks

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**{**COMMON, **SHAPES[asked.shape]}))
    widen_residual(model)
    if asked.checkpointing:
        checkpoint_activations(model)
    settings = BackendSettings(
        optim=OptimConfig(lr=1e-6), device=device, compute=compute_dtype("bfloat16", device)
    )
    if asked.turn == "single":
        return SingleBackend(model, settings)
    return FsdpBackend(
        model, settings, ranks=Ranks(0, 1), fsdp=FsdpConfig(reshard_after_forward=not asked.keep)
    )


def batch_of(asked: argparse.Namespace) -> Any:
    """Groups of answers to the same prompt; on-policy, so the update's own log-probs are the old ones."""
    from strop.types import Batch

    generator = torch.Generator().manual_seed(0)
    size = {**COMMON, **SHAPES[asked.shape]}["vocab_size"]

    def words(count: int) -> torch.Tensor:
        return torch.randint(size, (count,), generator=generator)

    rows, lengths = [], []
    for _ in range(asked.prompts):
        prompt = words(asked.prompt_length)
        for _ in range(asked.samples):
            lengths.append(int(torch.randint(asked.shortest, asked.longest + 1, (1,), generator=generator)))
            rows.append(torch.cat([prompt, words(lengths[-1])]))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    return Batch(
        sequences=rows,
        prompt_lengths=torch.full((len(rows),), asked.prompt_length),
        mask=mask,
        advantages=torch.randn(len(rows), 1, generator=generator) * mask,
        row_ids=torch.arange(len(rows)),
    )


def operations(asked: argparse.Namespace, batch: Any, micro: Any) -> float:
    """Forward and backward of one update. A beginning that answers share counts once, as it is computed
    once."""
    from strop.backends.micro_batches import partition
    from strop.models.packing import lay_out, rectangle, without_last

    shape = {**COMMON, **SHAPES[asked.shape]}
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    width = hidden // heads
    linear = (
        layers
        * hidden
        * (2 * hidden + 2 * shape["num_key_value_heads"] * width + 3 * shape["intermediate_size"])
    )
    tables = [without_last(rectangle(batch.select(rows).sequences)) for rows in partition(batch, micro)]
    tokens = sum(lay_out(table, packed=True).ids.numel() for table in tables)
    attention = sum(
        2 * layers * heads * width * length * length for length in batch.lengths
    )  # half of QK and PV: causal
    head = float(batch.mask.sum()) * hidden * shape["vocab_size"]
    return 3.0 * (2 * (tokens * linear + head) + attention)


def turn(asked: argparse.Namespace) -> dict[str, Any]:
    import contextlib

    from strop.backends.base import MicroBatching
    from strop.config.compose import load
    from strop.ppo.update import ActorUpdate
    from strop.runtime.local import joined

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load("ppo_trainer", ["data.train_files=none", "actor_rollout_ref.model.path=none"]).config
    batch, micro = batch_of(asked), MicroBatching(max_tokens=asked.tokens)
    needed, peak = operations(asked, batch, micro), matmul_peak(device)
    spent = []
    with joined(1, device, timeout=600) if asked.turn == "fsdp" else contextlib.nullcontext():
        backend = backend_of(asked, device)
        for _ in range(asked.warm_up + asked.updates):
            wait(device)
            begun = time.perf_counter()
            objective = ActorUpdate(config, asked.longest)
            backend.forward_backward(batch, objective.want(), objective.loss(batch, batch), micro)
            norm = backend.step().grad_norm
            wait(device)
            spent.append(time.perf_counter() - begun)
    seconds = spent[asked.warm_up :]
    return {
        "system": asked.turn,
        "shape": asked.shape,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "rows": len(batch),
        "tokens": sum(batch.lengths),
        "micro_tokens": asked.tokens,
        "checkpointing": asked.checkpointing,
        "seconds": round(statistics.median(seconds), 4),
        "least": round(min(seconds), 4),
        "most": round(max(seconds), 4),
        "tokens_per_second": round(sum(batch.lengths) / statistics.median(seconds)),
        "tflops": round(needed / statistics.median(seconds) / 1e12, 3),
        "matmul_peak_tflops": round(peak / 1e12, 3),
        "mfu": round(needed / statistics.median(seconds) / peak, 4),
        "grad_norm": round(norm, 6),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None,
        "out_of_memory": backend.out_of_memory,
    }


# --- all turns ----------------------------------------------------------------------------------------------


def taken(system: str, words: list[str]) -> dict[str, Any]:
    """One turn of a system; its JSON line."""
    command = [sys.executable, str(Path(__file__).resolve()), *words, "--turn", system]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env={**os.environ, **alone}, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the turn of {system} failed with exit code {done.returncode}")
    line = done.stdout.strip().splitlines()[-1]
    print(line, flush=True)
    found: dict[str, Any] = json.loads(line)
    return found


def main(words: list[str]) -> None:
    asked = parse(words)
    if asked.turn:
        print(json.dumps(turn(asked)), flush=True)
        return
    best: dict[str, float] = {}
    for _ in range(asked.rounds):
        for system in asked.systems:
            seconds = taken(system, words)["seconds"]
            best[system] = min(seconds, best.get(system, seconds))
    if len(best) == len(SYSTEMS):
        print(
            json.dumps(
                {"shape": asked.shape, "fsdp_over_single": round(best["fsdp"] / best["single"], 4), **best}
            )
        )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main(sys.argv[1:])
