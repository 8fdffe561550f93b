"""Composition: defaults once, overrides, user files, and refusals that help."""

from __future__ import annotations

import pytest

from strop.config.aliases import flatten
from strop.config.commandline import parse, plain_values
from strop.config.compose import load
from strop.config.hydra import compose_files
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys
from strop.config.typed import ConfigError


def refuse(*overrides: str, root: str = "ppo_trainer", **kwargs: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(root, overrides, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("root", ROOTS)
def test_every_root_composes_with_its_defaults_unchanged(root):
    loaded = load(root)
    assert loaded.notices == []
    if root != "ppo_megatron_trainer":
        assert loaded.set_by_user == {}
    else:
        assert loaded.config.actor_rollout_ref.actor.strategy == "megatron"


def test_links_follow_what_they_point_to():
    config = load(
        "ppo_trainer",
        ["actor_rollout_ref.actor.ppo_mini_batch_size=32", "critic.ppo_max_token_len_per_gpu=7"],
    ).config
    assert config.critic.ppo_mini_batch_size == 32
    assert config.reward_model.forward_max_token_len_per_gpu == 7
    assert config.trainer.default_local_dir == "checkpoints/strop/default"


def test_stages_do_not_share_a_folder():
    """A reward model that would go on from what `strop sft` left: the first commands of docs/supervised.md in a row."""
    roots = ("ppo_trainer", "sft_trainer", "rm_trainer", "dpo_trainer")
    assert len({load(root, []).config.trainer.default_local_dir for root in roots}) == 4


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("trainer.experiment_name", "2026_11_18", "2026_11_18"),
        ("+trainer.experiment_name", "0.10", "0.10"),
        ("data.train_files", "1e3", "1e3"),
        ("algorithm.rollout_correction.rollout_is_threshold", "0.5_5", "0.5_5"),
        ("algorithm.rollout_correction.rollout_is_threshold", "5", 5.0),
        ("data.train_batch_size", "1_000", 1000),
    ],
)
def test_digits_stay_as_they_are_written_where_a_key_takes_text(key, value, expected):
    """Hydra reads them as 20261118, 0.1, 1000.0 and 0.55: two runs would share a folder, a band be a number."""
    tree = flatten(load("ppo_trainer", [f"{key}={value}"]).tree())
    assert tree[key.removeprefix("+")] == expected


def test_values_are_converted_like_people_mean_them():
    config = load(
        "ppo_trainer",
        [
            "data.train_batch_size=1e2",
            "actor_rollout_ref.actor.optim.lr=1",
            "trainer.experiment_name=7",
            "trainer.logger=console",
        ],
    ).config
    assert config.data.train_batch_size == 100 and isinstance(config.data.train_batch_size, int)
    assert isinstance(config.actor_rollout_ref.actor.optim.lr, float)
    assert config.trainer.experiment_name == "7"
    assert config.trainer.logger == "console"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.trian_batch_size=3", ["data.trian_batch_size", "data.train_batch_size"]),
        ("custom_reward_functon.path=x", ["Did you mean custom_reward_function.path or"]),
        ("actor.optim.lr=1", ["Did you mean actor_rollout_ref.actor.optim.lr or"]),
        ("rollout.n=4", ["Did you mean actor_rollout_ref.rollout.n or"]),
        ("ppo_mini_batch_size=3", ["actor_rollout_ref.actor.ppo_mini_batch_size"]),
        ("actor_rollout_ref.actor.optim.lr=fast", ["expected number", "'fast'"]),
        ("data.train_batch_size=1.5", ["expected whole number", "1.5"]),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=two", ["tis_imp_ratio_cap: expected number, got 'two'"]),
        ("data.train_batch_size=inf", ["expected whole number", "inf"]),
        (f"actor_rollout_ref.actor.optim.lr={'9' * 400}", ["expected number", "999"]),
        ("critic.checkpoint.save_contents=[model,optimiser]", ["'optimiser'", "'optimizer'"]),
        ("actor_rollout_ref.actor.checkpoint.load_contents=[modell]", ["'modell'", "'model'"]),
        ("data.seed=-1", ["data.seed", "at least 0"]),
        (f"trainer.seed={10**20}", ["trainer.seed", "at most"]),
        ("data.shuffle=maybe", ["true or false", "'maybe'"]),
        ("algorithm.gamma=1.5", ["at most 1", "1.5"]),
        ("actor_rollout_ref.actor.clip_ratio_c=1", ["above 1"]),
        ("algorithm.adv_estimator=gea", ["'gea'", "'gae'"]),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanila", ["'vanilla'"]),
        ("actor_rollout_ref.actor.loss_agg_mode=token", ["token_mean", "seq_mean_token_sum"]),
        ("trainer.resume_mode=always", ["auto, disable, resume_path"]),
        ("data=3", ["data", "section"]),
        ("trainer.logger=a,b", ["[a,b]"]),
        ("plugins=mine.py", ["plugins", "list of text", "'mine.py'"]),
        ("data.train_batch_size", ["key=value"]),
        ("data.train_files=[a", ["data.train_files"]),
        ("trainer.project_name=${nowhere.to_be_found}", ["nowhere.to_be_found", "does not exist"]),
    ],
)
def test_one_clear_message(override, words):
    message = refuse(override)
    for word in words:
        assert word in message, message


