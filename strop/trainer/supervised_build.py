"""From an sft, rm or dpo configuration to a trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from strop.algorithms.ema import EMA
from strop.backends.base import MicroBatching
from strop.backends.single import SingleBackend
from strop.catalog import PREFERENCE_LOSSES
from strop.config.arithmetic import SupervisedPlan, plan_supervised
from strop.config.compose import Loaded
from strop.config.schema.supervised import DpoTrainer, RmTrainer, Supervised
from strop.data.chat import Chat
from strop.data.custom import order_seed
from strop.data.loader import Loader
from strop.data.supervised import build_supervised
from strop.models.build import build_critic, build_policy, build_reference, build_tokenizer
from strop.models.heads import padding_beside_the_end, set_reward_statistics
from strop.models.lora import has_adapters
from strop.ranks import Ranks
from strop.registry import load_plugins
from strop.run.checkpoint import Export
from strop.run.retention import Keep
from strop.trainer.backends import BackendMaker
from strop.trainer.build import WithoutAdapters, average_of, device_of
from strop.trainer.export import averaged, exported, folder_of, masters_of
from strop.trainer.keeper import Keeper
from strop.trainer.supervised import SupervisedTrainer
from strop.trainer.supervised_progress import Progress, ScoreMoments
from strop.trainer.supervised_reference import Forward, remember
from strop.trainer.supervised_tasks import Imitation, Judging, Preferring, Task

ROLE = "model"
"""Name of the one trained model in checkpoints."""


def build_supervised_trainer(
    loaded: Loaded, datasets: Mapping[str, Any] | None = None, ranks: Ranks | None = None
) -> SupervisedTrainer:
    """Every part of a supervised run, ready for `fit`; `datasets` are those that were read already, by split."""
    config, ranks = loaded.config, ranks or Ranks()
    load_plugins(config.plugins)
    torch.manual_seed(config.trainer.seed)
    device, tokenizer, task = device_of(config.trainer.device), tokenizer_of(config), task_of(config)
    known = datasets or {}
    rows = known.get("train") or build_supervised(config.data, tokenizer, split="train")
    plan = plan_supervised(config, rows=len(rows))
    assert plan.total_steps is not None and plan.steps_per_epoch is not None
    make = BackendMaker(device, plan.total_steps, ranks)
    model = backend_of(config, make)
    micro = micro_batching(config, plan, task)
    val_rows = known.get("val") or (build_supervised(config.data, tokenizer, split="val") if config.data.val_files else None)
    reference = reference_of(config, model, make)
    if reference is not None and config.loss.precompute_ref:
        rows, val_rows = _remembered(config, rows, val_rows, plan, reference, micro, ranks.lead)
        reference = None
    average = average_of(model, config.trainer)
    progress, scores = Progress(), ScoreMoments() if isinstance(config, RmTrainer) else None
    stateful = {"progress": progress, "scores": scores, "ema": average}
    return SupervisedTrainer(
        config=config,
        plan=plan,
        task=task,
        model=model,
        loader=train_loader(config, rows),
        validation=None if val_rows is None else validation_loader(config, val_rows),
        keeper=Keeper(
            config,
            loaded.tree(),
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            total_steps=plan.total_steps,
            models={ROLE: model},
            contents={ROLE: config.trainer.checkpoint},
            keep=keep_of(config.trainer),
            save_freq=period(config.trainer.save_freq, plan),
            stateful={name: thing for name, thing in stateful.items() if thing is not None},
            exports=lambda: exports(config, model, tokenizer, average, scores),
            ranks=ranks,
        ),
        micro=micro,
        total_steps=plan.total_steps,
        test_freq=period(config.trainer.test_freq, plan),
        reference=reference,
        progress=progress,
        observers=[] if scores is None else [scores],
        after_update=[] if average is None else [lambda: average.update(masters_of(model))],
    )


def task_of(config: Supervised) -> Task:
    if isinstance(config, RmTrainer):
        return Judging(config.loss)
    if isinstance(config, DpoTrainer):
        return Preferring(config.loss, config.model.aux_loss_coef)
    return Imitation(config.model.aux_loss_coef)


def tokenizer_of(config: Any) -> Any:
    """The tokenizer with the chat template that rows are rendered with, so that what is saved renders them alike."""
    tokenizer = build_tokenizer(config.model)
    template = config.data.chat_template or config.model.custom_chat_template
    if template is not None:
        tokenizer.chat_template = Chat(tokenizer, template=template).template
    return tokenizer


def backend_of(config: Any, make: BackendMaker) -> SingleBackend:
    """The model in training: a language model, or one with a scalar head for rewards."""
    build: Callable[..., Any] = build_critic if isinstance(config, RmTrainer) else build_policy
    settings = dataclasses.replace(config.model, use_remove_padding=config.use_remove_padding)
    optim = config.optim
    return make(build, settings, settings.fsdp_config, settings.strategy, optim, optim.clip_grad, **_sharing(config))


def _sharing(config: Any) -> dict[str, Any]:
    """How many ranks share a row or a matrix; a reference as the model in training."""
    return {"sequence_parallel": config.ulysses_sequence_parallel_size, "tensor_parallel": config.tensor_parallel_size}


def reference_of(config: Any, model: SingleBackend, make: BackendMaker) -> Forward | None:
    """Who answers for the frozen reference of DPO.

    The policy without its adapters; before training, the policy itself if the reference is the same folder; else another model.
    """
    if not isinstance(config, DpoTrainer):
        return None
    if config.loss.reference_free or "reference" not in PREFERENCE_LOSSES.entry(config.loss.type).facts["needs"]:
        return None
    same = config.ref.path == config.model.path
    if same and has_adapters(model.module):
        return WithoutAdapters(model).forward
    if same and config.loss.precompute_ref:
        return model.forward
    settings = dataclasses.replace(config.model, path=config.ref.path, use_remove_padding=config.use_remove_padding)
    frozen = make(build_reference, settings, settings.fsdp_config, settings.strategy, **_sharing(config))
    if not config.ref.param_offload:
        return frozen.forward
    frozen.offload()

    def on_demand(*question: Any) -> Any:
        frozen.onload()
        try:
            return frozen.forward(*question)
        finally:
            frozen.offload()

    return on_demand


def _remembered(
    config: Any, rows: Any, val_rows: Any, plan: SupervisedPlan, reference: Forward, micro: MicroBatching, lead: bool
) -> tuple[Any, Any]:
    """Both data sets with the reference's log-probs of every row that the run will see."""
    assert plan.total_steps is not None
    seen = plan.total_steps * plan.rows_per_update
    loader = train_loader(config, rows)
    places = range(len(rows)) if seen >= len(rows) else loader.order(0)[:seen]
    loader.close()
    folder, who = Path(config.trainer.default_local_dir).expanduser(), str(config.ref.path)
    known: dict[str, Any] = {"folder": folder, "who": who, "write": lead}
    train = remember(rows, [int(place) for place in places], reference, micro, **known)
    if val_rows is not None:
        val_rows = remember(val_rows, range(len(val_rows)), reference, micro, **known)
    return train, val_rows


