"""The stages before reinforcement learning: sft_trainer, rm_trainer and dpo_trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.catalog import PREFERENCE_LOSSES, SCHEDULES
from strop.config.schema.data import CustomClass
from strop.config.schema.fields import inert, link, section, setting
from strop.config.schema.model import Checkpoint, Fsdp, Model, Optim, Profiler
from strop.config.schema.trainer import GlobalProfiler, RayKwargs, Trainer


@dataclass
class MultiTurnData:
    enable: bool = setting(False, openrlhf="data.multiturn")
    """Rows hold whole conversations; every assistant turn is trained."""
    messages_key: str = "messages"
    """Column with the conversation."""
    tools_key: str = "tools"
    """Column with tool schemas."""
    enable_thinking_key: str = "enable_thinking"
    """Column that switches the template's thinking mode."""


@dataclass
class SupervisedData:
    """Rows of supervised training. Read by data/."""

    train_files: str | list[str] | None = setting(None, openrlhf="data.dataset")
    """Training rows: one path or a list; parquet, json or jsonl; local or any fsspec address."""
    val_files: str | list[str] | None = setting(None, openrlhf="eval.dataset")
    """Validation rows. Null: no validation."""
    train_max_samples: int = setting(-1, at_least=-1, openrlhf="data.max_samples")
    """Use at most this many training rows. -1: all."""
    val_max_samples: int = setting(-1, at_least=-1)
    """Use at most this many validation rows. -1: all."""
    prompt_probs: list[float] | None = setting(None, openrlhf="data.dataset_probs")
    """Mixture weights of the training files. Null: concatenate them."""
    train_batch_size: int = setting(256, at_least=1, openrlhf="train.batch_size")
    """Rows per optimizer update, over all devices."""
    micro_batch_size: int | None = setting(None, at_least=1)
    """Old form of micro_batch_size_per_gpu, counted over all devices."""
    micro_batch_size_per_gpu: int | None = setting(4, at_least=1, openrlhf="train.micro_batch_size")
    """Rows per forward and backward on one device."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens instead."""
    max_token_len_per_gpu: int = setting(8192, at_least=1)
    """Tokens per micro-batch then."""
    max_length: int = setting(1024, at_least=1, openrlhf="data.max_len")
    """Longest row in tokens."""
    truncation: str = setting("error", choices=("error", "left", "right"))
    """What happens to a longer one."""
    shuffle: bool = True
    """Draw rows in random order."""
    seed: int | None = link("trainer.seed")
    """Seed of that order."""
    apply_chat_template: bool = setting(True, openrlhf="data.apply_chat_template")
    """Render rows with the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = setting({})
    """Extra arguments of the chat template."""
    chat_template: str | None = setting(None, openrlhf="data.tokenizer_chat_template")
    """A Jinja chat template that replaces the tokenizer's."""
    input_template: str | None = setting(None, openrlhf="data.input_template")
    """Python format string with {} that wraps a plain-text prompt."""
    balance_dp_token: bool = inert(False, "the loss is always a mean over the tokens of the whole update")
    """Average over the tokens of all devices."""
    dataloader_num_workers: int = setting(0, at_least=0, openrlhf="data.dataloader_num_workers")
    """Processes that render rows ahead."""
    use_shm: bool = inert(False, "files are read once; a copy in shared memory gains nothing")
    """Stage files in shared memory."""
    custom_cls: CustomClass = section(CustomClass)
    """A dataset class of your own."""


@dataclass
class SftData(SupervisedData):
    prompt_key: str = setting("prompt", openrlhf="data.input_key")
    """Column with the prompt."""
    response_key: str | None = setting("response", openrlhf="data.output_key")
    """Column with the response."""
    prompt_dict_keys: list[str] | None = None
    """Path inside a nested prompt column."""
    response_dict_keys: list[str] | None = None
    """Path inside a nested response column."""
    multiturn: MultiTurnData = section(MultiTurnData)
    """Whole conversations."""
    pretrain_mode: bool = setting(False, openrlhf="model.pretrain_mode_enable")
    """Train every token, the prompt's too."""
    pad_mode: str = inert("no_padding", "rows are always packed")
    """Padding or none."""
    ignore_input_ids_mismatch: bool = inert(False, "a template that is not prefix-stable is refused by the preflight")
    """Tolerate templates that rewrite earlier turns."""


@dataclass
class PairData(SupervisedData):
    train_batch_size: int = setting(128, at_least=1, openrlhf="train.batch_size")
    """PAIRS per optimizer update, over all devices."""
    prompt_key: str | None = setting(None, openrlhf="data.prompt_key")
    """Column with the prompt. Null: chosen and rejected hold whole conversations."""
    chosen_key: str = setting("chosen", openrlhf="data.chosen_key")
    """Column with the better answer."""
    rejected_key: str = setting("rejected", openrlhf="data.rejected_key")
    """Column with the worse answer."""
    margin_key: str = "margin"
    """Column with how much better it is, for loss.margin."""


