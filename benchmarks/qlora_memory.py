"""Peak memory of a GRPO step with QLoRA: samples of one prompt, log-probs, reference and update, by phase.

    python benchmarks/qlora_memory.py                                         # 8B, 8 samples, context 20k
    python benchmarks/qlora_memory.py --offload-activations                   # the update in 24 GiB
    python benchmarks/qlora_memory.py --offload-activations --context 131072 --limit-gib 80
    python benchmarks/qlora_memory.py --quantization none --limit-gib 80      # LoRA over bf16 weights
    python benchmarks/qlora_memory.py --offload-activations --plan            # the forecast by part
    python benchmarks/qlora_memory.py --shape tiny --device cpu --context 96  # a trial

The weights are random. --limit-gib is what the process may allocate (half a GiB of it is the CUDA context): a
phase that needs more fails. Samples are drawn up to --sample-tokens, which bounds the time; the passes and
the update have all --samples rows at the full context. `forecast_gib` is what `strop plan` expects of the
update; --plan prints its parts at each moment that can be the peak. One process, one JSON line per
phase, then one for the whole step.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from strop.backends.base import BackendSettings, MicroBatching, Outputs
from strop.backends.single import SingleBackend
from strop.config.schema.model import OptimConfig
from strop.models.checkpointing import checkpoint_activations
from strop.models.lora import add_adapters, decoder_of
from strop.models.nf4.layers import quantize_layers
from strop.models.residual import widen_residual
from strop.planning.activations import Numbers, Tokens
from strop.planning.devices import WORKSPACE
from strop.planning.shape import KNOWN, read_shape
from strop.planning.training import TrainedModel
from strop.rollout.base import Request, Sampling
from strop.rollout.native.engine import NativeEngine
from strop.types import Batch

GIB = 1 << 30
CONTEXT = GIB // 2
"""Memory of a CUDA context, which torch does not count."""
PROMPT = 32
TINY = {**KNOWN["qwen3-0.6b"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
SHAPES = {"tiny": TINY, "1.7b": KNOWN["qwen3-1.7b"], "8b": KNOWN["qwen3-8b"]}


def batch_of(rows: int, context: int, vocabulary: int) -> Batch:
    """Rows of one prompt with random answers that fill the context, and advantages of a group."""
    draw = torch.Generator().manual_seed(0)
    answer = context - PROMPT
    prompt = torch.randint(3, vocabulary, (PROMPT,), generator=draw)
    sequences = []
    for _ in range(rows):
        sequences.append(torch.cat([prompt, torch.randint(3, vocabulary, (answer,), generator=draw)]))
    rewards = torch.arange(rows) % 2
    return Batch(
        sequences=sequences,
        prompt_lengths=torch.full((rows,), PROMPT),
        mask=torch.ones(rows, answer),
        advantages=(2.0 * rewards - 1)[:, None].expand(rows, answer).contiguous(),
    )


def build(arguments: argparse.Namespace) -> SingleBackend:
    device = torch.device(arguments.device)
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = dict(SHAPES[arguments.shape], max_position_embeddings=max(40960, arguments.context))
    kind = str(settings.pop("model_type"))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=compute)
    if arguments.quantization == "nf4":
        quantize_layers(model, decoder_of(model))
    model = add_adapters(model, rank=arguments.lora_rank, alpha=2 * arguments.lora_rank)
    widen_residual(model)
    checkpoint_activations(model, "full")
    return SingleBackend(
        model.train(),
        BackendSettings(
            optim=OptimConfig(lr=1e-5, lr_scheduler_type="constant"),
            device=device,
            compute=compute,
            offload_activations=arguments.offload_activations,
        ),
    )


def sample(backend: SingleBackend, batch: Batch, arguments: argparse.Namespace) -> dict[str, object]:
    """Draw samples of the prompt from the module, with a KV cache in what the limit leaves."""
    share = 0.9
    if arguments.device == "cuda":
        share = (arguments.limit_gib - 2) * GIB / torch.cuda.get_device_properties(0).total_memory
    engine = NativeEngine(
        backend.module,
        max_model_len=arguments.context,
        gpu_memory_utilization=min(0.95, share),
        max_num_seqs=len(batch),
    )
    tokens = min(arguments.sample_tokens, arguments.context - PROMPT)
    prompt = batch.sequences[0][:PROMPT].tolist()
    engine.wake()
    start = time.perf_counter()
    done = engine.generate(
        [Request(prompt, n=len(batch), seed=1)], Sampling(max_tokens=tokens, ignore_eos=True)
    )
    seconds = time.perf_counter() - start
    longest = max(done[0], key=lambda completion: len(completion.ids))
    row = Batch(
        sequences=[torch.tensor([*prompt, *longest.ids])],
        prompt_lengths=torch.tensor([PROMPT]),
        mask=torch.ones(1, len(longest.ids)),
    )
    engine.sleep()
    engine.release_memory()
    recomputed = backend.forward(row, ["log_probs"], MicroBatching(max_tokens=arguments.tokens)).log_probs
    assert recomputed is not None
    gap = (recomputed[0] - torch.tensor(longest.log_probs)).abs()
    drawn = sum(len(completion.ids) for completion in done[0])
    return {
        "tokens": drawn,
        "tokens_per_second": round(drawn / seconds),
        "largest_log_prob_gap": float(gap.max()),
        "mean_log_prob_gap": float(gap.mean()),
    }


def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO on the policy that sampled: the ratio is 1, the gradient that of ratio * advantage."""
    assert outputs.log_probs is not None and batch.advantages is not None
    ratio = (outputs.log_probs - outputs.log_probs.detach()).exp()
    value = -(ratio * batch.advantages * batch.mask).sum() / batch.mask.sum()
    return value, {"loss": value.detach()}


