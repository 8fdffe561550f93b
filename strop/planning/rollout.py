"""Memory of sampling on one rank: the engine's weights, its KV cache, and temporary memory of a step."""

from __future__ import annotations

from dataclasses import dataclass

from strop.planning.activations import FLOAT32, Numbers, layer_forward
from strop.planning.devices import CACHE_BLOCK, ENGINE_SAFE, HOST_SHARE, RESTING_SHARE, ROW_BYTES
from strop.planning.shape import Shape


@dataclass(frozen=True)
class PlannedSampler:
    """The native engine on one rank."""

    shape: Shape
    sequences: int
    """Responses that this rank samples in one step."""
    prompt: int
    """Tokens of a prompt."""
    response: int
    """Tokens of the longest response."""
    max_rows: int
    """max_num_seqs."""
    batch_tokens: int
    """Prompt tokens of one prefill pass (max_num_batched_tokens)."""
    share: float
    """gpu_memory_utilization."""
    samples: int = 1
    """Responses per prompt (rollout.n)."""
    numbers: Numbers = Numbers()
    tensor: int = 1
    """tensor_model_parallel_size."""
    shares_module: bool = True
    """It samples from the actor's module; otherwise it has a whole copy of the weights."""
    records: bool = True
    """Decode steps are CUDA graphs."""
    on_cpu: bool = False
    quantized: bool = False
    """It samples from 8-bit copies of the weights of all layers (rollout.quantization)."""
    four_bit: bool = False
    """The actor's module has 4-bit weights (model.quantization)."""
    fp8_cache: bool = False
    """The KV cache has 8 bits, and a byte for each head of a token (rollout.kv_cache_dtype)."""

    @property
    def module(self) -> int:
        """Bytes of the module it samples from. With tensor parallelism a rank has a part of each matrix, the
        head included, and the whole embedding."""
        shape = self.shape
        parts = self.tensor
        weights = shape.parameters
        if parts > 1:
            weights = shape.body // parts + shape.embedding + shape.embedding // parts + shape.hidden
        if self.four_bit and self.shares_module:
            return shape.stored(self.numbers.compute, four_bit=True)
        return self.numbers.compute * weights

    @property
    def copies(self) -> int:
        """Bytes of quantised weights; on a CPU, of weights that were dequantised for sampling."""
        if self.quantized:
            return self.shape.body
        if self.four_bit and self.shares_module and self.on_cpu:
            return self.numbers.compute * self.shape.linear
        return 0

    @property
    def weights(self) -> int:
        """Bytes of weights in addition to those of the actor."""
        if self.shares_module:
            return self.copies
        return self.module + self.copies

    @property
    def per_token(self) -> int:
        """Bytes of the KV cache per token."""
        if self.fp8_cache:
            heads = 2 * self.shape.layers * self.shape.key_heads
            return (self.shape.cache_per_token(1) + heads) // self.tensor
        return self.shape.cache_per_token(self.numbers.compute) // self.tensor

    @property
    def capacity(self) -> int:
        """Tokens of the KV cache that one sequence needs."""
        return -(-(self.prompt + self.response) // CACHE_BLOCK) * CACHE_BLOCK

    @property
    def wanted_rows(self) -> int:
        """Sequences at a time that the engine asks memory for."""
        rows = min(self.sequences, self.max_rows)
        return min(self.max_rows, 1 << max(0, rows - 1).bit_length())

    @property
    def wanted(self) -> int:
        """Bytes of a KV cache in which every sequence of the step, or max_num_seqs of them, can reach its
        longest length."""
        return self.wanted_rows * self.capacity * self.per_token

    def budget(self, memory: int, used: int) -> int:
        """Bytes that the KV cache may take on a device with `memory` bytes, of which `used` are taken; on a
        CPU, a quarter of the memory."""
        if self.on_cpu:
            return memory // HOST_SHARE
        weights = self.module + self.copies
        return max(0, int(min((memory - used) * ENGINE_SAFE, memory * self.share - weights)))

    def cache(self, memory: int, used: int) -> int:
        """Bytes of the KV cache."""
        return min(self.wanted, self.budget(memory, used))

    def rows(self, cache: int) -> int:
        """Sequences that fit a KV cache of `cache` bytes at the same time."""
        return min(self.sequences, self.max_rows, cache // max(1, self.capacity * self.per_token))

    def kept(self, cache: int, memory: int, used: int, *, frees: bool) -> int:
        """Bytes of the KV cache that stay while the models learn, with `used` other bytes on the device."""
        plenty = self.records and (used + cache) * RESTING_SHARE <= memory
        if plenty or not frees:
            return cache
        return 0

    def bookkeeping(self, cache: int) -> int:
        """Bytes of token ids and log-probs for a KV cache of `cache` bytes."""
        return cache // max(1, self.per_token) * ROW_BYTES

    @property
    def _dequantized(self) -> int:
        return self.numbers.compute * self.shape.biggest_linear * (self.four_bit and self.shares_module)

    @property
    def decoding(self) -> int:
        """Temporary bytes of a decode step: float32 logits, and one layer."""
        rows = min(self.sequences, self.max_rows)
        layer = layer_forward(self.shape, rows, self.numbers, tensor=self.tensor) + self._dequantized
        return rows * self.shape.vocabulary * FLOAT32 + layer

    @property
    def prefilling(self) -> int:
        """Temporary bytes of a prefill: one layer over a batch of prompt tokens, or the logits of the last
        prompt tokens, once per prompt and once per response, or the prompt keys copied for each response."""
        all_prompts = -(-self.sequences // self.samples)
        prompts = min(max(1, self.batch_tokens // self.prompt), all_prompts, self.max_rows)
        responses = min(prompts * self.samples, self.sequences, self.max_rows)
        tokens = min(self.batch_tokens, all_prompts * self.prompt)
        layer = layer_forward(self.shape, tokens, self.numbers, tensor=self.tensor) + self._dequantized
        logits = (prompts + responses) * self.shape.vocabulary * FLOAT32
        copied = responses * self.prompt * self.shape.keys // self.tensor * self.numbers.compute
        return max(layer, logits, copied)

    @property
    def recorded(self) -> int:
        """Bytes that CUDA graphs of decode steps reserve."""
        if self.records:
            return self.decoding
        return 0
