"""A run of GRPO on an environment that verifiers ships: its taskset `textarena` plays Hangman of the package textarena.

`make test-environments` runs it. The game reads its words from NLTK's corpus `words`, which NLTK downloads; here the
test writes a corpus of one word, so that no network is needed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from strop.quickstart.tiny_model import tiny_model
from tests.data.tokens import CHATML
from tests.ppo.runs import run

pytestmark = pytest.mark.environments
WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", "[E]", "[A]"]


def guessing_model(folder: Path) -> Path:
    """A small random model whose answers are guesses. It reads every other character as <unk>, and each of its
    words survives the way through text and back, which the endpoint insists on."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    known = "|".join([*map(re.escape, WORDS), r"[\s\S]"])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(known), behavior="isolated")
    backend.decoder = decoders.Fuse()
    end = "<|im_end|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token=end)
    tokenizer.chat_template = CHATML
    tiny_model(tokenizer, hidden=32, layers=2, max_model_len=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_step_of_grpo_on_a_game_that_verifiers_ships(tmp_path, monkeypatch):
    corpus = tmp_path / "nltk" / "corpora" / "words"
    corpus.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (corpus / name).write_text("ee\n")
    monkeypatch.setattr("nltk.data.path", [str(tmp_path / "nltk")])
    monkeypatch.setattr("nltk.download", lambda *_, **__: True)
    rows = [{"prompt": [{"role": "user", "content": "unused"}], "data_source": "game"} for _ in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = run(
        [
            f"data.train_files={tmp_path}/rows.jsonl",
            f"data.val_files={tmp_path}/rows.jsonl",
            "data.train_batch_size=2",
            "data.max_prompt_length=1400",
            "data.max_response_length=1600",
            f"actor_rollout_ref.model.path={guessing_model(tmp_path / 'model')}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.actor.optim.lr=2e-2",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.environment=verifiers:textarena",
            "+actor_rollout_ref.rollout.environment_kwargs.taskset.game=Hangman-v0",
            "algorithm.adv_estimator=grpo",
            "trainer.total_training_steps=1",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            f"trainer.default_local_dir={tmp_path}/run",
            "trainer.logger=file",
        ]
    )
    assert steps[1]["agent/episodes"] == 8 and steps[1]["agent/failed"] == 0
    # One guess wins or another loses: the groups differ, so the step has gradients.
    assert 0 < steps[1]["critic/score/mean"] < 1
    assert steps[1]["actor/grad_norm"] > 0
