"""A mixture of experts trains through the ordinary loop, with its load-balancing loss."""

from __future__ import annotations

from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from strop.quickstart.tiny_model import tiny_tokenizer
from tests.ppo.test_loop import run


def test_the_balance_of_experts_is_part_of_the_loss(overrides, tmp_path):
    tokenizer = tiny_tokenizer()
    config = Qwen2MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path / "experts")
    tokenizer.save_pretrained(tmp_path / "experts")
    steps = run(
        overrides,
        f"actor_rollout_ref.model.path={tmp_path}/experts",
        "actor_rollout_ref.actor.aux_loss_coef=0.01",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    )
    assert steps[1]["actor/aux_loss"] >= 2.0 - 1e-3  # at perfect balance it equals the experts per token
    assert steps[2]["training/rollout_logprobs_diff_max"] < 1e-3
