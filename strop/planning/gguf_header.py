"""Reads the header of a GGUF file: what the planner needs to know of a model, in the words of config.json.

The header is a list of (name, type, value) and a list of tensors; weights are not read. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING = 8
ARRAY = 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its code in `struct`."""
KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Key of GGUF behind the architecture's name -> key of config.json."""
MODEL_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""Architectures that transformers spells otherwise."""
TOKENS = "tokenizer.ggml.tokens"
OUTPUT = "output.weight"
"""The tensor of an output head; without it the head is the embedding."""
HEADER_ENDS = "ends within its header: the download may be incomplete"


def read_gguf_config(file: Path) -> dict[str, object]:
    """The values of config.json that the header tells."""
    try:
        with file.open("rb") as stream:
            values, tensors = _read_header(stream)
    except (struct.error, UnicodeDecodeError, EOFError, MemoryError, OverflowError) as error:
        raise ValueError(f"{file} {HEADER_ENDS}, or it is damaged ({error}).") from error
    except _NoGguf as error:
        raise ValueError(f"{file} is no GGUF file: {error}.") from error
    architecture = str(values.get("general.architecture", ""))
    if not architecture:
        raise ValueError(f"{file} does not name its architecture (general.architecture).")
    config = _translated(values, architecture)
    config["tie_word_embeddings"] = OUTPUT not in tensors
    return config


def _translated(values: Mapping[str, object], architecture: str) -> dict[str, object]:
    config: dict[str, object] = {"model_type": MODEL_TYPES.get(architecture, architecture)}
    if TOKENS in values:
        config["vocab_size"] = values[TOKENS]
    for name, key in KEYS.items():
        value = values.get(f"{architecture}.{name}")
        if value is not None:
            config[key] = value
    if architecture == "llama" and config.get("num_experts"):  # llama.cpp has no name of its own for Mixtral
        config["model_type"] = "mixtral"
        config["num_local_experts"] = config["num_experts"]
    return config


class _NoGguf(Exception):
    """The file does not begin as a GGUF file does."""


def _read_header(stream: BinaryIO) -> tuple[dict[str, object], set[str]]:
    """The values by name (of an array its length) and the names of the tensors."""
    if stream.read(4) != MAGIC:
        raise _NoGguf("it does not begin with the letters GGUF")
    version = _number(stream, "I")
    if version not in VERSIONS:
        raise _NoGguf(f"version {version} of the format; known are {' and '.join(map(str, VERSIONS))}")
    tensor_count = _number(stream, "Q")
    value_count = _number(stream, "Q")
    values: dict[str, object] = {}
    for _ in range(int(value_count)):
        name = _text(stream)
        values[name] = _value(stream, int(_number(stream, "I")))
    tensors = set()
    for _ in range(int(tensor_count)):
        tensors.add(_text(stream))
        dimensions = int(_number(stream, "I"))
        _skip(stream, 8 * dimensions + 4 + 8)  # sizes, type, place
    return values, tensors


def _value(stream: BinaryIO, kind: int) -> object:
    """A number or a text; of an array its length."""
    if kind == STRING:
        return _text(stream)
    if kind != ARRAY:
        return _number(stream, _code(kind))
    kind_of_items = int(_number(stream, "I"))
    count = int(_number(stream, "Q"))
    if kind_of_items == STRING:
        for _ in range(count):
            _skip(stream, int(_number(stream, "Q")))
    elif kind_of_items == ARRAY:
        for _ in range(count):
            _value(stream, ARRAY)
    else:
        _skip(stream, count * struct.calcsize("<" + _code(kind_of_items)))
    return count


def _code(kind: int) -> str:
    if kind not in NUMBERS:
        raise _NoGguf(f"a value of the unknown type {kind}")
    return NUMBERS[kind]


def _number(stream: BinaryIO, code: str) -> float:
    form = "<" + code
    (number,) = struct.unpack(form, stream.read(struct.calcsize(form)))
    return number


def _text(stream: BinaryIO) -> str:
    length = int(_number(stream, "Q"))
    data = stream.read(length)
    if len(data) != length:
        raise EOFError(f"{length} bytes of text expected")
    return data.decode()


def _skip(stream: BinaryIO, count: int) -> None:
    if len(stream.read(count)) != count:
        raise EOFError(f"{count} bytes expected")
