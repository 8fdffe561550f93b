"""Converts the constructor arguments of a TRL trainer to overrides of this configuration.

    conversion = convert_trl(["train.py"])
    print(conversion.render())

TRL's defaults that differ from ours are written out, so that the run means the same. TRL counts completions
and optimizer updates where this configuration counts prompts and steps of sampling.
"""

from __future__ import annotations

import math

from strop.config.openrlhf.command import Override
from strop.config.openrlhf.convert import Conversion
from strop.config.openrlhf.table import NO_CLIPPING
from strop.config.trl.draft import ACTOR, Draft
from strop.config.trl.policy_rules import (
    batches,
    completions_per_update,
    engine,
    kl,
    policy_loss,
    updates_per_step,
    validation,
)
from strop.config.trl.script import Expression, read_trl
from strop.config.trl.table import ARGUMENTS, COMBINED, GENERATIONS, LEARNING_RATES, MISSING, PAIRS, RL
from strop.registry import did_you_mean

VERBS = {"grpo": "ppo", "rloo": "ppo", "sft": "sft", "dpo": "dpo", "kto": "dpo", "reward": "rm"}
FUNCTIONS = {
    "grpo": "grpo",
    "rloo": "rloo",
    "sft": "sft",
    "dpo": "dpo",
    "kto": "dpo",
    "reward": "reward_model",
}
"""TRL's trainer, and the function of `import strop` that does the same."""


def convert_trl(words: list[str]) -> Conversion:
    """Convert a script or a command of TRL. A ValueError says what is wrong."""
    draft = Draft(read_trl(words))
    _single_arguments(draft)
    rules = [_model, _optimizer, _precision, _saving]
    rules += [batches, policy_loss, kl, engine, validation] if draft.run.trainer in RL else [_supervised]
    for rule in rules:
        rule(draft)
    _report_rest(draft)
    notes = [*draft.notes, *_python_call(draft)]
    verb = VERBS[draft.run.trainer]
    return Conversion(verb, list(draft.overrides.values()), draft.unmapped, notes, framework="TRL")


def _single_arguments(draft: Draft) -> None:
    trainer = draft.run.trainer
    defaults = {"learning_rate": LEARNING_RATES[trainer], "num_generations": GENERATIONS.get(trainer)}
    for row in ARGUMENTS:
        if trainer not in row.trainers:
            continue
        value = draft.run.config.get(row.name, row.default)
        if row.name not in draft.run.config and row.always:
            value = defaults.get(row.name, row.default)
            draft.put(row.target(trainer), value, row.name)
        elif row.name in draft.run.config and not isinstance(value, Expression):
            draft.put(row.target(trainer), value, row.name)


