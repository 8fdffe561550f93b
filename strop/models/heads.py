"""The scalar head of critics (per token) and reward models (per sequence).

A critic or reward model is a transformer body and a linear map of its last hidden state to one number, called
`score`. In memory there is one class per architecture, whatever the folder was: a language model (the head is
new), AutoModelForSequenceClassification or AutoModelForTokenClassification with one label, or OpenRLHF's body
with a head of another name. It is saved so that AutoModelForSequenceClassification loads it (token
classification when the head has a bias). The body of a model that takes images has its vision tower;
transformers has no classifiers of that kind, so that folder is read by Strop alone.

Also output heads of language models that are weights of their own, although config.json ties them to the
embedding.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForTokenClassification
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from strop.models.files.weights import open_weights, refuse_mismatch, weight_files, weights_of
from strop.models.load import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
HEAD = "score"
# Names under which folders keep the head: transformers' two, and the value head of TRL.
_OTHER_NAMES = ("classifier", r"v_head\.summary")


class _BodyAndScore(GenericForTokenClassification):
    """transformers' class, with a forward pass that reads only the last states: its own one wants attention
    weights, which the bodies of Mamba families do not have."""

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> TokenClassifierOutput:
        body = getattr(self, self.base_model_prefix)
        states = body(input_ids, **inputs).last_hidden_state
        return TokenClassifierOutput(logits=self.score(self.dropout(states)))


def scalar_class(config: PreTrainedConfig, *, bias: bool = False) -> type[PreTrainedModel]:
    """The class `body + score` of this architecture, with its vision tower if it has one."""
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if getattr(config, "vision_config", None) is not None and (
        type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    ):
        known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in known:
        raise ValueError(
            f"No decoder is known for model_type={config.model_type!r}, so it can carry no value or reward "
            "head."
        )
    language = known[type(config)]
    family = next(parent for parent in language.__mro__ if parent.__name__.endswith("PreTrainedModel"))
    stem = re.sub(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$", "", language.__name__)
    name = f"{stem}ForSequenceClassification"
    if bias:
        name = f"{stem}ForTokenClassification"
    if known is MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        _same_names_in_files(name, language.__name__, str(config.model_type))
    # In another module it would be custom code to transformers, which then leaves buffers that no file has as
    # uninitialized memory (the multipliers of Falcon-H1).
    attributes = {"base_model_prefix": family.base_model_prefix, "__module__": family.__module__}
    return type(name, (_BodyAndScore, family), attributes)


def _same_names_in_files(name: str, language: str, model_type: str) -> None:
    """Folders of models with a vision tower keep weights under names of their first release. transformers
    knows them by class: the class `name` has those of the class `language`."""
    renamed = get_checkpoint_conversion_mapping(language) or get_checkpoint_conversion_mapping(model_type)
    if renamed is not None:
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)


def new_scalar_model(config: PreTrainedConfig, *, bias: bool = False, seed: int = 0) -> PreTrainedModel:
    """Random weights in every layer."""
    _one_label(config, bias)
    model = scalar_class(config, bias=bias)(config)
    initialise_head(model, seed)
    return model


def empty_scalar_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The module of `load_scalar_model` before weights are loaded; build it on the meta device."""
    bias = (config.architectures or [""])[0].endswith("TokenClassification")
    _one_label(config, bias)
    model = scalar_class(config, bias=bias)(config)
    config.value_head_prefix = HEAD
    return model


def _one_label(config: PreTrainedConfig, bias: bool) -> None:
    config.num_labels = 1
    config.token_classification_bias = bias
    config.classifier_dropout = 0.0


def load_scalar_model(
    path: str,
    config: PreTrainedConfig,
    *,
    head_name: str = HEAD,
    new_head: bool,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **arguments: Any,
) -> PreTrainedModel:
    """Body and head from `path`. A folder without a head gets a new one when `new_head`, and is refused
    otherwise.

    A new head is normal with deviation 1 / (hidden + 1), so that first values are near 0.
    """
    saved_as = (config.architectures or [""])[0]
    bias = saved_as.endswith("TokenClassification")
    _one_label(config, bias)
    name = getattr(config, "value_head_prefix", None) or head_name
    others = [other for other in (re.escape(name), *_OTHER_NAMES) if other != HEAD]
    mapping = {rf"^(?:{'|'.join(others)})\.": f"{HEAD}."}
    cls: Any = scalar_class(config, bias=bias)
    with weights_of(path):
        model, report = cls.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            key_mapping=mapping,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **arguments,
        )
    _check_body(path, report)
    wrong = [entry for entry in report["mismatched_keys"] if HEAD in str(entry[0])]
    if wrong:
        raise ValueError(
            f"The head of {path!r} has shape {tuple(wrong[0][1])}, but a value or reward model has one "
            f"label: {tuple(wrong[0][2])}. Train it with num_labels=1."
        )
    if f"{HEAD}.weight" in report["missing_keys"]:
        if not new_head:
            raise ValueError(
                f"{path!r} (saved as {saved_as or 'an unnamed class'}) holds no head called {name!r}, so it "
                "cannot score. Give a sequence-classification model with one label, or name its head with "
                "value_head_prefix."
            )
        initialise_head(model, seed)
    config.value_head_prefix = HEAD
    return model


