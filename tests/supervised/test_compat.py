"""`compat` of sft, rm and dpo: what it changes, and that training losses stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.backends.base import Outputs
from strop.compat import FRAMEWORKS, conventions
from strop.config.openrlhf.convert import convert
from strop.config.schema.supervised import DpoLossConfig
from strop.data.chat import Rendered
from strop.data.examples import PreferencePair
from strop.supervised.tasks import DpoTask, PairBatch, pair_batch
from tests.supervised.runs import build, make_task, settings

LOG_PROBS = -torch.tensor(
    [[0.5, 1.0, 0.2, 0.4], [2.0, 0.1, 0.3, 0.0], [1.5, 0.0, 0.0, 0.0], [0.7, 0.9, 0.0, 0.0]]
)
LENGTHS = torch.tensor([4, 3, 1, 2])
MASK = (torch.arange(4) < LENGTHS[:, None]).float()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("compat"))


@pytest.mark.parametrize(
    ("verb", "compat"), [("sft", "strop"), ("sft", "verl"), ("rm", "openrlhf"), ("dpo", "trl")]
)
def test_warm_up_begins_as_in_the_framework(small: Path, tmp_path: Path, verb: str, compat: str) -> None:
    keys = ["loss.reference_free=true"] if verb == "dpo" else []
    keys += [f"compat={compat}", "optim.lr=1e-3", "optim.lr_warmup_steps=4"]
    trainer = build(verb, settings(small, tmp_path, verb), *keys)
    with trainer.output:
        optimizer = trainer.model.optimizer  # type: ignore[attr-defined]
        first = optimizer.param_groups[0]["lr"]
    assert first == pytest.approx(2.5e-4 if compat == "strop" else 0.0)


@pytest.mark.parametrize("compat", FRAMEWORKS)
def test_the_validation_loss_of_sft_is_the_mean_of_the_framework(
    small: Path, tmp_path: Path, compat: str
) -> None:
    trainer = build("sft", settings(small, tmp_path, "sft"), f"compat={compat}")
    with trainer.output:
        record = trainer.output.record(0)
        trainer.validate(record)
        assert trainer.validation is not None
        found = []
        for items in trainer.validation:
            batch = trainer.collect(items)
            assert batch is not None
            log_probs = trainer.model.forward(batch, ["log_probs"], trainer.micro).log_probs
            assert log_probs is not None
            tokens = float(batch.mask.sum())
            found.append((float(-(log_probs * batch.mask).sum()) / tokens, tokens, len(batch)))
    assert [rows for _, _, rows in found] == [16, 3]
    weights = {
        "strop": [tokens for _, tokens, _ in found],
        "verl": [1.0, 1.0],
        "openrlhf": [1.0, 1.0],
        "trl": [16.0, 3.0],
    }[compat]
    mean = sum(weight * loss for weight, (loss, _, _) in zip(weights, found)) / sum(weights)
    assert trainer.output.validation["val/loss"] == pytest.approx(mean, rel=1e-6)


def pair_loss(compat: str, config: DpoLossConfig, rows: slice = slice(None)) -> Tensor:
    """The part of the loss that a micro-batch of `rows` has."""
    loss = DpoTask(config, rules=conventions(compat)).loss(pairs(slice(None)))
    return loss(Outputs(log_probs=LOG_PROBS[rows] * MASK[rows]), pairs(rows))[0]


def pairs(rows: slice) -> PairBatch:
    sides = [Rendered([1] * (1 + int(n)), [0] + [1] * int(n)) for n in LENGTHS[rows]]
    batch = pair_batch(
        [PreferencePair(chosen, rejected) for chosen, rejected in zip(sides[0::2], sides[1::2])]
    )
    batch.mask = MASK[rows]
    return batch


@pytest.mark.parametrize(
    ("compat", "normalized", "averages"),
    [
        ("strop", None, True),
        ("trl", None, True),
        ("openrlhf", None, False),
        ("openrlhf", True, True),
        ("strop", False, False),
    ],
)
def test_log_probs_of_ipo(compat: str, normalized: bool | None, averages: bool) -> None:
    config = DpoLossConfig(type="IPO", beta=0.1, length_normalized=normalized)  # case does not matter
    answers = LOG_PROBS.sum(-1)
    if averages:
        answers = answers / LENGTHS
    expected = (answers[0::2] - answers[1::2] - 5.0).square().mean()
    torch.testing.assert_close(pair_loss(compat, config), expected)


def test_the_likelihood_of_chosen_answers() -> None:
    """TRL averages the tokens of a micro-batch, and micro-batches; OpenRLHF and we average answers."""
    config = DpoLossConfig(type="dpo", beta=0.1, nll_coef=0.5)
    sums = LOG_PROBS.sum(-1)
    preference = -F.logsigmoid(0.1 * (sums[0::2] - sums[1::2])).mean()
    answers = -(sums[0::2] / LENGTHS[0::2]).mean()
    for compat in ("strop", "openrlhf"):
        torch.testing.assert_close(pair_loss(compat, config), preference + 0.5 * answers)
    tokens = -sums[0::2].sum() / LENGTHS[0::2].sum()
    torch.testing.assert_close(pair_loss("trl", config), preference + 0.5 * tokens)
    cut = pair_loss("trl", config, slice(0, 2)) + pair_loss("trl", config, slice(2, 4))
    torch.testing.assert_close(cut, preference + 0.5 * answers)  # one pair each


@pytest.mark.parametrize("verb", ["sft", "rm", "dpo"])
def test_converted_commands_set_the_switch(verb: str) -> None:
    command = f"deepspeed --module openrlhf.cli.train_{verb} --pretrain m --dataset d"
    assert "compat=openrlhf" in convert(command.split()).arguments()
