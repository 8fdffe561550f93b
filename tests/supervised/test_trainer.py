"""Supervised training: the numbers are the right ones, however a batch is cut, and a killed run goes on as if nothing was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from strop.backends.base import Outputs
from strop.config.compose import load
from strop.config.schema.supervised import DpoLossConfig
from strop.data.files import open_rows
from strop.preflight.examine import examine
from strop.supervised.kto import KtoTask
from strop.supervised.tasks import DpoTask, PairBatch, SftTask
from strop.supervised.trainer import EpochProgress
from tests import forked
from tests.forked import Forked
from tests.ppo.runs import same
from tests.supervised.runs import VERBS, build, lines, make_task, settings, train, weights


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("supervised"))


def plain_log_probs(task: Path, text: str) -> torch.Tensor:
    """Log-prob of each token of a text but the first, one text at a time, by transformers alone."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(task / "model"),
        AutoTokenizer.from_pretrained(task / "model"),
    )
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)


def test_the_first_loss_is_the_cross_entropy_of_the_answers_and_their_ends(task, tmp_path):
    steps = train("sft", settings(task, tmp_path, "sft"), "data.shuffle=false", "data.train_max_samples=16")
    taught = []
    for row in list(open_rows(str(task / "train.jsonl")))[:16]:
        found = plain_log_probs(task, f"{row['prompt']}{row['response']}<eos>")
        taught.append(found[-len(row["response"]) - 1 :])
    assert steps[1]["train/loss"] == pytest.approx(-torch.cat(taught).mean().item(), rel=1e-5)
    rows = [plain_log_probs(task, f"{r['prompt']}{r['response']}<eos>")[-len(r["response"]) - 1 :]
            for r in open_rows(str(task / "val.jsonl"))]  # fmt: skip
    assert steps[0]["val/loss"] == pytest.approx(-torch.cat(rows).mean().item(), rel=1e-5)


def test_the_first_losses_of_pairs(task, tmp_path):
    """The policy is its own reference at first, so DPO begins at log 2; IPO at the square of its target."""
    base = settings(task, tmp_path, "dpo")
    expected = {
        "": 0.6931472,
        "loss.type=ipo": (1 / 0.2) ** 2,
        "loss.label_smoothing=0.2": 0.6931472,
        "loss.length_normalized=true": 0.6931472,
    }
    for number, (setting, value) in enumerate(expected.items()):
        more = [f"trainer.default_local_dir={tmp_path}/{number}", "trainer.total_training_steps=2"]
        steps = train("dpo", base, *more, *([setting] if setting else []))
        assert steps[1]["train/loss"] == pytest.approx(value, rel=1e-5), setting
        assert steps[1]["train/reward_margin"] == pytest.approx(0.0, abs=1e-6)
        assert steps[2]["train/loss"] != steps[1]["train/loss"]


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        ({"reference_free": "true"}, lambda c, r: -F.logsigmoid(0.1 * (c.sum() - r.sum()))),
        (
            {"reference_free": "true", "length_normalized": "true", "label_smoothing": 0.1},
            lambda c, r: (
                -0.9 * F.logsigmoid(0.1 * (c.mean() - r.mean()))
                - 0.1 * F.logsigmoid(-0.1 * (c.mean() - r.mean()))
            ),
        ),
        (
            {"type": "simpo", "beta": 2, "target_margin": 1},
            lambda c, r: -F.logsigmoid(2 * (c.mean() - r.mean()) - 1),
        ),
        (
            {"reference_free": "true", "nll_coef": 0.5},
            lambda c, r: -F.logsigmoid(0.1 * (c.sum() - r.sum())) - 0.5 * c.mean(),
        ),
        ({"reference_free": "true", "type": "ipo"}, lambda c, r: (c.mean() - r.mean() - 5.0).square()),
        (
            {"reference_free": "true", "type": "ipo", "length_normalized": "false"},
            lambda c, r: (c.sum() - r.sum() - 5.0).square(),
        ),
    ],
    ids=["reference-free", "cdpo per token", "simpo", "nll", "ipo", "ipo, summed"],
)
def test_a_loss_of_one_batch_is_the_formula(task, tmp_path, settings_, expected):
    more = [f"loss.{key}={value}" for key, value in settings_.items()]
    more += [
        "data.shuffle=false",
        "data.train_max_samples=16",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
    ]
    steps = train("dpo", settings(task, tmp_path, "dpo"), *more)
    values = []
    for row in list(open_rows(str(task / "train.jsonl")))[:16]:
        sides = (
            plain_log_probs(task, f"{row['prompt']}{row[k]}<eos>")[-len(row[k]) - 1 :]
            for k in ("chosen", "rejected")
        )
        values.append(expected(*sides))
    assert steps[1]["train/loss"] == pytest.approx(torch.stack(values).mean().item(), rel=2e-5)


