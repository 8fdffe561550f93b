"""Where a run resumes: from the latest complete checkpoint, from a named one, or from the beginning.

Also logs which settings differ from those that the checkpoint was saved with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from strop.config.aliases import flatten
from strop.run.checkpoint import layout, remote
from strop.run.checkpoint.layout import DamagedCheckpoint, read_manifest
from strop.run.checkpoint.store import load
from strop.run.checkpoint.tensor_files import Tree

log = logging.getLogger(__name__)

Reader = Callable[[Path], dict[str, Tree]]
MODES = ("auto", "disable", "resume_path")
OPTIMIZER_KEYS = {
    "actor": ("actor_rollout_ref.actor.optim.optimizer", "actor_rollout_ref.actor.checkpoint"),
    "critic": ("critic.optim.optimizer", "critic.checkpoint"),
    "model": ("optim.optimizer", "trainer.checkpoint"),
}
"""By role: the key of its optimizer, and the section of what its checkpoints contain."""


SCALE_KEYS = ("actor_rollout_ref.model.lora_alpha", "critic.model.lora_alpha", "model.lora_alpha")


@dataclass(frozen=True)
class ResumePoint:
    """A loaded checkpoint."""

    path: Path
    step: int
    parts: dict[str, Tree]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the validation that the checkpoint was saved with."""

    def refuse_other_meaning(self, now: Mapping[str, object], loaded: Mapping[str, Collection[str]]) -> None:
        """Refuse to load the state of another optimizer than that of the configuration `now`, and adapters
        that it gives another scale; `loaded` are the contents that each model loads."""
        changed = changed_values(self.parts.get("config", {}), now)
        for role, contents in loaded.items():
            key, checkpoint = OPTIMIZER_KEYS.get(role, ("", ""))
            if key in changed and "optimizer" in contents:
                was, value = changed[key]
                raise ValueError(
                    f"{key} was {was!r} and is {value!r}, whose state is another one. Set {was!r} again, or "
                    f"leave the state out with {checkpoint}.load_contents=[model,extra]."
                )
        values = flatten(now)
        for key, (was, value) in changed.items():
            if key in SCALE_KEYS and values[key.replace("alpha", "rank")]:
                raise ValueError(
                    f"{key} was {was} and is {value}: the trained adapters would be multiplied by the "
                    f"ratio of the two. Set {was} again."
                )


def resume(
    directory: str | Path,
    *,
    mode: str,
    path: str | None = None,
    copied_to: str | None = None,
    only: Callable[[str], bool] = lambda part: True,
    later: Callable[[str], bool] = lambda part: False,
) -> ResumePoint | None:
    """The checkpoint that a run starts from; None for the beginning.

    auto: the latest checkpoint in `directory`, or where it is damaged the one before it; without any complete
    one there, the copies at `copied_to`. resume_path: the folder or address `path` and no other. disable: the
    beginning. `only` and `later` are those of `load`.
    """
    home = Path(directory)
    if mode not in MODES:
        raise ValueError(f"trainer.resume_mode={mode!r} is not one of {', '.join(MODES)}.")
    if mode == "disable":
        there = layout.step_folders(home)
        if there:
            log.info(
                "Starting over (trainer.resume_mode=disable); %s has checkpoints up to %s. Those of the same "
                "step are replaced. trainer.resume_mode=auto continues from the latest.",
                home,
                there[-1].name,
            )
        return None
    read = partial(load, only=only, later=later)
    if mode == "resume_path":
        return _resume_named(home, path, read)
    return _resume_latest(home, copied_to, read)


def _resume_named(home: Path, path: str | None, read: Reader) -> ResumePoint:
    if path is None:
        raise ValueError(
            "trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder."
        )
    folder = remote.fetch(path, home) if remote.is_address(path) else Path(path).expanduser()
    if (folder / layout.LATEST).exists():
        inside = ", ".join(found.name for found in layout.step_folders(folder)) or "nothing"
        raise ValueError(
            f"trainer.resume_from_path={path} is the folder of a run; name one checkpoint inside it "
            f"({inside}), or set trainer.default_local_dir={path} and trainer.resume_mode=auto."
        )
    return _load(folder, read)


def _resume_latest(home: Path, copied_to: str | None, read: Reader) -> ResumePoint | None:
    layout.clean_up_leftovers(home)
    problems: list[str] = []
    found = _first_complete((partial(Path, folder) for folder in layout.candidates(home)), read, problems)
    if found is None and copied_to is not None:
        copies = remote.candidates(copied_to)
        found = _first_complete((partial(remote.fetch, address, home) for address in copies), read, problems)
    if found is not None:
        if problems:
            log.warning(
                "GOING BACK to %s (step %d), because of damage: %s",
                found.path,
                found.step,
                " ".join(problems),
            )
        return found
    if problems:
        raise DamagedCheckpoint(
            f"No checkpoint in {home} can be resumed: {' '.join(problems)} Restore one, or set "
            "trainer.resume_mode=disable to start over."
        )
    latest = layout.read_latest(home)
    if latest is not None:
        raise ValueError(
            f"{home / layout.LATEST} names step {latest}, but there is no checkpoint. Restore "
            f"{layout.checkpoint_folder(home, latest)}, or set trainer.resume_mode=disable to start over."
        )
    return None


def _first_complete(
    folders: Iterable[Callable[[], Path]], read: Reader, problems: list[str]
) -> ResumePoint | None:
    for folder in folders:
        try:
            return _load(folder(), read)
        except DamagedCheckpoint as error:
            problems.append(str(error))
    return None


def _load(folder: Path, read: Reader) -> ResumePoint:
    parts = read(folder)
    manifest = read_manifest(folder)
    return ResumePoint(folder.absolute(), manifest.step, parts, manifest.metrics)


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint, and point the tracker file at the one before it."""
    layout.remove(path)
    directory = path.parent
    remaining = layout.saved_checkpoints(directory)
    if not remaining:
        (directory / layout.LATEST).unlink(missing_ok=True)
    elif layout.read_latest(directory) == layout.step_of(path):
        layout.write_latest(directory, remaining[-1].step)


RESUME_KEYS = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir")
"""Settings of the resume itself, whose changes are not reported."""
MAX_REPORTED = 8


def changed_values(
    before: Mapping[str, object], now: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """(old, new) of the values that differ, by key. Keys that only one side has come from another version of
    Strop, and are left out.

    >>> changed_values({"optim": {"lr": 0.1}, "old": 1}, {"optim": {"lr": 0.2}, "new": 2})
    {'optim.lr': (0.1, 0.2)}
    """
    old = flatten(before)
    changed = {}
    for key, value in flatten(now).items():
        if key in old and key not in RESUME_KEYS and old[key] != value:
            changed[key] = (old[key], value)
    return changed


def log_config_changes(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Log changed settings, and warn about a changed model path: the weights come from the checkpoint."""
    found = changed_values(before, now)
    texts = [f"{key} was {was!r} and is {value!r}" for key, (was, value) in found.items()]
    if len(texts) > MAX_REPORTED:
        texts = [*texts[:MAX_REPORTED], f"and {len(texts) - MAX_REPORTED} more"]
    if texts:
        log.warning("Changed since the checkpoint: %s.", "; ".join(texts))
    for key, (was, value) in found.items():
        if key in ("model.path", "actor_rollout_ref.model.path", "critic.model.path"):
            log.warning(
                "%s is %s, but the run continues with the weights of its checkpoint, which began as %s. To "
                "train the new model set trainer.experiment_name to a name of its own, or "
                "trainer.resume_mode=disable.",
                key,
                value,
                was,
            )
