"""OpenRLHF commands of every generation, and short ways to convert them."""

from __future__ import annotations

from strop.config.compose import Loaded, load
from strop.config.openrlhf.convert import Conversion, convert
from strop.config.openrlhf.table import Row

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


WORKED_EXAMPLE = (
    "train_ppo_ray --actor_num_gpus_per_node 8 --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 128 "
    "--micro_train_batch_size 4 --micro_rollout_batch_size 4"
)

G1_COMMAND = r"""
deepspeed --num_gpus 4 --module openrlhf.cli.train_ppo \
  --pretrain OpenRLHF/Llama-2-7b-sft-model-ocra-500k \
  --reward_pretrain OpenRLHF/Llama-2-7b-rm-anthropic_hh-lmsys-oasst-webgpt \
  --save_path ./ckpt/7b_llama \
  --save_steps -1 --logging_steps 1 --eval_steps -1 \
  --micro_train_batch_size 2 --train_batch_size 128 \
  --micro_rollout_batch_size 4 --rollout_batch_size 1024 \
  --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024 \
  --zero_stage 2 --bf16 \
  --actor_learning_rate 5e-7 --critic_learning_rate=9e-6 --init_kl_coef 0.01 \
  --prompt_data OpenRLHF/prompt-collection-v0.1,./more.jsonl --prompt_data_probs 0.4,0.6 \
  --max_samples 80000 --normalize_reward --actor_init_on_gpu --adam_offload --flash_attn --gradient_checkpointing
  # --use_wandb {wandb_token}
"""

G2_COMMAND = r"""
ray job submit --address="http://127.0.0.1:8265" \
  --runtime-env-json='{"working_dir": "/openrlhf", "env_vars": {"WANDB_API_KEY": "hush"}}' \
  -- python3 -m openrlhf.cli.train_ppo_ray \
  --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8 \
  --critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
  --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --vllm_gpu_memory_utilization 0.5 \
  --init_kl_coef 1e-3 --gamma 1.0 --use_kl_loss --kl_estimator k3 --advantage_estimator group_norm \
  --pretrain OpenRLHF/Llama-3-8b-sft-mixture --remote_rm_url /openrlhf/reward_func.py \
  --save_path /ckpt/final --ckpt_path /ckpt --save_hf_ckpt --load_checkpoint \
  --micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 128 \
  --n_samples_per_prompt 8 --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024 --max_samples 100000 \
  --zero_stage 3 --param_dtype bf16 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 \
  --eps_clip_low_high 0.2 0.28 --reward_clip_range -5 5 --adam_betas 0.9 0.95 \
  --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --label_key answer --apply_chat_template \
  --gradient_checkpointing --packing_samples --vllm_sync_backend nccl --enforce_eager --vllm_enable_sleep \
  --deepspeed_enable_sleep --use_wandb sekrit
"""

G3_COMMAND = r"""
python3 -m openrlhf.cli.train_ppo_ray \
  --actor.model_name_or_path Qwen/Qwen3-4B --reward.remote_url http://rm-1:5000/get_reward,http://rm-2:5000/get_reward \
  --actor.num_nodes 1 --actor.num_gpus_per_node 8 --vllm.num_engines 8 --train.colocate_all \
  --data.prompt_dataset ./dapo.jsonl --data.input_key prompt --data.label_key label --data.apply_chat_template \
  --data.max_len 8192 --rollout.max_new_tokens 6144 --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 \
  --train.batch_size 1024 --train.dynamic_batch_enable --train.max_tokens_per_gpu 24576 --train.num_episodes 20 \
  --algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 0 --actor.eps_clip_low_high 0.2 0.27 \
  --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.0 1.0 \
  --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop \
  --reward.overlong_buffer_len 2048 --actor.adam.lr 5e-7 --actor.lr_scheduler constant_with_warmup \
  --eval.dataset ./aime.jsonl --eval.steps 10 --ckpt.save_steps 20 --logger.tensorboard_dir ./tb --train.full_determinism_enable
"""

SFT_COMMAND = (
    "deepspeed --include localhost:0,1 --module openrlhf.cli.train_sft --max_len 4096 --dataset Open-Orca/OpenOrca "
    "--input_key question --output_key response --train_batch_size 256 --micro_train_batch_size 2 --max_samples 500000 "
    "--pretrain meta-llama/Meta-Llama-3-8B --save_path ./checkpoint/llama3-8b-sft --zero_stage 2 --max_epochs 1 "
    "--packing_samples --bf16 --learning_rate 5e-6 --gradient_checkpointing --lora_rank 64 --target_modules q_proj v_proj"
)
RM_COMMAND = (
    "torchrun --nproc_per_node=8 -m openrlhf.cli.train_rm --model.model_name_or_path sft --data.dataset pref.jsonl "
    "--data.chosen_key chosen --data.rejected_key rejected --data.apply_chat_template --model.loss_type logexp --adam.lr 9e-6"
)
DPO_COMMAND = (
    "train_dpo --pretrain sft --ref_pretrain sft --dataset pref.jsonl --beta 0.2 --ipo --label_smoothing 0.1 "
    "--nll_loss_coef 0.3 --ref_offload --max_len 8192 --apply_chat_template --eval_dataset val.jsonl --eval_steps 50"
)
COMMANDS = [WORKED_EXAMPLE, G1_COMMAND, G2_COMMAND, G3_COMMAND, SFT_COMMAND, RM_COMMAND, DPO_COMMAND]


def values(conversion: Conversion) -> dict[str, object]:
    return {override.key: override.value for override in conversion.overrides}


def ppo(*words: object, trainer: str = "train_ppo_ray") -> dict[str, object]:
    return values(convert([trainer, *map(str, words)]))


def composed(conversion: Conversion) -> Loaded:
    return load(f"{conversion.verb}_trainer", conversion.arguments())


def nested(flat: dict[str, object]) -> dict[str, object]:
    tree: dict[str, object] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        level = tree
        for section in sections:
            level = level.setdefault(section, {})
        level[name] = value
    return tree


def sample_words(row: Row, flag: str) -> list[str]:
    """A use of the flag with a value that fits it."""
    words = {
        "switch": [],
        "pair": ["0.1", "0.3"],
        "band": ["0.1", "0.3"],
        "words": ["a", "b"],
        "int": ["3"],
        "int+": ["128"],
        "float": ["0.5"],
    }
    if "|" in row.type:
        return [f"--{flag}", row.type.split("|")[-1]]
    return [f"--{flag}", *words.get(row.type, ["0.5,0.5" if row.transform == "floats" else "text"])]
