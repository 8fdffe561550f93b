"""From an sft, rm or dpo configuration to a trainer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from strop.algorithms.ema import EMA
from strop.backends.base import MicroBatching, Outputs
from strop.backends.single import ModuleBackend
from strop.catalog import PREFERENCE_LOSSES
from strop.compat import conventions
from strop.config.arithmetic import SupervisedPlan, plan_supervised
from strop.config.compose import Loaded
from strop.config.schema.supervised import DpoConfig, RmConfig, SupervisedTrainerConfig
from strop.data.chat import Chat, template_text
from strop.data.loader import Loader
from strop.data.selection import order_seed
from strop.data.supervised.datasets import SupervisedDataset, build_supervised
from strop.data.supervised.labelled import dataset_class, reads_labels
from strop.data.templates.turn_end import turn_end_token
from strop.models.build import build_critic, build_policy, build_reference, build_tokenizer
from strop.models.generation.settings import add_eos_id
from strop.models.heads import pad_token_other_than_eos, set_reward_statistics
from strop.models.lora import base_model, has_adapters
from strop.models.vision.processor import processor_loader
from strop.ranks import Ranks
from strop.registry import load_plugins
from strop.run.checkpoint.contents import Stateful, seed_random_states
from strop.run.checkpoint.retention import RetentionPolicy
from strop.run.checkpoint.store import Export
from strop.shared.build import BackendMaker, WithoutAdapters, use_device
from strop.shared.export import average_of, averaged, exported, folder_of, masters_of
from strop.shared.in_process import RunObserver
from strop.shared.run_output import RunOutput
from strop.supervised.kto import KtoTask, with_kl
from strop.supervised.reference import ReferencePass
from strop.supervised.tasks import (
    DpoTask,
    Forward,
    Item,
    RewardModelTask,
    SftTask,
    Task,
)
from strop.supervised.trainer import EpochProgress, Observer, ScoreMoments, SupervisedTrainer
from strop.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from strop.config.schema.roots import AnySupervisedConfig

log = logging.getLogger(__name__)
ROLE = "model"
"""Name of the one trained model in checkpoints."""


def build_supervised_trainer(
    loaded: Loaded[AnySupervisedConfig],
    datasets: Mapping[str, SupervisedDataset] | None = None,
    ranks: Ranks | None = None,
    observer: RunObserver | None = None,
) -> SupervisedTrainer:
    """Every part of a supervised run, ready for `fit`. `datasets` are those that the preflight has read, by
    split."""
    config = loaded.config
    ranks = ranks or Ranks()
    load_plugins(config.plugins)
    seed_random_states(config.trainer.seed)
    tokenizer = build_chat_tokenizer(config)
    task = build_task(config)
    train_rows, val_rows = open_datasets(config, tokenizer, datasets or {})
    plan = plan_supervised(config, rows=len(train_rows))
    assert plan.total_steps is not None and plan.steps_per_epoch is not None
    make = BackendMaker(use_device(config.trainer.device), plan.total_steps, ranks, compat=config.compat)
    model = build_model(config, make)
    stop_where_turns_end(config, model, train_rows.chat)
    micro = micro_batching(config, plan, task)
    train_items: Sequence[Item] = train_rows
    val_items: Sequence[Item] | None = val_rows
    reference = build_reference_forward(config, model, make)
    if reference is not None and isinstance(config, DpoConfig) and config.loss.precompute_ref:
        reference_pass = ReferencePass(config, reference, micro, ranks)
        train_items = reference_pass.add(train_rows, _places_to_train(config, train_rows, plan))
        if val_rows is not None:
            val_items = reference_pass.add(val_rows, range(len(val_rows)))
        reference = None
    state = build_run_state(config, model)
    validation = None
    if val_items is not None:
        validation = validation_loader(config, val_items)
    return SupervisedTrainer(
        config=config,
        plan=plan,
        task=task,
        model=model,
        loader=train_loader(config, train_items),
        validation=validation,
        output=build_output(loaded, plan, model, tokenizer, state, ranks, observer),
        micro=micro,
        total_steps=plan.total_steps,
        test_freq=period(config.trainer.test_freq, plan),
        reference=reference,
        before_loss=with_kl if isinstance(task, KtoTask) else None,
        progress=state.progress,
        observers=state.observers(),
        after_update=state.after_update(model),
    )


def stop_where_turns_end(config: AnySupervisedConfig, model: ModuleBackend, chat: Chat) -> None:
    """A model that learns to end its turns with another token than its EOS token, such as a base model with
    the template of a chat model, stops there when it is sampled: its generation config says so."""
    if isinstance(config, RmConfig) or chat.plain:
        return
    end = turn_end_token(chat)
    if end is not None and add_eos_id(base_model(model.module), end, chat.tokenizer.eos_token_id):
        shown = chat.tokenizer.decode([end])
        log.info("The model learns to end its turns with %r; its generation config stops there.", shown)


@dataclasses.dataclass(frozen=True)
class SupervisedRunState:
    """What a checkpoint stores in addition to the model and the position in the data."""

    progress: EpochProgress
    scores: ScoreMoments | None
    """Of reward models."""
    average: EMA | None
    """With trainer.enable_ema."""

    def stateful(self) -> dict[str, Stateful]:
        """The parts by their names in checkpoints."""
        parts: dict[str, Stateful] = {"progress": self.progress}
        if self.scores is not None:
            parts["scores"] = self.scores
        if self.average is not None:
            parts["ema"] = self.average
        return parts

    def observers(self) -> list[Observer]:
        """Callbacks with the metrics of every update and validation."""
        if self.scores is None:
            return []
        return [self.scores]

    def after_update(self, model: ModuleBackend) -> list[Callable[[], None]]:
        """Callbacks after every optimizer step."""
        average = self.average
        if average is None:
            return []
        return [lambda: average.update(masters_of(model))]


def build_run_state(config: AnySupervisedConfig, model: ModuleBackend) -> SupervisedRunState:
    """The progress, the score moments of a reward model, and the averaged weights."""
    scores = None
    if isinstance(config, RmConfig):
        scores = ScoreMoments()
    return SupervisedRunState(EpochProgress(), scores, average_of(model, config.trainer))


def build_output(
    loaded: Loaded[AnySupervisedConfig],
    plan: SupervisedPlan,
    model: ModuleBackend,
    tokenizer: PreTrainedTokenizerBase,
    state: SupervisedRunState,
    ranks: Ranks,
    observer: RunObserver | None,
) -> RunOutput:
    """Checkpoints, trackers and dumps of the run."""
    config = loaded.config
    assert plan.total_steps is not None
    return RunOutput(
        config,
        loaded.tree(),
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        total_steps=plan.total_steps,
        models={ROLE: model},
        contents={ROLE: config.trainer.checkpoint},
        keep=retention_policy(config.trainer),
        save_freq=period(config.trainer.save_freq, plan),
        stateful=state.stateful(),
        exports=lambda: exports(config, model, tokenizer, state.average, state.scores),
        ranks=ranks,
        observer=observer,
    )


def build_task(config: AnySupervisedConfig) -> Task:
    """The data and the loss of the trainer."""
    if isinstance(config, RmConfig):
        return RewardModelTask(config.loss)
    if isinstance(config, DpoConfig):
        if reads_labels(config):
            return KtoTask(config.loss, config.model.aux_loss_coef)
        return DpoTask(config.loss, config.model.aux_loss_coef, conventions(config.compat))
    return SftTask(config.model.aux_loss_coef, conventions(config.compat))


def open_datasets(
    config: AnySupervisedConfig, tokenizer: PreTrainedTokenizerBase, known: Mapping[str, SupervisedDataset]
) -> tuple[SupervisedDataset, SupervisedDataset | None]:
    """Training and validation rows: those in `known`, else from the files."""
    kind = dataset_class(config)
    load = processor_loader(config.model)
    train = known.get("train") or build_supervised(
        config.data, tokenizer, split="train", kind=kind, load_processor=load
    )
    val = known.get("val")
    if not val and config.data.val_files:
        val = build_supervised(config.data, tokenizer, split="val", kind=kind, load_processor=load)
    return train, val


def build_chat_tokenizer(config: AnySupervisedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template that renders the rows; checkpoints keep this template."""
    tokenizer = build_tokenizer(config.model)
    if config.data.chat_template is not None:
        tokenizer.chat_template = template_text(config.data.chat_template)
    return tokenizer