@dataclass
class SupervisedModel(Model):
    """Weights. Read by models/build.py."""

    path: str | None = setting(None, openrlhf="model.model_name_or_path")
    """Hugging Face folder, hub name, .gguf file, or `smollm2-135m`. verl calls it partial_pretrain."""
    strategy: str = setting("fsdp2", choices=("fsdp", "fsdp2", "megatron", "single"))
    """Training backend."""
    fsdp_config: Fsdp = section(Fsdp)
    """Precision, sharding, offloading."""
    aux_loss_coef: float = setting(0.0, at_least=0, openrlhf="model.aux_loss_coef")
    """Weight of the load-balancing loss of mixture-of-experts models."""


@dataclass
class SupervisedOptim(Optim):
    lr: float = setting(1e-5, at_least=0, openrlhf="adam.lr")
    """Learning rate after warm-up."""
    betas: list[float] = setting([0.9, 0.95], openrlhf="adam.betas")
    """AdamW momentum coefficients."""
    lr_warmup_steps_ratio: float = setting(0.1, at_least=0, at_most=1, openrlhf="lr_warmup_ratio")
    """Warm-up as a share of all steps."""
    lr_scheduler: str = setting("cosine", one_of=SCHEDULES, openrlhf="lr_scheduler")
    """Shape after warm-up: cosine, wsd, constant or linear."""
    lr_scheduler_type: str = link("optim.lr_scheduler")
    """Another name of lr_scheduler."""


@dataclass
class SupervisedTrainer(Trainer):
    total_epochs: int = setting(4, at_least=1, openrlhf="train.max_epochs")
    """Passes over the training rows."""
    save_freq: int | str = setting(-1, openrlhf="ckpt.save_steps")  # type: ignore[assignment]
    """Save every so many STEPS, or `after_each_epoch`. The end of a run is always saved."""
    test_freq: int | str = setting(-1, openrlhf="eval.steps")  # type: ignore[assignment]
    """Validate every so many STEPS, or `after_each_epoch`. The end of a run is always validated."""
    max_ckpt_to_keep: int | None = setting(None, at_least=1, openrlhf="ckpt.max_num")
    """Checkpoints to keep. Null: all."""
    checkpoint: Checkpoint = section(Checkpoint)
    """Contents of checkpoints."""
    profile_interval: list[int] = setting([-1, -1])
    """First and last step to profile."""


@dataclass
class RmLoss:
    """Loss of the reward model. Read by algorithms/preference.py."""

    type: str = setting("logsigmoid", choices=("logsigmoid", "logexp"), openrlhf="model.loss_type")
    """-log sigmoid(chosen - rejected - margin), or log(1 + exp(rejected - chosen))."""
    margin: bool = setting(False, openrlhf="model.margin_loss_enable")
    """Read the margin column."""
    fp32: bool = setting(True, openrlhf="model.compute_fp32_loss_enable")
    """Scores in fp32."""


@dataclass
class DpoLoss:
    """Loss of direct preference optimisation. Read by algorithms/preference.py."""

    type: str = setting("dpo", one_of=PREFERENCE_LOSSES, openrlhf="model.ipo_enable")
    """dpo or ipo."""
    beta: float = setting(0.1, above=0, openrlhf="model.beta")
    """Strength of the pull towards the reference."""
    label_smoothing: float = setting(0.0, at_least=0, at_most=0.5, openrlhf="model.label_smoothing")
    """Probability that a label is wrong (cDPO)."""
    length_normalized: bool = False
    """Average log-probs over tokens instead of adding them up."""
    reference_free: bool = False
    """Leave the reference out."""
    nll_coef: float = setting(0.0, at_least=0, openrlhf="model.nll_loss_coef")
    """Weight of the negative log-likelihood of the better answer."""
    precompute_ref: bool = True
    """Compute the reference's log-probs once, before training."""


@dataclass
class DpoRef:
    """The frozen reference of DPO. Read by trainer/build.py."""

    path: str | None = link("model.path", openrlhf="ref.model_name_or_path")
    """Its weights."""
    param_offload: bool = setting(False, openrlhf="ref.offload")
    """Keep it in host memory."""


@dataclass
class Supervised:
    """What the three supervised trainers share."""

    model: SupervisedModel = section(SupervisedModel)
    """Weights and tokenizer."""
    optim: SupervisedOptim = section(SupervisedOptim)
    """Optimizer and schedule."""
    trainer: SupervisedTrainer = section(SupervisedTrainer)
    """The run."""
    ulysses_sequence_parallel_size: int = setting(1, at_least=1, openrlhf="ds.ring_attn_size")
    """Devices that share one sequence. Needs use_remove_padding."""
    use_remove_padding: bool = link("model.use_remove_padding")
    """Pack rows without padding tokens."""
    global_profiler: GlobalProfiler = section(GlobalProfiler)
    """Which tool profiles which steps."""
    ray_kwargs: RayKwargs = section(RayKwargs)
    """Ray."""
    profiler: Profiler = section(Profiler)
    """Profiling of the model."""
    plugins: list[str] = setting([])
    """Python files imported by every process before anything else."""
