"""Converts OpenRLHF's `serve_rm`, its HTTP server of a reward model, to `strop serve-rm`.

The server has a dozen flags, so it has a small table here and none of the rules of the trainers.
"""

from __future__ import annotations

from strop.config.openrlhf.command import DEFAULT, Override
from strop.registry import did_you_mean

VERB = "serve-rm"
FLAGS: dict[str, tuple[str, type]] = {
    "reward_pretrain": ("model.path", str),
    "value_head_prefix": ("model.value_head_prefix", str),
    "normalize_reward": ("server.normalize", bool),
    "max_len": ("server.max_length", int),
    "port": ("server.port", int),
    "host": ("server.host", str),
    "batch_size": ("server.max_batch_size", int),
    "bf16": ("server.dtype", bool),
    "ds.param_dtype": ("server.dtype", str),
}
DOTTED = {
    "reward.model_name_or_path": "reward_pretrain",
    "reward.normalize_enable": "normalize_reward",
    "ds.value_head_prefix": "value_head_prefix",
    "data.max_len": "max_len",
}
"""Names since 2026-04 -> names before."""
FLAGS |= {name: FLAGS[flat] for name, flat in DOTTED.items()}
DEFAULTS: dict[str, object] = {
    "value_head_prefix": "value_head",
    "max_len": 2048,
    "host": "0.0.0.0",
    "bf16": False,
}
"""OpenRLHF's defaults that differ from ours; without --bf16 the model computes in float32."""
DOTTED_DEFAULTS: dict[str, object] = {"data.max_len": 2048, "host": "0.0.0.0"}
"""Since 2026-04."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", True: "bfloat16", False: "float32"}
_FOUR_BITS = "4-bit weights are for training with LoRA; the server computes in 16 bits"
_ATTENTION = "attention is chosen by the device"
_PACKED = "texts are always packed"
_TOKENIZER = "the tokenizer's own class is used"
WITHOUT_EQUIVALENT = {
    "load_in_4bit": _FOUR_BITS,
    "ds.load_in_4bit": _FOUR_BITS,
    "flash_attn": _ATTENTION,
    "packing_samples": _PACKED,
    "ds.packing_samples": _PACKED,
    "disable_fast_tokenizer": _TOKENIZER,
    "data.disable_fast_tokenizer": _TOKENIZER,
    "use_ms": "download the model first and give its folder",
}
WITHOUT_EQUIVALENT_VALUES = {
    "ds.attn_implementation": _ATTENTION,
    "ds.experts_implementation": "the computation of experts is chosen by the device",
}
"""These have a value."""


def read_flags(words: list[str]) -> tuple[list[Override], list[tuple[str, str, str]]]:
    """The overrides, and (flag, value, reason) of flags without equivalent."""
    given: dict[str, object] = {}
    unmapped: list[tuple[str, str, str]] = []
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).removeprefix("--").partition("=")
        if name in WITHOUT_EQUIVALENT:
            unmapped.append((f"--{name}", "", WITHOUT_EQUIVALENT[name]))
            continue
        if name not in FLAGS and name not in WITHOUT_EQUIVALENT_VALUES:
            known = [*FLAGS, *WITHOUT_EQUIVALENT, *WITHOUT_EQUIVALENT_VALUES]
            raise ValueError(f"Unknown flag --{name} of OpenRLHF's serve_rm.{did_you_mean(name, known)}")
        kind: type = str
        if name in FLAGS:
            kind = FLAGS[name][1]
        if kind is bool:
            if equals:
                raise ValueError(f"--{name} is a switch and takes no value, got {value!r}. Leave that out.")
            given[name] = True
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{name} needs a value, but none follows it.")
            value = rest.pop(0)
        if name in WITHOUT_EQUIVALENT_VALUES:
            unmapped.append((f"--{name}", value, WITHOUT_EQUIVALENT_VALUES[name]))
            continue
        if name == "ds.param_dtype" and value not in DTYPES:
            raise ValueError(f"--{name} is bf16 or fp16, got {value!r}.")
        try:
            given[name] = kind(value)
        except ValueError:
            raise ValueError(f"--{name} needs a whole number, got {value!r}.") from None
    overrides = [_override(name, value, implied=False) for name, value in given.items()]
    defaults = DEFAULTS
    if any("." in word.partition("=")[0] for word in words if word.startswith("--")):
        defaults = DOTTED_DEFAULTS
    overrides += [
        _override(name, value, implied=True) for name, value in defaults.items() if name not in given
    ]
    return overrides, unmapped


def _override(name: str, value: object, *, implied: bool) -> Override:
    key = FLAGS[name][0]
    if key == "server.dtype":
        assert isinstance(value, bool | str)
        value = DTYPES[value]
    return Override(key, value, f"--{name}", DEFAULT if implied else "", implied)
