#!/usr/bin/env bash
# GSM8K with one of seven algorithms at the same number of samples per step (128 prompts x 8):
#   examples/qwen_gsm8k/algorithms.sh NAME [KEY=VALUE ...]
# NAME: grpo, ppo, rloo, reinforce_plus_plus, dapo, gspo, lora. Further keys are for all of them, such as the path
# of the model or trainer.total_training_steps.
set -euo pipefail

name="${1:?name one of grpo, ppo, rloo, reinforce_plus_plus, dapo, gspo, lora}"
shift
actor=actor_rollout_ref.actor
case "$name" in
  grpo) keys=() ;;
  ppo) keys=(
    algorithm.adv_estimator=gae critic.optim.lr=1e-5 critic.ppo_mini_batch_size=128
    critic.use_dynamic_bsz=true critic.ppo_max_token_len_per_gpu=32768 critic.forward_max_token_len_per_gpu=32768
    critic.model.enable_gradient_checkpointing=false
  ) ;;
  rloo) keys=(algorithm.adv_estimator=rloo) ;;
  reinforce_plus_plus) keys=(algorithm.adv_estimator=reinforce_plus_plus) ;;
  dapo) keys=(
    $actor.clip_ratio_low=0.2 $actor.clip_ratio_high=0.28 $actor.loss_agg_mode=token-mean $actor.ppo_mini_batch_size=32
    algorithm.filter_groups.enable=true algorithm.filter_groups.metric=score
    reward_model.overlong_buffer.enable=true reward_model.overlong_buffer.len=128
  ) ;;
  gspo) keys=(
    $actor.policy_loss.loss_mode=gspo $actor.loss_agg_mode=seq-mean-token-mean $actor.ppo_mini_batch_size=32
    $actor.clip_ratio_low=3e-4 $actor.clip_ratio_high=4e-4
  ) ;;
  lora) keys=(
    actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=64 $actor.optim.lr=3e-5
  ) ;;
  *) echo "unknown algorithm $name" >&2; exit 2 ;;
esac
exec "${STROP:-strop}" ppo examples/qwen_gsm8k/grpo.yaml trainer.experiment_name="$name" \
  trainer.default_local_dir="runs/qwen_gsm8k/$name" "${keys[@]}" "$@"