def build_model(config: AnySupervisedConfig, make: BackendMaker) -> ModuleBackend:
    """The model in training: a language model, or one with a scalar head for rewards."""
    build: Callable[..., PreTrainedModel] = build_policy
    if isinstance(config, RmConfig):
        build = build_critic
    model = dataclasses.replace(config.model, use_remove_padding=config.use_remove_padding)
    return make(
        build,
        model,
        model.fsdp_config,
        model.strategy,
        config.optim,
        config.optim.clip_grad,
        sequence_parallel=config.ulysses_sequence_parallel_size,
        tensor_parallel=config.tensor_parallel_size,
        megatron=model.megatron,
    )


def build_reference_forward(
    config: AnySupervisedConfig, model: ModuleBackend, make: BackendMaker
) -> Forward | None:
    """The forward pass of the frozen reference of DPO; None: no reference is needed.

    It is the policy itself if all log-probs are computed before training and both are the same folder, the
    policy without its new LoRA adapters, else another model.
    """
    if not isinstance(config, DpoConfig) or config.loss.reference_free:
        return None
    if "reference" not in PREFERENCE_LOSSES.entry(config.loss.type).facts["needs"]:
        return None
    same = config.ref.path == config.model.path
    new_adapters = has_adapters(model.module) and config.model.lora_adapter_path is None
    if same and config.loss.precompute_ref and not new_adapters:
        return model.forward
    if same and has_adapters(model.module):
        return WithoutAdapters(model).forward
    settings = dataclasses.replace(
        config.model, path=config.ref.path, use_remove_padding=config.use_remove_padding
    )
    frozen = make(
        build_reference,
        settings,
        settings.fsdp_config,
        settings.strategy,
        sequence_parallel=config.ulysses_sequence_parallel_size,
        tensor_parallel=config.tensor_parallel_size,
        megatron=settings.megatron,
    )
    if not config.ref.param_offload:
        return frozen.forward
    frozen.offload()

    def onload_and_forward(batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        frozen.onload()
        try:
            return frozen.forward(batch, want, micro)
        finally:
            frozen.offload()

    return onload_and_forward


def _places_to_train(config: DpoConfig, rows: SupervisedDataset, plan: SupervisedPlan) -> Sequence[int]:
    """The rows that the run will see."""
    assert plan.total_steps is not None
    seen = plan.total_steps * plan.rows_per_update
    if seen >= len(rows):
        return range(len(rows))
    loader = train_loader(config, rows)
    places = [int(place) for place in loader.order(0)[:seen]]
    loader.close()
    return places


def micro_batching(config: AnySupervisedConfig, plan: SupervisedPlan, task: Task) -> MicroBatching:
    """How an update is cut into micro-batches; the rows of an item stay together."""
    size = task.rows_per_item
    rows = (plan.micro_batch or plan.rows_per_device) * size
    max_tokens = None
    if config.data.use_dynamic_bsz:
        max_tokens = config.data.max_token_len_per_gpu
    return MicroBatching(rows=rows, max_tokens=max_tokens, rows_per_item=size)


def train_loader(config: AnySupervisedConfig, rows: Sequence[Item]) -> Loader:
    """Batches of training rows, in the order of the seed."""
    data = config.data
    return Loader(
        rows,
        data.train_batch_size,
        shuffle=data.shuffle,
        seed=order_seed(data),
        workers=data.dataloader_num_workers,
    )


def validation_loader(config: AnySupervisedConfig, rows: Sequence[Item]) -> Loader:
    """Batches of validation rows, in the order of the files."""
    return Loader(rows, config.data.train_batch_size, shuffle=False, drop_last=False)


def period(freq: int | str, plan: SupervisedPlan) -> int:
    """Steps between two saves or validations: a number, an epoch, or the whole run."""
    assert plan.total_steps is not None and plan.steps_per_epoch is not None
    if freq == "after_each_epoch":
        return max(1, plan.steps_per_epoch)
    if int(freq) > 0:
        return int(freq)
    return plan.total_steps


def retention_policy(trainer: SupervisedTrainerConfig) -> RetentionPolicy:
    """Which checkpoints are kept."""
    newest = trainer.max_ckpt_to_keep
    if trainer.remove_previous_ckpt_in_save:
        newest = 1
    return RetentionPolicy(
        newest=newest,
        max_gb=trainer.max_ckpt_mem_gb,
        best_metric=trainer.best_metric,
        lowest_is_best=bool(trainer.best_metric and trainer.best_metric.endswith("loss")),
    )


def exports(
    config: AnySupervisedConfig,
    model: ModuleBackend,
    tokenizer: PreTrainedTokenizerBase,
    average: EMA | None,
    scores: ScoreMoments | None,
) -> dict[str, Export]:
    """`model/huggingface`, which transformers and `strop ppo` load, and the averaged weights if there are
    some."""
    if "hf_model" not in config.trainer.checkpoint.save_contents:
        return {}
    if scores is not None:
        settings = model.module.config
        set_reward_statistics(settings, scores.statistics)
        settings.get_text_config().pad_token_id = pad_token_other_than_eos(tokenizer)
    wanted = {f"{ROLE}/huggingface": folder_of(model, tokenizer)}
    if average is not None:
        with averaged(model, average):
            copies = {name: weight.clone() for name, weight in exported(model).items()}
        wanted[f"{ROLE}/huggingface_ema"] = Export(copies, folder_of(model, tokenizer).write_files)
    return wanted
