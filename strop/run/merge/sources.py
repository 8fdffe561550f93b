"""Read the model of a checkpoint that Strop (`global_step_N/actor`, `critic` ...) or verl (FSDP, Megatron)
wrote."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from strop.config.policies import ROLE_PREFIX
from strop.config.schema.model import ModelConfig
from strop.config.typed import build
from strop.models.heads import HEAD
from strop.models.load import load_config, resolve
from strop.registry import did_you_mean
from strop.run.checkpoint.layout import MANIFEST, read_manifest
from strop.run.checkpoint.store import load as load_checkpoint
from strop.run.merge.megatron import checkpoint_folder, read_megatron
from strop.run.merge.verl import is_verl_checkpoint, read_object, read_shards

log = logging.getLogger(__name__)

SECTIONS = {"actor": ("actor_rollout_ref", "model"), "critic": ("critic", "model")}
"""The section of the run's configuration that describes the model of a role. Default: `model`."""
TAKEN_FROM_THE_RUN = (
    "path",
    "hf_config_path",
    "tokenizer_path",
    "custom_chat_template",
    "override_config",
    "lora_rank",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "lora_adapter_path",
    "quantization",
    "value_head_prefix",
)
"""Keys of the saved model section that are used. Others, such as trust_remote_code and external_lib, could
run code of whoever wrote the checkpoint; they come from the command line alone."""


@dataclass(frozen=True)
class CodeTrust:
    """What code may run while a checkpoint is read. It is never read from the checkpoint."""

    trust_remote_code: bool = False
    external_lib: str | None = None


@dataclass
class MergeSource:
    """The weights of a checkpoint, and the settings to build their model."""

    tensors: dict[str, Tensor]
    settings: ModelConfig
    """Paths of the config, the tokenizer and, if only adapters were saved, of the base weights."""

    @property
    def has_adapters(self) -> bool:
        return any(".lora_A." in name for name in self.tensors)

    @property
    def is_scalar(self) -> bool:
        """Whether the model has a scalar head: a critic or a reward model."""
        return any(_is_scalar_head(name) for name in self.tensors)


def _is_scalar_head(name: str) -> bool:
    return name.endswith(f"{HEAD}.weight") or "v_head" in name


def read_source(
    local_dir: str,
    *,
    base: str | None = None,
    lora_alpha: float | None = None,
    ema: bool = False,
    trust: CodeTrust | None = None,
) -> MergeSource:
    """The model in a folder such as `global_step_20/actor`, written by Strop or verl."""
    found = _read_folder(local_dir, base, lora_alpha, ema)
    trust = trust or CodeTrust()
    found.settings = dataclasses.replace(
        found.settings, trust_remote_code=trust.trust_remote_code, external_lib=trust.external_lib
    )
    return found


def _read_folder(local_dir: str, base: str | None, lora_alpha: float | None, ema: bool) -> MergeSource:
    folder = Path(local_dir).expanduser().absolute()
    if not folder.is_dir():
        what = "is a file; name the folder that holds it" if folder.is_file() else "does not exist"
        raise ValueError(f"--local_dir {local_dir} {what}.")
    if is_verl_checkpoint(folder):
        return _read_verl(folder, base, lora_alpha)
    if checkpoint_folder(folder) is not None:
        return _read_megatron(folder, base)
    if (folder.parent / MANIFEST).is_file():
        return _read_strop(folder.parent, folder.name, base, ema)
    if (folder / MANIFEST).is_file():
        roles = _roles(folder)
        if len(roles) == 1:
            return _read_strop(folder, roles[0], base, ema)
        choices = ", ".join(str(folder / role) for role in roles)
        raise ValueError(f"{local_dir} holds several models; name one: {choices}.")
    if (folder / "config.json").is_file():
        raise ValueError(f"{local_dir} is a Hugging Face folder already.")
    names = sorted(os.listdir(folder))
    inside = ", ".join(names[:8]) or "nothing"
    raise ValueError(
        f"{local_dir} is no checkpoint: it needs a role inside a global_step_N of Strop (with a {MANIFEST}), "
        f"or verl's model_world_size_W_rank_R.pt files or dist_ckpt folder. It holds: {inside}."
    )


def _roles(folder: Path) -> list[str]:
    """The roles whose weights a checkpoint holds, sorted."""
    roles = set()
    for part in read_manifest(folder).parts:
        if part.endswith("/model"):
            roles.add(part.removesuffix("/model"))
    return sorted(roles)


