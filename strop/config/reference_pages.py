"""The configuration reference in docs/: an index page, and one page per program or section with its keys.

`strop config docs --out docs` writes the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from strop.config.aliases import ALIASES, WITHOUT_EFFECT
from strop.config.explain import default_text, limits
from strop.config.schema import ROOTS
from strop.config.schema.reflect import Key, keys, sections

FOLDER = "configuration"
PPO_PAGES = {
    "actor_rollout_ref": "ppo_actor",
    "actor_rollout_ref.model": "ppo_model",
    "actor_rollout_ref.actor": "ppo_actor",
    "actor_rollout_ref.rollout": "ppo_rollout",
    "actor_rollout_ref.ref": "ppo_reference",
    "critic": "ppo_critic",
    "reward_model": "ppo_reward",
    "custom_reward_function": "ppo_reward",
    "reward_manager": "ppo_reward",
    "algorithm": "ppo_algorithm",
    "data": "ppo_data",
    "": "ppo_trainer",
}
"""The page of each section of ppo_trainer; the longest name that fits decides."""
TITLES = {
    "ppo_algorithm": ("RL: algorithm", "Advantage estimator, KL, dynamic sampling, rollout correction"),
    "ppo_actor": (
        "RL: actor",
        "Updates of the policy: loss, batch sizes, optimizer, FSDP, checkpoint contents",
    ),
    "ppo_model": ("RL: model", "Weights, tokenizer, LoRA, patches"),
    "ppo_rollout": ("RL: rollout", "Sampling, engines, validation sampling, multi-turn, agents"),
    "ppo_reference": ("RL: reference model", "The reference of the KL terms"),
    "ppo_critic": ("RL: critic", "The value model"),
    "ppo_reward": ("RL: reward", "Reward functions, reward managers, reward models, judges, sandboxes"),
    "ppo_data": ("RL: data", "Files, columns, lengths, batch size, order"),
    "ppo_trainer": ("RL: trainer", "Steps, loggers, checkpoints, devices, asynchronous training, profiler"),
    "sft": ("SFT", "`strop sft`"),
    "rm": ("Reward-model training", "`strop rm`"),
    "dpo": ("DPO", "`strop dpo`"),
    "generation": ("Generation", "`strop generate`"),
    "evaluation": ("Evaluation of responses", "`strop eval`"),
    "reward_server": ("Reward server", "`strop serve-rm`"),
    "training_service": ("Training service", "`strop serve-train`"),
    "old_names": ("Old names", "Former names of keys, which still work"),
    "verl_keys_without_effect": ("Keys of verl without effect", "Accepted, and why they change nothing"),
}
"""Title and contents of every page, in the order of the index."""
TABLE = ("| key | default | meaning |", "|---|---|---|")
Sections = dict[str, tuple[str, list[Key]]]
"""Section -> its documentation and its keys."""


def write_pages(folder: Path) -> list[Path]:
    """Write all pages below `folder` and delete pages of sections that no longer exist."""
    written = pages()
    for name, text in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in (folder / FOLDER).glob("*.md"):
        if f"{FOLDER}/{path.name}" not in written:
            path.unlink()
    return [folder / name for name in written]


def pages() -> dict[str, str]:
    """Path below docs/ -> text of the page."""
    collected = _sections_of_pages()
    found = {f"{FOLDER}.md": _index(collected)}
    for page, content in collected.items():
        found[f"{FOLDER}/{page}.md"] = _page(page, content)
    found[f"{FOLDER}/old_names.md"] = _old_names()
    found[f"{FOLDER}/verl_keys_without_effect.md"] = _without_effect()
    return found


def _sections_of_pages() -> dict[str, Sections]:
    collected: dict[str, Sections] = {}
    for root, kind in ROOTS.items():
        if root == "ppo_megatron_trainer":  # has the keys of ppo_trainer
            continue
        about = dict(sections(kind))
        for key in keys(kind):
            section = key.path.rpartition(".")[0]
            page = _page_of(section) if root == "ppo_trainer" else root.removesuffix("_trainer")
            content = collected.setdefault(page, {})
            content.setdefault(section, (about.get(section, ""), []))[1].append(key)
    return collected


def _page_of(section: str) -> str:
    """The page of a section of ppo_trainer."""
    while section not in PPO_PAGES:
        section = section.rpartition(".")[0]
    return PPO_PAGES[section]


def _index(collected: Mapping[str, Sections]) -> str:
    lines = [
        "# Configuration reference",
        "",
        "Every key with its default. The names are verl's where verl has the key. `strop config explain KEY` "
        "prints one key, `strop config show ppo` a whole file with comments.",
        "",
        "- *no effect* marks a key that is accepted because existing files contain it, with the reason.",
        "- A default written as `→ key` is the value of that key.",
        "- The tables give the last part of a name. The full name is the section, a dot and that part: "
        "`actor_rollout_ref.actor` and `clip_ratio` make `actor_rollout_ref.actor.clip_ratio`.",
        "",
        "| page | contents | sections |",
        "|---|---|---|",
    ]
    for page, (title, contents) in TITLES.items():
        names = [f"`{name}`" for name in _upper_sections(collected.get(page, {}))]
        lines.append(f"| [{title}]({FOLDER}/{page}.md) | {contents} | {', '.join(names)} |")
    lines += [
        "",
        "`ppo_megatron_trainer` has the keys of the RL pages, with "
        "`actor_rollout_ref.actor.strategy: megatron`.",
        "",
        "`strop config docs --out docs` writes these pages from `strop/config/schema`; do not edit them.",
    ]
    return "\n".join(lines) + "\n"


def _upper_sections(content: Sections) -> list[str]:
    """The sections of a page that the index names: those that PPO_PAGES names or that are in no other."""
    upper: list[str] = []
    for name in content:
        inside = any(name.startswith(f"{other}.") for other in content)
        if name and (name in PPO_PAGES or not inside):
            upper.append(name)
    return upper


def _page(page: str, content: Sections) -> str:
    title, contents = TITLES[page]
    lines = [f"# {title}", "", f"{contents}. [All pages](../{FOLDER}.md)", ""]
    for section, (about, found) in content.items():
        lines += [f"## {section or 'Top level'}", ""]
        if about:
            lines += [about, ""]
        lines += [*TABLE, *(_row(key) for key in found), ""]
    return "\n".join(lines)


def _old_names() -> str:
    lines = ["# Old names", "", "These names still work; the preflight names the new one.", ""]
    lines += ["| old | now | why |", "|---|---|---|"]
    for alias in ALIASES:
        if callable(alias.new):
            new = "depends on the value"
        else:
            new = ", ".join(f"`{name.replace('{prefix}', '*')}`" for name in alias.new)
        lines.append(f"| `{alias.old}` | {new} | {alias.why} |")
    return "\n".join(lines) + "\n"


def _without_effect() -> str:
    lines = ["# Keys of verl without effect", ""]
    lines += ["They are accepted, with one notice per reason. `*` stands for any text.", ""]
    lines += ["| key | reason |", "|---|---|"]
    for row in WITHOUT_EFFECT:
        refused = "" if row.accepted is None else " (other values than null and off are refused)"
        lines.append(f"| `{row.pattern}` | {row.why}{refused} |")
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    default = default_text(key)
    shown = f"→ `{default.removeprefix('follows ')}`" if default.startswith("follows ") else f"`{default}`"
    notes = [f"{label}: {value}" for label, value in limits(key)]
    if key.inert:
        notes.append(f"*no effect: {key.inert}*")
    meaning = " ".join([key.doc, *(f"({note})" for note in notes)])
    return f"| `{key.name}` | {shown} | {meaning} |"
