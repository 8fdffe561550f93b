"""The roots of supervised training: sft_trainer, rm_trainer and dpo_trainer."""

from __future__ import annotations

from dataclasses import dataclass

from strop.catalog import PREFERENCE_LOSSES, SCHEDULES
from strop.compat import FRAMEWORKS
from strop.config.schema.actor import STRATEGIES
from strop.config.schema.data import CustomClassConfig
from strop.config.schema.fields import MAX_SEED, FreeForm, inert, link, section, setting
from strop.config.schema.megatron import MegatronConfig
from strop.config.schema.model import CheckpointConfig, FsdpConfig, ModelConfig, OptimConfig, ProfilerConfig
from strop.config.schema.trainer import GlobalProfilerConfig, RayKwargsConfig, TrainerConfig


@dataclass(eq=False)
class MultiTurnDataConfig:
    enable: bool = setting(False)
    """Rows contain whole conversations; every assistant turn is trained."""
    messages_key: str = "messages"
    """Column with the conversation."""
    tools_key: str = "tools"
    """Column with the JSON schemas of the tools that the prompt of a row lists; also of rows with a prompt
    and a response."""
    enable_thinking_key: str = "enable_thinking"
    """Column that switches the template's thinking mode; also of rows with a prompt and a response."""


@dataclass(eq=False)
class SupervisedDataConfig:
    """Data of supervised training."""

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
    """Deprecated form of micro_batch_size_per_gpu, counted over all devices."""
    micro_batch_size_per_gpu: int | None = setting(4, at_least=1)
    """Rows per forward and backward on one device."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens instead of by rows."""
    max_token_len_per_gpu: int = setting(8192, at_least=1)
    """Tokens per micro-batch when use_dynamic_bsz is on."""
    max_length: int = setting(1024, at_least=1)
    """Maximum row length in tokens."""
    truncation: str = setting("error", choices=("error", "left", "right"))
    """How to handle a longer row: raise an error, or truncate its beginning (left) or its end (right)."""
    bad_rows: str = setting("error", choices=("error", "skip"))
    """How to handle an unusable row: an empty response, two equal responses, or a conversation that does not
    start with the user."""
    shuffle: bool = True
    """Shuffle the rows."""
    seed: int | None = link("trainer.seed", at_least=0, at_most=MAX_SEED)
    """Seed of the shuffle."""
    apply_chat_template: bool = setting(True)
    """Render rows with the tokenizer's chat template."""
    apply_chat_template_kwargs: FreeForm = setting({})
    """Extra arguments of the chat template."""
    chat_template: str | None = setting(None)
    """A Jinja chat template that replaces the tokenizer's."""
    input_template: str | None = setting(None)
    """Python format string with {} that wraps a plain-text prompt."""
    image_key: str = setting("images")
    """Column with images: paths, bytes, {bytes: ...}, data URLs. The prompt has <image> in the place of each
    image."""
    video_key: str = setting("videos")
    """Column with videos: lists of frames, {frames: [...], fps: 2}, or video files (which need the extra
    `video`). The prompt has <video> in the place of each video."""
    video_fps: float = setting(2.0, above=0)
    """Frames per second that are sampled from a video file; the frame rate of lists of frames without fps."""
    video_max_frames: int = setting(768, at_least=1)
    """Maximum number of frames that are sampled from a video file."""
    min_pixels: int | None = setting(None, at_least=1)
    """Images and video frames with fewer pixels are enlarged. Null: the limit of the model's processor."""
    max_pixels: int | None = setting(None, at_least=1)
    """Images and video frames with more pixels are reduced, which limits their tokens. Null: the limit of the
    model's processor."""
    balance_dp_token: bool = inert(False, "the loss is always a mean over the tokens of the whole update")
    """Average over the tokens of all devices."""
    dataloader_num_workers: int = setting(0, at_least=0)
    """Processes that render rows in advance."""
    use_shm: bool = inert(False, "files are read once; a copy in shared memory gains nothing")
    """Copy files to shared memory first."""
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    """A custom dataset class."""


@dataclass(eq=False)
class SftDataConfig(SupervisedDataConfig):
    prompt_key: str = setting("prompt")
    """Column with the prompt."""
    response_key: str | None = setting("response")
    """Column with the response."""
    prompt_dict_keys: list[str] | None = None
    """Path inside a nested prompt column."""
    response_dict_keys: list[str] | None = None
    """Path inside a nested response column."""
    multiturn: MultiTurnDataConfig = section(MultiTurnDataConfig)
    """Rows that contain whole conversations."""
    pretrain_mode: bool = setting(False)
    """Train on every token, including prompt tokens. With apply_chat_template=false a row ends with the EOS
    token."""
    pad_mode: str = inert("no_padding", "rows are always packed")
    """Padding mode."""
    ignore_input_ids_mismatch: bool = inert(
        False, "the preflight refuses rows of which the template rewrites earlier turns"
    )
    """Accept templates that rewrite earlier turns."""