def _check_body(path: str, report: Mapping[str, Any]) -> None:
    missing = [key for key in report["missing_keys"] if not key.startswith(f"{HEAD}.")]
    if missing:
        raise ValueError(
            f"{path!r} lacks {len(missing)} weights of the model it claims to be, for instance "
            f"{sorted(missing)[:3]}."
        )
    refuse_mismatch(
        path, [entry for entry in report["mismatched_keys"] if not entry[0].startswith(f"{HEAD}.")]
    )


def initialise_head(model: nn.Module, seed: int = 0) -> None:
    """Small random weights, so that first values are near 0."""
    head = scalar_head(model)
    with torch.no_grad():
        noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
        head.weight.copy_(noise / (head.in_features + 1))
        if head.bias is not None:
            head.bias.zero_()


def scalar_head(model: nn.Module) -> nn.Linear:
    """The map to one number; refuses a model without one."""
    head = getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ValueError(
            f"{type(model).__name__} has no head {HEAD!r} with one output; values and scores need a critic "
            "or a reward model."
        )
    return head


@dataclass(frozen=True)
class RewardStatistics:
    """Mean and standard deviation of a reward model's scores over its evaluation data; a run uses (score -
    mean) / std."""

    mean: float = 0.0
    std: float = 1.0


def reward_statistics(config: PreTrainedConfig) -> RewardStatistics:
    """What OpenRLHF's reward trainer (and ours) wrote into config.json; 0 and 1 when nothing is there."""
    mean = float(getattr(config, "mean", 0.0) or 0.0)
    std = float(getattr(config, "std", 1.0) or 1.0)
    return RewardStatistics(mean, max(std, 1e-8))


def set_reward_statistics(config: PreTrainedConfig, statistics: RewardStatistics) -> None:
    """Write them into the configuration that is saved with the model."""
    config.mean = statistics.mean
    config.std = statistics.std


def wrong_head(folder: Path, *, wanted: str) -> str | None:
    """Why a folder cannot be what is `wanted`, by its config.json: "language", "scalar" (a head may be new),
    "reward"."""
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    saved_as = (said.get("architectures") or [""])[0]
    classifier = saved_as.endswith(("SequenceClassification", "TokenClassification"))
    labels = len(said.get("id2label") or "01")  # transformers writes down any number but two
    if wanted == "language" and classifier:
        return f"it holds a classifier ({saved_as}), but a language model is needed."
    if wanted != "language" and classifier and labels != 1:
        return f"its head ({saved_as}) has {labels} labels, but a reward is one number: num_labels=1."
    if (
        wanted == "reward"
        and saved_as.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
        and "value_head_prefix" not in said
    ):
        return (
            f"it holds a language model ({saved_as}) without a score head. `strop rm` makes a reward model "
            "of it; strop ppo can ask it as a judge (reward_model.judge.enable=true)."
        )
    return None


def pad_token_other_than_eos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """A padding token that is not the end-of-sequence token; None if the tokenizer has none.

    transformers' classifiers read the score at the last token that is not padding. Where the end-of-text
    token is the padding too, they would read it one token early.
    """
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    if pad is not None and pad != end:
        return int(pad)
    others = [
        tokenizer.unk_token_id,
        *sorted(tokenizer.all_special_ids),
        *sorted(tokenizer.added_tokens_decoder),
    ]
    for token in others:
        if token is not None and token != end:
            return int(token)
    return None


# --- output heads of language models ------------------------------------------------------------------------


def untie_own_head(config: PreTrainedConfig, source: WeightFiles) -> None:
    """If the files have an output head that differs from the embedding, transformers loads it, although
    config.json ties both. The configuration says so from now on: ranks build the model from it, and it is
    saved with the model."""
    if source.gguf_file or not config.tie_word_embeddings:
        return
    found: dict[str, Tensor] = {}
    folder = Path(source.name)
    for file in weight_files(folder):
        opened = open_weights(folder / file)
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            end = name.split(".")[-2:]
            if end in (["lm_head", "weight"], ["embed_tokens", "weight"]):
                found[end[0]] = opened.get_slice(name)
    if len(found) == 2 and not torch.equal(found["lm_head"][:], found["embed_tokens"][:]):
        log.warning("%s has an output head of its own, although its config.json ties it.", source.name)
        untie(config)


def note_own_head(model: PreTrainedModel) -> None:
    """The same of a model that transformers loaded from other files than a folder's safetensors."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is not None and model.config.tie_word_embeddings and head.weight is not embedding.weight:
        untie(model.config)


def untie(config: PreTrainedConfig) -> None:
    """The output head is a weight of its own."""
    config.tie_word_embeddings = False
    config.get_text_config().tie_word_embeddings = False