def update(backend: SingleBackend, batch: Batch, micro: MicroBatching) -> dict[str, object]:
    backend.forward_backward(batch, ["log_probs"], loss, micro)
    return {"grad_norm": backend.step().grad_norm}


def moments(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """GiB by part, at each moment of an update that can be its peak."""
    gpu = arguments.device == "cuda"
    planned = TrainedModel(
        read_shape(SHAPES[arguments.shape]),
        Numbers(2 if gpu else 4, 4, residual=4),
        checkpointing="full",
        offloads_activations=gpu and arguments.offload_activations,
        lora_rank=arguments.lora_rank,
        four_bit=arguments.quantization == "nf4",
        kernels=gpu,
    )
    rows = max(1, arguments.tokens // arguments.context)
    tokens = Tokens(rows * arguments.context, rows * (arguments.context - PROMPT))
    held = planned.present(learns=True) | {"workspace": WORKSPACE * gpu}
    found = {}
    for name, parts in planned.moments_of_update(
        tokens, accumulated=arguments.samples > rows, entropy=False
    ).items():
        found[name] = {part: round(size / GIB, 3) for part, size in (held | parts).items() if size}
    if planned.offloads_activations:
        found["host"] = {"activations": round(planned.kept(tokens) / GIB, 3)}
    return found


def forecast(arguments: argparse.Namespace) -> float:
    on_device = {name: sum(parts.values()) for name, parts in moments(arguments).items() if name != "host"}
    return max(on_device.values())


def measured(name: str, arguments: argparse.Namespace, work: Callable[[], object]) -> tuple[float, object]:
    """Run a phase, print its time and peak, and return the peak in GiB and what the phase returned."""
    cuda = arguments.device == "cuda"
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = work()
    line: dict[str, object] = {"phase": name}
    peak = 0.0
    if cuda:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / GIB
        line |= {
            "peak_gib": round(peak, 2),
            "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
            "after_gib": round(torch.cuda.memory_allocated() / GIB, 2),
        }
    line["seconds"] = round(time.perf_counter() - start, 3)
    if isinstance(found, dict):
        line |= found
    print(json.dumps(line), flush=True)
    return peak, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--quantization", choices=("nf4", "none"), default="nf4")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--context", type=int, default=20480, help="tokens of prompt and answer")
    parser.add_argument("--tokens", type=int, help="of a micro-batch; default: one row")
    parser.add_argument("--sample-tokens", type=int, default=512, help="limit of a sampled answer")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--offload-activations", action="store_true")
    parser.add_argument("--limit-gib", type=float, default=24.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--plan", action="store_true", help="print the forecast by part and stop")
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or arguments.context
    if arguments.plan:
        for name, parts in moments(arguments).items():
            print(json.dumps({"moment": name, "gib": round(sum(parts.values()), 2), **parts}))
        return
    if arguments.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (arguments.limit_gib * GIB - CONTEXT) / total))
    batch = batch_of(arguments.samples, arguments.context, int(SHAPES[arguments.shape]["vocab_size"]))
    micro = MicroBatching(max_tokens=arguments.tokens)
    peaks = []
    peak, made = measured("load", arguments, lambda: build(arguments))
    assert isinstance(made, SingleBackend)
    backend = made
    peaks.append(peak)

    def old_log_probs() -> None:
        backend.forward(batch, ["log_probs", "entropy"], micro)

    def reference() -> None:
        with backend.reference():
            backend.forward(batch, ["log_probs"], micro)

    phases: dict[str, Callable[[], object]] = {
        "rollout": lambda: sample(backend, batch, arguments),
        "old_log_prob": old_log_probs,
        "ref": reference,
        "update_actor": lambda: update(backend, batch, micro),
        "update_actor (second)": lambda: update(backend, batch, micro),
    }
    for name, work in phases.items():
        peaks.append(measured(name, arguments, work)[0])
    summary: dict[str, object] = {key: vars(arguments)[key] for key in ("shape", "quantization", "samples")}
    summary |= {"context": arguments.context, "offload_activations": arguments.offload_activations}
    summary |= {"forecast_gib": round(forecast(arguments), 2), "limit_gib": arguments.limit_gib}
    if arguments.device == "cuda":
        summary["peak_gib"] = round(max(peaks), 2)
        summary["peak_gib_without_load"] = round(max(peaks[1:]), 2)
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
