"""Keys of a configuration as keyword arguments in Python: by full name, or by a short form.

    overrides("ppo_trainer", {"max_response_length": 512, "lr": 1e-6, "rollout.n": 8})

A short form is one of SHORT_FORMS, or the end of a key's full name after a dot. If several keys end alike,
the policy's is meant before the critic's, the reference's and the reward model's; if that leaves more than
one, the name is refused with a list of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from strop.config.compose import SchemaKeys
from strop.config.openrlhf.convert import hydra_value
from strop.config.schema import ROOTS
from strop.config.typed import ConfigError, unknown_key

_TRAINER = {
    "steps": "trainer.total_training_steps",
    "total_training_steps": "trainer.total_training_steps",
    "epochs": "trainer.total_epochs",
    "batch_size": "data.train_batch_size",
    "folder": "trainer.default_local_dir",
    "seed": "trainer.seed",
    "path": "model.path",
}
_SUPERVISED = {
    **_TRAINER,
    "use_remove_padding": "use_remove_padding",
    "dtype": "model.fsdp_config.dtype",
}
SHORT_FORMS: dict[str, dict[str, str]] = {
    "ppo_trainer": {
        **_TRAINER,
        "path": "actor_rollout_ref.model.path",
        "mini_batch_size": "actor_rollout_ref.actor.ppo_mini_batch_size",
        "micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "n": "actor_rollout_ref.rollout.n",
        "dtype": "actor_rollout_ref.actor.fsdp_config.dtype",
        "temperature": "actor_rollout_ref.rollout.temperature",
        "top_k": "actor_rollout_ref.rollout.top_k",
        "top_p": "actor_rollout_ref.rollout.top_p",
        "shuffle": "data.shuffle",
        "engine": "actor_rollout_ref.rollout.name",
        "nnodes": "trainer.nnodes",
        "n_gpus_per_node": "trainer.n_gpus_per_node",
    },
    "sft_trainer": {**_SUPERVISED, "micro_batch_size": "data.micro_batch_size_per_gpu"},
    "rm_trainer": {**_SUPERVISED, "micro_batch_size": "data.micro_batch_size_per_gpu"},
    "dpo_trainer": {**_SUPERVISED, "micro_batch_size": "data.micro_batch_size_per_gpu"},
    "generation": {
        "n": "data.n_samples",
        "max_prompt_length": "rollout.prompt_length",
        "max_response_length": "rollout.response_length",
        "seed": "trainer.seed",
        "path": "model.path",
        "engine": "rollout.name",
        "n_gpus_per_node": "trainer.n_gpus_per_node",
    },
    "evaluation": {},
}
"""Short forms by root, for names that several keys share or that are shorter than any key."""
OTHER_MODELS = ("critic.", "reward_model.", "actor_rollout_ref.ref.", "ref.")


def full_key(root: str, name: str) -> str:
    """The full name of a key. A ValueError for a name that no key or several keys have."""
    schema = SchemaKeys(ROOTS[root])
    short = SHORT_FORMS.get(root, {})
    if name in short:
        return short[name]
    if schema.has(name):
        return name
    ends = []
    for key in schema.keys:
        if key.path.endswith(f".{name}") and not key.inert:
            ends.append(key.path)
    policy = [path for path in ends if not path.startswith(OTHER_MODELS)]
    found = policy or ends
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{name} is the end of several keys: {', '.join(found)}. Write one of them in full."
        )
    if "." in name:  # an old name, which `load` translates or refuses
        return name
    raise ConfigError(unknown_key(name, ROOTS[root]) + _short_hint(name, short))


def overrides(root: str, settings: Mapping[str, object]) -> list[str]:
    """The settings as words of a command line. A mapping sets the keys below it one by one."""
    words: dict[str, str] = {}
    for name, value in settings.items():
        for key, leaf in _leaves(full_key(root, name), value):
            word = f"{key}={hydra_value(leaf)}"
            if words.get(key, word) != word:
                raise ConfigError(f"{key} is set twice: {words[key]} and, by {name}, {word}.")
            words[key] = word
    return list(words.values())


def _leaves(key: str, value: object) -> list[tuple[str, object]]:
    plain = getattr(value, "item", None)  # a number of numpy or torch
    if callable(plain):
        return [(key, plain())]
    if not isinstance(value, Mapping):
        return [(key, value)]
    found: list[tuple[str, object]] = []
    for name, item in value.items():
        found += _leaves(f"{key}.{name}", item)
    return found


def _short_hint(name: str, short: Mapping[str, str]) -> str:
    from strop.registry import did_you_mean

    return did_you_mean(name, short)