def test_all_problems_are_told_at_once():
    message = refuse("data.train_batch_size=0", "algorithm.gamma=2", "trainer.device=toaster")
    assert len(message.splitlines()) == 3


def test_circles_are_refused():
    message = refuse(
        "trainer.project_name=${trainer.experiment_name}", "trainer.experiment_name=${trainer.project_name}"
    )
    assert "circle" in message


def test_user_yaml_with_defaults_and_overrides(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\ndata:\n  train_batch_size: 64\ntrainer:\n  experiment_name: ${data.train_batch_size}\n"
    )
    config = load("ppo_trainer", ["data.max_prompt_length=9"], config="mine", search=str(tmp_path)).config
    assert (config.data.train_batch_size, config.data.max_prompt_length, config.trainer.experiment_name) == (
        64,
        9,
        "64",
    )


def test_a_file_that_is_not_there_is_named_with_its_neighbours(tmp_path):
    (tmp_path / "nightly.yaml").write_text("data: {}\n")
    with pytest.raises(ConfigError, match=rf"no file {tmp_path}/nightl\.yaml\. Did you mean 'nightly'"):
        load("ppo_trainer", config=f"{tmp_path}/nightl.yaml")


def test_a_file_that_holds_a_list_is_refused(tmp_path):
    (tmp_path / "list.yaml").write_text("- data\n- trainer\n")
    with pytest.raises(ConfigError, match="'list' holds a list; a configuration holds keys and values"):
        load("ppo_trainer", config=str(tmp_path / "list.yaml"))


def test_a_file_of_verl_that_names_dataclasses(tmp_path):
    """verl's dapo_trainer.yaml, and every whole configuration that verl writes."""
    (tmp_path / "dapo.yaml").write_text(
        "hydra:\n  searchpath:\n    - file://verl/trainer/config\ndefaults:\n  - ppo_trainer\n  - _self_\n"
        "algorithm:\n  _target_: verl.trainer.config.AlgoConfig\n"
        "  filter_groups:\n    _target_: verl.trainer.config.FilterGroupsConfig\n    enable: true\n"
    )
    loaded = load("ppo_trainer", config=str(tmp_path / "dapo.yaml"))
    assert loaded.config.algorithm.filter_groups.enable
    assert len(loaded.notices) == 1 and "_target_ have no effect" in loaded.notices[0]