def _read_strop(checkpoint: Path, role: str, base: str | None, ema: bool) -> MergeSource:
    roles = _roles(checkpoint)
    if role not in roles:
        raise ValueError(
            f"{checkpoint} holds no model {role!r}.{did_you_mean(role, roles)} It holds: "
            f"{', '.join(roles) or 'none'}. (Weights are saved when checkpoint.save_contents has `model`.)"
        )
    wanted = {f"{role}/model", "config"}
    if ema:
        wanted.add("trainer")
    parts = load_checkpoint(checkpoint, only=lambda part: part in wanted)
    tensors = dict(parts[f"{role}/model"])
    if ema:
        average = parts["trainer"].get("ema")
        if average is None or role == "critic":
            raise ValueError(
                f"{checkpoint} holds no average of {role}. It is kept with trainer.enable_ema=true, of the "
                "actor or of the model of sft, rm and dpo."
            )
        tensors |= average["average"]
    return MergeSource(tensors, _settings(checkpoint, role, parts.get("config"), base))


def _model_section(config: object, role: str) -> Mapping[str, object] | None:
    """The section of a saved configuration that describes the model of a role; None if it has none."""
    section = config
    if role.startswith(ROLE_PREFIX):  # one of several policies
        role = "actor"
    for name in SECTIONS.get(role, ("model",)):
        if not isinstance(section, Mapping):
            return None
        section = section.get(name)
    if not isinstance(section, Mapping):
        return None
    return section


def _settings(checkpoint: Path, role: str, config: object, base: str | None) -> ModelConfig:
    """The model settings of the run that saved the checkpoint."""
    section = _model_section(config, role)
    exported = checkpoint / role / "huggingface"
    has_config = (exported / "config.json").is_file()
    if section is None:
        if base is None and not has_config:
            raise ValueError(
                f"{checkpoint} does not say which model {role!r} began as. Name its folder with --base (a "
                "Hugging Face folder with config.json and tokenizer)."
            )
        section = {"path": str(exported)}
    plain = {name: value for name, value in section.items() if name in TAKEN_FROM_THE_RUN}
    if section.get("external_lib"):
        log.warning(
            "The run imported external_lib=%s, which is not imported here. If the model needs it, name it "
            "with --external_lib.",
            section["external_lib"],
        )
    settings: ModelConfig = build(ModelConfig, {**plain, "path": base or plain.get("path")})
    if base:
        settings = dataclasses.replace(settings, tokenizer_path=None, hf_config_path=None)
    elif has_config:  # training adds to the config, for example the mean and std of a reward model's scores
        settings = dataclasses.replace(settings, hf_config_path=str(exported))
    return settings


def _described(folder: Path, base: str | None) -> str:
    """The folder with config and tokenizer of a checkpoint of verl."""
    described = folder / "huggingface"
    if base is None and not (described / "config.json").is_file():
        raise ValueError(
            f"{folder} has no huggingface/config.json. Name the model it was trained from with --base."
        )
    return base or str(described)


def _read_megatron(folder: Path, base: str | None) -> MergeSource:
    settings = ModelConfig(path=_described(folder, base))
    place = checkpoint_folder(folder)
    assert place is not None
    return MergeSource(read_megatron(place, load_config(resolve(settings.path))), settings)


def _read_verl(folder: Path, base: str | None, lora_alpha: float | None) -> MergeSource:
    settings = ModelConfig(path=_described(folder, base))
    tensors = read_shards(folder)
    ranks: set[int] = set()
    modules: set[str] = set()
    for name, tensor in tensors.items():
        module, separator, _ = name.partition(".lora_A.")
        if separator:
            if tensor.dim() != 2:
                raise ValueError(f"{folder} holds {name}, which is no matrix: {tuple(tensor.shape)}.")
            ranks.add(tensor.shape[0])
            modules.add(module.rpartition(".")[2])
    if ranks:
        alpha = lora_alpha or _saved_alpha(folder)
        if not alpha:
            raise ValueError(
                f"{folder} holds LoRA weights but not their scale. Give --lora_alpha, the one of the "
                "training run."
            )
        settings = dataclasses.replace(
            settings, lora_rank=ranks.pop(), lora_alpha=alpha, target_modules=sorted(modules)
        )
    return MergeSource(tensors, settings)


def _saved_alpha(folder: Path) -> float | None:
    """The LoRA alpha of a verl checkpoint; None if it was not saved."""
    adapter_config = folder / "lora_adapter" / "adapter_config.json"
    if not adapter_config.is_file():
        return None
    alpha = read_object(adapter_config).get("lora_alpha")
    if alpha is None:
        return None
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"{adapter_config} has lora_alpha={str(alpha)[:40]}; it must be a number over 0.")
    return float(alpha)
