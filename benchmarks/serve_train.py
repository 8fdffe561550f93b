"""Throughput of the training service: several users against one user, at the same total batch.

    python benchmarks/serve_train.py --adapters 8 --requests 64 --tokens 64 --repeats 3
    OMP_NUM_THREADS=1 python benchmarks/serve_train.py --shape 40m --tokens 24 --clock process
    python benchmarks/serve_train.py --shape 0.4b --device cuda --requests 256 --tokens 256 --rank 32

All requests of a measurement are sent at once through the service (everything but HTTP). Sampling:
`--requests` prompts of `--prompt` tokens, each with `--tokens` new ones, by one adapter or by `--adapters` in
equal shares. Training: the same number of sequences in one forward_backward and an optim_step, or in one of
each per adapter. The two take turns. Prints one JSON line: medians in tokens per second, the rate of every
turn, and the ratio of many to one. With `--profile`, one more turn of each on a GPU shows for how much of the
time kernels run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from strop.config.schema.training_service import ServiceConfig, ServiceModelConfig, TrainingServiceConfig
from strop.serve.policy_host import PolicyHost
from strop.serve.requests import Fields
from strop.serve.service import TrainingService
from strop.serve.start import build_service
from strop.serve.wire import Message, Writer

USER = "bench"
SHAPES = {
    "8m": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4},
    "40m": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8},
    "0.4b": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
}
VOCABULARY = 4096
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def write_model(folder: Path, shape: str) -> Path:
    """A random model with a tokenizer that is never used on text."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=4096, eos_token_id=0, **SHAPES[shape])
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0", pad_token="w0")
    made.save_pretrained(folder)
    return folder


