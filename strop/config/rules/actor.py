"""Rules of `actor_rollout_ref.actor`, `.model` and `.ref`: the policy, its loss and its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.catalog import KL_ESTIMATORS
from strop.config.derived import (
    device_count,
    engine_name,
    has_critic,
    has_reference,
    uses_lora,
)
from strop.config.objective import objective
from strop.config.rules.findings import Findings, error, warning
from strop.config.schema.actor import UNSUPPORTED_STRATEGIES
from strop.config.schema.model import is_dropout_rate

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.model import ModelConfig, OptimConfig
    from strop.config.schema.ppo import PpoConfig

ACTOR = "actor_rollout_ref.actor"


def model_path(loaded: Loaded[PpoConfig]) -> Findings:
    """The policy starts from a model."""
    if loaded.config.actor_rollout_ref.model.path is None:
        yield error(
            "actor_rollout_ref.model.path",
            "not set. Name the model to train: a folder, a hub name or a .gguf file.",
        )


def clip_ratio(loaded: Loaded[PpoConfig]) -> Findings:
    """clip_ratio has no effect where both sides are set separately."""
    set_by_user = loaded.set_by_user
    actor = loaded.config.actor_rollout_ref.actor
    low = actor.clip_ratio_low
    high = actor.clip_ratio_high
    if f"{ACTOR}.clip_ratio" not in set_by_user:
        return
    if set_by_user.get(f"{ACTOR}.clip_ratio_low") is None or low is None:
        return
    if set_by_user.get(f"{ACTOR}.clip_ratio_high") is None or high is None:
        return
    if not low == high == actor.clip_ratio:
        yield warning(
            f"{ACTOR}.clip_ratio",
            f"{actor.clip_ratio:g} has no effect: {ACTOR}.clip_ratio_low={low:g} and "
            f"{ACTOR}.clip_ratio_high={high:g} are set instead.",
        )


def kl_terms(loaded: Loaded[PpoConfig]) -> Findings:
    """The KL in the reward and the KL in the loss: settings without their switch, and both at once."""
    set_by_user = loaded.set_by_user
    actor = loaded.config.actor_rollout_ref.actor
    algorithm = loaded.config.algorithm
    if not algorithm.use_kl_in_reward:
        for key, value in sorted(set_by_user.items()):
            of_kl = key.startswith("algorithm.kl_ctrl.") or key == "algorithm.kl_penalty"
            if of_kl and value != 0:  # a coefficient of 0 says the same as the switch
                yield warning(key, f"{value} has no effect without algorithm.use_kl_in_reward=true.")
    if not actor.use_kl_loss:
        for key in (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"):
            if set_by_user.get(key, 0) != 0:
                yield warning(key, f"{set_by_user[key]} has no effect without {ACTOR}.use_kl_loss=true.")
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield warning(
            "algorithm.use_kl_in_reward",
            f"the KL acts twice, in the reward and in the loss: {objective(loaded.config)}.",
        )
    if actor.use_kl_loss and KL_ESTIMATORS.entry(actor.kl_loss_type).name in ("k1", "kl"):
        yield warning(
            f"{ACTOR}.kl_loss_type",
            f"{actor.kl_loss_type} as a loss: its gradient is that of log π alone. It does not depend on the "
            "reference, and on samples of the policy its mean is 0, so it restrains nothing. Set low_var_kl, "
            f"mse, or {actor.kl_loss_type}+ (the same value with the gradient of mse).",
        )


def reference_model(loaded: Loaded[PpoConfig]) -> Findings:
    """With LoRA the reference is the model without any adapter, so ref.model has no effect."""
    group = loaded.config.actor_rollout_ref
    if not uses_lora(loaded.config) or not has_reference(loaded.config):
        return
    if group.ref.model:
        yield warning(
            "actor_rollout_ref.ref.model",
            "with LoRA the reference is the actor without adapters; this section is not read.",
        )
    if group.model.lora_adapter_path:
        yield warning(
            "actor_rollout_ref.model.lora_adapter_path",
            f"the reference is the model without the adapter {group.model.lora_adapter_path}, so the KL is "
            "not 0 when the training begins, and pulls towards the model before that adapter. For the KL to "
            "the model with it, merge the adapter into actor_rollout_ref.model.path first, and set "
            "actor_rollout_ref.model.lora_rank.",
        )


def strategy(loaded: Loaded[PpoConfig]) -> Findings:
    """Some backends of verl do not exist here."""
    chosen = loaded.config.actor_rollout_ref.actor.strategy
    yield from unsupported_strategy(f"{ACTOR}.strategy", chosen)


def unsupported_strategy(key: str, chosen: str) -> Findings:
    """The same for the backend at `key`."""
    reason = UNSUPPORTED_STRATEGIES.get(chosen)
    if reason is not None:
        yield error(key, f"{chosen}: {reason}. Use fsdp (FSDP2), or single.")


def dropout(loaded: Loaded[PpoConfig]) -> Findings:
    """Models of the run are trained without dropout."""
    group = loaded.config.actor_rollout_ref
    yield from dropout_rates("actor_rollout_ref.model", group.model)
    yield from dropout_rates("critic.model", loaded.config.critic.model)
    if uses_lora(loaded.config) and group.model.lora_dropout:
        yield warning(
            "actor_rollout_ref.model.lora_dropout",
            f"{group.model.lora_dropout:g}: updates are computed with it, and responses are sampled without "
            "it. So the policy that is trained is not the one that sampled: its ratio is not 1 before it "
            "changes. Set 0.",
        )


def dropout_rates(section: str, model: ModelConfig) -> Findings:
    """The same for the model at `section`: the layers would not get the rate of the configuration."""
    for name, rate in model.override_config.items():
        if is_dropout_rate(name) and isinstance(rate, int | float) and rate > 0:
            yield error(
                f"{section}.override_config.{name}",
                f"{rate:g}, but models are trained without dropout: with it, the policy that is trained "
                "would not be the policy that sampled. Set 0; the weight decay of the optimizer "
                "regularises, and in supervised training model.lora_dropout.",
            )


def lora(loaded: Loaded[PpoConfig]) -> Findings:
    """LoRA of the policy and of the critic."""
    yield from lora_scale("actor_rollout_ref.model", loaded.config.actor_rollout_ref.model)
    yield from lora_scale("critic.model", loaded.config.critic.model)


def lora_scale(section: str, model: ModelConfig) -> Findings:
    """Adapters with a scale of 0 are never trained."""
    if model.lora_rank and not model.lora_alpha:
        yield error(
            f"{section}.lora_alpha",
            f"0 with lora_rank={model.lora_rank}: the adapters would have no effect. Set it above 0.",
        )


def quantization(loaded: Loaded[PpoConfig]) -> Findings:
    """4-bit weights of the policy and of the critic."""
    config = loaded.config
    group = config.actor_rollout_ref
    devices = device_count(config.trainer)
    yield from four_bit_weights("actor_rollout_ref.model", group.model, devices)
    if has_critic(config):
        if config.critic.nnodes:
            devices = device_count(config.critic)
        yield from four_bit_weights("critic.model", config.critic.model, devices)
    if group.model.quantization and group.rollout.quantization and engine_name(group.rollout) == "native":
        yield error(
            "actor_rollout_ref.rollout.quantization",
            f"{group.rollout.quantization} with actor_rollout_ref.model.quantization="
            f"{group.model.quantization}: the native engine samples from the 4-bit weights. Set "
            "actor_rollout_ref.rollout.quantization=null.",
        )


def four_bit_weights(section: str, model: ModelConfig, devices: int) -> Findings:
    """4-bit weights are frozen and whole: they need LoRA and one device."""
    value = model.quantization
    key = f"{section}.quantization"
    if value is None:
        return
    if not (model.lora_rank or model.lora_adapter_path):
        yield error(
            key,
            f"{value} without LoRA: 4-bit weights are frozen, so nothing could be trained. Set "
            f"{section}.lora_rank (for instance 32), or {key}=null.",
        )
    if devices > 1:
        yield error(
            key,
            f"{value} on {devices} devices: 4-bit weights are not sharded. Use one device, or "
            f"{key}=null, with which FSDP2 divides the weights.",
        )


def betas(loaded: Loaded[PpoConfig]) -> Findings:
    """AdamW has two momentum coefficients."""
    yield from two_betas(f"{ACTOR}.optim.betas", loaded.config.actor_rollout_ref.actor.optim.betas)


def optimizer(loaded: Loaded[PpoConfig]) -> Findings:
    """The optimizers of policy and critic on their devices."""
    config = loaded.config
    devices = device_count(config.trainer)
    yield from usable_optimizer(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim, devices)
    if has_critic(config):
        if config.critic.nnodes:
            devices = device_count(config.critic)
        yield from usable_optimizer("critic.optim", config.critic.optim, devices)


_UNUSABLE = {
    "LBFGS": "computes the loss several times in one step, but an update has the gradient of one pass",
    "SparseAdam": "takes sparse gradients only, but those of a language model are dense",
}


def usable_optimizer(section: str, optim: OptimConfig, devices: int) -> Findings:
    """Two optimizers of torch do not fit into an update. AdamW8bit cuts whole weights into blocks, which the
    shards of several devices would cut through. Adafactor of torch takes means of whole rows and columns, and
    fails with sharded weights in its first step."""
    reason = _UNUSABLE.get(optim.optimizer) if optim.optimizer_impl == "torch.optim" else None
    if reason:
        yield error(f"{section}.optimizer", f"{optim.optimizer} {reason}. Set AdamW.")
    alone = optim.optimizer in ("AdamW8bit", "Adafactor") and optim.optimizer_impl == "torch.optim"
    if alone and devices > 1:
        yield error(
            f"{section}.optimizer",
            f"{optim.optimizer} works on one device, but there are {devices}: its state is not sharded. Use "
            "AdamW, whose state is divided over the devices, or Muon.",
        )


def two_betas(key: str, values: list[float]) -> Findings:
    """The same for the optimizer whose betas are at `key`."""
    if len(values) != 2 or not all(0 <= beta < 1 for beta in values):
        yield error(key, f"expected two numbers in [0, 1), got {values}.")


def reference_pool(loaded: Loaded[PpoConfig]) -> Findings:
    """ref.nnodes needs a reference that is a separate model."""
    config = loaded.config
    ref = config.actor_rollout_ref.ref
    key = "actor_rollout_ref.ref.nnodes"
    if ref.nnodes and not has_reference(config):
        yield warning(
            key,
            f"{ref.nnodes}, but the run has no reference (algorithm.use_kl_in_reward, "
            "actor_rollout_ref.actor.use_kl_loss).",
        )
    elif ref.nnodes and uses_lora(config):
        yield error(
            key, f"{ref.nnodes}, but the reference of a LoRA run is the actor without its adapters. Set 0."
        )
