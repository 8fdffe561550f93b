"""Rules for the run: placement, evaluation, schedules, checkpoints, trackers, and the columns of supervised
data sets."""

from __future__ import annotations

from collections.abc import Callable

from strop.config.openrlhf.command import ConversionDraft, Override
from strop.config.openrlhf.rules import ACTOR, REF, ROLLOUT, longest_sequence
from strop.config.openrlhf.table import SAVED, SCHEDULES, NoEquivalentError

# A checkpoint is written every `save_freq` steps and at the end; a period longer than any run leaves the end.
END_ONLY = 1_000_000


def optimizer_groups(verb: str) -> list[tuple[str, str, str]]:
    """For each optimizer: the prefix of OpenRLHF's flags, our section, and our key of the schedule."""
    if verb == "ppo":
        return [
            ("actor.", f"{ACTOR}.optim", f"{ACTOR}.optim.lr_scheduler_type"),
            ("critic.", "critic.optim", "critic.optim.lr_scheduler_type"),
        ]
    return [("", "optim", "optim.lr_scheduler")]


def contents_key(verb: str) -> str:
    """The key that lists what a checkpoint holds."""
    if verb == "ppo":
        return f"{ACTOR}.checkpoint.save_contents"
    return "trainer.checkpoint.save_contents"


def placement(draft: ConversionDraft) -> None:
    """Read the number of GPUs from the Ray flags, or from the launcher."""
    nodes = "actor.num_nodes"
    gpus = "actor.num_gpus_per_node"
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
        reason = "no GPUs are set aside for a reward model"
        if shared:
            reason = "the reward model shares GPUs"
        for flag in own:
            draft.drop(flag, reason)
        return
    draft.put("reward_model.enable_resource_pool", True, *own, why="the reward model has GPUs of its own")
    draft.put("reward_model.nnodes", draft.value(own[0]), own[0])
    draft.put("reward_model.n_gpus_per_node", draft.value(own[1]), own[1])


def launched(draft: ConversionDraft) -> None:
    """Read the number of GPUs of a command that the launcher starts once per GPU."""
    for key, count in (
        ("trainer.nnodes", draft.command.nodes),
        ("trainer.n_gpus_per_node", draft.command.gpus),
    ):
        if count is not None:
            draft.overrides[key] = Override(key, count, "(launcher)", "as the launcher says")
    if draft.command.gpus is None:
        draft.notes.append(
            "The command does not say how many GPUs there are: set trainer.n_gpus_per_node (1 if unset)."
        )


def supervised_conventions(draft: ConversionDraft) -> None:
    why = "OpenRLHF's numbers where ours deliberately differ"
    draft.overrides["compat"] = Override("compat", "openrlhf", "", why, implied=True)


def evaluation(draft: ConversionDraft) -> None:
    """OpenRLHF evaluates only when it has a dataset, and not before training."""
    steps = "eval.steps"
    temperature = "eval.temperature"
    samples = "eval.n_samples_per_prompt"
    evaluates = draft.value("eval.dataset") is not None
    if evaluates or draft.given(steps):
        draft.put("trainer.test_freq", draft.value(steps), steps)
    if evaluates:
        draft.put(
            "trainer.val_before_train", False, steps, why="OpenRLHF does not evaluate before the first step"
        )
    if evaluates or draft.given(temperature):
        draft.put(f"{ROLLOUT}.val_kwargs.temperature", draft.value(temperature), temperature)
        draft.put(f"{ROLLOUT}.val_kwargs.do_sample", draft.value(temperature) > 0, temperature)
    if evaluates or draft.given(samples):
        draft.put(f"{ROLLOUT}.val_kwargs.n", draft.value(samples), samples)


def dynamic_batch(draft: ConversionDraft) -> None:
    on = "train.dynamic_batch_enable"
    train = "train.max_tokens_per_gpu"
    forward = "rollout.max_tokens_per_gpu"
    if not draft.value(on):
        for flag in (train, forward):
            draft.drop(flag, f"no effect without {draft.name(on)}")
        return
    draft.put(f"{ACTOR}.use_dynamic_bsz", True, on)
    draft.put("actor_rollout_ref.model.use_remove_padding", True, on, why="dynamic batches are packed")
    for key in (f"{ACTOR}.ppo", "critic.ppo"):
        draft.put(f"{key}_max_token_len_per_gpu", _token_budget(draft, train), train)
    if draft.value(forward) is not None:
        for key in (f"{ROLLOUT}.log_prob", f"{REF}.log_prob", "critic.forward"):
            draft.put(f"{key}_max_token_len_per_gpu", _token_budget(draft, forward), forward)


