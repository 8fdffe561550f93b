"""Tensors in the safetensors format: 8 bytes of header length, a JSON header, then the raw numbers.

Writing is done here, piece by piece, so that a full disk is an ordinary OSError, the checksum costs no second pass, and tensors
on a device are brought over one at a time. Reading is the safetensors library's.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from strop.run.durable import CHUNK, Fingerprint, write_file

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> Fingerprint:
    """`facts` go into the header beside the tensors."""
    return write_file(path, _pieces(tensors, facts or {}))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, in memory of their own: the file may be deleted or replaced afterwards."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _pieces(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    # Wide types first keeps every tensor aligned to its own width, which readers that map the file rely on.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    yield _header({name: tensors[name] for name in names}, facts)
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().data
        for start in range(0, len(raw), CHUNK):
            yield raw[start : start + CHUNK]


def _header(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    # transformers refuses a file that does not say which framework wrote it.
    header: dict[str, object] = {"__metadata__": {"format": "pt", **facts}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