@pytest.mark.parametrize("kind", [SftTask, DpoTask, KtoTask])
def test_the_load_balancing_loss_of_a_micro_batch_has_the_weight_of_its_tokens(kind) -> None:
    task_ = kind(aux_loss_coef=0.5) if kind is SftTask else kind(DpoLossConfig(), aux_loss_coef=0.5)
    assert task_.want(training=True) == ["log_probs", "auxiliary"]
    assert task_.want(training=False) == ["log_probs"]
    lengths = [2, 2, 6, 6]
    batch = PairBatch(
        sequences=[torch.arange(length) for length in lengths],
        prompt_lengths=torch.ones(4, dtype=torch.int64),
        mask=torch.tensor([[1.0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        reference=torch.zeros(4),
        margins=torch.ones(4),
        kl=torch.zeros(4),
    )
    loss = task_.loss(batch)
    added = reported = 0.0
    for rows, auxiliary in (([0, 1], 2.0), ([2, 3], 4.0)):
        piece = batch.select(rows)
        zeros = torch.zeros_like(piece.mask)
        plain = loss(Outputs(log_probs=zeros), piece)
        value, found = loss(Outputs(log_probs=zeros, auxiliary=torch.tensor(auxiliary)), piece)
        added += float(value - plain[0])
        reported += float(found["aux_loss"])
    assert "aux_loss" not in plain[1] and reported == pytest.approx(2.0 * 4 / 16 + 4.0 * 12 / 16)
    assert added == pytest.approx(0.5 * reported, rel=1e-4)


@pytest.mark.parametrize(
    "verb", ["sft", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("rm", "dpo"))]
)
def test_micro_batches_and_packing_change_nothing(task, tmp_path, verb):
    cuts = {
        "whole": [],
        "threes": ["data.micro_batch_size_per_gpu=3"],
        "tokens": ["data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=40", "data.max_length=20"],
        "padded": ["use_remove_padding=false", "data.micro_batch_size_per_gpu=5"],
        "checkpointed": ["model.enable_gradient_checkpointing=true"],
    }
    found, losses = {}, {}
    for name, cut in cuts.items():
        steps = train(verb, settings(task, tmp_path / name, verb), *cut, "optim.lr=3e-3")
        found[name], losses[name] = weights(tmp_path / name, 8), [steps[s]["train/loss"] for s in range(1, 9)]
        assert steps[8]["val/loss"] < steps[0]["val/loss"]
    for name in cuts:
        assert losses[name] == pytest.approx(losses["whole"], rel=2e-4), name
        for weight, tensor in found[name].items():
            assert torch.allclose(tensor, found["whole"][weight], rtol=1e-3, atol=2e-4), (name, weight)


@pytest.mark.parametrize("verb", VERBS)
def test_stopping_and_resuming_gives_the_same_run(task, tmp_path, verb):
    base = settings(task, tmp_path, verb)
    straight = train(verb, base, f"trainer.default_local_dir={tmp_path}/whole", "trainer.enable_ema=true")
    cut = [f"trainer.default_local_dir={tmp_path}/cut", "trainer.enable_ema=true"]
    train(
        verb,
        base,
        *cut,
        "trainer.save_freq=3",
        "trainer.total_training_steps=3",
        "optim.total_training_steps=8",
    )
    resumed = train(verb, base, *cut)
    assert same(weights(tmp_path / "whole", 8), weights(tmp_path / "cut", 8))
    unlike = ("timing", "perf/")
    for step in range(4, 9):
        for name, value in straight[step].items():
            assert name.startswith(unlike) or resumed[step][name] == value, (step, name)


@pytest.mark.parametrize("verb", [pytest.param("sft", marks=pytest.mark.slow), "dpo"])
def test_a_killed_run_goes_on_to_the_same_weights(task, tmp_path, verb):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    base = [*settings(task, tmp_path, verb), "trainer.save_freq=1", "trainer.total_epochs=4"]
    train(verb, base, f"trainer.default_local_dir={whole}")
    command = [*base, f"trainer.default_local_dir={killed}", forked.waits_in_step(3, tmp_path)]
    first = Forked(f"strop.trainer.main_{verb}", command, tmp_path / "first.log")
    first.kill_when((killed / "global_step_2").exists)
    assert not (killed / "global_step_16").exists()
    done = forked.run(f"strop.trainer.main_{verb}", command, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert same(weights(whole, 16), weights(killed, 16))


def test_schedules(task, tmp_path):
    rates = {}
    for name in ("cosine", "wsd", "constant", "linear"):
        more = [
            f"optim.lr_scheduler={name}",
            "optim.lr_warmup_steps_ratio=0.25",
            f"trainer.default_local_dir={tmp_path}/{name}",
        ]
        steps = train(
            "sft", settings(task, tmp_path, "sft"), *more, "trainer.total_epochs=4", "optim.lr=1e-3"
        )
        rates[name] = [steps[step]["train/lr"] for step in range(1, 17)]
    for name, found in rates.items():
        assert found[:4] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3]), name
    assert rates["constant"][4:] == [1e-3] * 12
    assert rates["linear"][4:] == pytest.approx([1e-3 * (1 - k / 12) for k in range(12)])
    assert rates["wsd"][4:14] == [1e-3] * 10 and rates["wsd"][15] < 1e-3
    assert rates["cosine"][10] == pytest.approx(0.5e-3)


def test_a_model_learns_sums_and_its_folder_is_that_model(task, tmp_path):
    steps = train("sft", settings(task, tmp_path, "sft"), "trainer.total_epochs=25", "optim.lr=5e-3")
    assert steps[100]["train/loss"] < 0.3 < steps[1]["train/loss"]
    folder = tmp_path / "global_step_100" / "model" / "huggingface"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    saved = weights(tmp_path, 100)
    assert all(torch.equal(value, saved[name]) for name, value in model.named_parameters())
    right = 0
    for row in list(open_rows(str(task / "train.jsonl")))[:20]:
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        said = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        right += tokenizer.decode(said, skip_special_tokens=True) == row["response"]
    assert right >= 15, right


def test_adapters_alone_are_trained_and_saved_and_merged_for_others(task, tmp_path):
    for verb in VERBS:
        folder = tmp_path / verb
        more = ["model.lora_rank=4", "optim.lr=1e-2", f"trainer.default_local_dir={folder}"]
        steps = train(verb, settings(task, tmp_path, verb), *more)
        assert steps[8]["val/loss"] < steps[0]["val/loss"], verb
        trained = set(weights(folder, 8))
        assert all("lora_" in name or "score" in name for name in trained) and any(
            "lora_" in name for name in trained
        )
        assert any("score" in name for name in trained) == (verb == "rm")
    trainer = build("sft", settings(task, tmp_path / "sft", "sft"), "model.lora_rank=4")
    trainer.output.resume(trainer)
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "sft" / "global_step_8" / "model" / "huggingface"
    )
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, trainer.model.module.eval()(ids).logits, atol=1e-5)