def test_a_group_of_the_user_is_chosen_on_the_command_line(tmp_path):
    (tmp_path / "size").mkdir()
    for name, rows in (("small", 3), ("large", 300)):
        text = f"# @package _global_\ndata:\n  train_batch_size: {rows}\n"
        (tmp_path / "size" / f"{name}.yaml").write_text(text)
    (tmp_path / "mine.yaml").write_text("defaults:\n  - ppo_trainer\n  - size: small\n  - _self_\n")
    for words, rows in (([], 3), (["size=large"], 300), (["size=large", "data.train_batch_size=7"], 7)):
        for place in ({"config": str(tmp_path / "mine.yaml")}, {"config": "mine", "search": str(tmp_path)}):
            assert load("ppo_trainer", words, **place).config.data.train_batch_size == rows


def test_user_groups_override_ours(tmp_path):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "small.yaml").write_text("ppo_mini_batch_size: 3\n")
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - override actor@actor_rollout_ref.actor: small\n  - _self_\n"
    )
    assert (
        load(
            "ppo_trainer", config=str(tmp_path / "mine.yaml")
        ).config.actor_rollout_ref.actor.ppo_mini_batch_size
        == 3
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data:\n  train_batch_size: [1\n", ["does not parse"]),
        ("data:\n\t- a\n", ["does not parse"]),
        ("defaults:\n  - nothing_here\n", ["nothing_here"]),
        (
            "defaults:\n  - ppo_trainer\n  - override actor@actor_rollout_ref.actor: dp\n",
            ["Could not find 'actor/dp'", "dp_actor"],
        ),
        ("data:\n  trian_files: x\n", ["data.trian_files", "data.train_files"]),
        ("- a\n- b\n", ["mine"]),
    ],
)
def test_broken_yaml(tmp_path, text, words):
    (tmp_path / "mine.yaml").write_text(text)
    message = refuse(config=str(tmp_path / "mine.yaml"))
    for word in words:
        assert word in message, message


def test_missing_configuration_names_the_nearest():
    assert "ppo_trainer" in refuse(config="ppo_trianer")
    assert "no folder" in refuse(config="x", search="/nowhere/at/all")


