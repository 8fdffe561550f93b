"""Rules of SFT, reward model training and DPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.catalog import PREFERENCE_LOSSES
from strop.config.derived import device_count
from strop.config.megatron import ranks_per_row
from strop.config.rules.actor import (
    dropout_rates,
    four_bit_weights,
    lora_scale,
    two_betas,
    unsupported_strategy,
    usable_optimizer,
)
from strop.config.rules.findings import Findings, error, nearest_multiples, warning
from strop.config.rules.megatron import megatron_schedule, own_balance, role_findings, supervised_role
from strop.config.rules.parallelism import expert_parallel, shard_groups, tensor_parallel
from strop.config.rules.trainer import no_best_checkpoint, saved_weights

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.roots import AnySupervisedConfig
    from strop.config.schema.supervised import DpoConfig, RmConfig

PPO_ONLY = (
    "log_val_generations",
    "rollout_data_dir",
    "validation_data_dir",
    "critic_warmup",
    "record_steps",
    "max_actor_ckpt_to_keep",
    "max_critic_ckpt_to_keep",
    "samples_to_keep",
    "balance_batch",
    "async_training",
)
"""Keys and sections of the trainer section that only PPO reads."""

OPTIONAL_TERMS = ("margin", "label_smoothing", "target_margin", "nll_coef")
"""Terms that only some preference losses have."""


def inputs(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """Training needs a model and rows."""
    config = loaded.config
    if config.model.path is None:
        yield error("model.path", "not set. Name the model to train: a folder, a hub name or a .gguf file.")
    if not config.data.train_files:
        yield error("data.train_files", "not set. Name one or more parquet, json or jsonl files.")


def parallel_sizes(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """Devices divide into groups of ranks, and the batch divides over the groups."""
    config = loaded.config
    devices = device_count(config.trainer)
    ulysses = config.ulysses_sequence_parallel_size
    group = ranks_per_row(config)
    rows = config.data.train_batch_size
    yield from tensor_parallel("tensor_parallel_size", config, config.model, devices)
    model = config.model
    yield from expert_parallel("model.fsdp_config", model, model.fsdp_config, model, devices)
    size = config.tensor_parallel_size
    yield from shard_groups("model.fsdp_config", model.strategy, model.fsdp_config, size, devices)
    data = config.data
    if data.micro_batch_size is not None and "data.micro_batch_size_per_gpu" in loaded.set_by_user:
        yield error(
            "data.micro_batch_size",
            f"{data.micro_batch_size} over all devices, set together with data.micro_batch_size_per_gpu="
            f"{data.micro_batch_size_per_gpu}. Keep only the latter.",
        )
    if devices % ulysses:
        yield error("ulysses_sequence_parallel_size", f"{ulysses} does not divide the {devices} devices.")
    elif devices % group == 0 and rows % (devices // group):
        ranks = devices // group
        yield error(
            "data.train_batch_size",
            f"{rows} rows cannot be shared by {ranks} ranks. Set {nearest_multiples(rows, ranks)}.",
        )


def strategy(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """Some backends of verl do not exist here."""
    chosen = loaded.config.model.strategy
    yield from unsupported_strategy("model.strategy", chosen)
    yield from megatron_schedule("optim", loaded.config.optim, chosen, loaded.set_by_user)
    yield from role_findings(list(supervised_role(loaded.config)))
    if chosen == "megatron":
        yield from own_balance("model", loaded.config.model.aux_loss_coef)


def frequencies(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """save_freq and test_freq are a number of steps, or one word; what is saved has the weights, and the best
    checkpoint needs validations."""
    trainer = loaded.config.trainer
    yield from saved_weights("trainer.checkpoint", trainer.checkpoint)
    yield from _frequency("trainer.save_freq", trainer.save_freq)
    yield from _frequency("trainer.test_freq", trainer.test_freq)
    if not loaded.config.data.val_files:
        yield from no_best_checkpoint(trainer, "data.val_files")


def _frequency(key: str, value: int | str) -> Findings:
    if isinstance(value, str) and value != "after_each_epoch":
        yield error(key, f"expected a number of steps or after_each_epoch, got {value!r}.")


def dropout(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """The model is trained without dropout."""
    yield from dropout_rates("model", loaded.config.model)


def lora(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """LoRA of the model."""
    yield from lora_scale("model", loaded.config.model)


def quantization(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """4-bit weights of the model."""
    config = loaded.config
    yield from four_bit_weights("model", config.model, device_count(config.trainer))


def betas(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """AdamW has two momentum coefficients."""
    yield from two_betas("optim.betas", loaded.config.optim.betas)


def optimizer(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """The optimizer on the devices of the run."""
    config = loaded.config
    yield from usable_optimizer("optim", config.optim, device_count(config.trainer))


def ppo_only_keys(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """Keys of the trainer section that only PPO reads have no effect."""
    for name in PPO_ONLY:
        for path in loaded.set_by_user:
            if path == f"trainer.{name}" or path.startswith(f"trainer.{name}."):
                yield warning(path, "no effect in supervised training.")


def preference_loss(loaded: Loaded[RmConfig | DpoConfig]) -> Findings:
    """The loss fits the trainer (scores for a reward model, log-probs for DPO), and has the terms set."""
    config = loaded.config
    chosen = config.loss.type
    entry = PREFERENCE_LOSSES.entry("sigmoid" if chosen == "logsigmoid" else chosen)
    inputs = "scores" if loaded.root == "rm_trainer" else "log_probs"
    if inputs not in entry.facts["needs"]:
        yield error(
            "loss.type",
            f"{chosen} compares the scores of a reward model. Choose one of {', '.join(_losses_of(inputs))}.",
        )
        return
    for term in OPTIONAL_TERMS:
        value = getattr(config.loss, term, False)
        if value and term not in entry.facts["terms"]:
            yield warning(f"loss.{term}", f"{value} has no effect: {chosen} has no such term.")
    yield from _labels(loaded, "labels" in entry.facts["needs"])
    if getattr(config.loss, "label_smoothing", 0.0) >= 0.5:
        yield error(
            "loss.label_smoothing", "0.5: half of all labels wrong is no information. Set it below 0.5."
        )
    reference = "reference" in entry.facts["needs"] and not getattr(config.loss, "reference_free", True)
    if reference and config.model.lora_adapter_path and not getattr(config.loss, "precompute_ref", True):
        yield warning(
            "loss.precompute_ref",
            f"false: the reference is the model without the adapter {config.model.lora_adapter_path}. With "
            "true it is the model before training, which has the adapter.",
        )
    if inputs == "scores" and config.model.aux_loss_coef:
        yield error("model.aux_loss_coef", "a reward model has no load-balancing loss. Set it to 0.")


def _labels(loaded: Loaded[RmConfig | DpoConfig], uses_labels: bool) -> Findings:
    """Responses with labels need a reference, sums of log-probs and a partner; pairs have no labels."""
    loss = loaded.config.loss
    if not uses_labels:
        for key in ("data.label_key", "loss.desirable_weight", "loss.undesirable_weight"):
            if loaded.set_by_user.get(key) is not None:
                yield warning(key, f"no effect: {loss.type} reads pairs. loss.type=kto reads labels.")
        return
    if getattr(loss, "reference_free", False):
        yield error("loss.reference_free", "true, but kto compares with a reference. Set it to false.")
    if getattr(loss, "length_normalized", None) is not None:
        yield warning("loss.length_normalized", "no effect: kto sums log-probs.")
    rows = loaded.config.data.train_batch_size
    if rows < 2:
        yield error("data.train_batch_size", f"{rows}: kto compares responses of a batch. Set at least 2.")


def _losses_of(inputs: str) -> list[str]:
    """Names of the preference losses that are computed from `inputs`."""
    return [
        name for name in PREFERENCE_LOSSES.names() if inputs in PREFERENCE_LOSSES.entry(name).facts["needs"]
    ]
