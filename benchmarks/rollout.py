"""Generation with log-probs: tokens per second of each engine on the same prompts.

    python benchmarks/rollout.py --prompts 16 --samples 4 --tokens 128 --repeats 3
    python benchmarks/rollout.py --engines hf,native,vllm,vllm-mp,vllm-eager,strop-vllm \\
        --vllm-python .venv-vllm/bin/python
    python benchmarks/rollout.py --model FOLDER --engines native,vllm,vllm-mp --dtype bfloat16 \\
        --prompts 256 --tokens 256

Every completion has exactly `--tokens` tokens (no stop token), temperature 1, no top-k and top-p, and the
log-probs of its tokens. With `--ragged 1 512` each prompt has a limit of its own between the two and the
model may end earlier. With `--lengths-lognormal 1500 0.8 8192` each prompt has a length of its own, drawn
from a log-normal distribution with this median and sigma and at most 8,192, and all its completions have
exactly this length. `--cache-gib 30` limits the KV cache of the native engine and of vLLM; each line says
how many rows were in flight. With `--quantization fp8` the engine `native-fp8` is measured too (`int8`:
`native-int8`), with `--kv-cache-dtype fp8` the engine `native-fp8cache`. Engines take turns so that a noisy
moment hits all of them; the first round warms up, and `--warm-up-tokens 64` makes it short. Prints one JSON
line per engine (median, minimum and maximum over the repeats), then the ratios of the native engine to the
others.

`native` decodes token by token. `--speculation auto` (or `on`) adds `native-auto` (`native-on`), which
guesses tokens from earlier answers; `--draft-model` adds `native-draft`, for which that model, or a random
one of that shape, guesses. The warm-up round is its first epoch, the others are later epochs.
`--epochs 2` is one round after that. With random weights two answers to one prompt have nothing in common, so
nothing is guessed right; `--same-seeds` repeats the answers of the first epoch, where all is guessed right:
the upper bound. A low `--temperature` is in between. With `--model` and `--questions` answers are real ones.

    python benchmarks/rollout.py --shape qwen2.5-1.5b --dtype bfloat16 --engines native --speculation auto \\
        --epochs 2 --same-seeds --prompts 8 --samples 8 --tokens 512 --stats
    python benchmarks/rollout.py --shape qwen3-8b --dtype bfloat16 --engines native,vllm --prompts 256 \\
        --samples 4 --lengths-lognormal 1500 0.8 8192 --cache-gib 30 --kv-cache-dtype fp8 --repeats 1

`vllm` is vLLM's own offline interface in a process of its own (rollout_vllm.py), its engine in that process;
`vllm-mp` has the engine in a further process, which is vLLM's default; `strop-vllm` is vLLM behind Strop's
rollout.name=vllm. With `-eager` at the end they do without compilation and CUDA graphs. A vLLM that does not
start (a model that it does not know) has a line with its exit code; the others are measured. Without
`--model`, a random model of the shape that `--shape` names; with `--questions FILE` the prompts are the
questions of a JSON-lines file in the chat template of `--model`. A hybrid model:

    python benchmarks/rollout.py --shape qwen3.5-0.8b --dtype bfloat16 --engines native,vllm,vllm-mp \\
        --prompts 256 --samples 4 --tokens 256 --max-num-seqs 1024
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from strop.config.schema.rollout import SpeculationConfig
from strop.models.lora import adapted_layers, add_adapters
from strop.models.patches import DEVICE_PATCHES, MODEL_PATCHES, ROLLOUT_NAMES, choose_patches
from strop.rollout.base import Request, Sampling, build_engine

QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1e6}
HYBRID = {"model_type": "qwen3_5_text", "max_position_embeddings": 32768, "tie_word_embeddings": True}
"""Three layers of the gated delta rule, then one of attention."""
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": QWEN
    | {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": QWEN
    | {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "qwen3.5-0.8b": HYBRID
    | {
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "tiny-hybrid": HYBRID
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "tiny": QWEN
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": QWEN
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


def load(options: argparse.Namespace) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = getattr(torch, options.dtype)
    if options.model is not None:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[options.shape])
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def load_adapted(options: argparse.Namespace, *, apart: bool) -> Any:
    """The same model with random adapters. `apart`: the engine computes each LoRA layer by itself."""
    model = add_adapters(load(options), rank=options.lora_rank, alpha=2 * options.lora_rank)
    model.to(getattr(torch, options.dtype))  # peft makes adapters in float32
    for layer in adapted_layers(model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    if apart:
        every = [patch.name for patch in (*MODEL_PATCHES, *DEVICE_PATCHES)]
        choose_patches(model, [name for name in (*every, *ROLLOUT_NAMES) if name != "fused_lora"])
    return model


def save_for_vllm(model: Any, folder: str) -> dict[str, Any]:
    """Write the model as vLLM reads it; return the settings that vLLM needs for it.

    vLLM knows Qwen3.5 only with its vision tower. It gets the whole configuration, runs the language part
    alone, and makes random weights of its own.
    """
    if model.config.model_type != "qwen3_5_text":
        model.save_pretrained(folder)
        return {}
    from transformers import Qwen3_5Config

    whole = Qwen3_5Config(text_config=model.config.to_dict(), tie_word_embeddings=True)
    whole.architectures = ["Qwen3_5ForConditionalGeneration"]
    whole.save_pretrained(folder)
    return {"load_format": "dummy", "language_model_only": True}


def prompts(options: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Questions, or random tokens with the lengths of grade-school questions in a chat template."""
    draw = random.Random(0)
    if options.questions is None:
        return [
            [draw.randrange(vocabulary) for _ in range(draw.randint(*options.lengths))]
            for _ in range(options.prompts)
        ]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with Path(options.questions).open() as file:
        chats = [
            [{"role": "user", "content": json.loads(line)["question"]}]
            for _, line in zip(range(options.prompts), file)
        ]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]