def _model(draft: Draft) -> None:
    """model, peft_config, ref_model and the data sets."""
    given = draft.run.given
    if isinstance(given.get("model"), str):
        draft.overrides["model"] = Override(draft.section("model.path"), given["model"], "model", "")
    if isinstance(given.get("ref_model"), str):
        draft.overrides["ref"] = Override("ref.path", given["ref_model"], "ref_model", "")
    if given.get("load_in_4bit") is True:
        key = draft.section("model.quantization")
        draft.overrides[key] = Override(key, "nf4", "load_in_4bit", "")
    names = {"r": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
    names |= {"target_modules": "target_modules", "exclude_modules": "exclude_modules"}
    lora = draft.run.lora
    if lora and "target_modules" not in lora:
        draft.notes.append(
            "Adapters are on all linear layers. peft has a default for each kind of model, for most "
            f"[q_proj,v_proj]: set {draft.section('model.target_modules')} for the same."
        )
    for name, value in lora.items():
        if isinstance(value, Expression):
            draft.unmapped.append((name, value.text, "its value is known only when the script runs"))
        elif name in names:
            key = draft.section(f"model.{names[name]}")
            draft.overrides[key] = Override(key, value, f"LoraConfig.{name}", "")
        elif name not in ("task_type", "bias", "inference_mode"):
            draft.unmapped.append((f"LoraConfig.{name}", str(value), "adapters have no such setting"))


def _optimizer(draft: Draft) -> None:
    """Schedule, warm-up, Adam and clipping."""
    schedule = str(draft.value("lr_scheduler_type"))
    known = {
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "constant": "constant",
    }
    if schedule in known:
        key = draft.section("optim.lr_scheduler_type")
        if key == "optim.lr_scheduler_type":
            key = "optim.lr_scheduler"  # its name in supervised training
        draft.put(key, known[schedule], "lr_scheduler_type")
    else:
        reason = f"schedules are {', '.join(sorted(set(known.values())))} and wsd"
        draft.unmapped.append(("lr_scheduler_type", schedule, reason))
    warmup = draft.number("warmup_steps")
    ratio = draft.number("warmup_ratio")
    if schedule == "constant":
        warmup = ratio = 0.0
    if 0 < warmup < 1:  # transformers 5 reads a fraction as a ratio
        ratio = warmup
        warmup = 0.0
    if warmup:
        draft.put(draft.section("optim.lr_warmup_steps"), int(warmup), "warmup_steps")
    else:
        draft.put(draft.section("optim.lr_warmup_steps_ratio"), ratio, "warmup_ratio")
    betas = [draft.number("adam_beta1"), draft.number("adam_beta2")]
    draft.put(draft.section("optim.betas"), betas, "adam_beta1", "adam_beta2")
    clip = f"{ACTOR}.grad_clip" if draft.run.trainer in RL else "optim.clip_grad"
    if draft.given("max_grad_norm"):
        draft.put(clip, draft.number("max_grad_norm") or NO_CLIPPING, "max_grad_norm")
    if draft.given("router_aux_loss_coef"):
        section = ACTOR if draft.run.trainer in RL else "model"
        draft.put(f"{section}.aux_loss_coef", draft.value("router_aux_loss_coef"), "router_aux_loss_coef")
    if not str(draft.value("optim")).startswith("adamw_torch"):
        reason = "set optim.optimizer and optim.optimizer_impl to a class that torch or a library defines"
        draft.unmapped.append(("optim", str(draft.value("optim")), reason))


def _precision(draft: Draft) -> None:
    dtype = ""
    if draft.value("fp16") is True:
        dtype = "float16"
    elif draft.value("bf16") is True:
        dtype = "bfloat16"
    elif draft.value("bf16") is False:
        dtype = "float32"
    if dtype:
        section = f"{ACTOR}.fsdp_config" if draft.run.trainer in RL else "model.fsdp_config"
        draft.put(f"{section}.dtype", dtype, "bf16", "fp16")


def _frequency(draft: Draft, what: str, key: str) -> None:
    """save_strategy and save_steps, or eval_strategy and eval_steps."""
    strategy = draft.value(f"{what}_strategy")
    if strategy == "epoch" and draft.run.trainer not in RL:
        draft.put(key, "after_each_epoch", f"{what}_strategy")
    elif strategy == "steps":
        name = f"{what}_steps"
        if not draft.value(name):  # transformers evaluates as often as it logs
            name = "logging_steps"
        every = draft.number(name)
        if every < 1:
            every = math.ceil(every * max(draft.number("max_steps"), 0))
        if every:
            draft.put(key, max(1, round(every / updates_per_step(draft))), name)
        else:
            share = f"a share of all steps, whose number max_steps does not say; set {key} to a number"
            draft.unmapped.append((name, str(draft.value(name)), share))
    elif strategy != "no":
        draft.unmapped.append((f"{what}_strategy", str(strategy), f"set {key} to a number of steps"))


def _saving(draft: Draft) -> None:
    """Checkpoints, validation, trackers and the length in epochs."""
    updates = updates_per_step(draft)
    _frequency(draft, "save", "trainer.save_freq")
    _frequency(draft, "eval", "trainer.test_freq")
    if draft.value("save_total_limit") is not None:
        kept = "max_actor_ckpt_to_keep" if draft.run.trainer in RL else "max_ckpt_to_keep"
        draft.put(f"trainer.{kept}", draft.value("save_total_limit"), "save_total_limit")
    if draft.number("max_steps") > 0:
        steps = max(1, round(draft.number("max_steps") / updates))
        draft.put("trainer.total_training_steps", steps, "max_steps", why="TRL counts optimizer updates")
    else:
        epochs = draft.number("num_train_epochs")
        draft.put("trainer.total_epochs", max(1, round(epochs)), "num_train_epochs")
        if epochs != round(epochs):
            draft.notes.append(f"num_train_epochs={epochs:g} was rounded: epochs are whole numbers here.")
    wanted = draft.value("report_to")
    names = wanted if isinstance(wanted, list) else [wanted]
    trackers = [name for name in names if name not in (None, "none", "all")]
    if trackers:
        draft.put("trainer.logger", ["console", "file", *trackers], "report_to")


def _supervised(draft: Draft) -> None:
    draft.overrides["compat"] = Override("compat", "trl", "", "TRL's conventions (docs/compat.md)")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    draft.put("data.train_batch_size", completions_per_update(draft), *names)
    per_device = int(draft.number("per_device_train_batch_size"))
    draft.put("data.micro_batch_size_per_gpu", per_device, "per_device_train_batch_size")
    draft.notes.append(
        "data.train_batch_size counts rows over all devices, here for one process. With N processes multiply "
        "it by N, and set trainer.n_gpus_per_node=N."
    )
    if draft.run.trainer == "reward":
        draft.notes.append(
            "TRL leaves out pairs that are longer than max_length. Here they are an error: raise "
            "data.max_length, or remove them from the file."
        )
        draft.notes.append("TRL subtracts the column `margin` of rows that have it: set loss.margin=true.")
    else:
        side = "right" if draft.value("truncation_mode") == "keep_start" else "left"
        why = "a row that is too long is an error by default"
        draft.put("data.truncation", side, "truncation_mode", why=why)
    if draft.run.config.get("max_length", 0) is None:
        del draft.overrides["data.max_length"]
        draft.put("data.truncation", "error", "max_length", why="no row is cut there")
        reason = "rows have no limit there; `strop check` names the longest one for data.max_length"
        draft.unmapped.append(("max_length", "None", reason))
    template = draft.overrides.get("data.chat_template")
    if template is not None and not str(template.value).endswith((".jinja", ".j2")):
        del draft.overrides["data.chat_template"]
        reason = "set data.chat_template to a .jinja file with the template of this model"
        draft.unmapped.append(("chat_template_path", str(template.value), reason))
    if draft.run.trainer == "sft":
        _sft(draft)
    if draft.run.trainer in PAIRS:
        draft.overrides["prompt"] = Override("data.prompt_key", "prompt", "", "TRL's name of the column")
        draft.notes.append(
            "Where chosen and rejected hold whole conversations, leave out data.prompt_key=prompt."
        )
    if draft.run.trainer == "dpo":
        _dpo(draft)
    if draft.run.trainer == "kto":
        _kto(draft)
    strategy = draft.value("train_sampling_strategy")
    if strategy == "sequential" or (strategy is None and draft.run.trainer == "kto"):
        draft.put("data.shuffle", False, "train_sampling_strategy")
    elif strategy not in (None, "random"):
        reason = "rows are shuffled, or in the order of the file (data.shuffle=false)"
        draft.unmapped.append(("train_sampling_strategy", str(strategy), reason))


def _sft(draft: Draft) -> None:
    draft.overrides["response"] = Override("data.response_key", "completion", "", "TRL's name of the column")
    if draft.value("completion_only_loss") is False:
        draft.put("data.pretrain_mode", True, "completion_only_loss")
    if draft.value("assistant_only_loss") is True:
        draft.put("data.multiturn.enable", True, "assistant_only_loss")
    draft.notes.append(
        "Rows with `messages` need data.multiturn.enable=true, which trains on the assistant's turns alone. "
        "TRL trains on every token of them unless assistant_only_loss is set: add data.pretrain_mode=true."
    )
    if draft.value("loss_type") not in (None, "nll"):
        draft.unmapped.append(
            ("loss_type", str(draft.value("loss_type")), "SFT has the log-likelihood alone")
        )


def _dpo(draft: Draft) -> None:
    written = draft.value("loss_type") or ["sigmoid"]
    names = written if isinstance(written, list) else [written]
    weights = draft.value("loss_weights") or [1.0] * len(names)
    assert isinstance(weights, list)
    kinds = {"sigmoid": "dpo", "sigmoid_norm": "dpo", "ipo": "ipo"}
    for name, weight in zip(names, weights, strict=False):
        if name == "sft":
            draft.put("loss.nll_coef", float(weight), "loss_type", "loss_weights")
        elif name in kinds and weight == 1:
            draft.put("loss.type", kinds[name], "loss_type")
            if name == "sigmoid_norm":
                draft.put("loss.length_normalized", True, "loss_type")
        else:
            draft.unmapped.append(("loss_type", f"{name} x {weight}", "losses are dpo, ipo and simpo"))


def _kto(draft: Draft) -> None:
    kind = draft.value("loss_type") or "kto"
    draft.put("loss.type", "kto", "loss_type")
    if kind != "kto":
        draft.unmapped.append(("loss_type", str(kind), "the only loss of labelled responses is kto"))
    columns = {"prompt_key": "prompt", "response_key": "completion", "label_key": "label"}
    for key, column in columns.items():
        draft.overrides[key] = Override(f"data.{key}", column, "", "TRL's name of the column")
    draft.notes.append(
        "Where rows are pairs (chosen, rejected), leave out data.response_key and data.label_key: each pair "
        "gives a good and a bad response, as in TRL."
    )
    draft.notes.append(
        "TRL estimates the KL divergence on each per_device_train_batch_size rows of all processes, Strop on "
        "all rows of an update."
    )


def _report_rest(draft: Draft) -> None:
    """Arguments that became nothing."""
    trainer = draft.run.trainer
    single = [row.name for row in ARGUMENTS if trainer in row.trainers]
    for name, value in draft.run.config.items():
        if isinstance(value, Expression):
            draft.unmapped.append((name, value.text, "its value is known only when the script runs"))
        elif name in MISSING and name not in single:
            draft.unmapped.append((name, str(value), MISSING[name]))
        elif name not in single and name not in COMBINED:
            near = did_you_mean(name, [*single, *COMBINED, *MISSING])
            draft.unmapped.append((name, str(value), f"no such argument is known.{near}"))


def _python_call(draft: Draft) -> list[str]:
    """What the trainer's own arguments become: they are Python objects."""
    given = draft.run.given
    call = [_shown(given.get("model", Expression("model")))]
    names = {
        "train_dataset": "train",
        "eval_dataset": "val",
        "reward_funcs": "reward",
        "tools": "tools",
    }
    for name, ours in names.items():
        if name in given:
            call.append(f"{ours}={_shown(given[name])}")
    function = FUNCTIONS[draft.run.trainer]
    notes = [
        f"From Python: strop.{function}({', '.join(call)}, **keys) with the keys above; functions and data "
        "sets stay as they are (docs/porting_trl.md)."
    ]
    if "reward_funcs" in given:
        notes.append(
            "On the command line a reward is custom_reward_function.path=FILE.py and "
            "custom_reward_function.name=NAME. Put it into its own file: importing this script would train."
        )
    if isinstance(given.get("train_dataset"), str | Expression):
        notes.append("On the command line data is data.train_files=FILE.parquet: dataset.to_parquet(FILE).")
    unused = sorted(
        given.keys() - names.keys() - {"model", "args", "peft_config", "processing_class", "ref_model"}
    )
    for name in unused:
        notes.append(f"The trainer's argument {name}={_shown(given[name])} has no equivalent.")
    return notes


def _shown(value: object) -> str:
    return value.text if isinstance(value, Expression) else repr(value)