@dataclass(eq=False)
class PairDataConfig(SupervisedDataConfig):
    train_batch_size: int = setting(128, at_least=1)
    """PAIRS per optimizer update, over all devices."""
    prompt_key: str | None = setting(None)
    """Column with the prompt. Null: chosen and rejected contain whole conversations."""
    chosen_key: str = setting("chosen")
    """Column with the chosen response."""
    rejected_key: str = setting("rejected")
    """Column with the rejected response."""
    tools_key: str = "tools"
    """Column with the JSON schemas of the tools that the prompt of a row lists."""
    margin_key: str = "margin"
    """Column with the margin between the responses, for loss.margin."""


@dataclass(eq=False)
class DpoDataConfig(PairDataConfig):
    train_batch_size: int = setting(128, at_least=1)
    """PAIRS per optimizer update, over all devices. kto: responses."""
    label_key: str | None = setting(None)
    """kto: column with the label of the row's response: good (true or 1) or bad (false or 0). Null: rows are
    pairs; the chosen response is good and the rejected one bad."""
    response_key: str = setting("response")
    """kto with label_key: column with the response."""


@dataclass(eq=False)
class SupervisedModelConfig(ModelConfig):
    """Weights and training backend."""

    path: str | None = setting(None)
    """Hugging Face folder, hub name, .gguf file, or `smollm2-135m`. verl calls it partial_pretrain."""
    strategy: str = setting("fsdp2", choices=STRATEGIES)
    """Training backend."""
    fsdp_config: FsdpConfig = section(FsdpConfig)
    """Precision, sharding and offloading."""
    megatron: MegatronConfig = section(MegatronConfig)
    """How strategy=megatron divides the model."""
    aux_loss_coef: float = setting(0.0, at_least=0)
    """Weight of the load-balancing loss of mixture-of-experts models."""


@dataclass(eq=False)
class SupervisedOptimConfig(OptimConfig):
    lr: float = setting(1e-5, at_least=0)
    """Learning rate after warm-up."""
    betas: list[float] = setting([0.9, 0.95])
    """AdamW momentum coefficients."""
    clip_grad: float = setting(1.0, above=0)
    """Gradients are clipped to this norm."""
    lr_warmup_steps_ratio: float = setting(0.1, at_least=0, at_most=1)
    """Warm-up as a fraction of all steps."""
    lr_scheduler: str = setting("cosine", one_of=SCHEDULES)
    """Schedule after warm-up: cosine, wsd, constant or linear."""
    lr_scheduler_type: str = link("optim.lr_scheduler")
    """Alternative name of lr_scheduler."""


@dataclass(eq=False)
class SupervisedTrainerConfig(TrainerConfig):
    total_epochs: int = setting(4, at_least=1)
    """Passes over the training rows."""
    save_freq: int | str = setting(-1)  # type: ignore[assignment]
    """Save a checkpoint every N STEPS, or `after_each_epoch`. The last step is always saved."""
    test_freq: int | str = setting(-1)  # type: ignore[assignment]
    """Validate every N STEPS, or `after_each_epoch`. The last step is always validated."""
    max_ckpt_to_keep: int | None = setting(None, at_least=1)
    """Number of checkpoints to keep. Null: all."""
    checkpoint: CheckpointConfig = section(
        CheckpointConfig, save_contents=["model", "optimizer", "extra", "hf_model"]
    )
    """Contents of checkpoints."""
    profile_interval: list[int] = inert([-1, -1], "set global_profiler.steps")
    """First and last step to profile."""


@dataclass(eq=False)
class RmLossConfig:
    """Loss of the reward model."""

    type: str = setting("logsigmoid", choices=("logsigmoid", "logexp"))
    """-log sigmoid(chosen - rejected - margin), or log(1 + exp(rejected - chosen))."""
    margin: bool = setting(False)
    """Subtract the margin of the margin column."""
    fp32: bool = inert(True, "scores are always computed and compared in fp32")
    """Compute scores in fp32."""


