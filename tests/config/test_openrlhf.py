"""OpenRLHF commands mean the same here: units, defaults, whole commands of three generations, and errors."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.arithmetic import plan_ppo, plan_supervised
from strop.config.compose import load
from strop.config.openrlhf.command import TRAINERS
from strop.config.openrlhf.convert import ROOT_OF_VERB, convert, hydra_argument
from strop.config.openrlhf.rules import OUT_OF_REACH
from strop.config.openrlhf.table import VERBS, names_of
from strop.config.rules import check
from tests.config.openrlhf_commands import (
    ACTOR,
    COMMANDS,
    DPO_COMMAND,
    G1_COMMAND,
    G2_COMMAND,
    G3_COMMAND,
    RM_COMMAND,
    ROLLOUT,
    SFT_COMMAND,
    WORKED_EXAMPLE,
    composed,
    ppo,
    sample_words,
    values,
)

# --- units ---------------------------------------------------------------------------------------------------------------


def test_the_worked_example():
    conversion = convert([WORKED_EXAMPLE])
    plan = plan_ppo(composed(conversion).config, rows=1024)
    assert plan.steps_per_epoch == 32
    assert plan.sequences_per_step == 256
    assert plan.updates_per_step == 2 and not plan.on_policy
    assert plan.accumulation == 4
    found = values(conversion)
    assert found["data.train_batch_size"] == 32 and found[f"{ROLLOUT}.n"] == 8
    assert found[f"{ACTOR}.ppo_mini_batch_size"] == 16 and found[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] == 4
    assert 256 // (found[f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"] * 8) == 8  # experience passes
    assert any(
        "256 samples per step, 2 updates of 128 samples, 4 accumulation passes" in note
        for note in conversion.notes
    )


def test_a_batch_that_cuts_a_group_is_refused():
    with pytest.raises(ValueError, match=r"--train_batch_size 128 counts samples.*is 3.*126 or 129"):
        ppo("--n_samples_per_prompt", 3, "--train_batch_size", 128)
    with pytest.raises(ValueError, match=r"--train\.batch_size 128 is more than a step has.*64 samples"):
        ppo("--rollout.batch_size", 32, "--rollout.n_samples_per_prompt", 2)


def test_forward_micro_batches_reach_every_role():
    found = ppo("--micro_rollout_batch_size", 4, "--reward_pretrain", "rm")
    for key in (
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "critic.forward_micro_batch_size_per_gpu",
        "reward_model.micro_batch_size_per_gpu",
    ):
        assert found[key] == 4


@pytest.mark.parametrize(("steps", "warmup"), [(-1, 0), (0, 2), (10, 12)])
def test_freezing_steps(steps, warmup):
    assert ppo("--freezing_actor_steps", steps)["trainer.critic_warmup"] == warmup


def test_kl_in_the_reward_is_the_default():
    conversion = convert(["train_ppo_ray"])
    found = values(conversion)
    assert found["algorithm.use_kl_in_reward"] is True and found["algorithm.kl_ctrl.kl_coef"] == 0.01
    written = next(o for o in conversion.overrides if o.key == "algorithm.kl_ctrl.kl_coef")
    assert written.implied and written.reason.startswith("OpenRLHF's default")


def test_kl_in_the_loss():
    found = ppo("--use_kl_loss", "--init_kl_coef", 1e-3, "--kl_estimator", "k3")
    assert found[f"{ACTOR}.use_kl_loss"] is True and found["algorithm.use_kl_in_reward"] is False
    assert found[f"{ACTOR}.kl_loss_coef"] == 1e-3 and found[f"{ACTOR}.kl_loss_type"] == "low_var_kl"
    assert (
        ppo("--use_kl_loss", "--use_kl_estimator_k3")[f"{ACTOR}.kl_loss_type"] == "low_var_kl"
    )  # how early 2025 said it
    assert ppo("--use_kl_loss")[f"{ACTOR}.kl_loss_type"] == "kl"  # k1 by default, low_var_kl here


@pytest.mark.parametrize(("there", "here"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_estimators(there, here):
    assert ppo("--algo.kl.estimator", there)["algorithm.kl_penalty"] == here


def test_no_kl_and_adaptive_kl():
    off = ppo("--init_kl_coef", 0)
    assert off["algorithm.use_kl_in_reward"] is False and "algorithm.kl_ctrl.kl_coef" not in off
    adaptive = ppo("--kl_target", 0.1)
    assert adaptive["algorithm.kl_ctrl.type"] == "adaptive" and adaptive["algorithm.kl_ctrl.target_kl"] == 0.1
    assert ppo("--kl_target", 0.1, "--kl_horizon", 500)["algorithm.kl_ctrl.horizon"] == 500


def test_dual_clip_off_means_out_of_reach():
    assert ppo()[f"{ACTOR}.clip_ratio_c"] == OUT_OF_REACH > 2.718281828**20
    assert ppo("--dual_clip", 3)[f"{ACTOR}.clip_ratio_c"] == 3.0


@pytest.mark.parametrize(
    ("there", "here", "by_std"),
    [
        ("gae", "gae", None),
        ("reinforce", "reinforce_plus_plus", None),
        ("reinforce_baseline", "reinforce_plus_plus_baseline", None),
        ("rloo", "rloo", None),
        ("group_norm", "grpo", None),
        ("dr_grpo", "grpo", False),
    ],
)
def test_estimators(there, here, by_std):
    found = ppo("--advantage_estimator", there, "--n_samples_per_prompt", 8)
    assert found["algorithm.adv_estimator"] == here
    assert found.get("algorithm.norm_adv_by_std_in_grpo") is by_std
    assert any(key.startswith("critic.") for key in found) == (there == "gae")


def test_group_estimators_need_a_group():
    with pytest.raises(
        ValueError, match="group_norm compares the samples of a prompt, but --n_samples_per_prompt is 1"
    ):
        ppo("--advantage_estimator", "group_norm")


def test_a_critic_flag_without_a_critic_is_reported():
    conversion = convert(
        [
            "train_ppo_ray",
            "--advantage_estimator",
            "rloo",
            "--n_samples_per_prompt",
            "2",
            "--critic_learning_rate",
            "1e-5",
        ]
    )
    assert ("--critic_learning_rate", "1e-05", "rloo has no critic") in conversion.unmapped


def test_lengths_of_the_older_and_the_newer_generation():
    old = ppo("--prompt_max_len", 512, "--generate_max_len", 256)
    assert (old["data.max_prompt_length"], old["data.max_response_length"]) == (512, 256)
    assert f"{ROLLOUT}.max_model_len" not in old
    new = ppo("--data.max_len", 4096)
    assert (
        new["data.max_prompt_length"],
        new["data.max_response_length"],
        new[f"{ROLLOUT}.max_model_len"],
    ) == (
        4095,
        4095,
        4096,
    )
    assert new["data.truncation"] == "left"
    assert ppo("--data.max_len", 4096, "--rollout.max_new_tokens", 1024)["data.max_response_length"] == 1024
    single = ppo(trainer="train_ppo")
    assert (single["data.max_prompt_length"], single["data.max_response_length"]) == (1024, 1024)


def test_zero_stage_precision_and_shard_groups():
    key = f"{ACTOR}.fsdp_config"
    assert ppo("--zero_stage", 3)[f"{key}.reshard_after_forward"] is True
    assert ppo("--zero_stage", 2)[f"{key}.reshard_after_forward"] is False
    assert ppo("--ds.param_dtype", "fp16")[f"{key}.dtype"] == "float16"
    four_bit = ppo("--load_in_4bit", "--lora_rank", 8)
    assert four_bit["actor_rollout_ref.model.quantization"] == "nf4" == four_bit["critic.model.quantization"]
    assert ppo("--zpg", 1)[f"{key}.fsdp_size"] == -1 and ppo("--zpg", 8)[f"{key}.fsdp_size"] == 8


def test_rewards():
    model = ppo("--reward_pretrain", "rm")
    assert model["reward_model.enable"] is True and model["reward_model.model.path"] == "rm"
    apart = ppo("--reward_pretrain", "rm", "--reward_num_nodes", 1, "--reward_num_gpus_per_node", 2)
    assert apart["reward_model.enable_resource_pool"] is True and apart["reward_model.n_gpus_per_node"] == 2
    assert "reward_model.nnodes" not in ppo("--reward_num_nodes", 0, "--reward_num_gpus_per_node", 0)
    assert model["critic.model.path"] == "rm"  # the critic starts from the reward model
    assert ppo("--remote_rm_url", "/code/reward.py")["reward_model.remote_url"] == "/code/reward.py"
    assert ppo("--remote_rm_url", "http://a:1/r")["reward_model.remote_url"] == "http://a:1/r"
    assert ppo("--remote_rm_url", "http://a:1/r,http://b:1/r")["reward_model.remote_url"] == [
        "http://a:1/r",
        "http://b:1/r",
    ]
    with pytest.raises(ValueError, match="several reward models"):
        ppo("--reward_pretrain", "a,b")


def test_rollout_correction_bands():
    key = "algorithm.rollout_correction"
    on = "--enable_vllm_is_correction"
    tis = ppo(on)
    assert tis[f"{key}.rollout_is"] == "token" and tis[f"{key}.rollout_is_threshold"] == 5.0
    assert ppo(on, "--vllm_is_correction_type", "icepop")[f"{key}.rollout_is_threshold"] == "0.5_5.0"
    masked = ppo(on, "--vllm_is_correction_type", "seq-mask-tis", "--vllm_is_truncated_threshold", 0.5, 4)
    assert masked[f"{key}.rollout_rs"] == "seq_mean_k1" and masked[f"{key}.rollout_rs_threshold"] == "0.25_2"
    assert ppo(on, "--use_icepop")[f"{key}.rollout_is_threshold"] == "0.5_5.0"  # how 2025 said it
    assert ppo(on, "--vllm_is_truncated_threshold", 2)[f"{key}.rollout_is_threshold"] == 2
    with pytest.raises(ValueError, match="0 < low < high"):
        ppo(on, "--vllm_is_truncated_threshold", 0, 4)


def test_schedules():
    key = f"{ACTOR}.optim"
    usual = ppo()
    assert (
        usual[f"{key}.lr_scheduler_type"],
        usual[f"{key}.lr_warmup_steps_ratio"],
        usual[f"{key}.min_lr_ratio"],
    ) == (
        "cosine",
        0.03,
        0.1,
    )
    plain = ppo("--lr_scheduler", "cosine")
    assert plain[f"{key}.min_lr_ratio"] == 0.0
    assert ppo("--lr_scheduler", "constant")[f"{key}.lr_warmup_steps_ratio"] == 0.0
    assert ppo("--lr_scheduler", "constant_with_warmup")[f"{key}.lr_warmup_steps_ratio"] == 0.03
    odd = convert(["train_ppo_ray", "--lr_scheduler", "polynomial"])
    assert any(flag == "--lr_scheduler" and "polynomial" in reason for flag, _, reason in odd.unmapped)


def test_checkpoints_keep_the_final_model():
    found = ppo("--save_path", "out")
    assert found["trainer.default_local_dir"] == "out" and found["trainer.save_freq"] > 10_000
    assert (
        "hf_model" in found[f"{ACTOR}.checkpoint.save_contents"] and found["trainer.resume_mode"] == "disable"
    )
    assert ppo("--save_steps", 20)["trainer.save_freq"] == 20
    assert ppo("--disable_ds_ckpt")[f"{ACTOR}.checkpoint.save_contents"] == ["hf_model"]


def test_evaluation_is_sampled_and_only_with_a_dataset():
    assert not any("val_kwargs" in key for key in ppo())
    found = ppo("--eval_dataset", "val.jsonl")
    assert found[f"{ROLLOUT}.val_kwargs.temperature"] == 0.6 and found[f"{ROLLOUT}.val_kwargs.n"] == 4
    assert found["trainer.val_before_train"] is False
    assert values(convert(["train_sft", "--eval_steps", "-1"]))["trainer.test_freq"] == "after_each_epoch"


def test_mixed_language_model_loss_of_2024():
    found = ppo("--pretrain_data", "a.jsonl,b.jsonl", trainer="train_ppo")
    assert found["algorithm.pretrain_files"] == ["a.jsonl", "b.jsonl"] and found["algorithm.ptx_coef"] == 0.05
    alone = convert(["train_ppo", "--ptx_coef", "0.1"])
    assert ("--ptx_coef", "0.1", "no effect without --pretrain_data") in alone.unmapped


# --- generations and whole commands --------------------------------------------------------------------------------------


def test_generations_have_their_own_defaults():
    first, second, third = (
        ppo(trainer="train_ppo"),
        ppo("--pretrain", "m"),
        ppo("--actor.model_name_or_path", "m"),
    )
    assert (
        first["data.train_batch_size"] == 512
        and second["data.train_batch_size"] == third["data.train_batch_size"] == 1024
    )
    assert (
        first["algorithm.lam"] == 0.95
        and first["critic.cliprange_value"] == 0.2
        and first["algorithm.kl_ctrl.kl_coef"] == 0.02
    )
    assert first[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-mean" and f"{ACTOR}.loss_agg_mode" not in second
    assert "algorithm.lam" not in second
    assert (
        ppo("--vllm_num_engines", 2, trainer="train_ppo")["data.train_batch_size"] == 1024
    )  # a Ray flag: not 2024's trainer


@pytest.mark.parametrize("command", COMMANDS)
def test_whole_commands_compose(command):
    conversion = convert([command])
    loaded = composed(conversion)
    for override in conversion.overrides:
        value = loaded.config
        for name in override.key.split("."):
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        assert value == override.value, override
    text = conversion.render()
    assert text.endswith("\n")
    assert all(override.key in text for override in conversion.overrides)


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_whole_commands_pass_the_rules(command):
    found = [finding for finding in check(composed(convert([command]))) if finding.level == "error"]
    # A command may ask for a logger that is not installed here; nothing else may be wrong with it.
    assert [finding for finding in found if finding.key != "trainer.logger"] == []


def test_the_2024_command():
    conversion = convert([G1_COMMAND])
    found = values(conversion)
    assert found["trainer.n_gpus_per_node"] == 4
    assert found["data.train_files"] == ["OpenRLHF/prompt-collection-v0.1", "./more.jsonl"] and found[
        "data.prompt_probs"
    ] == [
        0.4,
        0.6,
    ]
    assert found[f"{ACTOR}.ppo_mini_batch_size"] == 128 and found["critic.optim.lr"] == 9e-6
    assert found["actor_rollout_ref.model.override_config.attn_implementation"] == "flash_attention_2"
    assert [flag for flag, _, _ in conversion.unmapped] == ["--actor_init_on_gpu", "--logging_steps"]
    assert "trainer.logger" not in found  # the commented line


def test_the_flat_ray_command():
    conversion = convert([G2_COMMAND])
    found, text = values(conversion), conversion.render()
    assert found["reward_model.clip_range"] == [-5, 5] and found[f"{ACTOR}.clip_ratio_high"] == 0.28
    assert found[f"{ACTOR}.ppo_mini_batch_size"] == 16 and found["trainer.resume_mode"] == "auto"
    assert found["trainer.logger"] == ["console", "file", "wandb"]
    assert "sekrit" not in text and "hush" not in text
    assert "OpenRLHF's defaults that differ from Strop's" in text and "Flags without equivalent" in text


def test_the_dotted_command():
    found = values(convert([G3_COMMAND]))
    assert found["reward_model.remote_url"] == ["http://rm-1:5000/get_reward", "http://rm-2:5000/get_reward"]
    assert (
        found["algorithm.filter_groups.range"] == [0.0, 1.0]
        and found["reward_model.overlong_buffer.len"] == 2048
    )
    assert found[f"{ACTOR}.use_dynamic_bsz"] is True and found[f"{ACTOR}.ppo_max_token_len_per_gpu"] == 24576
    assert found["data.max_response_length"] == 6144 and found["trainer.total_epochs"] == 20


def test_the_supervised_commands():
    sft, rm, dpo = (convert([command]) for command in (SFT_COMMAND, RM_COMMAND, DPO_COMMAND))
    found = values(sft)
    assert found["trainer.n_gpus_per_node"] == 2 and found["model.target_modules"] == ["q_proj", "v_proj"]
    assert (
        found["data.input_template"] == "User: {}\nAssistant: " and found["data.response_key"] == "response"
    )
    assert plan_supervised(composed(sft).config).accumulation == 64
    assert (
        values(rm)["loss.type"] == "logexp"
        and values(rm)["trainer.n_gpus_per_node"] == 8
        and values(rm)["data.max_length"] == 512
    )
    assert "loss.fp32" not in values(rm)  # scores are in fp32 whatever the flag says
    expected = {
        "loss.type": "ipo",
        "compat": "openrlhf",  # which sums log-probs
        "loss.beta": 0.2,
        "loss.label_smoothing": 0.1,
        "loss.nll_coef": 0.3,
        "ref.param_offload": True,
    }
    assert expected.items() <= values(dpo).items() and values(dpo)["trainer.test_freq"] == 50


def test_a_conversation_column():
    found = values(convert(["train_sft", "--apply_chat_template", "--input_key", "messages", "--multiturn"]))
    assert found["data.multiturn.enable"] is True and found["data.multiturn.messages_key"] == "messages"
    assert "data.input_template" not in found
    last = values(convert(["train_sft", "--apply_chat_template", "--input_key", "messages"]))
    assert "data.multiturn.enable" not in last  # every turn would be trained, there it is the last one
    assert (last["data.prompt_key"], last["data.response_key"]) == ("messages", None)


def test_a_norm_of_zero_clips_nothing():
    for words in (["train_ppo_ray", "--max_norm", "0"], ["train_sft", "--max_norm", "0"]):
        conversion = convert(words)
        norms = [
            value for key, value in values(conversion).items() if key.endswith(("grad_clip", "clip_grad"))
        ]
        assert norms and min(norms) > 1e6
        load(ROOT_OF_VERB[conversion.verb], conversion.arguments())  # 0 is refused


def test_mixed_generations_are_read_and_mentioned():
    conversion = convert(["train_sft", "--model.model_name_or_path", "m", "--max_len", "99"])
    assert values(conversion)["data.max_length"] == 99
    assert any("mixed" in note for note in conversion.notes)


def test_the_beginning_of_a_flag_is_completed_as_argparse_does():
    conversion = convert(["train_ppo_ray", "--actor_learn=2e-6", "--critic_learning_rat", "1e-5"])
    assert values(conversion)[f"{ACTOR}.optim.lr"] == 2e-6
    assert sum("is read as" in note for note in conversion.notes) == 2
    with pytest.raises(ValueError, match="Unknown flag --max_ckpt "):  # max_ckpt_num or max_ckpt_mem
        convert(["train_ppo_ray", "--max_ckpt", "3"])


# --- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "train_ppo_ray --rollout_batchsize 8",
            r"Unknown flag --rollout_batchsize.*Did you mean 'rollout_batch_size'",
        ),
        ("train_ppo_ray --actor.adam.learning_rate 1", r"Unknown flag --actor\.adam\.learning_rate"),
        ("train_sft --prompt_data x", r"Unknown flag --prompt_data of OpenRLHF's sft trainer"),
        ("train_ppo_ray --pretrain", r"--pretrain needs a value, but none follows"),
        ("train_ppo_ray --pretrain --bf16", r"--pretrain needs a value"),
        ("train_ppo_ray --adam_betas 0.9", r"--adam_betas needs two numbers"),
        ("train_ppo_ray --zero_stage two", r"expects a whole number, but got 'two'"),
        ("train_ppo_ray --rollout_batch_size 1.5", r"expects a whole number"),
        ("train_ppo_ray --rollout_batch_size 0", r"--rollout_batch_size is 0, but must be at least 1"),
        ("train_ppo_ray --init_kl_coef nan", r"must be finite"),
        ("train_ppo_ray --init_kl_coef much", r"--init_kl_coef expects a number"),
        ("train_ppo_ray --kl_estimator k4", r"must be one of k1, k2, k3"),
        ("train_ppo_ray --packing_samples True", r"is a switch and takes no value, but 'True' follows"),
        ("train_ppo_ray --packing_samples=1", r"is a switch"),
        ("train_ppo_ray --pretrain my model", r"takes 1 value, but 'my model' follows"),
        ("train_ppo_ray stray", r"'stray' belongs to no flag"),
        ("train_ppo_ray --prompt_data_probs half,half", r"Mixture weights must be numbers"),
        ("train_ppo_ray --pretrain '${MODEL}/x'", r"write the value instead of the shell variable"),
        ("python train_kto.py --beta 1", r"train_kto \(KTO; see `strop dpo loss.type=kto`\) was removed"),
        ("python -m openrlhf.cli.train_pop", r"Unknown OpenRLHF trainer 'train_pop'.*'train_ppo'"),
        ("python run.py --lr 1", r"No OpenRLHF trainer in the command"),
        ("serve_rm --reward_pretrain m --bf16=False", r"--bf16 is a switch and takes no value, got 'False'"),
        ("serve_rm --reward_pretrain --port 5000", r"--reward_pretrain needs a value"),
        ("train_ppo_ray --pretrain 'open", r"cannot be split into words.*quotes"),
    ],
)
def test_bad_commands_say_what_is_wrong(command, message):
    with pytest.raises(ValueError, match=message):
        convert([command])


def test_an_empty_command():
    with pytest.raises(ValueError, match="No OpenRLHF trainer"):
        convert([])


_FLAGS = sorted({f"--{name}" for verb in VERBS for name in names_of(verb)})
_WORDS = st.one_of(
    st.sampled_from(_FLAGS),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["k1", "gae"]),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*TRAINERS, "ray"]), st.lists(_WORDS, max_size=8))
def test_random_words_raise_nothing_but_value_errors(trainer, words):
    try:
        conversion = convert([trainer, *words])
    except ValueError:
        return
    assert conversion.render() and conversion.arguments()


_USES = st.sampled_from(sorted(names_of("ppo"))).map(
    lambda name: sample_words(names_of("ppo")[name][0], name)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_USES, max_size=6))
def test_random_valid_flags_give_arguments_that_hydra_reads(uses):
    try:
        conversion = convert(["train_ppo_ray", *(word for use in uses for word in use)])
    except ValueError:
        return
    assert OverridesParser.create().parse_overrides(conversion.arguments())


@settings(max_examples=120, deadline=None)
@given(
    st.one_of(
        st.text(max_size=20),
        st.text(alphabet="ab1e._-+\\'\"${}[],=: \n", max_size=12),
        st.none(),
        st.booleans(),
        st.integers(),
    )
)
def test_values_survive_hydras_grammar(value):
    for written in (value, [value, "x"]):
        (override,) = OverridesParser.create().parse_overrides([hydra_argument("a.b", written)])
        assert override.value() == written


def test_a_token_budget_holds_one_sequence():
    """OpenRLHF gives a longer sequence a pass of its own."""
    command = (
        "train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset d.jsonl --data.max_len 74240 --rollout.max_new_tokens "
        "64000 --train.dynamic_batch_enable --train.max_tokens_per_gpu 16192 --rollout.max_tokens_per_gpu 40000 "
        "--ds.ring_attn_size 2 --algo.advantage.estimator rloo --rollout.n_samples_per_prompt 8 --actor.num_gpus_per_node 8"
    )
    conversion = convert(command.split())
    loaded = composed(conversion)
    actor, rollout = loaded.config.actor_rollout_ref.actor, loaded.config.actor_rollout_ref.rollout
    assert actor.ppo_max_token_len_per_gpu == 37120 and rollout.log_prob_max_token_len_per_gpu == 40000
    assert any("--train.max_tokens_per_gpu 16192 does not hold one" in note for note in conversion.notes)
    assert not [f for f in check(loaded) if "max_token_len" in f.key]


def test_odd_paths_arrive_as_they_are():
    conversion = convert(["train_ppo_ray", "--pretrain", "it's \\ odd, [really]=1", "--prompt_data", "null"])
    config = composed(conversion).config
    assert (
        config.actor_rollout_ref.model.path == "it's \\ odd, [really]=1" and config.data.train_files == "null"
    )


def test_the_reward_server_converts() -> None:

    command = (
        "python -m openrlhf.cli.serve_rm --reward_pretrain m --port 5001 --bf16 --flash_attn --batch_size 16"
    )
    conversion = convert(command.split())
    config = load("reward_server", conversion.arguments()).config
    assert conversion.verb == "serve-rm"
    assert (config.model.path, config.server.port, config.server.max_batch_size) == ("m", 5001, 16)
    assert (config.server.dtype, config.server.max_length, config.server.host) == (
        "bfloat16",
        2048,
        "0.0.0.0",
    )
    assert config.model.value_head_prefix == "value_head"
    assert [flag for flag, _, _ in conversion.unmapped] == ["--flash_attn"]
    newest = (
        "serve_rm --reward.model_name_or_path m --port 5000 --ds.param_dtype fp16 --batch_size 16 "
        "--ds.attn_implementation flash_attention_2 --reward.normalize_enable --data.max_len 8192"
    )
    conversion = convert(newest.split())
    config = load("reward_server", conversion.arguments()).config
    assert (config.model.path, config.model.value_head_prefix) == ("m", "score")
    assert (config.server.dtype, config.server.max_length, config.server.host) == ("float16", 8192, "0.0.0.0")
    assert config.server.normalize and [flag for flag, _, _ in conversion.unmapped] == [
        "--ds.attn_implementation"
    ]
    with pytest.raises(ValueError, match="bf16 or fp16, got 'int8'"):
        convert(["serve_rm", "--ds.param_dtype", "int8"])
    with pytest.raises(ValueError, match="reward_pretrain"):
        convert(["serve_rm", "--reward_pretrian", "m"])
    with pytest.raises(ValueError, match="whole number"):
        convert(["serve_rm", "--port", "x"])
