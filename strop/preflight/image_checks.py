"""What cannot be done with images and videos in prompts."""

from __future__ import annotations

from strop.catalog import ENGINES
from strop.config.derived import engine_name, has_critic
from strop.config.rules import ConfigFinding, error
from strop.config.schema.model import ModelConfig
from strop.config.schema.ppo import PpoConfig
from strop.models.load import load_config, resolve
from strop.rollout.vllm.images import FAMILIES


def image_findings(config: PpoConfig, *, videos: bool = False) -> list[ConfigFinding]:
    """Engines and models of a run that cannot read images; with `videos`, videos."""
    found: list[ConfigFinding] = []
    engine = engine_name(config.actor_rollout_ref.rollout)
    key = "actor_rollout_ref.rollout.name"
    if not ENGINES.entry(engine).facts["images"]:
        message = f"The data has images, which {engine} is not given. Set it to native, hf or vllm."
        found.append(error(key, message))
    if engine == "vllm":
        found += _vllm_findings(config, key)
    if engine == "vllm" and videos:
        found.append(error(key, "The data has videos, which vLLM is not given. Set it to native or hf."))
    if config.reward_model.enable and config.reward_model.model.path:
        found += _reader_findings(config, config.reward_model.model, "reward_model.model", "reward model")
    if has_critic(config):
        found += _reader_findings(config, config.critic.model, "critic.model", "critic")
    return found


def _model_type(model: ModelConfig) -> tuple[str, bool]:
    """The type of a model, and whether it has a vision tower."""
    config = load_config(resolve(model.path), trust_remote_code=model.trust_remote_code)
    return str(config.model_type), getattr(config, "vision_config", None) is not None


def _reader_findings(config: PpoConfig, model: ModelConfig, key: str, role: str) -> list[ConfigFinding]:
    """A critic or reward model reads the images as the actor's processor prepared them."""
    try:
        kind, sees = _model_type(model)
        actor, _ = _model_type(config.actor_rollout_ref.model)
    except ValueError:
        return []  # the check of the model itself says so
    if not sees:
        message = (
            f"The data has images, and the {role} {model.path} ({kind}) reads text only. Give a model with a "
            "vision tower, of the family of the actor."
        )
        return [error(f"{key}.path", message)]
    if kind != actor:
        message = (
            f"The data has images, which are prepared for the actor ({actor}), and the {role} {model.path} "
            f"is of another family ({kind}). Give one of the same family."
        )
        return [error(f"{key}.path", message)]
    return []


def _vllm_findings(config: PpoConfig, key: str) -> list[ConfigFinding]:
    if "url" in (config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}):
        url = "actor_rollout_ref.rollout.engine_kwargs.vllm.url"
        message = f"The data has images, which a server ({url}) is not given. Remove it."
        return [error(key, message)]
    kind, _ = _model_type(config.actor_rollout_ref.model)
    if kind not in FAMILIES:
        message = (
            f"The data has images, which vLLM is not given for models of the type {kind} (known: "
            f"{', '.join(FAMILIES)}). Set it to native or hf."
        )
        return [error(key, message)]
    return []
