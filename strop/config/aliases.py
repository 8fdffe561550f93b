"""Old names of keys. Files and commands of every version of verl load: a key that was renamed is translated
here, with a notice.

A row is (pattern, new names, why). `*` stands for any beginning of a path. A new name may use `{prefix}`; a
function instead of names turns the value into a mapping of new names to values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from strop.config.typed import ConfigError


@dataclass(frozen=True)
class Alias:
    old: str
    new: tuple[str, ...] | Callable[[str, object], dict[str, object]]
    why: str
    verbs: tuple[str, ...] = ()  # root names it is limited to

    def match(self, path: str) -> str | None:
        """The part of `path` that `*` stands for ("" without one); None when the pattern does not match."""
        if self.old.endswith(".*"):
            start = self.old[:-1]
            return path[len(start) :] if path.startswith(start) else None
        if self.old.startswith("*."):
            tail = self.old[1:]
            return path[: -len(tail)] if path.endswith(tail) and len(path) > len(tail) else None
        return "" if path == self.old else None


def _under(new: str) -> Callable[[str, object], dict[str, object]]:
    return lambda prefix, value: {new.format(prefix=prefix): value}


def _ratio_cap(prefix: str, cap: object) -> dict[str, object]:
    correction = "algorithm.rollout_correction."
    if isinstance(cap, int | float | str) and float(cap) > 0:
        return {f"{correction}rollout_is": "token", f"{correction}rollout_is_threshold": cap}
    return {f"{correction}rollout_is": None}


SUPERVISED = ("sft_trainer", "rm_trainer", "dpo_trainer")
NSYS = "global_profiler.global_tool_config.nsys."

ALIASES: tuple[Alias, ...] = (
    Alias(
        "*.checkpoint.contents",
        ("{prefix}.checkpoint.save_contents", "{prefix}.checkpoint.load_contents"),
        "split in two",
    ),
    Alias("ray_init.timeline_json_file", ("ray_kwargs.timeline_json_file",), "moved"),
    Alias("ray_init.*", _under("ray_kwargs.ray_init.{prefix}"), "moved"),
    Alias("trainer.profile_steps", ("global_profiler.steps",), "moved"),
    Alias(
        "trainer.controller_nsight_options.*", _under(NSYS + "controller_nsight_options.{prefix}"), "moved"
    ),
    Alias("trainer.worker_nsight_options.*", _under(NSYS + "worker_nsight_options.{prefix}"), "moved"),
    Alias("trainer.val_generations_to_log_to_wandb", ("trainer.log_val_generations",), "renamed"),
    Alias(
        "*.engine_kwargs.swap_space",
        ("{prefix}.engine_kwargs.vllm.swap_space",),
        "engine arguments now name their engine",
    ),
    Alias(
        "*.update_weights_bucket_megabytes",
        lambda prefix, value: (
            {}
            if prefix.endswith("checkpoint_engine")
            else {f"{prefix}.checkpoint_engine.update_weights_bucket_megabytes": value}
        ),
        "moved",
    ),
    Alias("optim.warmup_steps_ratio", ("optim.lr_warmup_steps_ratio",), "renamed"),
    Alias("*.optim.warmup_steps_ratio", ("{prefix}.optim.lr_warmup_steps_ratio",), "renamed"),
    Alias("optim.warmup_style", ("optim.lr_scheduler",), "renamed"),
    Alias("*.optim.warmup_style", ("{prefix}.optim.lr_scheduler_type",), "renamed"),
    Alias("optim.lr_scheduler_type", ("optim.lr_scheduler",), "its name in supervised training", SUPERVISED),
    Alias("*.profiler.discrete", ("{prefix}.profiler.tool_config.nsys.discrete",), "moved"),
    Alias("*.fsdp_config.min_num_params", ("{prefix}.fsdp_config.wrap_policy.min_num_params",), "moved"),
    Alias("*.fsdp_config.cpu_offload", ("{prefix}.fsdp_config.offload_policy",), "renamed"),
    Alias("*.fsdp_config.offload_params", ("{prefix}.fsdp_config.param_offload",), "renamed"),
    Alias("actor_rollout_ref.actor.tis_imp_ratio_cap", _ratio_cap, "now part of rollout_correction"),
    Alias(
        "algorithm.rollout_correction.use_policy_gradient",
        lambda _, value: {"algorithm.rollout_correction.loss_type": "reinforce" if value else "ppo_clip"},
        "renamed",
    ),
    Alias("async_training.*", _under("trainer.async_training.{prefix}"), "moved"),
    Alias(
        "reward_model.reward_kwargs.overlong_buffer_cfg.*",
        _under("reward_model.overlong_buffer.{prefix}"),
        "a section of its own",
    ),
    Alias("model.partial_pretrain", ("model.path",), "one name for every trainer", SUPERVISED),
    Alias("data.messages_key", ("data.multiturn.messages_key",), "moved", SUPERVISED),
    Alias("data.tools_key", ("data.multiturn.tools_key",), "moved", SUPERVISED),
    Alias("data.enable_thinking_key", ("data.multiturn.enable_thinking_key",), "moved", SUPERVISED),
)


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Leaves of a nested mapping by dotted path; an empty mapping is a leaf."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found.update(flatten(value, f"{path}."))
        else:
            found[path] = value
    return found


def nest(leaves: Mapping[str, object]) -> dict[str, object]:
    """The opposite of `flatten`."""
    tree: dict[str, object] = {}
    for path, value in leaves.items():
        *parents, name = path.split(".")
        at = tree
        for part in parents:
            below = at.setdefault(part, {})
            if not isinstance(below, dict):
                raise ConfigError(f"{path}: {part} is both a value ({below!r}) and a section.")
            at = below
        if isinstance(at.get(name), dict) and value == {}:
            continue
        at[name] = value
    return tree


def translate(leaves: Mapping[str, object], root: str) -> tuple[dict[str, object], list[str]]:
    """Leaves under their current names, and one notice per name that was translated."""
    current: dict[str, object] = {}
    notices: list[str] = []
    renamed: dict[str, tuple[str, object]] = {}
    for path, value in leaves.items():
        found = _find(path, value, root)
        if found is None:
            current[path] = value
            continue
        alias, new = found
        if value is None:  # an old key left empty says nothing
            continue
        for name, moved in new.items():
            renamed[name] = (path, moved)
        if new:
            notices.append(f"{path} is now {' and '.join(new)} ({alias.why}).")
    for name, (old, value) in renamed.items():
        if name in current and current[name] != value:
            raise ConfigError(
                f"{old}={value!r} and {name}={current[name]!r} are two names of one setting. Set only {name}."
            )
        current[name] = value
    return current, notices


def _find(path: str, value: object, root: str) -> tuple[Alias, dict[str, object]] | None:
    """The first alias that matches a path, with the new names and values."""
    for alias in ALIASES:
        if alias.verbs and root not in alias.verbs:
            continue
        prefix = alias.match(path)
        if prefix is None:
            continue
        if not callable(alias.new):
            return alias, {name.format(prefix=prefix): value for name in alias.new}
        new = alias.new(prefix, value)
        if new:
            return alias, new
    return None
