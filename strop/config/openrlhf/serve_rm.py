"""Converts OpenRLHF's `serve_rm`, its HTTP server of a reward model, to `strop serve-rm`.

The server has a dozen flags of one generation and no generations of defaults, so it has a small table here
and none of the rules of the trainers.
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
}
DEFAULTS: dict[str, object] = {
    "value_head_prefix": "value_head",
    "max_len": 2048,
    "host": "0.0.0.0",
    "bf16": False,
}
"""OpenRLHF's defaults that differ from ours; without --bf16 the model computes in float32."""
WITHOUT_EQUIVALENT = {
    "load_in_4bit": "4-bit weights are for training with LoRA; the server computes in 16 bits",
    "flash_attn": "attention is chosen by the device",
    "packing_samples": "texts are always packed",
    "disable_fast_tokenizer": "the tokenizer's own class is used",
    "use_ms": "download the model first and give its folder",
}


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
        if name not in FLAGS:
            known = [*FLAGS, *WITHOUT_EQUIVALENT]
            raise ValueError(f"Unknown flag --{name} of OpenRLHF's serve_rm.{did_you_mean(name, known)}")
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
        try:
            given[name] = kind(value)
        except ValueError:
            raise ValueError(f"--{name} needs a whole number, got {value!r}.") from None
    overrides = [_override(name, value, implied=False) for name, value in given.items()]
    overrides += [
        _override(name, value, implied=True) for name, value in DEFAULTS.items() if name not in given
    ]
    return overrides, unmapped


def _override(name: str, value: object, *, implied: bool) -> Override:
    key = FLAGS[name][0]
    if key == "server.dtype":
        value = "bfloat16" if value else "float32"
    return Override(key, value, f"--{name}", DEFAULT if implied else "", implied)