@dataclass(eq=False)
class DpoLossConfig:
    """Loss of direct preference optimization."""

    type: str = setting("dpo", one_of=PREFERENCE_LOSSES)
    """dpo, ipo, simpo (no reference, averaged log-probs; usually with beta 2 and target_margin 1), orpo (no
    reference; adds the negative log-likelihood of the chosen response) or kto (single responses with a label,
    good or bad)."""
    beta: float = setting(0.1, above=0)
    """Strength of the KL regularization towards the reference. orpo: weight of the odds ratio."""
    label_smoothing: float = setting(0.0, at_least=0, at_most=0.5)
    """Probability that a label is wrong (cDPO)."""
    length_normalized: bool | None = setting(None)
    """Average log-probs over tokens instead of summing them. Null: ipo (as in TRL; not with
    compat=openrlhf) and simpo average, dpo sums."""
    reference_free: bool = False
    """Use no reference model."""
    nll_coef: float = setting(0.0, at_least=0)
    """Weight of the negative log-likelihood of the chosen response, averaged over its tokens."""
    target_margin: float = setting(0.0, at_least=0)
    """Target margin between the implicit rewards of the chosen and the rejected response (gamma of SimPO; dpo
    and simpo)."""
    desirable_weight: float = setting(1.0, at_least=0)
    """kto: weight of good responses. With unequal numbers, choose weights so that weight times number is
    about the same for good and bad responses."""
    undesirable_weight: float = setting(1.0, at_least=0)
    """kto: weight of bad responses."""
    precompute_ref: bool = True
    """Compute the reference's log-probs once before training, one number per response, so that no second
    model stays in memory."""


@dataclass(eq=False)
class DpoRefConfig:
    """The frozen reference model of DPO."""

    path: str | None = link("model.path")
    """Weights of the reference model."""
    param_offload: bool = setting(False)
    """Offload the reference model to host memory."""


@dataclass(eq=False)
class SupervisedConfig:
    """The sections that all supervised trainers have."""

    model: SupervisedModelConfig = section(SupervisedModelConfig)
    """Weights and tokenizer."""
    optim: SupervisedOptimConfig = section(SupervisedOptimConfig)
    """Optimizer and schedule."""
    trainer: SupervisedTrainerConfig = section(SupervisedTrainerConfig)
    """Length, logging, checkpoints and devices of the run."""
    ulysses_sequence_parallel_size: int = setting(1, at_least=1)
    """Devices that split each sequence (Ulysses). Needs use_remove_padding."""
    tensor_parallel_size: int = setting(1, at_least=1)
    """Devices that split each weight matrix, by the plan that transformers has for the model. It must divide
    the number of attention heads and of key-value heads. It cannot be combined with LoRA or
    ulysses_sequence_parallel_size."""
    use_remove_padding: bool = link("model.use_remove_padding")
    """Pack rows without padding tokens."""
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig)
    """Which tool profiles which steps."""
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig)
    """Settings of Ray."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of the model."""
    compat: str = setting("strop", choices=tuple(FRAMEWORKS))
    """Reproduce the numbers of this framework where Strop's default deliberately differs: warm-up, validation
    loss, IPO. docs/compat.md lists what each value changes. The same as algorithm.compat in strop ppo."""
    plugins: list[str] = setting([])
    """Python files imported by every process before anything else."""


@dataclass(eq=False)
class SftConfig(SupervisedConfig):
    """Supervised fine-tuning."""

    trainer: SupervisedTrainerConfig = section(SupervisedTrainerConfig, experiment_name="sft")
    """Length, logging, checkpoints and devices of the run."""
    data: SftDataConfig = section(SftDataConfig)
    """Training and validation data."""


@dataclass(eq=False)
class RmConfig(SupervisedConfig):
    """Training of a reward model from preferences."""

    trainer: SupervisedTrainerConfig = section(SupervisedTrainerConfig, experiment_name="rm")
    """Length, logging, checkpoints and devices of the run."""
    data: PairDataConfig = section(PairDataConfig)
    """Preference pairs."""
    loss: RmLossConfig = section(RmLossConfig)
    """The loss and its settings."""


@dataclass(eq=False)
class DpoConfig(SupervisedConfig):
    """Direct preference optimization."""

    trainer: SupervisedTrainerConfig = section(SupervisedTrainerConfig, experiment_name="dpo")
    """Length, logging, checkpoints and devices of the run."""
    data: DpoDataConfig = section(DpoDataConfig)
    """Preference pairs, or responses with labels."""
    loss: DpoLossConfig = section(DpoLossConfig)
    """The loss and its settings."""
    ref: DpoRefConfig = section(DpoRefConfig)
    """The frozen reference model."""
