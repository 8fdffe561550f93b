"""Keyword arguments of the advantage estimator and the policy loss: `algorithm.adv_kwargs` and
`actor_rollout_ref.actor.policy_loss.kwargs`.

Each value goes to the chosen function under its own name. Names and types are checked against the signature
of that function before the run. A built-in function is imported for this only if a keyword argument is set.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from strop.catalog import ADVANTAGES, POLICY_LOSSES
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.reflect import type_name
from strop.config.typed import ConfigError, convert
from strop.registry import Entry, nearest

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
CORRECTION = "algorithm.rollout_correction"

PLAIN_TYPES = (bool, int, float, str, type(None))

# Arguments that the trainer fills from the batch. They are never hyperparameters.
ADVANTAGE_INPUTS = (
    "rewards",
    "mask",
    "groups",
    "values",
    "reward_baselines",
    "old_log_probs",
    "sum_pi_squared",
    "entropy",
    "rollout_is_weights",
    "reward_components",
    "component_weights",
)
LOSS_INPUTS = (
    "log_probs",
    "old_log_probs",
    "advantages",
    "mask",
    "rollout_weights",
    "rollout_log_probs",
)

# Arguments that have configuration keys, as verl spells them: argument -> keys that set it.
ADVANTAGE_KEYS = {
    "gamma": ("algorithm.gamma",),
    "lam": ("algorithm.lam",),
    "norm_by_std": ("algorithm.norm_adv_by_std_in_grpo",),
    "normalisation": ("algorithm.norm_adv_by_std",),
    "component_weights": ("algorithm.gdpo_reward_weights",),
    "compat": ("algorithm.compat",),
}
LOSS_KEYS = {
    "clip_low": (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio"),
    "clip_high": (f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio"),
    "clip_c": (f"{ACTOR}.clip_ratio_c",),
    "tau_pos": (f"{ACTOR}.tau_pos",),
    "tau_neg": (f"{ACTOR}.tau_neg",),
    "clip_cov_ratio": (f"{LOSS}.clip_cov_ratio",),
    "clip_cov_lb": (f"{LOSS}.clip_cov_lb",),
    "clip_cov_ub": (f"{LOSS}.clip_cov_ub",),
    "kl_cov_ratio": (f"{LOSS}.kl_cov_ratio",),
    "ppo_kl_coef": (f"{LOSS}.ppo_kl_coef",),
    "dro_beta": (f"{LOSS}.dro_beta",),
}
BYPASS_KEYS = {
    "loss_type": (f"{CORRECTION}.loss_type",),
    "rollout_is": (f"{CORRECTION}.rollout_is",),
    "rollout_is_threshold": (f"{CORRECTION}.rollout_is_threshold",),
    "rollout_is_batch_normalize": (f"{CORRECTION}.rollout_is_batch_normalize",),
    "rollout_rs": (f"{CORRECTION}.rollout_rs",),
    "rollout_rs_threshold": (f"{CORRECTION}.rollout_rs_threshold",),
}


@dataclass(frozen=True)
class KeywordProblem:
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


@dataclass(frozen=True)
class KeywordArguments:
    """The keyword arguments that a configuration sets for one registered function."""

    section: str
    """Configuration key of the mapping."""
    values: Mapping[str, object]
    entry: Entry
    """The function in its registry."""
    inputs: tuple[str, ...]
    """Arguments that the trainer fills from the batch."""
    keys: Mapping[str, tuple[str, ...]]
    """Arguments that also have configuration keys."""

    def converted(self) -> dict[str, object]:
        """The values in the types that the function declares. Raises ConfigError for a wrong name or type."""
        if not self.values:
            return {}
        problems = list(self._wrong_values())
        if problems:
            raise ConfigError([str(problem) for problem in problems])
        hints = _annotations(self.entry.load())
        made = {}
        for name, value in self.values.items():
            made[name] = _converted(hints.get(name, Any), value)
        return made

    def problems(self, set_by_user: Mapping[str, object]) -> Iterator[KeywordProblem]:
        """Everything that is wrong. `set_by_user` holds the configuration keys that the user set."""
        is_imported = not isinstance(self.entry.target, str)
        if not self.values and not is_imported:
            return
        yield from self._missing_values()
        yield from self._wrong_values()
        for name, value in self.values.items():
            for key in self.keys.get(name, ()):
                if set_by_user.get(key) is not None and name not in self.inputs:
                    yield KeywordProblem(
                        f"{self.section}.{name}",
                        f"{value!r}, but {key}={set_by_user[key]} sets the same argument of "
                        f"{self.entry.name}. Set only one of the two keys.",
                    )

    def _missing_values(self) -> Iterator[KeywordProblem]:
        """Hyperparameters without a default that nothing sets."""
        for parameter in self._hyperparameters():
            name = parameter.name
            if parameter.default is parameter.empty and name not in self.keys and name not in self.values:
                yield KeywordProblem(
                    f"{self.section}.{name}",
                    f"not set, but {self.entry.name} needs {name}, which has no default. The trainer itself "
                    f"passes {', '.join(self.inputs)}.",
                )

    def _wrong_values(self) -> Iterator[KeywordProblem]:
        """Names that the function does not take, and values of a wrong type."""
        hints = _annotations(self.entry.load())
        names = [parameter.name for parameter in self._hyperparameters()]
        for name, value in self.values.items():
            key = f"{self.section}.{name}"
            if name in self.inputs:
                yield KeywordProblem(key, self._is_an_input(name))
            elif name not in names and not self._takes_any_name():
                yield KeywordProblem(key, self._unknown_name(name, names))
            elif not _fits(hints.get(name, Any), value):
                yield KeywordProblem(
                    key, f"{self.entry.name} expects {_in_words(hints[name])}, got {value!r}."
                )

    def _is_an_input(self, name: str) -> str:
        message = f"the trainer passes {name} to {self.entry.name}; it is no hyperparameter."
        if name in self.keys:
            message += f" Set {self.keys[name][0]}."
        return message

    def _unknown_name(self, name: str, names: list[str]) -> str:
        message = f"{self.entry.name} takes {', '.join(names) or 'no hyperparameters'}."
        close = nearest(name, names)
        if close:
            message += f" Did you mean {' or '.join(close)}?"
        return message

    def _hyperparameters(self) -> list[inspect.Parameter]:
        """The parameters of the function that a configuration may set."""
        found = []
        for parameter in inspect.signature(self.entry.load()).parameters.values():
            by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if by_name and parameter.name not in self.inputs:
                found.append(parameter)
        return found

    def may_read(self, name: str) -> bool:
        """Whether the function takes this argument. Of a built-in one, which is not imported for this, the
        facts say what it needs."""
        if self.entry.source == "built-in":
            return False
        return self._takes_any_name() or name in inspect.signature(self.entry.load()).parameters

    def _takes_any_name(self) -> bool:
        parameters = inspect.signature(self.entry.load()).parameters.values()
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def advantage_kwargs(config: PpoConfig) -> KeywordArguments:
    """The keyword arguments of the advantage estimator."""
    algorithm = config.algorithm
    return KeywordArguments(
        section="algorithm.adv_kwargs",
        values=algorithm.adv_kwargs,
        entry=ADVANTAGES.entry(algorithm.adv_estimator),
        inputs=ADVANTAGE_INPUTS,
        keys=ADVANTAGE_KEYS,
    )


def policy_loss_name(config: PpoConfig) -> str:
    """The policy loss that is trained: bypass mode has one of its own."""
    if config.algorithm.rollout_correction.bypass_mode:
        return "bypass_mode"
    return config.actor_rollout_ref.actor.policy_loss.loss_mode


def policy_loss_kwargs(config: PpoConfig) -> KeywordArguments:
    """The keyword arguments of the policy loss."""
    settings = config.actor_rollout_ref.actor.policy_loss
    keys = LOSS_KEYS
    if config.algorithm.rollout_correction.bypass_mode:
        keys = {**LOSS_KEYS, **BYPASS_KEYS}
    return KeywordArguments(
        section=f"{LOSS}.kwargs",
        values=settings.kwargs,
        entry=POLICY_LOSSES.entry(policy_loss_name(config)),
        inputs=LOSS_INPUTS,
        keys=keys,
    )


@functools.cache
def _annotations(function: Callable[..., object]) -> Mapping[str, Any]:
    """Types of the parameters. Empty if an annotation cannot be evaluated: then no type is checked."""
    try:
        return typing.get_type_hints(function)
    except (NameError, AttributeError, TypeError):
        return {}


def _in_words(annotation: Any) -> str:
    """An annotation as an error message prints it."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_in_words(option) for option in typing.get_args(annotation))
    if origin is Literal:
        return " or ".join(repr(value) for value in typing.get_args(annotation))
    if annotation in PLAIN_TYPES or origin is not None:
        return type_name(annotation)
    return getattr(annotation, "__name__", str(annotation))


def _fits(annotation: Any, value: object) -> bool:
    try:
        _converted(annotation, value)
    except (TypeError, ValueError):
        return False
    return True


def _converted(annotation: Any, value: object) -> object:
    """`value` in the annotated type. Raises TypeError or ValueError if it does not fit."""
    if annotation in (Any, object):
        return value
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        return _converted_union(typing.get_args(annotation), value)
    if origin is Literal:
        if value in typing.get_args(annotation):
            return value
        raise TypeError(value)
    if annotation in PLAIN_TYPES or origin in (list, dict):
        return convert(annotation, value)
    if isinstance(value, origin or annotation):
        return value
    raise TypeError(value)


def _converted_union(options: tuple[Any, ...], value: object) -> object:
    """`value` as the first option that has exactly its type, else as the first option that it fits."""
    exact = [option for option in options if option is type(value)]
    for option in [*exact, *options]:
        try:
            return _converted(option, value)
        except (TypeError, ValueError):
            continue
    raise TypeError(value)