def limits(options: argparse.Namespace, asked: list[list[int]]) -> list[int]:
    """The most new tokens of each prompt."""
    draw = random.Random(1)
    if options.lengths_lognormal:
        median, sigma, most = options.lengths_lognormal
        drawn = (draw.lognormvariate(math.log(median), sigma) for _ in asked)
        return [max(1, min(int(most), round(length))) for length in drawn]
    return [draw.randint(*options.ragged) if options.ragged else options.tokens for _ in asked]


def cache_bytes(options: argparse.Namespace) -> int | None:
    return None if options.cache_gib is None else int(options.cache_gib * 2**30)


def longest(options: argparse.Namespace, asked: list[list[int]]) -> int:
    return max(map(len, asked)) + max(limits(options, asked))


def end_tokens(model: Any, options: argparse.Namespace) -> tuple[int, ...]:
    if not options.ragged:
        return ()
    found = model.generation_config.eos_token_id if model.generation_config is not None else None
    found = model.config.eos_token_id if found is None else found
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)


SPECULATION: dict[str, bool | str] = {"native-on": True, "native-auto": "auto", "native-draft": "auto"}


def speculation(name: str, options: argparse.Namespace) -> SpeculationConfig:
    """A draft model guesses also on a CPU, where `auto` is off."""
    enable = SPECULATION.get(name, False)
    if not name.endswith("-draft"):
        return SpeculationConfig(enable=enable)
    return SpeculationConfig(
        enable=enable if options.device == "cuda" else True, draft_model=options.draft_model
    )


class Ours:
    """An engine of Strop's, in this process or behind it."""

    def __init__(self, name: str, model: Any, asked: list[list[int]], options: argparse.Namespace) -> None:
        plain = name.removeprefix("strop-")
        for suffix in ("-eager", "-on", "-auto", "-fp8cache", "-draft", "-apart", "-lora"):
            plain = plain.removesuffix(suffix)
        plain, _, quantization = plain.partition("-")
        self._engine = build_engine(
            plain,
            model,
            enforce_eager=name.endswith("-eager"),
            speculation=speculation(name, options),
            max_num_seqs=options.max_num_seqs,
            max_model_len=longest(options, asked),
            gpu_memory_utilization=options.vllm_memory
            if name.startswith("strop-vllm")
            else options.native_memory,
            quantization=quantization or None,
            kv_cache_dtype=options.kv_cache_dtype if name.endswith("-fp8cache") else "auto",
            cache_bytes=cache_bytes(options),
            engine_kwargs={"vllm": {"python": options.vllm_python}}
            if options.vllm_python != sys.executable
            else None,
        )
        self.facts: dict[str, Any] = {}
        self.stats: dict[str, float] = {}
        most = limits(options, asked)
        self._requests = [
            Request(ids, n=options.samples, max_tokens=limit, seed=i if options.same_seeds else None)
            for i, (ids, limit) in enumerate(zip(asked, most))
        ]
        self._sampling = Sampling(
            temperature=options.temperature,
            ignore_eos=not options.ragged,
            stop_ids=end_tokens(model, options),
        )
        self._warm_up = options.warm_up_tokens
        self._cuda, self._turn = options.device == "cuda", 0

    def __call__(self) -> tuple[int, float]:
        self._turn += 1
        requests = self._requests
        if self._turn == 1 and self._warm_up is not None:
            most = max(one.max_tokens or 0 for one in requests)
            factor = min(1.0, self._warm_up / most)  # rows end one by one, as in the later rounds
            requests = [
                replace(one, max_tokens=max(1, round((one.max_tokens or 0) * factor))) for one in requests
            ]
        self._engine.update_weights(
            (), self._turn
        )  # each round computes its prompts, as after a weight update
        start = time.perf_counter()
        answers = self._engine.generate(requests, self._sampling)
        if self._cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.stats = dict(self._engine.stats())
        if "rows_in_flight" in self.stats:
            self.facts["rows_in_flight"] = round(self.stats["rows_in_flight"])
        return sum(len(completion.ids) for group in answers for completion in group), seconds

    def close(self) -> None:
        self._engine.close()