def test_saving_and_validating_by_epoch_keeping_the_best(task, tmp_path):
    more = [
        "trainer.save_freq=after_each_epoch",
        "trainer.test_freq=after_each_epoch",
        "trainer.max_ckpt_to_keep=1",
    ]
    more += [
        "trainer.best_metric=val/loss",
        "trainer.total_epochs=4",
        "optim.lr=2.0",
        "optim.lr_warmup_steps=16",
    ]
    steps = train("sft", settings(task, tmp_path, "sft"), *more)
    validated = {step: found["val/loss"] for step, found in steps.items() if "val/loss" in found}
    assert set(validated) == {0, 4, 8, 12, 16}
    best = min((4, 8, 12, 16), key=validated.__getitem__)
    assert {path.name for path in tmp_path.glob("global_step_*")} == {
        f"global_step_{best}",
        "global_step_16",
    } and best != 16


def test_the_average_of_the_weights_is_exported(task, tmp_path):
    train("sft", settings(task, tmp_path, "sft"), "trainer.enable_ema=true", "trainer.ema_beta=0")
    folder = tmp_path / "global_step_8" / "model"
    now, average = (
        AutoModelForCausalLM.from_pretrained(folder / name) for name in ("huggingface", "huggingface_ema")
    )
    assert all(torch.equal(a, b) for a, b in zip(now.parameters(), average.parameters(), strict=True))


