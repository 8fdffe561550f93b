"""Speaks OpenRLHF: a whole command line of any generation becomes overrides of this configuration.

    conversion = convert(["train_ppo_ray", "--pretrain", "Qwen/Qwen3-0.6B", "--n_samples_per_prompt", "8", ...])
    print(conversion.render())        # every setting with its reason, what has no equivalent, what else to know
    main(conversion.arguments())      # Hydra overrides

A default of OpenRLHF that differs from ours is written out, so the converted run means the same. What each flag becomes is
data: `openrlhf_flags.tsv`. Flags that decide together have a function in `openrlhf_rules.py` or `openrlhf_run_rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from strop.config.openrlhf_argv import Command, read_command
from strop.config.openrlhf_draft import Draft, Override
from strop.config.openrlhf_render import block, hydra_argument, shell_word, with_comments
from strop.config.openrlhf_rules import RULES
from strop.config.openrlhf_run_rules import RUN_RULES, launched
from strop.config.openrlhf_table import about_critic
from strop.config.openrlhf_transforms import TRANSFORMS, NoEquivalentError

__all__ = ["Conversion", "Override", "convert"]

_RULES = RULES | RUN_RULES


@dataclass
class Conversion:
    """What an OpenRLHF command means here."""

    verb: str
    overrides: list[Override]
    unmapped: list[tuple[str, str, str]]  # flag, value, reason
    notes: list[str] = field(default_factory=list)

    def arguments(self) -> list[str]:
        """Hydra overrides, one word each."""
        return [hydra_argument(override.key, override.value) for override in self.overrides]

    def render(self) -> str:
        """All of it for people; the lines without `#` can be pasted behind `strop <verb>`."""
        typed = [override for override in self.overrides if not override.implied]
        implied = [override for override in self.overrides if override.implied]
        lines = [f"# strop {self.verb} with these overrides", *_listing(typed)]
        lines += block(
            "OpenRLHF's defaults that differ from ours, written out so that the run means the same", _listing(implied)
        )
        missing = [f"# {flag}{' ' + value if value else ''}: {reason}" for flag, value, reason in self.unmapped]
        lines += block("Flags without equivalent", [" ".join(line.split()) for line in missing])
        lines += block("Good to know", [f"# - {' '.join(note.split())}" for note in self.notes])
        return "\n".join(lines) + "\n"


def convert(argv: list[str]) -> Conversion:
    """Translate a command, given as words or as one string. ValueError says what is wrong with it and what to set."""
    command = read_command(list(argv))
    draft = Draft(command)
    _single_flags(draft)
    for name in dict.fromkeys(row.rule for row in draft.rows.values() if row.rule):
        _RULES[name](draft)
    if command.verb != "ppo":
        launched(draft)
    if not draft.has_critic:
        _leave_out_critic(draft)
    notes = [*_about(command), *command.notes, *draft.notes, *_arithmetic(draft), *_said(draft)]
    return Conversion(command.verb, list(draft.overrides.values()), draft.unmapped, notes)


def _single_flags(draft: Draft) -> None:
    """Every flag that decides alone."""
    for row in draft.rows.values():
        if row.rule:
            continue
        if not row.targets:
            draft.drop(row.id)
        elif draft.given(row.id) or row.written(draft.generation):
            try:
                value = TRANSFORMS[row.transform].there_to_here(draft.value(row.id))
            except NoEquivalentError as reason:
                draft.drop(row.id, str(reason))
                continue
            for key in row.targets:
                draft.put(key, value, row.id)


def _leave_out_critic(draft: Draft) -> None:
    """Only `gae` has a critic; flags that speak about nothing else are reported."""
    gone = [override for key, override in draft.overrides.items() if about_critic(key)]
    for override in gone:
        del draft.overrides[override.key]
    kept = {override.flag for override in draft.overrides.values()}
    reported = {flag for flag, _, _ in draft.unmapped}
    for typed in draft.command.given.values():
        if typed.spelled in reported | kept or typed.spelled not in {override.flag for override in gone}:
            continue
        reported.add(typed.spelled)
        name = draft.value("algo.advantage.estimator") if draft.command.verb == "ppo" else draft.command.verb
        draft.unmapped.append((typed.spelled, typed.shown, f"{name} has no critic"))


def _about(command: Command) -> list[str]:
    names = {1: "single-node flags of 2024", 2: "flat flags (before 2026-04)", 3: "dotted flags (since 2026-04)"}
    notes = [f"Read as {command.trainer} with {names[command.generation]}; its defaults are those of that generation."]
    if command.generation == 1 and not {"data.input_template", "data.apply_chat_template"} & set(command.given):
        notes.append(
            "Some versions of that trainer wrapped prompts in 'User: {}\\nAssistant: '; set data.input_template if yours did."
        )
    if command.launcher:
        notes.append(f"Left out, as it only starts the program: {_launcher(command.launcher)}")
    return notes


def _launcher(words: list[str]) -> str:
    """The program's name; its options may hold keys and passwords."""
    flags = [at for at, word in enumerate(words) if word.startswith("-")]
    return " ".join(words[: flags[0]] + ["..."] if flags and flags[0] else words[:1])


def _arithmetic(draft: Draft) -> list[str]:
    """The batch arithmetic both frameworks agree on."""
    if draft.command.verb != "ppo":
        return []
    P, n, B, m = (
        draft.value(flag)
        for flag in ("rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size", "train.micro_batch_size")
    )
    updates = max(P * n // B, 1) * draft.value("train.max_epochs")
    text = f"{P} prompts x {n} = {P * n} samples per step, {updates} update{'s' * (updates > 1)} of {B} samples"
    keys = [draft.overrides.get(key) for key in ("trainer.nnodes", "trainer.n_gpus_per_node")]
    if keys[1] is not None:
        ranks = (keys[0].value if keys[0] else 1) * keys[1].value // draft.value("ds.ring_attn_size")
        ranks = max(ranks // draft.value("ds.tensor_parallel_size"), 1)
        passes = B / (m * ranks)
        text += f", {passes:g} accumulation pass{'es' * (passes != 1)} on {ranks} data-parallel rank{'s' * (ranks > 1)}"
        if B % (m * ranks) and not draft.value("train.dynamic_batch_enable"):
            text += f" (not whole: choose a batch that {m} x {ranks} divides)"
    return [text + f": {'on-policy' if updates == 1 else 'off-policy'}."]


def _said(draft: Draft) -> list[str]:
    """Defaults that differ in speed or memory only."""
    left = [
        f"{draft.name(row.id)} {'off' if row.type == 'switch' else row.default_text} ({row.targets[0]})"
        for row in draft.rows.values()
        if row.when == "say" and not draft.given(row.id) and not (draft.generation == 1 and row.only_later)
    ]
    return ["Defaults that differ in speed or memory only, left as they are here: " + ", ".join(left) + "."] if left else []


def _listing(overrides: list[Override]) -> list[str]:
    return with_comments(
        (shell_word(hydra_argument(o.key, o.value)), f"{o.flag}: {o.reason}" if o.reason else o.flag) for o in overrides
    )
