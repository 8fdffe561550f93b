"""GSM8K with one of several algorithms, each with 1,024 samples per round of sampling (128 prompts x 8):

    python examples/qwen_gsm8k/algorithms.py NAME [KEY=VALUE ...]

Further keys apply to all of them, such as the path of the model or trainer.total_training_steps. After the
last step, the test questions are answered greedily (mean@1) and with eight samples at temperature 1 (mean@8).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from strop.algorithms.metrics.training import StepRecord
from strop.config.compose import Loaded, load
from strop.config.schema.ppo import PpoConfig
from strop.ppo.build import build_ppo
from strop.ppo.trainer import PpoTrainer
from strop.shared.process_setup import prepare_process

ACTOR = "actor_rollout_ref.actor."
TWO_UPDATES = [
    f"{ACTOR}ppo_mini_batch_size=64",
    f"{ACTOR}clip_ratio_high=0.28",
    f"{ACTOR}use_rollout_log_probs=true",
]
GRPO = [*TWO_UPDATES, f"{ACTOR}optim.lr_warmup_steps=0", f"{ACTOR}ppo_max_token_len_per_gpu=16384"]
ASYNC = "trainer.async_training."
ALGORITHMS = {
    "grpo": [],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-5",
        "critic.ppo_mini_batch_size=64",
        "critic.use_dynamic_bsz=true",
        "critic.ppo_max_token_len_per_gpu=16384",
        "critic.forward_max_token_len_per_gpu=16384",
        "critic.model.enable_gradient_checkpointing=false",
    ],
    "rloo": ["algorithm.adv_estimator=rloo"],
    "reinforce_plus_plus": ["algorithm.adv_estimator=reinforce_plus_plus"],
    "dapo": [
        # A step trains on the first 32 prompts (of 128, 256 ...) whose answers are not equally good.
        "data.train_batch_size=32",
        "data.gen_batch_size=128",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer.enable=true",
        "reward_model.overlong_buffer.len=128",
        f"{ACTOR}ppo_mini_batch_size=16",
        f"{ACTOR}loss_agg_mode=token-mean",
    ],
    "gspo": [
        f"{ACTOR}policy_loss.loss_mode=gspo",
        f"{ACTOR}loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}clip_ratio_low=3e-4",
        f"{ACTOR}clip_ratio_high=4e-4",
    ],
    "lora": [
        "actor_rollout_ref.model.lora_rank=32",
        "actor_rollout_ref.model.lora_alpha=64",
        f"{ACTOR}optim.lr=5e-5",
    ],
    # Old samples: clipping is around recomputed log-probs, the engine's are for importance weights.
    "one_step_off": [f"{ASYNC}enable=true", f"{ACTOR}use_rollout_log_probs=false"],
    "async_partial": [
        f"{ASYNC}enable=true",
        f"{ASYNC}partial_rollout=true",
        f"{ACTOR}use_rollout_log_probs=false",
    ],
}


class SamplesAtTheEnd(PpoTrainer):
    """After the last step, the validation also has eight samples per question."""

    def validate(self, record: StepRecord) -> None:
        super().validate(record)
        if self.step < self.total_steps or self.validator is None:
            return
        greedy = self.validator
        self.validator = replace(
            greedy,
            sampling=replace(greedy.sampling, temperature=1.0, top_p=1.0, top_k=0),
            samples_per_prompt=8,
        )
        super().validate(record)
        self.validator = greedy


def config_of(arguments: Sequence[str] | None = None) -> Loaded[PpoConfig]:
    """The configuration of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=ALGORITHMS)
    parser.add_argument("keys", nargs="*", help="KEY=VALUE")
    asked = parser.parse_args(arguments)
    folder = f"runs/qwen_gsm8k/{asked.name}"
    own = [f"trainer.experiment_name={asked.name}", f"trainer.default_local_dir={folder}"]
    file = Path(__file__).with_name("grpo.yaml")
    return load("ppo_trainer", [*GRPO, *own, *ALGORITHMS[asked.name], *asked.keys], str(file))


if __name__ == "__main__":
    prepare_process()
    build_ppo(config_of(), trainer_class=SamplesAtTheEnd).fit()