def _token_budget(draft: ConversionDraft, flag: str) -> int:
    """Tokens per pass, at least those of one sequence: OpenRLHF gives a longer one a pass of its own."""
    longest = longest_sequence(draft)
    needed = -(-longest // int(draft.value("ds.ring_attn_size")))
    budget = int(draft.value(flag))
    if budget >= needed:
        return budget
    note = (
        f"{draft.name(flag)} {budget} does not hold one sequence of {longest} tokens, which gets a pass of "
        f"its own there; here a pass holds at least one: {needed} per GPU."
    )
    if note not in draft.notes:
        draft.notes.append(note)
    return needed


def sequence_parallel(draft: ConversionDraft) -> None:
    flag = "ds.ring_attn_size"
    if not draft.given(flag):
        return
    size = draft.value(flag)
    keys = ["ulysses_sequence_parallel_size"]
    packing = "use_remove_padding"
    if draft.command.verb == "ppo":
        keys = [f"{ACTOR}.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size"]
        packing = "actor_rollout_ref.model.use_remove_padding"
    for key in keys:
        draft.put(key, size, flag)
    if size > 1:
        draft.put(packing, True, flag, why="needs packing")


def schedule(draft: ConversionDraft) -> None:
    """Convert the schedule, warm-up and minimum of the learning rate, for each optimizer."""
    ppo = draft.command.verb == "ppo"
    for prefix, key, shape_key in optimizer_groups(draft.command.verb):
        shape = f"{prefix}lr_scheduler"
        warmup = f"{prefix}lr_warmup_ratio"
        floor = f"{prefix}min_lr_ratio"
        name = draft.value(shape)
        try:
            converted = SCHEDULES.from_openrlhf(name)
        except NoEquivalentError as reason:
            draft.drop(shape, str(reason))
            continue
        if ppo or draft.given(shape):  # the supervised trainers start from cosine anyway
            draft.put(shape_key, converted, shape, why=f"{name} there")
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


def checkpoint(draft: ConversionDraft) -> None:
    """OpenRLHF always exports the final model; --save_steps adds resumable checkpoints."""
    folder = "ckpt.path"
    output = "ckpt.output_dir"
    steps = "ckpt.save_steps"
    ppo = draft.command.verb == "ppo"
    if draft.given(folder):
        draft.put("trainer.default_local_dir", draft.value(folder), folder)
        draft.drop(
            output,
            "the final model is part of the last checkpoint, in trainer.default_local_dir; `strop openrlhf` "
            "puts it there too",
        )
    elif draft.given(output):
        draft.put(
            "trainer.default_local_dir",
            draft.value(output),
            output,
            why="checkpoints and the final model",
        )
    if draft.value(steps) > 0:
        draft.put("trainer.save_freq", draft.value(steps), steps, why="steps")
    elif ppo:
        draft.put(
            "trainer.save_freq",
            END_ONLY,
            steps,
            why="no checkpoint but the final model: a period longer than the run",
        )
    states = [] if draft.value("ckpt.disable_ds") else SAVED
    flags = ("ckpt.save_hf", "ckpt.disable_ds")
    if ppo or not states or draft.given(*flags):  # the supervised trainers export anyway
        draft.put(
            contents_key(draft.command.verb),
            [*states, "hf_model"],
            *flags,
            why="the final model is exported for transformers",
        )


def logger(draft: ConversionDraft) -> None:
    wandb = "logger.wandb.key"
    board = "logger.tensorboard_dir"
    if not draft.given(wandb, board):
        return
    names = [name for name, flag in (("wandb", wandb), ("tensorboard", board)) if draft.given(flag)]
    draft.put("trainer.logger", ["console", "file", *names], wandb, board, why="trackers")
    if draft.given(wandb):
        draft.notes.append(
            f"{draft.name(wandb)}: the key itself is left out; put it into the environment as WANDB_API_KEY."
        )
    if draft.given(board):
        draft.notes.append(
            f"{draft.name(board)} {draft.value(board)}: set TENSORBOARD_DIR to keep this folder."
        )


def sup_length(draft: ConversionDraft) -> None:
    flag = "data.max_len"
    draft.put("data.max_length", draft.value(flag), flag, why="tokens")
    draft.put(
        "data.truncation", "right", flag, why="longer rows are cut there; here they are an error by default"
    )


def columns(draft: ConversionDraft) -> None:
    """Prompt and response, or whole conversations."""
    column = "data.input_key"
    answer = "data.output_key"
    turns = "data.multiturn"
    if draft.value(turns):
        draft.put("data.multiturn.enable", True, turns, column, why="rows hold whole conversations")
        draft.put(
            "data.multiturn.messages_key", draft.value(column), column, why="column of the conversation"
        )
        if draft.value(answer):
            draft.drop(answer, "a conversation is one column; append the answer to it")
        return
    draft.put("data.prompt_key", draft.value(column), column)
    if draft.value("data.apply_chat_template") and not draft.value(answer):
        last = "the column holds whole conversations, of which the last message is trained"
        draft.put("data.response_key", None, column, why=last)
    else:
        draft.put("data.response_key", draft.value(answer), answer)


def sft_template(draft: ConversionDraft) -> None:
    flag = "data.input_template"
    chat = "data.apply_chat_template"
    if draft.value(chat) or draft.value("data.multiturn"):
        draft.drop(flag, f"no effect with {draft.name(chat)}")
    else:
        draft.put("data.input_template", draft.value(flag), flag)


RUN_RULES: dict[str, Callable[[ConversionDraft], None]] = {
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
