"""Converts an OpenRLHF command line, of any version, to overrides of this configuration.

    conversion = convert(["train_ppo_ray", "--pretrain", "Qwen/Qwen3-0.6B", ...])
    print(conversion.render())        # every setting with its reason, and flags without an equivalent
    main(conversion.arguments())      # Hydra overrides

A default of OpenRLHF that differs from ours is written out, so the converted run means the same. The table
`openrlhf_flags.tsv` says what each flag becomes. Flags that depend on each other have a function in
`rules.py` or `run_rules.py`. The second half of this file formats the result for Hydra and for a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from strop.config.openrlhf.command import Command, ConversionDraft, Override, read_command, split_command
from strop.config.openrlhf.rules import RULES
from strop.config.openrlhf.run_rules import RUN_RULES, launched, supervised_conventions
from strop.config.openrlhf.serve_rm import VERB, read_flags
from strop.config.openrlhf.table import TRANSFORMS, NoEquivalentError, about_critic
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys

__all__ = ["Conversion", "Override", "convert"]

_RULES = RULES | RUN_RULES
ROOT_OF_VERB = {"ppo": "ppo_trainer", "sft": "sft_trainer", "rm": "rm_trainer", "dpo": "dpo_trainer"}


@dataclass
class Conversion:
    """A run of another framework as overrides of our configuration."""

    verb: str
    overrides: list[Override]
    unmapped: list[tuple[str, str, str]]  # flag, value, reason
    notes: list[str] = field(default_factory=list)
    framework: str = "OpenRLHF"
    final_model: str | None = None
    """Folder that gets the model when the run ends (--ckpt.output_dir)."""

    def arguments(self) -> list[str]:
        """Hydra overrides, one word each."""
        return [hydra_argument(override.key, override.value) for override in self.overrides]

    def render(self) -> str:
        """The whole conversion as text; the lines without `#` can be pasted after `strop <verb>`."""
        typed = [override for override in self.overrides if not override.implied]
        implied = [override for override in self.overrides if override.implied]
        lines = [f"# strop {self.verb} with these overrides", *_listing(typed)]
        lines += block(
            f"{self.framework}'s defaults that differ from Strop's, written out for the same results",
            _listing(implied),
        )
        missing = []
        for flag, value, reason in self.unmapped:
            typed_flag = f"{flag} {value}" if value else flag
            missing.append(_one_line(f"# {typed_flag}: {reason}"))
        what = "Flags" if self.framework == "OpenRLHF" else "Arguments"
        lines += block(f"{what} without equivalent", missing)
        lines += block("Good to know", [f"# - {_one_line(note)}" for note in self.notes])
        return "\n".join(lines) + "\n"


def convert(argv: list[str]) -> Conversion:
    """Convert a command, given as words or as one string. A ValueError says what is wrong and what to set."""
    program, words = split_command(list(argv))
    if program == "serve_rm":
        overrides, unmapped = read_flags(words)
        return Conversion(VERB, overrides, unmapped)
    command = read_command(list(argv))
    draft = ConversionDraft(command)
    _single_flags(draft)
    for name in dict.fromkeys(row.rule for row in draft.rows.values() if row.rule):
        _RULES[name](draft)
    if command.verb != "ppo":
        launched(draft)
        supervised_conventions(draft)
    if not draft.has_critic:
        _leave_out_critic(draft)
    _leave_out_inert(draft)
    notes = [*_about(command), *command.notes, *draft.notes, *_arithmetic(draft), *_unset_defaults(draft)]
    output = "ckpt.output_dir"
    final_model = str(draft.value(output)) if draft.given(output) else None
    overrides = list(draft.overrides.values())
    return Conversion(command.verb, overrides, draft.unmapped, notes, final_model=final_model)


def _single_flags(draft: ConversionDraft) -> None:
    """Convert every flag that depends on no other flag."""
    for row in draft.rows.values():
        if row.rule:
            continue
        if not row.targets:
            draft.drop(row.id)
        elif draft.given(row.id) or row.written(draft.generation):
            try:
                value = TRANSFORMS[row.transform].from_openrlhf(draft.value(row.id))
            except NoEquivalentError as reason:
                draft.drop(row.id, str(reason))
                continue
            for key in row.targets:
                draft.put(key, value, row.id)


def _leave_out_inert(draft: ConversionDraft) -> None:
    """Keys without effect are left out; a flag that sets nothing else is reported with the reason."""
    inert = {key.path: key.inert for key in keys(ROOTS[ROOT_OF_VERB[draft.command.verb]]) if key.inert}
    gone = [override for key, override in draft.overrides.items() if key in inert]
    for override in gone:
        del draft.overrides[override.key]
    kept = {flag for override in draft.overrides.values() for flag in override.flag.split()}
    for override in gone:
        for flag in draft.command.given.values():
            if flag.spelled in override.flag.split() and flag.spelled not in kept:
                kept.add(flag.spelled)
                reason = f"{override.key} has no effect: {inert[override.key]}"
                draft.unmapped.append((flag.spelled, flag.shown, reason))


def _leave_out_critic(draft: ConversionDraft) -> None:
    """Only `gae` has a critic: remove the critic's keys, and report flags that set nothing else."""
    gone = [override for key, override in draft.overrides.items() if about_critic(key)]
    for override in gone:
        del draft.overrides[override.key]
    kept = {override.flag for override in draft.overrides.values()}
    reported = {flag for flag, _, _ in draft.unmapped}
    for typed in draft.command.given.values():
        if typed.spelled in reported | kept or typed.spelled not in {override.flag for override in gone}:
            continue
        reported.add(typed.spelled)
        name = draft.command.verb
        if name == "ppo":
            name = draft.value("algo.advantage.estimator")
        draft.unmapped.append((typed.spelled, typed.shown, f"{name} has no critic"))


