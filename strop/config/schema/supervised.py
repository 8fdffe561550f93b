"""The stages before reinforcement learning: sft_trainer, rm_trainer and dpo_trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.catalog import PREFERENCE_LOSSES, SCHEDULES
from strop.config.schema.data import CustomClass
from strop.config.schema.fields import inert, link, section, setting
from strop.config.schema.model import Checkpoint, Fsdp, Model, Optim, Profiler
from strop.config.schema.trainer import GlobalProfiler, RayKwargs, Trainer


@dataclass(eq=False)
class MultiTurnData:
    enable: bool = setting(False)
    """Rows hold whole conversations; every assistant turn is trained."""
    messages_key: str = "messages"
    """Column with the conversation."""
    tools_key: str = "tools"
    """Column with tool schemas."""
    enable_thinking_key: str = "enable_thinking"
    """Column that switches the template's thinking mode."""


@dataclass(eq=False)
class SupervisedData:
    """Rows of supervised training. Read by data/."""

    train_files: str | list[str] | None = setting(None)
    """Training rows: one path or a list; parquet, json or jsonl; local or any fsspec address."""
    val_files: str | list[str] | None = setting(None)
    """Validation rows. Null: no validation."""
    train_max_samples: int = setting(-1, at_least=-1)
    """Use at most this many training rows. -1: all."""
    val_max_samples: int = setting(-1, at_least=-1)
    """Use at most this many validation rows. -1: all."""
    prompt_probs: list[float] | None = setting(None)
    """Mixture weights of the training files. Null: concatenate them."""
    train_batch_size: int = setting(256, at_least=1)
    """Rows per optimizer update, over all devices."""
    micro_batch_size: int | None = setting(None, at_least=1)
    """Old form of micro_batch_size_per_gpu, counted over all devices."""
    micro_batch_size_per_gpu: int | None = setting(4, at_least=1)
    """Rows per forward and backward on one device."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens instead."""
    max_token_len_per_gpu: int = setting(8192, at_least=1)
    """Tokens per micro-batch then."""
    max_length: int = setting(1024, at_least=1)
    """Longest row in tokens."""
    truncation: str = setting("error", choices=("error", "left", "right"))
    """What happens to a longer one."""
    bad_rows: str = setting("error", choices=("error", "skip"))
    """What happens to a row that teaches nothing: an empty answer, two equal ones, a chat without the user first."""
    shuffle: bool = True
    """Draw rows in random order."""
    seed: int | None = link("trainer.seed")
    """Seed of that order."""
    apply_chat_template: bool = setting(True)
    """Render rows with the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = setting({})
    """Extra arguments of the chat template."""
    chat_template: str | None = setting(None)
    """A Jinja chat template that replaces the tokenizer's."""
    input_template: str | None = setting(None)
    """Python format string with {} that wraps a plain-text prompt."""
    balance_dp_token: bool = inert(False, "the loss is always a mean over the tokens of the whole update")
    """Average over the tokens of all devices."""
    dataloader_num_workers: int = setting(0, at_least=0)
    """Processes that render rows ahead."""
    use_shm: bool = inert(False, "files are read once; a copy in shared memory gains nothing")
    """Stage files in shared memory."""
    custom_cls: CustomClass = section(CustomClass)
    """A dataset class of your own."""


@dataclass(eq=False)
class SftData(SupervisedData):
    prompt_key: str = setting("prompt")
    """Column with the prompt."""
    response_key: str | None = setting("response")
    """Column with the response."""
    prompt_dict_keys: list[str] | None = None
    """Path inside a nested prompt column."""
    response_dict_keys: list[str] | None = None
    """Path inside a nested response column."""
    multiturn: MultiTurnData = section(MultiTurnData)
    """Whole conversations."""
    pretrain_mode: bool = setting(False)
    """Train every token, the prompt's too."""
    pad_mode: str = inert("no_padding", "rows are always packed")
    """Padding or none."""
    ignore_input_ids_mismatch: bool = inert(False, "a template that is not prefix-stable is refused by the preflight")
    """Tolerate templates that rewrite earlier turns."""


@dataclass(eq=False)
class PairData(SupervisedData):
    train_batch_size: int = setting(128, at_least=1)
    """PAIRS per optimizer update, over all devices."""
    prompt_key: str | None = setting(None)
    """Column with the prompt. Null: chosen and rejected hold whole conversations."""
    chosen_key: str = setting("chosen")
    """Column with the better answer."""
    rejected_key: str = setting("rejected")
    """Column with the worse answer."""
    margin_key: str = "margin"
    """Column with how much better it is, for loss.margin."""


@dataclass(eq=False)
class SupervisedModel(Model):
    """Weights. Read by models/build.py."""

    path: str | None = setting(None)
    """Hugging Face folder, hub name, .gguf file, or `smollm2-135m`. verl calls it partial_pretrain."""
    strategy: str = setting("fsdp2", choices=("fsdp", "fsdp2", "megatron", "single"))
    """Training backend."""
    fsdp_config: Fsdp = section(Fsdp)
    """Precision, sharding, offloading."""
    aux_loss_coef: float = setting(0.0, at_least=0)
    """Weight of the load-balancing loss of mixture-of-experts models."""