class DidNotStart(Exception):
    """The process of vLLM ended."""


class Vllm:
    """vLLM in a process of its own; a call makes all completions and returns how many tokens in how many
    seconds."""

    def __init__(
        self,
        name: str,
        folder: str,
        asked: list[list[int]],
        stop_ids: tuple[int, ...],
        options: argparse.Namespace,
        more: dict[str, Any] | None = None,
    ) -> None:
        """`more`: further work, see rollout_vllm.py."""
        script = str(Path(__file__).with_name("rollout_vllm.py"))
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if "-mp" in name else "0"}
        defaults = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_KVCACHE_SPACE": "2",
        }
        self._process = subprocess.Popen(
            [options.vllm_python, script],
            env={**defaults, **os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        work = {
            "model": folder,
            "prompts": asked,
            "samples": options.samples,
            "limits": limits(options, asked),
            "ignore_eos": not options.ragged,
            "stop_ids": stop_ids,
            "dtype": options.dtype,
            "max_model_len": longest(options, asked),
            "max_num_seqs": options.max_num_seqs or 1024,
            "eager": name.endswith("-eager"),
            "memory": options.vllm_memory,
            "cache_bytes": cache_bytes(options),
            "warm_up_tokens": options.vllm_warm_up_tokens or options.warm_up_tokens,
            "settings": json.loads(options.vllm_settings),
            **(more or {}),
        }
        self.facts = {f"vllm_{key}": value for key, value in self._ask(json.dumps(work)).items()}

    def __call__(self) -> tuple[int, float]:
        found = self._ask("go")
        self.facts["rows_in_flight"] = found["rows_in_flight"]
        return found["tokens"], found["seconds"]

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        # A process that has ended reads nothing and answers nothing.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise DidNotStart(f"exit code {self._process.wait()}; what vLLM said is above")
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


System = Ours | Vllm


def measure(systems: dict[str, System], repeats: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(repeats + 1):
        for name, run in systems.items():
            tokens, seconds = run()
            if turn > 0:  # the first round warms up
                rates[name].append(tokens / seconds)
            found = {"turn": turn, "engine": name, "tokens": tokens, "seconds": round(seconds, 2)}
            print(json.dumps(found), file=sys.stderr, flush=True)
    return rates


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a Hugging Face model")
    parser.add_argument(
        "--shape",
        default="smollm2-135m",
        choices=sorted(SHAPES),
        help="random model where --model is not given",
    )
    parser.add_argument("--engines", default="hf,native")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--ragged",
        type=int,
        nargs=2,
        help="least and most new tokens, drawn for each prompt; may end earlier",
    )
    parser.add_argument(
        "--lengths-lognormal",
        type=float,
        nargs=3,
        metavar=("MEDIAN", "SIGMA", "MOST"),
        help="new tokens, drawn for each prompt; the end of the text is ignored",
    )
    parser.add_argument("--cache-gib", type=float, help="KV cache of the native engine and of vLLM")
    parser.add_argument(
        "--kv-cache-dtype", choices=("fp8",), help="measure the native engine with such a KV cache too"
    )
    parser.add_argument(
        "--quantization",
        choices=("fp8", "int8"),
        action="append",
        default=[],
        help="measure the native engine with such weights too",
    )
    parser.add_argument(
        "--lora-rank",
        type=int,
        help="measure the native engine with adapters too, computed together and apart",
    )
    parser.add_argument("--native-memory", type=float, help="share of the memory for the native engine")
    parser.add_argument("--lengths", type=int, nargs=2, default=(70, 170), help="shortest and longest prompt")
    parser.add_argument("--questions", help="JSON lines with a question each, as prompts of --model")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument(
        "--vllm-python", default=sys.executable, help="interpreter of an environment with vLLM"
    )
    parser.add_argument("--vllm-memory", type=float, default=0.5, help="share of the memory for each vLLM")
    parser.add_argument("--vllm-settings", default="{}", help="more arguments of vllm.LLM as JSON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--warm-up-tokens",
        type=int,
        help="most new tokens of a completion in the first round; shorter ones are shortened alike",
    )
    parser.add_argument(
        "--vllm-warm-up-tokens",
        type=int,
        help="the same for vLLM, which records its CUDA graphs when it starts",
    )
    parser.add_argument("--speculation", default="off", choices=("off", "on", "auto"))
    parser.add_argument(
        "--draft-model", help="folder of a small model, or a shape: it guesses instead (native-draft)"
    )
    parser.add_argument("--epochs", type=int, help="rounds, the first of which is the warm-up")
    parser.add_argument("--temperature", type=float, default=1.0, help="of our engines")
    parser.add_argument(
        "--same-seeds", action="store_true", help="every round of our engines samples the same answers"
    )
    parser.add_argument(
        "--stats", action="store_true", help="print what our engines counted in the last turn"
    )
    parser.add_argument("--save", help="JSON-lines file to which the lines are added")
    found = parser.parse_args()
    if found.epochs is not None:
        found.repeats = max(1, found.epochs - 1)
    if found.kv_cache_dtype is not None and "native-fp8cache" not in found.engines:
        found.engines += ",native-fp8cache"
    if found.draft_model is not None:
        found.engines += ",native-draft"
    if found.lora_rank is not None:
        found.engines += ",native-lora,native-lora-apart"
    if found.speculation != "off":
        found.engines += f",native-{found.speculation}"
    return found


def systems_of(
    model: Any, folder: str, asked: list[list[int]], options: argparse.Namespace
) -> dict[str, System]:
    made: dict[str, System] = {}
    names = options.engines.split(",")
    for name in [*names, *(f"native-{form}" for form in options.quantization)]:
        if name.startswith("vllm"):
            try:
                made[name] = Vllm(name, folder, asked, end_tokens(model, options), options)
            except DidNotStart as error:
                print(json.dumps({"engine": name, "error": str(error)}), flush=True)
        elif "-lora" in name:
            adapted = load_adapted(options, apart=name.endswith("-apart"))
            made[name] = Ours(name, adapted, asked, options)
        else:
            made[name] = Ours(name, model, asked, options)
    return made


def describe(
    name: str, found: list[float], facts: dict[str, Any], asked_for: argparse.Namespace
) -> dict[str, Any]:
    lengths = "{}-{}".format(*asked_for.ragged) if asked_for.ragged else asked_for.tokens
    if asked_for.lengths_lognormal:
        lengths = "lognormal({:g},{:g},{:g})".format(*asked_for.lengths_lognormal)
    return {
        "engine": name,
        "work": f"{asked_for.prompts}x{asked_for.samples}x{lengths}",
        "model": Path(asked_for.model).name if asked_for.model else f"random {asked_for.shape}",
        "dtype": asked_for.dtype,
        "device": torch.cuda.get_device_name() if asked_for.device == "cuda" else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        **facts,
        "tokens_per_second": round(statistics.median(found), 1),
        "min": round(min(found), 1),
        "max": round(max(found), 1),
    }


def main() -> None:
    asked_for = options()
    model = load(asked_for)
    asked = prompts(asked_for, model.config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        if asked_for.draft_model in SHAPES:
            shape = argparse.Namespace(**{**vars(asked_for), "model": None, "shape": asked_for.draft_model})
            asked_for.draft_model = str(Path(folder) / "draft")
            load(shape).save_pretrained(asked_for.draft_model)
        if asked_for.model is None and "vllm" in asked_for.engines:
            settings = save_for_vllm(model, folder) | json.loads(asked_for.vllm_settings)
            asked_for.vllm_settings = json.dumps(settings)
        systems = systems_of(model, asked_for.model or folder, asked, asked_for)
        rates = measure(systems, asked_for.repeats)
    lines = [describe(name, found, systems[name].facts, asked_for) for name, found in rates.items()]
    if "native" in rates:
        own = statistics.median(rates["native"])
        ratios = {
            f"native/{n}": round(own / statistics.median(r), 2) for n, r in rates.items() if n != "native"
        }
        for name in SPECULATION.keys() & rates.keys():
            ratios[f"{name}/native"] = round(statistics.median(rates[name]) / own, 2)
        lines.append({"work": lines[0]["work"], "model": lines[0]["model"], **ratios})
    for line in lines:
        print(json.dumps(line), flush=True)
    if asked_for.save:
        with Path(asked_for.save).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    for name, system in systems.items():
        if isinstance(system, Ours) and asked_for.stats:
            print(json.dumps({"engine": name, **{key: round(v, 4) for key, v in system.stats.items()}}))
        system.close()


if __name__ == "__main__":
    main()