def _about(command: Command) -> list[str]:
    names = {
        1: "single-node flags of 2024",
        2: "flat flags (before 2026-04)",
        3: "dotted flags (since 2026-04)",
    }
    notes = [
        f"Read as {command.trainer} with {names[command.generation]}; its defaults are those of that "
        "generation."
    ]
    if command.generation == 1 and not {"data.input_template", "data.apply_chat_template"} & set(
        command.given
    ):
        notes.append(
            "Some versions of that trainer wrapped prompts in 'User: {}\\nAssistant: '; set "
            "data.input_template if yours did."
        )
    if command.launcher:
        notes.append(f"Left out, as it only starts the program: {_launcher(command.launcher)}")
    return notes


def _launcher(words: list[str]) -> str:
    """The launcher without its options, which may hold keys and passwords."""
    flags = [at for at, word in enumerate(words) if word.startswith("-")]
    if flags and flags[0]:
        return " ".join([*words[: flags[0]], "..."])
    return " ".join(words[:1])


def _arithmetic(draft: ConversionDraft) -> list[str]:
    """A note with the batch arithmetic, which is the same in both frameworks."""
    if draft.command.verb != "ppo":
        return []
    prompts = draft.value("rollout.batch_size")
    n = draft.value("rollout.n_samples_per_prompt")
    batch = draft.value("train.batch_size")
    updates = max(prompts * n // batch, 1) * draft.value("train.max_epochs")
    plural = "s" if updates > 1 else ""
    text = f"{prompts} prompts x {n} = {prompts * n} samples per step, "
    text += f"{updates} update{plural} of {batch} samples"
    text += _accumulation(draft)
    policy = "on-policy" if updates == 1 else "off-policy"
    return [f"{text}: {policy}."]


def _accumulation(draft: ConversionDraft) -> str:
    """Gradient accumulation on the data-parallel ranks, when the number of GPUs is known."""
    gpus = draft.overrides.get("trainer.n_gpus_per_node")
    if gpus is None:
        return ""
    ranks = gpus.value
    if "trainer.nnodes" in draft.overrides:
        ranks *= draft.overrides["trainer.nnodes"].value
    ranks = ranks // draft.value("ds.ring_attn_size")
    ranks = max(ranks // draft.value("ds.tensor_parallel_size"), 1)
    batch = draft.value("train.batch_size")
    micro = draft.value("train.micro_batch_size")
    passes = batch / (micro * ranks)
    plural_pass = "passes" if passes != 1 else "pass"
    plural_rank = "ranks" if ranks > 1 else "rank"
    text = f", {passes:g} accumulation {plural_pass} on {ranks} data-parallel {plural_rank}"
    if batch % (micro * ranks) and not draft.value("train.dynamic_batch_enable"):
        text += f" (not whole: choose a batch that {micro} x {ranks} divides)"
    return text


def _unset_defaults(draft: ConversionDraft) -> list[str]:
    """A note about defaults that differ in speed or memory only; they are not converted."""
    differences = []
    for row in draft.rows.values():
        not_yet_there = draft.generation == 1 and row.only_later
        if row.when != "say" or draft.given(row.id) or not_yet_there:
            continue
        default = "off" if row.type == "switch" else row.default_text
        differences.append(f"{draft.name(row.id)} {default} ({row.targets[0]})")
    if not differences:
        return []
    listed = ", ".join(differences)
    return [f"Defaults that differ in speed or memory only, left as they are here: {listed}."]


def _listing(overrides: list[Override]) -> list[str]:
    lines = []
    for override in overrides:
        comment = override.flag
        if override.reason:
            comment = f"{override.flag}: {override.reason}".removeprefix(": ")
        lines.append((shell_word(hydra_argument(override.key, override.value)), comment))
    return with_comments(lines)


# --- Formatting for Hydra's command line and for a shell ----------------------------------------------------

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_SPECIAL = {"null", "true", "false", "inf", "nan"}


def hydra_value(value: object) -> str:
    """A value in Hydra's grammar; Hydra parses it to the same value of the same type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{hydra_value(inside)}" for name, inside in value.items()) + "}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _SPECIAL and not _looks_like_number(text):
        return text
    # Inside quotes Hydra reads backslashes literally, except in front of a quote.
    text = re.sub(r"(\\*)('|$(?!\n))", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{text}'"


def hydra_argument(key: str, value: object) -> str:
    """`key=value`; a key of a free-form dictionary gets `++`, which adds it."""
    free_form = ".override_config." in key or ".kwargs." in key
    prefix = "++" if free_form else ""
    return f"{prefix}{key}={hydra_value(value)}"


def shell_word(word: str) -> str:
    """A word that can be pasted into a shell, on one line."""
    if "\n" not in word and "\r" not in word:
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return f"$'{escaped}'"


def with_comments(lines: Iterable[tuple[str, str]]) -> list[str]:
    """`text  # comment` lines, with the comments in one column after lines of at most 80 characters."""
    pairs = list(lines)
    width = max((len(text) for text, _ in pairs if len(text) <= 80), default=0)
    return [f"{text:<{width}}  # {_one_line(comment)}" if comment else text for text, comment in pairs]


def block(title: str, lines: list[str]) -> list[str]:
    """Lines under a title; an empty list when there are no lines."""
    return ["", f"# {title}", *lines] if lines else []


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _looks_like_number(text: str) -> bool:
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True