def test_relative_and_environment_interpolation_work(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_NAME", "blue")
    (tmp_path / "mine.yaml").write_text(
        "trainer:\n  project_name: ${oc.env:RUN_NAME}\n  experiment_name: ${.project_name}2\n"
    )
    trainer = load("ppo_trainer", config=str(tmp_path / "mine.yaml")).config.trainer
    assert (trainer.project_name, trainer.experiment_name) == ("blue", "blue2")


def test_plugins_are_loaded_before_names_are_checked(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from strop.catalog import ADVANTAGES\n\n@ADVANTAGES.register('own_estimator', needs=('group',))\ndef own(rewards, mask): ...\n"
    )
    loaded = load("ppo_trainer", [f"plugins=[{file}]", "algorithm.adv_estimator=own-estimator"])
    assert loaded.config.algorithm.adv_estimator == "own-estimator"


def test_a_broken_plugin_is_named(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def f(:\n")
    with pytest.raises(ValueError, match=r"broken.py does not parse: .*line 1"):
        load("ppo_trainer", [f"plugins=[{file}]"])


def test_every_inert_key_says_why_when_it_is_set():
    inert = [key for key in keys(ROOTS["ppo_trainer"]) if key.inert]
    assert len(inert) > 50
    for key in inert[:5]:
        notices = load(
            "ppo_trainer", [f"{key.path}={key.default if key.default is not None else 'null'}"]
        ).notices
        assert notices == [f"{key.path} has no effect: {key.inert}."] or key.default is None


@pytest.mark.parametrize(
    "value",
    ["3", "-3", "+4", "0", "007", "1e-6", "1E5", ".5", "5.", "1_000", "true", "False", "NULL", "abc", "a-b_c.d/e", "/x/y.parquet",
     "s3://b/k", "nan", "inf", "1a", "a:b", "x@y", "50%", "a+b", "-", "", "a b", "'q'", "[1,2]", "[a,b]", "[console]", "[0.9,0.95]", "[]", "[a, b]", "[[1],2]", "[true,null]", "[a,'b']", "{a: 1}", "~/x", "a=b", "1-2", "."],
)  # fmt: skip
def test_plain_words_and_numbers_mean_the_same_with_and_without_hydra(value):
    override = f"++trainer.project_name={value}"
    quick = plain_values([override])
    if quick is not None:
        assert quick == flatten(compose_files("ppo_trainer", [override], None, None)["trainer"], "trainer.")
    if value in ("3", "1e-6", "true", "abc", "/x/y.parquet"):
        assert quick is not None


def test_a_group_can_be_chosen_on_the_command_line():
    config = load(
        "ppo_trainer", ["actor@actor_rollout_ref.actor=megatron_actor", "data.train_batch_size=3"]
    ).config
    assert config.actor_rollout_ref.actor.strategy == "megatron" and config.data.train_batch_size == 3


@pytest.mark.parametrize(
    "command",
    [
        "python my_agent.py {task}",
        "python a.py --x=1 '{task}' {task_file}",
        "docker run -e A=b image, x [y] {task}",
        "sh -c 'a \\'b\\' \"c\"' d",
        "'my program' x 'y'",
        "a 'b",
    ],
)
def test_the_command_of_an_agent_is_taken_as_it_is_written(command):
    key = "actor_rollout_ref.rollout.agent.command"
    config = load("ppo_trainer", [f"{key}={command}"]).config
    assert config.actor_rollout_ref.rollout.agent.command == command
    quoted = load("ppo_trainer", [f'{key}="python a.py {{task}}"']).config
    assert quoted.actor_rollout_ref.rollout.agent.command == "python a.py {task}"


@pytest.mark.parametrize("name", ["mine.yml", "mine.yaml"])
def test_both_endings_of_yaml_files(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("data: {train_batch_size: 7}\n")
    (tmp_path / "over.yaml").write_text(f"defaults:\n  - {name}\n  - _self_\n")
    monkeypatch.chdir(tmp_path)
    for place in ({"config": name}, {"config": name, "search": str(tmp_path)}, {"config": "over.yaml"}):
        assert load("ppo_trainer", **place).config.data.train_batch_size == 7


def test_an_empty_section_has_its_defaults(tmp_path):
    """All keys of a section are comments: YAML says null."""
    file = tmp_path / "mine.yaml"
    file.write_text("trainer:\n  # seed: 3\nactor_rollout_ref: {actor: {optim: }}\ncritic:\n")
    loaded = load("ppo_trainer", ["critic.grad_clip=0.5"], config=str(file))
    assert loaded.tree() == load("ppo_trainer", ["critic.grad_clip=0.5"]).tree()
    assert loaded.notices == []


def test_a_section_that_is_a_value_is_named(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: 5\ncritic: [a]\n")
    message = refuse(config=str(tmp_path / "mine.yaml"))
    assert message.splitlines() == [
        "trainer: expected a section with keys such as trainer.total_epochs, got 5.",
        "critic: expected a section with keys such as critic.enable, got ['a'].",
    ]


def test_a_section_can_be_that_of_another_key(tmp_path):
    (tmp_path / "mine.yaml").write_text("critic: {optim: '${actor_rollout_ref.actor.optim}'}\n")
    words = ["actor_rollout_ref.actor.optim.lr=0.5"]
    assert load("ppo_trainer", words, config=str(tmp_path / "mine.yaml")).config.critic.optim.lr == 0.5


def test_references_inside_lists_are_resolved(monkeypatch):
    monkeypatch.setenv("DATA", "/data")
    words = [
        "data.train_files=['${oc.env:DATA}/a.parquet',b.parquet]",
        "data.val_files=${data.train_files.1}",
    ]
    data = load("ppo_trainer", words[:1]).config.data
    assert data.train_files == ["/data/a.parquet", "b.parquet"]
    assert load("ppo_trainer", ["data.train_files=[a,b]", words[1]]).config.data.val_files == "b"
    assert "data.train_files.2, which does not exist" in refuse(
        "data.train_files=[a,b]", "data.val_files=${data.train_files.2}"
    )


def test_what_only_a_run_of_hydra_has_is_refused():
    assert "Write the value itself" in refuse("trainer.default_local_dir=${hydra:runtime.output_dir}")


def test_the_search_path_of_a_file_is_kept_beside_ours(tmp_path):
    """verl's own folder need not exist; its files are among ours."""
    groups = tmp_path / "groups"
    (groups / "size").mkdir(parents=True)
    (groups / "size" / "small.yaml").write_text("# @package _global_\ndata: {train_batch_size: 3}\n")
    (tmp_path / "mine.yaml").write_text(
        f"hydra:\n  searchpath:\n    - file://verl/trainer/config\n    - file://{groups}\n"
        "defaults:\n  - ppo_trainer\n  - size: small\n  - _self_\n"
    )
    assert load("ppo_trainer", config=str(tmp_path / "mine.yaml")).config.data.train_batch_size == 3


def test_a_folder_is_added_to_the_built_in_ones(tmp_path):
    """--config-dir adds a folder behind the others; --config-path is where the file itself is."""
    own = tmp_path / "it's mine"
    (own / "experiment").mkdir(parents=True)
    (own / "experiment" / "small.yaml").write_text("# @package _global_\ndata: {seed: 3}\n")
    (own / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {seed: 4}\n")
    (own / "ppo_trainer.yaml").write_text("data: {seed: 5}\n")
    other = tmp_path / "other"
    other.mkdir()
    (other / "his.yaml").write_text("defaults: [ppo_trainer, experiment: small, _self_]\n")
    (other / "experiment").mkdir()
    (other / "experiment" / "large.yaml").write_text("# @package _global_\ndata: {seed: 6}\n")

    def seed(*words: str) -> int:
        asked = parse(words)
        return load("ppo_trainer", asked.overrides, asked.config, asked.search).config.data.seed

    added = f"--config-dir={own}"
    assert seed(added) == 1 and seed(added, "--config-name", "ppo_trainer") == 1
    assert seed(added, "+experiment=small") == 3
    assert seed(added, "--config-name=mine") == 4 and seed(added, "-cn", "mine", "+experiment=small") == 3
    assert seed("-cd", str(own), f"--config-path={other}", "--config-name=his") == 3
    assert seed(added, "-cd", str(other), "+experiment=large") == 6
    assert seed(added, "-cd", str(other), "+experiment=small") == 3
    with pytest.raises(ConfigError, match=r"--config-dir and hydra.searchpath= are one setting"):
        seed(added, f"hydra.searchpath=[file://{other}]")
    with pytest.raises(ConfigError, match=r"--config-dir: there is no folder .*/nowhere"):
        seed("--config-dir", f"{tmp_path}/nowhere")
    with pytest.raises(ConfigError, match=r"other has no ppo_trainer\. With --config-dir"):
        seed("--config-path", str(other), "--config-name", "ppo_trainer")


def test_variables_of_the_environment_are_text(tmp_path):
    """Ray and subprocess refuse anything else."""
    variables = "ray_kwargs.ray_init.runtime_env.env_vars"
    (tmp_path / "mine.yaml").write_text(
        "ray_kwargs: {ray_init: {runtime_env: {env_vars: {A: 1, B: true, C: null, D: x}}}}\n"
    )
    words = [
        f"+{variables}.E=0.10",
        f"+{variables}.F=True",
        "trainer.worker_env.G=1",
        f"+{variables}.H='a b'",
    ]
    ray = load("ppo_trainer", words, str(tmp_path / "mine.yaml")).config.ray_kwargs.ray_init
    assert ray["runtime_env"] == {
        "env_vars": {"A": "1", "B": "true", "D": "x", "E": "0.10", "F": "True", "G": "1", "H": "a b"}
    }
