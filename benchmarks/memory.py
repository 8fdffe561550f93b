"""Peak memory of a training step: log-probs with a head that never holds the logits, beside a plain forward
that does.

    python benchmarks/memory.py [--sequences 8] [--length 2048] [--layers 24]

The model has the shape of Qwen2.5-0.5B (vocabulary 151,936), bf16 compute with fp32 masters on CUDA, fp32 on
the CPU; both systems share backend, gradient checkpointing, optimizer and batch, and differ only in how
log-probs and entropy are computed. Each runs in a process of its own: peak is
torch.cuda.max_memory_allocated, or the peak resident size on the CPU (less what the process had before the
model). Prints one JSON line per system and the ratio. On the CPU the sizes default to smaller ones.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

VOCABULARY = 151_936


def plain_outputs(model, batch, width: int) -> dict[str, Tensor]:
    """The whole [B, L, V] of logits, as a straightforward trainer has it. All rows are equally long here."""
    ids = torch.stack(batch.sequences).to(next(model.parameters()).device)
    model.set_attn_implementation("sdpa")
    logits = model(input_ids=ids, use_cache=False).logits[:, -width - 1 : -1].float()
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, ids[:, -width:, None]).squeeze(-1)
    return {"log_probs": picked, "entropy": -(log_p.exp() * log_p).sum(-1)}


def measure(system: str, sequences: int, length: int, layers: int) -> dict[str, float | str]:
    from transformers import AutoModelForCausalLM, Qwen2Config

    from strop.backends.base import BackendSettings, MicroBatching, Outputs
    from strop.backends.single import SingleBackend
    from strop.config.schema.model import OptimConfig
    from strop.models.checkpointing import checkpoint_activations
    from strop.types import Batch

    class Plain(SingleBackend):
        def _outputs(self, piece: Batch, want: Sequence[str]) -> dict[str, Tensor]:
            return plain_outputs(self.module, piece, piece.mask.shape[1])

    cuda = torch.cuda.is_available()
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    generator = torch.Generator().manual_seed(0)
    batch = Batch(
        sequences=list(torch.randint(VOCABULARY, (sequences, length), generator=generator)),
        prompt_lengths=torch.ones(sequences, dtype=torch.long),
        mask=torch.ones(sequences, length - 1),
        advantages=torch.randn(sequences, length - 1, generator=generator),
    )
    before = resident()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    checkpoint_activations(model)
    backend = (Plain if system == "plain" else SingleBackend)(
        model,
        BackendSettings(
            optim=OptimConfig(lr=1e-6),
            device="cuda" if cuda else "cpu",
            compute=torch.bfloat16 if cuda else torch.float32,
        ),
    )

    def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.log_probs is not None and outputs.entropy is not None and piece.advantages is not None
        value = -(outputs.log_probs * piece.advantages + 0.01 * outputs.entropy).mean()
        return value, {"loss": value}

    seconds = []
    for _ in range(3 if cuda else 1):
        start = time.perf_counter()
        report = backend.forward_backward(
            batch, ["log_probs", "entropy"], loss, MicroBatching(rows=sequences)
        )
        norm = backend.step().grad_norm
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if cuda else resident() - before
    return {
        "system": system,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "peak_gib": round(peak / 2**30, 3),
        "seconds": round(min(seconds), 3),
        "loss": report["loss"],
        "grad_norm": norm,
    }


def resident() -> int:
    """Largest resident size of this process so far, in bytes (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048 if cuda else 128)
    parser.add_argument("--layers", type=int, default=24 if cuda else 1)
    parser.add_argument(
        "--system", choices=("plain", "strop"), default=None, help="measure one, in this process"
    )
    arguments = parser.parse_args()
    if arguments.system:
        print(
            json.dumps(measure(arguments.system, arguments.sequences, arguments.length, arguments.layers)),
            flush=True,
        )
        return
    peaks = {}
    for system in ("plain", "strop"):
        done = subprocess.run(
            [sys.executable, *sys.argv, "--system", system], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(f"{system} failed:\n{done.stderr}")
        line = done.stdout.strip().splitlines()[-1]
        print(line)
        peaks[system] = json.loads(line)["peak_gib"]
    ratio = peaks["plain"] / peaks["strop"]
    size = {"sequences": arguments.sequences, "length": arguments.length, "layers": arguments.layers}
    print(json.dumps({"plain_over_strop": round(ratio, 2), **size}))


if __name__ == "__main__":
    main()