class Users:
    """Sessions with one adapter each, and a sampler of it."""

    def __init__(self, service: TrainingService, options: argparse.Namespace) -> None:
        self.service = service
        self.options = options
        self.models: list[str] = []
        self.samplers: list[str] = []
        self.seq: dict[str, int] = {}
        self.samples = 0

    async def answer(self, future: dict[str, object]) -> bytes:
        found = None
        while found is None:
            found = await self.service.retrieve(USER, str(future["request_id"]))
        assert found.kind != "error", found.body
        return found.body

    async def add(self, number: int) -> None:
        session = self.service.create_session(USER, Fields({}))["session_id"]
        lora = {"rank": self.options.rank, "seed": number}
        request = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": self.service.base_model,
            "lora_config": lora,
        }
        future = self.service.create_model(USER, Fields(request))
        await self.answer(future)
        model = str(future["model_id"])
        self.models.append(model)
        self.seq[model] = 0
        await self.train([model], 4)  # or B A is 0
        self.seq[model] += 1
        save = {"model_id": model, "seq_id": self.seq[model], "sampling_session_seq_id": 0}
        body = json.dumps(save).encode()
        await self.answer(self.service.model_request(USER, "save_weights_for_sampler", Fields(save), body))
        self.samplers.append(f"{session}:sample:0")

    async def sample(self, samplers: list[str]) -> int:
        """Send all requests at once; returns the number of sampled tokens."""
        rng = np.random.default_rng(self.samples)
        futures = []
        for number in range(self.options.requests):
            self.samples += 1
            request = {
                "sampling_session_id": samplers[number % len(samplers)],
                "seq_id": self.samples,
                "prompt": {"chunks": [{"tokens": rng.integers(1, 1000, self.options.prompt).tolist()}]},
                "sampling_params": {"max_tokens": self.options.tokens},
            }
            futures.append(self.service.sample(USER, Fields(request)))
        found = await asyncio.gather(*(self.answer(future) for future in futures))
        return sum(len(Message(body).message(1).raw(2)) // 4 for body in found)

    async def train(self, models: list[str], sequences: int) -> int:
        """One forward_backward and optim_step per model; returns the number of trained tokens."""
        rng = np.random.default_rng(0)
        length = self.options.prompt + self.options.tokens
        futures = []
        for model in models:
            data = []
            for _ in range(sequences // len(models)):
                data.append(datum(rng.integers(1, 1000, length + 1)))
            self.seq[model] += 2
            message = Writer().text(1, model).integer(2, self.seq[model] - 1).text(4, "cross_entropy")
            for one in data:
                message.message(3, one)
            futures.append(self.service.training_pass(USER, message.done()))
            step: dict[str, Any] = {"model_id": model, "seq_id": self.seq[model], "adam_params": {}}
            body = json.dumps(step).encode()
            futures.append(self.service.model_request(USER, "optim_step", Fields(step), body))
        for future in futures:
            await self.answer(future)
        return sequences * length


def datum(ids: np.ndarray) -> Writer:
    tokens = Writer().message(1, Writer().raw(1, ids[:-1].astype("<i4").tobytes()))
    found = Writer().message(1, tokens)
    targets = Writer().raw(1, ids[1:].astype("<i8").tobytes()).integer(3, 2)
    weights = Writer().raw(1, np.ones(len(ids) - 1, "<f4").tobytes()).integer(3, 1)
    for name, tensor in (("target_tokens", targets), ("weights", weights)):
        found.message(2, Writer().text(1, name).message(2, tensor))
    return found


def jobs(users: Users, options: argparse.Namespace) -> dict[str, Coroutine[Any, Any, int]]:
    """One turn."""
    return {
        "sample_one": users.sample(users.samplers[:1]),
        "sample_many": users.sample(users.samplers),
        "train_one": users.train(users.models[:1], options.requests),
        "train_many": users.train(users.models, options.requests),
    }


async def share_of_kernels(job: Coroutine[Any, Any, int]) -> float:
    """Kernels in seconds per second of a job."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        await job
        wall = time.perf_counter() - start
    microseconds = 0.0
    for event in seen.events() or ():
        if event.device_type == DeviceType.CUDA:
            microseconds += event.self_device_time_total
    return round(microseconds / 1e6 / wall, 3)


async def measure(service: TrainingService, options: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"sample_one": [], "sample_many": [], "train_one": [], "train_many": []}
    busy: dict[str, float] = {}
    clock = CLOCKS[options.clock]
    async with service.running():
        users = Users(service, options)
        for number in range(options.adapters):
            await users.add(number)
        for repeat in range(options.repeats + 1):  # the first one warms up
            for name, job in jobs(users, options).items():
                start = clock()
                tokens = await job
                if repeat:
                    rates[name].append(tokens / (clock() - start))
        if options.profile:
            for name, job in jobs(users, options).items():
                busy[name] = await share_of_kernels(job)
    found: dict[str, Any] = {name: round(statistics.median(values)) for name, values in rates.items()}
    found["sample_ratio"] = round(found["sample_many"] / found["sample_one"], 3)
    found["train_ratio"] = round(found["train_many"] / found["train_one"], 3)
    found["turns"] = {name: [round(value) for value in values] for name, values in rates.items()}
    if busy:
        found["kernels_per_second"] = busy
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="several users of the training service against one")
    parser.add_argument("--model", help="folder; by default a random model of --shape")
    parser.add_argument("--shape", default="8m", choices=list(SHAPES))
    parser.add_argument(
        "--clock",
        default="wall",
        choices=sorted(CLOCKS),
        help="process: processor time, for a CPU that other processes use too; with one thread",
    )
    parser.add_argument("--profile", action="store_true", help="on a GPU: how long kernels run")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or str(write_model(Path(folder) / "model", options.shape))
        server = ServiceConfig(
            state_dir=f"{folder}/state", device=options.device, max_adapters_per_user=options.adapters
        )
        config = TrainingServiceConfig(model=ServiceModelConfig(path=path), server=server)
        service = build_service(config, PolicyHost.build(config))
        found = asyncio.run(measure(service, options))
    found.update(vars(options), machine=platform.processor() or platform.machine())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