@dataclass(eq=False)
class SupervisedOptim(Optim):
    lr: float = setting(1e-5, at_least=0)
    """Learning rate after warm-up."""
    betas: list[float] = setting([0.9, 0.95])
    """AdamW momentum coefficients."""
    lr_warmup_steps_ratio: float = setting(0.1, at_least=0, at_most=1)
    """Warm-up as a share of all steps."""
    lr_scheduler: str = setting("cosine", one_of=SCHEDULES)
    """Shape after warm-up: cosine, wsd, constant or linear."""
    lr_scheduler_type: str = link("optim.lr_scheduler")
    """Another name of lr_scheduler."""


@dataclass(eq=False)
class SupervisedTrainer(Trainer):
    total_epochs: int = setting(4, at_least=1)
    """Passes over the training rows."""
    save_freq: int | str = setting(-1)  # type: ignore[assignment]
    """Save every so many STEPS, or `after_each_epoch`. The end of a run is always saved."""
    test_freq: int | str = setting(-1)  # type: ignore[assignment]
    """Validate every so many STEPS, or `after_each_epoch`. The end of a run is always validated."""
    max_ckpt_to_keep: int | None = setting(None, at_least=1)
    """Checkpoints to keep. Null: all."""
    checkpoint: Checkpoint = section(Checkpoint, save_contents=["model", "optimizer", "extra", "hf_model"])
    """Contents of checkpoints."""
    profile_interval: list[int] = setting([-1, -1])
    """First and last step to profile."""


@dataclass(eq=False)
class RmLoss:
    """Loss of the reward model. Read by algorithms/preference.py."""

    type: str = setting("logsigmoid", choices=("logsigmoid", "logexp"))
    """-log sigmoid(chosen - rejected - margin), or log(1 + exp(rejected - chosen))."""
    margin: bool = setting(False)
    """Read the margin column."""
    fp32: bool = inert(True, "scores are always computed and compared in fp32")
    """Scores in fp32."""


@dataclass(eq=False)
class DpoLoss:
    """Loss of direct preference optimisation. Read by algorithms/preference.py."""

    type: str = setting("dpo", one_of=PREFERENCE_LOSSES)
    """dpo, ipo, or simpo (no reference, averaged log-probs; usual: beta 2, target_margin 1)."""
    beta: float = setting(0.1, above=0)
    """Strength of the pull towards the reference."""
    label_smoothing: float = setting(0.0, at_least=0, at_most=0.5)
    """Probability that a label is wrong (cDPO)."""
    length_normalized: bool = False
    """Average log-probs over tokens instead of adding them up."""
    reference_free: bool = False
    """Leave the reference out."""
    nll_coef: float = setting(0.0, at_least=0)
    """Weight of the negative log-likelihood of the better answer, averaged over its tokens."""
    target_margin: float = setting(0.0, at_least=0)
    """How much larger than the other the better answer's implicit reward should be (gamma of SimPO; dpo and simpo)."""
    precompute_ref: bool = True
    """Compute the reference's log-probs once, before training, one number per answer: no second model stays in memory."""


@dataclass(eq=False)
class DpoRef:
    """The frozen reference of DPO. Read by trainer/build.py."""

    path: str | None = link("model.path")
    """Its weights."""
    param_offload: bool = setting(False)
    """Keep it in host memory."""


@dataclass(eq=False)
class Supervised:
    """What the three supervised trainers share."""

    model: SupervisedModel = section(SupervisedModel)
    """Weights and tokenizer."""
    optim: SupervisedOptim = section(SupervisedOptim)
    """Optimizer and schedule."""
    trainer: SupervisedTrainer = section(SupervisedTrainer)
    """The run."""
    ulysses_sequence_parallel_size: int = setting(1, at_least=1)
    """Devices that share one sequence. Needs use_remove_padding."""
    tensor_parallel_size: int = setting(1, at_least=1)
    """Devices that share each weight matrix, by the plan that transformers ships for the model. It must divide the attention
    heads and the key-value heads. Not together with LoRA or ulysses_sequence_parallel_size."""
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


@dataclass(eq=False)
class SftTrainer(Supervised):
    """Supervised fine-tuning."""

    trainer: SupervisedTrainer = section(SupervisedTrainer, experiment_name="sft")
    """The run."""
    data: SftData = section(SftData)
    """Rows."""


@dataclass(eq=False)
class RmTrainer(Supervised):
    """Training of a reward model from preferences."""

    trainer: SupervisedTrainer = section(SupervisedTrainer, experiment_name="rm")
    """The run."""
    data: PairData = section(PairData)
    """Pairs."""
    loss: RmLoss = section(RmLoss)
    """Loss."""


@dataclass(eq=False)
class DpoTrainer(Supervised):
    """Direct preference optimisation."""

    trainer: SupervisedTrainer = section(SupervisedTrainer, experiment_name="dpo")
    """The run."""
    data: PairData = section(PairData)
    """Pairs."""
    loss: DpoLoss = section(DpoLoss)
    """Loss."""
    ref: DpoRef = section(DpoRef)
    """The frozen reference."""