def micro_batching(config: Any, plan: SupervisedPlan, task: Task) -> MicroBatching:
    size = task.rows_per_item
    budget = config.data.max_token_len_per_gpu if config.data.use_dynamic_bsz else None
    return MicroBatching(rows=(plan.micro_batch or plan.rows_per_device) * size, max_tokens=budget, together=size)


def train_loader(config: Any, rows: Sequence[Any]) -> Loader:
    data = config.data
    return Loader(rows, data.train_batch_size, shuffle=data.shuffle, seed=order_seed(data), workers=data.dataloader_num_workers)


def validation_loader(config: Any, rows: Sequence[Any]) -> Loader:
    return Loader(rows, config.data.train_batch_size, shuffle=False, drop_last=False)


def period(freq: int | str, plan: SupervisedPlan) -> int:
    """Steps between two saves or validations: a number, an epoch, or the whole run."""
    assert plan.total_steps is not None and plan.steps_per_epoch is not None
    if freq == "after_each_epoch":
        return max(1, plan.steps_per_epoch)
    return int(freq) if int(freq) > 0 else plan.total_steps


def keep_of(trainer: Any) -> Keep:
    return Keep(
        newest=1 if trainer.remove_previous_ckpt_in_save else trainer.max_ckpt_to_keep,
        max_gb=trainer.max_ckpt_mem_gb,
        best_metric=trainer.best_metric,
        lowest_is_best=bool(trainer.best_metric and trainer.best_metric.endswith("loss")),
    )


def exports(
    config: Any, model: SingleBackend, tokenizer: Any, average: EMA | None, scores: ScoreMoments | None
) -> dict[str, Export]:
    """`model/huggingface`, which transformers and `strop ppo` load; beside it the average of the weights, where it is kept."""
    if "hf_model" not in config.trainer.checkpoint.save_contents:
        return {}
    if scores is not None:
        settings = model.module.config
        set_reward_statistics(settings, scores.statistics)
        settings.get_text_config().pad_token_id = padding_beside_the_end(tokenizer)
    wanted = {f"{ROLE}/huggingface": folder_of(model, tokenizer)}
    if average is not None:
        with averaged(model, average):
            copies = {name: weight.clone() for name, weight in exported(model).items()}
        wanted[f"{ROLE}/huggingface_ema"] = Export(copies, folder_of(model, tokenizer).write_files)
    return wanted
