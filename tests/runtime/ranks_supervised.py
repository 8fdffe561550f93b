"""sft, rm and dpo as one of several ranks, beside one process; started by test_local.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config.compose import load
from strop.supervised.build import build_supervised_trainer
from tests.backends.ranks import here
from tests.supervised.runs import VERBS, make_task, metrics, settings, weights

PLAIN = ["optim.optimizer=SGD", "optim.lr=0.1"]
"""AdamW makes full steps of gradients that are 0 but for rounding."""
MORE = {"sft": ["ulysses_sequence_parallel_size=2"], "rm": [], "dpo": ["loss.precompute_ref=true"]}
ASKED = {"sft": [], "rm": [], "dpo": ["loss.precompute_ref=false"]}


@pytest.mark.parametrize("verb", VERBS)
def test_supervised_training_is_that_of_one_process(verb, tmp_path):
    assert_alike(verb, MORE[verb], tmp_path)


@pytest.mark.parametrize("verb", VERBS)
def test_shared_matrices_teach_what_one_process_teaches(verb, tmp_path):
    """DPO asks its reference, which is shared alike, in every step."""
    assert_alike(verb, ["tensor_parallel_size=2", *ASKED[verb]], tmp_path)


def test_ranks_agree_about_what_the_reference_must_read(tmp_path, monkeypatch):
    """Validation rows that are training rows: rank 0 stores their log-probs while other ranks look for them."""
    place = Path(here().broadcast_object(str(tmp_path)))
    if here().is_rank0:
        make_task(place)
    else:
        monkeypatch.setattr("strop.supervised.reference.read_tensors", lambda path: {})
    here().all_gather_object(None)
    world = [f"trainer.n_gpus_per_node={here().world}", "trainer.device=cpu", "trainer.total_epochs=1"]
    asked = [*settings(place, place / "run", "dpo"), *world, f"data.val_files={place}/train.jsonl"]
    build_supervised_trainer(load("dpo_trainer", asked), ranks=here()).fit()


def assert_alike(verb: str, more: list[str], tmp_path: Path) -> None:
    place = Path(here().broadcast_object(str(tmp_path)))
    if here().is_rank0:
        make_task(place)
        build_supervised_trainer(
            load(f"{verb}_trainer", [*settings(place, place / "one", verb), *PLAIN])
        ).fit()
    here().all_gather_object(None)
    world = [f"trainer.n_gpus_per_node={here().world}", "trainer.device=cpu", "trainer.enable_ema=true"]
    asked = [*settings(place, place / "many", verb), *PLAIN, *world, *more]
    build_supervised_trainer(load(f"{verb}_trainer", asked), ranks=here()).fit()
    here().all_gather_object(None)
    if here().is_rank0:
        expected, found = weights(place / "one", 8), weights(place / "many", 8)
        for name, weight in expected.items():
            assert (weight - found[name]).abs().max() <= 1e-5 * weight.abs().max(), name
        one, many = metrics(place / "one"), metrics(place / "many")
        for step in one:
            assert many[step].keys() == one[step].keys()
            for name in {"train/loss", "train/grad_norm", "val/loss"} & one[step].keys():
                assert many[step][name] == pytest.approx(one[step][name], rel=1e-4), (step, name)
        assert (place / "many/global_step_8/model/huggingface_ema/model.safetensors").exists()
    here().all_gather_object(None)