def test_a_loss_that_is_no_number_leaves_the_batch(task, tmp_path):
    trainer = build("rm", settings(task, tmp_path, "rm"), "trainer.val_before_train=false")
    with torch.no_grad():
        trainer.model.module.score.weight.fill_(float("nan"))
    with pytest.raises(
        ValueError, match=r"Step 1: The loss is nan because of rows .* Not finite in them: scores"
    ):
        trainer.fit()
    assert (tmp_path / "nonfinite_step_1" / "rows.json").exists()


def test_worker_processes_give_the_same_run(task, tmp_path):
    base = settings(task, tmp_path, "sft")
    train("sft", base, f"trainer.default_local_dir={tmp_path}/alone")
    train("sft", base, f"trainer.default_local_dir={tmp_path}/helped", "data.dataloader_num_workers=1")
    assert same(weights(tmp_path / "alone", 8), weights(tmp_path / "helped", 8))


def test_the_time_left_counts_what_this_process_did():
    now = [100.0]
    progress = EpochProgress(clock=lambda: now[0])
    progress.start(10, 30)
    now[0] = 106.0
    found = progress.after(12, tokens=50, rows=4)
    assert found["perf/eta_s"] == pytest.approx(54.0) and found["train/total_tokens"] == 50
    other = EpochProgress()
    other.load_state_dict(progress.state_dict())
    assert (other.tokens, other.rows) == (50, 4)


def test_a_generation_config_that_transformers_refuses_to_save_is_kept(task, tmp_path):
    """It loads them, and many models have one; the run must not end with its first checkpoint."""
    shutil.copytree(task / "model", tmp_path / "model")
    written = {
        "eos_token_id": [1, 2],
        "pad_token_id": 0,
        "temperature": 0.6,
        "top_p": 0.9,
        "do_sample": False,
    }
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(written))
    base = [*settings(task, tmp_path / "run", "sft"), f"model.path={tmp_path}/model"]
    train("sft", base, "trainer.total_training_steps=1", "trainer.checkpoint.save_contents=[model,hf_model]")
    export = tmp_path / "run" / "global_step_1" / "model" / "huggingface"
    kept = GenerationConfig.from_pretrained(export)
    changed = {name: getattr(kept, name) for name in written}
    assert changed == written


@pytest.mark.parametrize("verb", ["sft", "dpo"])
def test_the_model_stops_at_the_token_that_it_learned_to_end_its_turns_with(task, tmp_path, verb):
    """A base model with the template of a chat model: its EOS token ends no turn."""
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<unk>{% endif %}{% endfor %}"
    )
    base = [*settings(task, tmp_path / "run", verb), f'data.chat_template="{template}"']
    assert examine(load(f"{verb}_trainer", base)).findings == []
    train(verb, base, "trainer.total_training_steps=1")
    export = tmp_path / "run" / "global_step_1" / "model" / "huggingface"
    tokenizer = AutoTokenizer.from_pretrained(export)
    stops = GenerationConfig.from_pretrained(export).eos_token_id
    assert stops == [tokenizer.eos_token_id, tokenizer.unk_token_id]
    train(verb, settings(task, tmp_path / "plain", verb), "trainer.total_training_steps=1")
    export = tmp_path / "plain" / "global_step_1" / "model" / "huggingface"
    assert GenerationConfig.from_pretrained(export).eos_token_id == tokenizer.eos_token_id


def test_a_chat_template_of_the_run_travels_with_the_model(task, tmp_path):
    template = tmp_path / "twice.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% else %}={% endif %}{% endfor %}"
    )
    rows = lines(
        tmp_path / "chat.jsonl",
        [{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}] * 16,
    )
    more = [
        f"data.chat_template={template}",
        f"data.train_files={rows}",
        "data.val_files=null",
        "data.multiturn.enable=true",
    ]
    train("sft", settings(task, tmp_path / "run", "sft"), *more)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "global_step_2" / "model" / "huggingface")
    assert tokenizer.chat_template == template.read_text()
