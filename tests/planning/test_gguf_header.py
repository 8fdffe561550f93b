"""Headers of GGUF files, written by the library that everyone writes them with."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy
import pytest

from strop.planning.gguf_header import read_gguf_config
from strop.planning.shape import KNOWN, read_shape, shape_of


def written(file: Path, architecture: str, values: dict[str, int], *, tied: bool) -> Path:
    writer = gguf.GGUFWriter(str(file), architecture)
    for name, value in values.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"<{i}>" for i in range(49152)])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_string("general.name", "a name")
    writer.add_tensor("token_embd.weight", numpy.zeros((2, 4), dtype=numpy.float32))
    if not tied:
        writer.add_tensor("output.weight", numpy.zeros((2, 4), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


SMOLLM2 = {
    "embedding_length": 576,
    "block_count": 30,
    "attention.head_count": 9,
    "attention.head_count_kv": 3,
    "feed_forward_length": 1536,
}


def test_the_planner_reads_the_header(tmp_path: Path) -> None:
    file = written(tmp_path / "model.gguf", "llama", SMOLLM2, tied=True)
    assert shape_of(str(file)) == read_shape(KNOWN["smollm2-135m"])
    untied = written(tmp_path / "untied.gguf", "llama", SMOLLM2, tied=False)
    assert shape_of(str(untied)).parameters == shape_of(str(file)).parameters + 49152 * 576


def test_a_mixture_of_experts_is_read(tmp_path: Path) -> None:
    values = SMOLLM2 | {"expert_count": 4, "expert_used_count": 2}
    config = read_gguf_config(written(tmp_path / "moe.gguf", "llama", values, tied=True))
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == (
        "mixtral",
        4,
        2,
    )
    assert read_shape(config).experts is not None


@pytest.mark.parametrize("length", [0, 3, 20, 100, 5000])
def test_a_damaged_file_is_refused(tmp_path: Path, length: int) -> None:
    whole = written(tmp_path / "model.gguf", "llama", SMOLLM2, tied=True).read_bytes()
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole[:length])
    with pytest.raises(ValueError, match=r"cut\.gguf (is no GGUF file|ends within its header)"):
        read_gguf_config(file)
