"""Memory of sampling on one rank: the engine's weights, its cache, and what a step needs for a moment."""

from __future__ import annotations

from dataclasses import dataclass

from strop.planning.activations import FLOAT32, Numbers, layer_forward
from strop.planning.assumptions import CACHE_BLOCK, ENGINE_SAFE, HOST_SHARE, RESTING_SHARE, ROW_BYTES
from strop.planning.shape import Shape


@dataclass(frozen=True)
class Sampler:
    """The native engine on one rank."""

    shape: Shape
    sequences: int
    """Answers that this rank samples in one step."""
    prompt: int
    """Tokens of a prompt."""
    response: int
    """Longest answer."""
    samples: int = 1
    """Answers per prompt (rollout.n)."""
    numbers: Numbers = Numbers()
    max_rows: int = 1024
    batch_tokens: int = 32768
    """Prompt tokens of one pass (max_num_batched_tokens)."""
    share: float = 0.5
    """gpu_memory_utilization."""
    tensor: int = 1
    borrows: bool = True
    """It samples from the actor's own module; otherwise it has a whole copy of the weights."""
    records: bool = True
    """Decode steps are recorded as CUDA graphs."""
    on_cpu: bool = False

    @property
    def module(self) -> int:
        """Weights of the module it samples from. Ranks that share it have a part of each matrix, the head included, and the
        whole embedding."""
        shape, parts = self.shape, self.tensor
        if parts == 1:
            return self.numbers.compute * shape.parameters
        return self.numbers.compute * (shape.body // parts + shape.embedding + shape.embedding // parts + shape.hidden)

    @property
    def weights(self) -> int:
        """Beside those of the actor."""
        return 0 if self.borrows else self.module

    @property
    def per_token(self) -> int:
        return self.shape.cache_per_token(self.numbers.compute) // self.tensor

    @property
    def capacity(self) -> int:
        return -(-(self.prompt + self.response) // CACHE_BLOCK) * CACHE_BLOCK

    @property
    def wanted_rows(self) -> int:
        rows = min(self.sequences, self.max_rows)
        return min(self.max_rows, 1 << max(0, rows - 1).bit_length())

    @property
    def wanted(self) -> int:
        """Bytes of a cache in which every sequence of the step, or max_num_seqs of them, can run to its end."""
        return self.wanted_rows * self.capacity * self.per_token

    def budget(self, memory: int, used: int) -> int:
        """Bytes that the cache may take on a device of so much memory, of which `used` is taken; on a CPU, a quarter."""
        if self.on_cpu:
            return memory // HOST_SHARE
        return max(0, int(min((memory - used) * ENGINE_SAFE, memory * self.share - self.module)))

    def cache(self, memory: int, used: int) -> int:
        return min(self.wanted, self.budget(memory, used))

    def rows(self, cache: int) -> int:
        """Sequences that run at the same time in a cache of so many bytes."""
        return min(self.sequences, self.max_rows, cache // max(1, self.capacity * self.per_token))

    def kept(self, cache: int, memory: int, used: int, *, frees: bool) -> int:
        """What of the cache stays while the models learn, beside `used` bytes on a device of so much memory."""
        plenty = self.records and (used + cache) * RESTING_SHARE <= memory
        return cache if plenty or not frees else 0

    def bookkeeping(self, cache: int) -> int:
        return cache // max(1, self.per_token) * ROW_BYTES

    @property
    def decoding(self) -> int:
        """A step of all rows: float32 logits, and one layer."""
        rows = min(self.sequences, self.max_rows)
        return rows * self.shape.vocabulary * FLOAT32 + layer_forward(self.shape, rows, self.numbers, tensor=self.tensor)

    @property
    def prefilling(self) -> int:
        """Prompts that join: one layer over a batch of their tokens, or the logits of their last tokens, once for each prompt
        and once for each answer; and the keys that answers of one prompt copy."""
        prompts = max(1, self.batch_tokens // self.prompt)
        leaders = min(prompts, -(-self.sequences // self.samples), self.max_rows)
        seated = min(leaders * self.samples, self.sequences, self.max_rows)
        tokens = min(self.batch_tokens, -(-self.sequences // self.samples) * self.prompt)
        layer = layer_forward(self.shape, tokens, self.numbers, tensor=self.tensor)
        copied = seated * self.prompt * self.shape.keys // self.tensor * self.numbers.compute
        return max(layer, (leaders + seated) * self.shape.vocabulary * FLOAT32, copied)

    @property
    def recorded(self) -> int:
        """Memory that recorded decode steps reserve for themselves."""
        return self.decoding if self.records else 0
