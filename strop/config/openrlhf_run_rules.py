"""How the run goes: placement, evaluation, schedules, checkpoints, trackers, and the columns of supervised training."""

from __future__ import annotations

from collections.abc import Callable

from strop.config.openrlhf_draft import Draft, Override
from strop.config.openrlhf_rules import ACTOR, REF, ROLLOUT
from strop.config.openrlhf_transforms import SAVED, SCHEDULES, NoEquivalentError

# A checkpoint is written every `save_freq` steps and at the end; a period longer than any run leaves the end.
END_ONLY = 1_000_000


def placement(draft: Draft) -> None:
    """GPUs: from Ray flags, or from the launcher."""
    nodes, gpus = "actor.num_nodes", "actor.num_gpus_per_node"
    if draft.generation == 1 or draft.command.trainer == "train_ppo":
        launched(draft)
    else:
        if draft.given(nodes):
            draft.put("trainer.nnodes", draft.value(nodes), nodes)
        draft.put("trainer.n_gpus_per_node", draft.value(gpus), gpus)
    own = ("reward.num_nodes", "reward.num_gpus_per_node")
    if not draft.given(*own):
        return
    shared = draft.value("train.colocate_all") or draft.value("train.colocate_critic_reward")
    if shared or not draft.value("reward.model_name_or_path") or min(map(draft.value, own)) < 1:
        for flag in own:
            draft.drop(flag, "the reward model shares GPUs" if shared else "no GPUs are set aside for a reward model")
        return
    draft.put("reward_model.enable_resource_pool", True, *own, why="the reward model has GPUs of its own")
    draft.put("reward_model.nnodes", draft.value(own[0]), own[0])
    draft.put("reward_model.n_gpus_per_node", draft.value(own[1]), own[1])


def launched(draft: Draft) -> None:
    """GPUs of commands that are started once per GPU."""
    for key, count in (("trainer.nnodes", draft.command.nodes), ("trainer.n_gpus_per_node", draft.command.gpus)):
        if count is not None:
            draft.overrides[key] = Override(key, count, "(launcher)", "as the launcher says")
    if draft.command.gpus is None:
        draft.notes.append("The command does not say how many GPUs there are: set trainer.n_gpus_per_node (1 if unset).")


def evaluation(draft: Draft) -> None:
    """OpenRLHF evaluates only when it has a dataset, and not before training."""
    steps, temperature, samples = "eval.steps", "eval.temperature", "eval.n_samples_per_prompt"
    evaluates = draft.value("eval.dataset") is not None
    if evaluates or draft.given(steps):
        draft.put("trainer.test_freq", draft.value(steps), steps)
    if evaluates:
        draft.put("trainer.val_before_train", False, steps, why="OpenRLHF does not evaluate before the first step")
    if evaluates or draft.given(temperature):
        draft.put(f"{ROLLOUT}.val_kwargs.temperature", draft.value(temperature), temperature)
        draft.put(f"{ROLLOUT}.val_kwargs.do_sample", draft.value(temperature) > 0, temperature)
    if evaluates or draft.given(samples):
        draft.put(f"{ROLLOUT}.val_kwargs.n", draft.value(samples), samples)


def dynamic_batch(draft: Draft) -> None:
    on, train, forward = "train.dynamic_batch_enable", "train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"
    if not draft.value(on):
        for flag in (train, forward):
            draft.drop(flag, f"no effect without {draft.name(on)}")
        return
    draft.put(f"{ACTOR}.use_dynamic_bsz", True, on)
    draft.put("actor_rollout_ref.model.use_remove_padding", True, on, why="dynamic batches are packed")
    for key in (f"{ACTOR}.ppo", "critic.ppo"):
        draft.put(f"{key}_max_token_len_per_gpu", draft.value(train), train)
    if draft.value(forward) is not None:
        for key in (f"{ROLLOUT}.log_prob", f"{REF}.log_prob", "critic.forward"):
            draft.put(f"{key}_max_token_len_per_gpu", draft.value(forward), forward)


def sequence_parallel(draft: Draft) -> None:
    flag = "ds.ring_attn_size"
    if not draft.given(flag):
        return
    size, ppo = draft.value(flag), draft.command.verb == "ppo"
    for key in (ACTOR + ".", "critic.") if ppo else ("",):
        draft.put(f"{key}ulysses_sequence_parallel_size", size, flag)
    if size > 1:
        draft.put(
            "actor_rollout_ref.model.use_remove_padding" if ppo else "use_remove_padding", True, flag, why="needs packing"
        )


