"""The `data` section of reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.fields import MAX_SEED, FreeForm, inert, link, section, setting


@dataclass(eq=False)
class CustomClassConfig:
    path: str | None = None
    """Python file (or `pkg://module`) that defines a custom dataset class."""
    name: str | None = None
    """Name of the class in the file."""


@dataclass(eq=False)
class SamplerConfig:
    class_path: str | None = None
    """Python file of a custom sampler, for a curriculum. Its `update(trajectories)` is called after each
    step."""
    class_name: str | None = None
    """Name of the sampler class in the file."""


@dataclass(eq=False)
class DataGenConfig:
    path: str | None = inert(None, "datasets that grow while training are not supported; use data.custom_cls")
    """File of a data generator."""
    name: str | None = inert(None, "datasets that grow while training are not supported; use data.custom_cls")
    """Class of a data generator."""


@dataclass(eq=False)
class DataConfig:
    """Training and validation data."""

    train_files: str | list[str] | None = setting(None)
    """Training rows: one path or a list; parquet, json or jsonl; local or any fsspec address (hdfs://,
    s3://)."""
    val_files: str | list[str] | None = setting(None)
    """Validation rows, as train_files. Null: no validation."""
    train_max_samples: int = setting(-1, at_least=-1)
    """Use at most this many training rows: random rows if shuffle is on, else the first ones. -1: all."""
    val_max_samples: int = setting(-1, at_least=-1)
    """Use at most this many validation rows. -1: all."""
    prompt_probs: list[float] | None = setting(None)
    """Mixture weights of the training files. Null: concatenate them."""
    prompt_key: str = setting("prompt")
    """Column with the prompt: chat messages, or plain text, which becomes one user message."""
    label_key: str | None = setting(None)
    """Column with the answer, for files without a reward_model column."""
    input_template: str | None = setting(None)
    """Python format string with {} that wraps a plain-text prompt."""
    apply_chat_template: bool = setting(True)
    """Render prompts with the tokenizer's chat template. False: use the plain text."""
    reward_fn_key: str = setting("data_source")
    """Column that selects the scorer."""
    max_prompt_length: int = setting(512, at_least=1)
    """Maximum prompt length in tokens, after the chat template."""
    max_response_length: int = setting(512, at_least=1)
    """Maximum response length in tokens; for agents, over all turns."""
    train_batch_size: int = setting(1024, at_least=1)
    """PROMPTS per training step; rollout.n responses are sampled for each."""
    gen_batch_size: int | None = setting(None, at_least=1)
    """Prompts per generation batch when groups are filtered (dynamic sampling). Null: train_batch_size."""
    val_batch_size: int | None = setting(None, at_least=1)
    """Validation prompts per call of the engine. Null: all at once."""
    shuffle: bool = setting(True)
    """Shuffle training rows, with a new order in each epoch."""
    validation_shuffle: bool = setting(False)
    """Shuffle validation rows too."""
    seed: int | None = link("trainer.seed", at_least=0, at_most=MAX_SEED)
    """Seed of the row order."""
    filter_overlong_prompts: bool = setting(False)
    """Drop rows whose prompt is longer than max_prompt_length instead of applying `truncation`."""
    filter_overlong_prompts_workers: int = setting(1, at_least=1)
    """Processes that tokenize prompts for filter_overlong_prompts."""
    truncation: str = setting("error", choices=("error", "left", "right", "middle"))
    """How to handle a prompt over the limit: raise an error, or truncate its beginning (left), its end
    (right), or its middle."""
    dataloader_num_workers: int = setting(0, at_least=0)
    """Processes that render prompts in advance. 0: the main process renders them."""
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
    image_patch_size: int = inert(14, "the model's own processor knows its patch size")
    """Side length of a vision patch."""
    tool_config_path: str | None = inert(
        "${actor_rollout_ref.rollout.multi_turn.tool_config_path}",
        "set actor_rollout_ref.rollout.multi_turn.tool_config_path",
    )
    """Tools whose schemas count towards the prompt length."""
    trust_remote_code: bool = inert(
        "${actor_rollout_ref.model.trust_remote_code}", "set actor_rollout_ref.model.trust_remote_code"
    )
    """Allow the tokenizer to run code from its repository."""
    apply_chat_template_kwargs: FreeForm = setting({})
    """Extra arguments of the chat template, for instance {enable_thinking: false}."""
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    """A custom dataset class."""
    sampler: SamplerConfig = section(SamplerConfig)
    """A custom sampler."""
    datagen: DataGenConfig = section(DataGenConfig)
    """Data that is generated during training."""
    tokenizer: str | None = inert(None, "the tokenizer comes from actor_rollout_ref.model.tokenizer_path")
    """Tokenizer path."""
    use_shm: bool = inert(False, "files are read once; a copy in shared memory gains nothing")
    """Stage files in shared memory."""
    return_raw_input_ids: bool = inert(
        False, "a reward model with another template gets the messages themselves"
    )
    """Keep the token ids without chat template."""
    return_raw_chat: bool = inert(True, "messages are always kept")
    """Keep the chat messages."""
    return_full_prompt: bool = inert(False, "the rendered prompt can always be decoded from its ids")
    """Keep the rendered prompt text."""
    return_multi_modal_inputs: bool = inert(True, "processor outputs are always kept")
    """Keep processor outputs."""
