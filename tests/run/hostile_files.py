"""Checkpoints and model folders that try to run code: a module that leaves a marker file when it is imported."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer
from strop.run.checkpoint.layout import MANIFEST
from strop.run.checkpoint.store import Export, save

MODULE = """
import pathlib
pathlib.Path({marker!r}).write_text("code ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class EvilConfig(LlamaConfig):
    model_type = {kind!r}
class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}


def hostile_folder(folder: Path, marker: Path, *, kind: str = "evil", tokenizer: bool = False) -> Path:
    """A Hugging Face folder whose config.json (and tokenizer_config.json) name a module of the folder."""
    words = tiny_tokenizer()
    words.save_pretrained(folder)
    tiny_model(words, hidden=32, layers=1).save_pretrained(folder)
    change(folder / "config.json", model_type=kind, auto_map=AUTO_MAP)
    if tokenizer:
        named = {"AutoTokenizer": [None, "evil.EvilTokenizer"]}
        change(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=named)
    (folder / "evil.py").write_text(MODULE.format(marker=str(marker), kind=kind))
    return folder


def change(file: Path, **values: object) -> None:
    said: dict[str, Any] = json.loads(file.read_text())
    file.write_text(json.dumps({**said, **values}))


def hostile_checkpoint(run: Path, marker: Path, *, kind: str = "evil", **section: object) -> Path:
    """A complete checkpoint with right checksums, whose configuration trusts the code in its own export."""
    words = tiny_tokenizer()
    model = tiny_model(words, hidden=32, layers=1)
    export = run / "global_step_1" / "model" / "huggingface"
    settings = {"path": str(export), "trust_remote_code": True, **section}
    parts = {"config": {"model": settings}, "model/model": dict(model.state_dict())}
    exports = {"model/huggingface": Export({}, lambda folder: hostile_folder(folder, marker, kind=kind))}
    return save(run, 1, parts, exports=exports)


def sign(checkpoint: Path) -> None:
    """Put the sizes and checksums of what the files are now into the manifest."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    for name, facts in manifest["files"].items():
        data = (checkpoint / name).read_bytes()
        facts.update(bytes=len(data), crc32=zlib.crc32(data))
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
