"""A model's own head for multi-token prediction (MTP), which transformers leaves out when it loads a model.

The layout is that of DeepSeek-V3, which GLM-4.5 has too: the tensors `model.layers.N.*` of a model with N
layers. The head has two norms (`enorm`, `hnorm`), a product (`eh_proj`), one decoder layer and a last norm
(`shared_head.norm`). From the policy's last hidden state at a token and the embedding of the next token it
predicts the token after that. Embedding and output head are those of the policy.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from strop.models.files.weights import INDEX, SINGLE, open_weights
from strop.models.lora import base_model, decoder_of
from strop.rollout.native.attention import Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "rollout.speculation.mtp=true"
_OWN = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
_OF_THE_POLICY = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of weights that the policy has; they are not read."""
_BY_LAYER = ("layer_types", "mlp_layer_types")
"""Keys of a configuration with one entry per layer."""
_INSTEAD = "Set it to false; tokens are guessed from earlier answers, or by a draft_model."


class MtpHead(nn.Module):
    def __init__(self, policy: PreTrainedModel, decoder: PreTrainedModel, own: Mapping[str, Tensor]) -> None:
        """`decoder`: one layer and the last norm. `own`: the tensors of `_OWN`."""
        super().__init__()
        self.decoder = decoder
        norm: Any = type(decoder.norm)
        size = own["enorm.weight"].shape[0]
        epsilon = getattr(policy.config.get_text_config(), "rms_norm_eps", 1e-6)
        self.enorm = norm(size, eps=epsilon)
        self.hnorm = norm(size, eps=epsilon)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        for name in ("enorm", "hnorm", "eh_proj"):
            getattr(self, name).weight = nn.Parameter(own[f"{name}.weight"], requires_grad=False)
        self._policy = [policy]  # in a list: its weights are not those of the head

    @property
    def dtype(self) -> torch.dtype:
        return self.eh_proj.weight.dtype

    @property
    def hidden_size(self) -> int:
        return self.eh_proj.out_features

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, step: Step) -> Tensor:
        """The hidden states after tokens `ids` [rows, 1] behind hidden states `hidden` [rows, 1, size]."""
        embedded = self._policy[0].get_input_embeddings()(ids).to(self.dtype)
        states = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden.to(self.dtype))], -1))
        output = self.decoder(inputs_embeds=states, position_ids=positions, use_cache=False, rollout=step)
        result: Tensor = output.last_hidden_state
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Those of the policy's output head."""
        head = self._policy[0].get_output_embeddings()
        found: Tensor = head(hidden)
        return found


def load_mtp_head(policy: PreTrainedModel, device: torch.device) -> MtpHead:
    """The head in the folder that the policy was loaded from, in the precision of the policy."""
    core = base_model(policy)
    config = core.config.get_text_config()
    dtype = next(core.parameters()).dtype
    tensors = {name: tensor.to(dtype) for name, tensor in read_mtp_tensors(core.config).items()}
    one_layer = _one_layer(config, sparse=any(name.startswith("mlp.experts.") for name in tensors))
    state = {"embed_tokens.weight": torch.zeros(1, config.hidden_size, dtype=dtype)}
    for name, tensor in tensors.items():
        if name not in _OWN:
            state[f"layers.0.{name}"] = tensor
    state["norm.weight"] = tensors["shared_head.norm.weight"]
    kind: Any = type(decoder_of(core))
    decoder, report = kind.from_pretrained(
        None, config=one_layer, state_dict=state, dtype=dtype, output_loading_info=True
    )
    wrong = sorted([*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]])
    if wrong:
        raise ValueError(
            f"{KEY}: the multi-token prediction head of {config.model_type} does not fit a layer of "
            f"{kind.__name__}: {wrong[:3]}. {_INSTEAD}"
        )
    head = MtpHead(core, decoder, {name: tensors[name] for name in _OWN})
    return head.to(device).requires_grad_(False).eval()


def read_mtp_tensors(config: PreTrainedConfig) -> dict[str, Tensor]:
    """The tensors of the head by name behind `model.layers.N.`."""
    found: dict[str, Tensor] = {}
    files = head_files(str(config.name_or_path), config)
    for file in sorted(set(files.values())):
        with open_weights(file) as opened:
            for key in files:
                if files[key] == file:
                    found[key.removeprefix(_prefix(config))] = opened.get_tensor(key)
    return found


def _prefix(config: PreTrainedConfig) -> str:
    return f"model.layers.{config.get_text_config().num_hidden_layers}."


def head_files(name: str, config: PreTrainedConfig) -> dict[str, Path]:
    """The file of each tensor of the head, for the model in `name`. Refused are models that have none, or one
    of another layout."""
    family = config.model_type
    prefix = _prefix(config)
    files = weight_map(name)
    lacking = [own for own in _OWN if prefix + own not in files]
    if lacking:
        others = sorted(key for key in files if ".mtp" in f".{key}")
        there = "has no weights of one"
        if others:
            there = f"has weights of another layout ({others[0]})"
        raise ValueError(
            f"{KEY}: a multi-token prediction head in the layout of DeepSeek-V3 and GLM-4.5 is needed "
            f"({prefix}{lacking[0]}), but {name} ({family}) {there}. {_INSTEAD}"
        )
    found = {}
    for key, file in files.items():
        if key.startswith(prefix) and key.removeprefix(prefix) not in _OF_THE_POLICY:
            found[key] = file
    scaled = sorted(key for key in found if key.endswith(("_scale", "_scale_inv")))
    if scaled:
        raise ValueError(
            f"{KEY}: the multi-token prediction head of {name} ({family}) is stored in 8 bits ({scaled[0]}). "
            f"Convert the model to bf16 first. {_INSTEAD}"
        )
    return found


def weight_map(name: str) -> dict[str, Path]:
    """The safetensors file of each weight of a model folder or a hub name in the local cache; empty where
    there are none, as for a GGUF file."""
    index = _file(name, INDEX)
    if index is not None:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: index.parent / file for key, file in placed.items()}
    single = _file(name, SINGLE)
    if single is None:
        return {}
    with open_weights(single) as opened:
        return dict.fromkeys(opened.keys(), single)


def _file(name: str, file: str) -> Path | None:
    if Path(name).is_dir():
        place = Path(name) / file
        return place if place.is_file() else None
    if not name:
        return None
    found = cached_file(
        name,
        file,
        local_files_only=True,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def _one_layer(config: PreTrainedConfig, *, sparse: bool) -> PreTrainedConfig:
    """The configuration of a decoder with the last of the layers alone, and a vocabulary that is not used."""
    changed = copy.deepcopy(config)
    for key in _BY_LAYER:
        kinds = getattr(config, key, None)
        if kinds:
            setattr(changed, key, list(kinds[-1:]))
    changed.num_hidden_layers = 1
    changed.vocab_size = 1
    changed.pad_token_id = None
    if hasattr(config, "first_k_dense_replace"):
        changed.first_k_dense_replace = int(not sparse)
    return changed
