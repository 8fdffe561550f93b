"""Checks of a chat template with the tokens that end a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.rules import ConfigFinding
from strop.config.schema.data import DataConfig
from strop.config.schema.inference import GenerationDataConfig
from strop.config.schema.model import ModelConfig
from strop.config.schema.supervised import SupervisedDataConfig
from strop.data.report import probe_template
from strop.models.generation.settings import eos_ids_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def template_findings(
    tokenizer: PreTrainedTokenizerBase,
    model: ModelConfig,
    data: DataConfig | GenerationDataConfig | SupervisedDataConfig,
    *,
    template: str | None,
    learns_to_stop: bool = False,
) -> list[ConfigFinding]:
    """Findings about a chat template; None is the tokenizer's."""
    found = probe_template(
        tokenizer,
        template=template,
        kwargs=data.apply_chat_template_kwargs,
        plain=not data.apply_chat_template,
        further_stop_ids=eos_ids_of(model),
        learns_to_stop=learns_to_stop,
    )
    return [ConfigFinding(finding.level, "chat template", finding.message) for finding in found]