def schedule(draft: Draft) -> None:
    """Shape, warm-up and floor, per optimiser."""
    ppo = draft.command.verb == "ppo"
    groups = (("actor.", f"{ACTOR}.optim"), ("critic.", "critic.optim")) if ppo else (("", "optim"),)
    for prefix, key in groups:
        shape, warmup, floor = (f"{prefix}{name}" for name in ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio"))
        name = draft.value(shape)
        try:
            here = SCHEDULES.there_to_here(name)
        except NoEquivalentError as reason:
            draft.drop(shape, str(reason))
            continue
        if ppo or draft.given(shape):  # the supervised trainers start from cosine anyway
            draft.put(f"{key}.lr_scheduler{'_type' * ppo}", here, shape, why=f"{name} there")
        if name == "constant":
            draft.put(f"{key}.lr_warmup_steps_ratio", 0.0, shape, why="constant there has no warm-up")
            draft.drop(warmup, f"no effect with {draft.name(shape)} constant")
        else:
            draft.put(f"{key}.lr_warmup_steps_ratio", draft.value(warmup), warmup)
        if name == "cosine_with_min_lr":
            draft.put(f"{key}.min_lr_ratio", draft.value(floor), floor)
        else:
            draft.put(f"{key}.min_lr_ratio", 0.0, shape, why=f"{name} there has no floor")
            draft.drop(floor, f"no effect with {draft.name(shape)} {name}")


def checkpoint(draft: Draft) -> None:
    """OpenRLHF always exports the final model; --save_steps adds resumable checkpoints."""
    folder, output, steps = "ckpt.path", "ckpt.output_dir", "ckpt.save_steps"
    ppo = draft.command.verb == "ppo"
    if draft.given(folder):
        draft.put("trainer.default_local_dir", draft.value(folder), folder)
        draft.drop(output, "the final model is part of the last checkpoint, in trainer.default_local_dir")
    elif draft.given(output):
        draft.put(
            "trainer.default_local_dir", draft.value(output), output, why="the final model is part of the last checkpoint there"
        )
    if draft.value(steps) > 0:
        draft.put("trainer.save_freq", draft.value(steps), steps, why="steps")
    elif ppo:
        draft.put("trainer.save_freq", END_ONLY, steps, why="no checkpoint but the final model: a period longer than the run")
    key = f"{ACTOR}.checkpoint.save_contents" if ppo else "trainer.checkpoint.save_contents"
    states = [] if draft.value("ckpt.disable_ds") else SAVED
    flags = ("ckpt.save_hf", "ckpt.disable_ds")
    if ppo or not states or draft.given(*flags):  # the supervised trainers export anyway
        draft.put(key, [*states, "hf_model"], *flags, why="the final model is exported for transformers")


def logger(draft: Draft) -> None:
    wandb, board = "logger.wandb.key", "logger.tensorboard_dir"
    if not draft.given(wandb, board):
        return
    names = [name for name, flag in (("wandb", wandb), ("tensorboard", board)) if draft.given(flag)]
    draft.put("trainer.logger", ["console", "file", *names], wandb, board, why="trackers")
    if draft.given(wandb):
        draft.notes.append(f"{draft.name(wandb)}: the key itself is left out; put it into the environment as WANDB_API_KEY.")
    if draft.given(board):
        draft.notes.append(f"{draft.name(board)} {draft.value(board)}: set TENSORBOARD_DIR to keep this folder.")


def sup_length(draft: Draft) -> None:
    flag = "data.max_len"
    draft.put("data.max_length", draft.value(flag), flag, why="tokens")
    draft.put("data.truncation", "right", flag, why="longer rows are cut there; here they are an error by default")


def columns(draft: Draft) -> None:
    """Prompt and response, or whole conversations."""
    column, answer, turns = "data.input_key", "data.output_key", "data.multiturn"
    conversation = draft.value("data.apply_chat_template") and not draft.value(answer)
    if draft.value(turns) or conversation:
        draft.put("data.multiturn.enable", True, turns, column, why="rows hold whole conversations")
        draft.put("data.multiturn.messages_key", draft.value(column), column, why="column of the conversation")
        if not draft.value(turns):
            draft.notes.append(
                "Without --multiturn OpenRLHF trains the last message of a conversation; here every assistant turn is."
            )
        if draft.value(answer):
            draft.drop(answer, "a conversation is one column; append the answer to it")
        return
    draft.put("data.prompt_key", draft.value(column), column)
    draft.put("data.response_key", draft.value(answer), answer)


def sft_template(draft: Draft) -> None:
    flag, chat = "data.input_template", "data.apply_chat_template"
    if draft.value(chat) or draft.value("data.multiturn"):
        draft.drop(flag, f"no effect with {draft.name(chat)}")
    else:
        draft.put("data.input_template", draft.value(flag), flag)


RUN_RULES: dict[str, Callable[[Draft], None]] = {
    rule.__name__: rule
    for rule in (
        placement,
        evaluation,
        dynamic_batch,
        sequence_parallel,
        schedule,
        checkpoint,
        logger,
        sup_length,
        columns,
        sft_template,
    )
}
