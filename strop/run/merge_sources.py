"""The model of a checkpoint, whoever wrote it: Strop (`global_step_N/actor`, `critic` ...) or verl with FSDP."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from strop.config.schema.model import Model
from strop.config.typed import build
from strop.models.heads import HEAD
from strop.registry import did_you_mean
from strop.run.checkpoint import load as load_checkpoint
from strop.run.manifest import NAME as MANIFEST
from strop.run.manifest import read_manifest
from strop.run.merge_verl import is_verl, read_shards

SECTIONS = {"actor": ("actor_rollout_ref", "model"), "critic": ("critic", "model")}
"""Where the configuration of a run describes the model of a role; other roles are described under `model`."""


@dataclass
class Saved:
    """The model of a checkpoint, whoever wrote it."""

    tensors: dict[str, Tensor]
    settings: Model
    """Where its config, its tokenizer and, for adapters alone, the weights below them are."""

    @property
    def has_adapters(self) -> bool:
        return any(".lora_A." in name for name in self.tensors)

    @property
    def is_scalar(self) -> bool:
        """Whether it answers with one number: a critic or a reward model."""
        return any(name.endswith(f"{HEAD}.weight") or "v_head" in name for name in self.tensors)


def read(local_dir: str, *, base: str | None = None, lora_alpha: float | None = None, ema: bool = False) -> Saved:
    """The model of a folder such as `global_step_20/actor`, of Strop or verl."""
    folder = Path(local_dir).expanduser().absolute()
    if not folder.is_dir():
        raise ValueError(f"--local_dir {local_dir} does not exist.")
    if is_verl(folder):
        return _of_verl(folder, base, lora_alpha)
    if (folder.parent / MANIFEST).is_file():
        return _of_strop(folder.parent, folder.name, base, ema)
    if (folder / MANIFEST).is_file():
        roles = _roles(folder)
        if len(roles) == 1:
            return _of_strop(folder, roles[0], base, ema)
        raise ValueError(f"{local_dir} holds several models; name one: {', '.join(str(folder / role) for role in roles)}.")
    if (folder / "config.json").is_file():
        raise ValueError(f"{local_dir} is a Hugging Face folder already.")
    inside = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise ValueError(
        f"{local_dir} is no checkpoint: it needs a role inside a global_step_N of Strop (with a {MANIFEST}), or verl's "
        f"model_world_size_W_rank_R.pt files. It holds: {inside}."
    )


def _roles(folder: Path) -> list[str]:
    return sorted({part.rpartition("/")[0] for part in read_manifest(folder).parts if part.endswith("/model")})


def _of_strop(checkpoint: Path, role: str, base: str | None, ema: bool) -> Saved:
    roles = _roles(checkpoint)
    if role not in roles:
        raise ValueError(
            f"{checkpoint} holds no model {role!r}.{did_you_mean(role, roles)} It holds: {', '.join(roles) or 'none'}. "
            "(Weights are saved when checkpoint.save_contents has `model`.)"
        )
    wanted = {f"{role}/model", "config", *(["trainer"] if ema else [])}
    parts = load_checkpoint(checkpoint, only=lambda part: part in wanted)
    tensors = dict(parts[f"{role}/model"])
    if ema:
        average = parts["trainer"].get("ema")
        if average is None or role == "critic":
            raise ValueError(
                f"{checkpoint} holds no average of {role}. It is kept with trainer.enable_ema=true, of the actor or of the "
                "model of sft, rm and dpo."
            )
        tensors |= average["average"]
    return Saved(tensors, _settings(checkpoint, role, parts.get("config"), base))


def _settings(checkpoint: Path, role: str, config: Any, base: str | None) -> Model:
    """The `model` section of the run that saved the checkpoint."""
    section: Any = config
    for name in SECTIONS.get(role, ("model",)):
        section = section.get(name) if isinstance(section, Mapping) else None
    exported = checkpoint / role / "huggingface"
    has_config = (exported / "config.json").is_file()
    if not isinstance(section, Mapping):
        if base is None and not has_config:
            raise ValueError(
                f"{checkpoint} does not say which model {role!r} began as. Name its folder with --base (a Hugging Face folder "
                "with config.json and tokenizer)."
            )
        section = {"path": str(exported)}
    known = {field.name for field in dataclasses.fields(Model)}
    plain = {name: value for name, value in section.items() if name in known}
    settings: Model = build(Model, {**plain, "path": base or plain.get("path")})
    if base:
        settings = dataclasses.replace(settings, tokenizer_path=None, hf_config_path=None)
    elif has_config:  # what training added to the config, such as the statistics of a reward model's scores
        settings = dataclasses.replace(settings, hf_config_path=str(exported))
    return settings


def _of_verl(folder: Path, base: str | None, lora_alpha: float | None) -> Saved:
    described = folder / "huggingface"
    if base is None and not (described / "config.json").is_file():
        raise ValueError(f"{folder} has no huggingface/config.json. Name the model it was trained from with --base.")
    tensors = read_shards(folder)
    settings = Model(path=base or str(described))
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name}
    if ranks:
        about = folder / "lora_adapter" / "adapter_config.json"
        alpha = lora_alpha or (json.loads(about.read_text()).get("lora_alpha") if about.is_file() else None)
        if not alpha:
            raise ValueError(
                f"{folder} holds LoRA weights but not their scale. Give --lora_alpha, the one of the training run."
            )
        modules = {name.partition(".lora_A.")[0].rpartition(".")[2] for name in tensors if ".lora_A." in name}
        settings = dataclasses.replace(settings, lora_rank=ranks.pop(), lora_alpha=alpha, target_modules=sorted(modules))
    return Saved(tensors, settings)
