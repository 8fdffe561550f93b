"""Lengths of verl's asynchronous trainers, in the units of Strop."""

from __future__ import annotations

from collections.abc import Mapping

ASYNC_LENGTHS = ("rollout.total_rollout_steps", "rollout.test_freq")
"""Keys of verl's asynchronous trainers that other keys turn into trainer.total_training_steps and
trainer.test_freq."""
SYNC_STEPS = "trainer.async_training.trigger_parameter_sync_step"
V1_SYNC_STEPS = 4
"""verl's default of trainer.v1.separate_async.parameter_sync_step."""


def fill_async_lengths(leaves: dict[str, object], written: Mapping[str, object]) -> list[str]:
    """Translate the lengths of verl's asynchronous trainers in `leaves`, the keys that the user set; returns
    the notices. `written`: the keys as the user wrote them.

    They count a step as `require_batches` mini-batches, the run in prompts, and validations and checkpoints
    in weight syncs. Only verl's fully asynchronous trainer has a section `async_training` of its own.
    """
    notices: list[str] = []

    def fill(path: str, value: int, why: str) -> None:
        leaves[path] = value
        notices.append(f"{why}: {path}={value}.")

    is_separate = written.get("trainer.v1.trainer_mode") == "separate_async"
    if is_separate and written.get("trainer.use_v1") is not False and SYNC_STEPS not in leaves:
        fill(SYNC_STEPS, V1_SYNC_STEPS, "verl's default with trainer.v1.trainer_mode=separate_async")
    fully_async = any(name.startswith("async_training.") for name in written)
    mini = leaves.get("actor_rollout_ref.actor.ppo_mini_batch_size")
    batches = leaves.get("trainer.async_training.require_batches") or 1
    steps_per_sync = leaves.get(SYNC_STEPS) or 1
    prompts = leaves.pop("rollout.total_rollout_steps", None)
    syncs = leaves.pop("rollout.test_freq", None)
    if not isinstance(batches, int) or not isinstance(steps_per_sync, int):
        return notices  # the type check of the schema reports it

    def fill_syncs(path: str) -> None:
        count = leaves.get(path)
        if isinstance(count, int) and count > 0:
            why = f"{path}={count} weight syncs, one every {steps_per_sync} steps"
            fill(path, count * steps_per_sync, why)

    is_async = any(key.startswith("trainer.async_training.") for key in leaves)
    if leaves.get("data.train_batch_size") == 0 and isinstance(mini, int) and is_async:
        why = f"data.train_batch_size=0 with {batches} mini-batches (require_batches) of {mini} prompts"
        fill("data.train_batch_size", batches * mini, why)
    if isinstance(prompts, int) and isinstance(mini, int) and "trainer.total_training_steps" not in leaves:
        why = f"rollout.total_rollout_steps={prompts} prompts, {batches * mini} per step"
        fill("trainer.total_training_steps", max(1, prompts // (batches * mini)), why)
    if isinstance(syncs, int) and syncs > 0:
        why = f"rollout.test_freq={syncs} weight syncs, one every {steps_per_sync} steps"
        fill("trainer.test_freq", syncs * steps_per_sync, why)
    elif fully_async and steps_per_sync > 1:
        fill_syncs("trainer.test_freq")
    if fully_async and steps_per_sync > 1:
        fill_syncs("trainer.save_freq")
    return notices
