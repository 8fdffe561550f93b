"""Mixers of the gated delta rule (Qwen3-Next, Qwen3.5) in the rollout engine.

Their own forward takes rows of one length, and prompts have many lengths: a pass per length would launch
thousands of small kernels. Here the prompts of a pass run together: a token of padding has decay 1 and rate
0, so it leaves the state as it is. On a GPU, decode steps run as three kernels (`delta_kernels.py`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.extras import MissingExtra, require
from strop.models.layouts.sequences import PackedSequences
from strop.models.self_check import same

_SPLIT = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_JOINT = ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")
_PARTS = ("conv1d", "dt_bias", "A_log", "norm", "out_proj", "num_v_heads", "num_k_heads", "head_v_dim")
_CHUNKS = "torch_chunk_gated_delta_rule"
"""The function of transformers over whole rows; that of flash-linear-attention where it is installed."""
DELTA_RULE = "delta_rule"
"""Name of the patch: these kernels in decode steps."""
_CHECK_ULPS = 64
"""Self-check of the kernels: sums over a state have another order."""


class _Mixer(Protocol):
    num_v_heads: int
    num_k_heads: int
    head_k_dim: int
    head_v_dim: int
    activation: str
    conv1d: nn.Conv1d
    dt_bias: Tensor
    A_log: Tensor
    norm: _GatedNorm
    out_proj: Callable[[Tensor], Tensor]
    in_proj_qkv: Callable[[Tensor], Tensor]
    in_proj_z: Callable[[Tensor], Tensor]
    in_proj_b: Callable[[Tensor], Tensor]
    in_proj_a: Callable[[Tensor], Tensor]
    in_proj_qkvz: Callable[[Tensor], Tensor]
    in_proj_ba: Callable[[Tensor], Tensor]
    fix_query_key_value_ordering: Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class _GatedNorm(Protocol):
    weight: Tensor
    variance_epsilon: float

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor: ...


@cache
def delta_kernels(device: str) -> ModuleType | None:
    """The kernels of a decode step on a device of this type, or None: then the module's own forward runs."""
    if device != "cuda":
        return None
    try:
        return require("strop.models.layouts.delta_kernels", extra="gpu", why="Fast decoding on a GPU")
    except MissingExtra as error:
        warnings.warn(
            f"{error} The gated delta rule runs as plain torch, several times slower.", stacklevel=2
        )
        return None


_checked: dict[tuple[object, ...], bool] = {}
"""Whether the kernels give the numbers of the module, by what that depends on."""


class DeltaRule:
    """Passes of the rollout engine over one mixer of the gated delta rule."""

    def __init__(self, mixer: nn.Module) -> None:
        self._mixer = cast("_Mixer", mixer)
        self._chunks: Callable[..., tuple[Tensor, Tensor]] = vars(sys.modules[type(mixer).__module__])[
            _CHUNKS
        ]
        self._joint = all(hasattr(mixer, name) for name in _JOINT)
        self._kernels: ModuleType | None = None

    @staticmethod
    def of(mixer: nn.Module) -> DeltaRule | None:
        """None: the mixer computes something else."""
        projected = any(all(hasattr(mixer, name) for name in names) for names in (_SPLIT, _JOINT))
        if not projected or not all(hasattr(mixer, name) for name in _PARTS):
            return None
        found = cast("_Mixer", mixer)
        known = _CHUNKS in vars(sys.modules[type(mixer).__module__])
        if not known or found.conv1d.bias is not None or found.activation != "silu":
            return None
        return DeltaRule(mixer)

    @torch.no_grad()
    def check_kernels(
        self, plain: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, states: tuple[Tensor, Tensor]
    ) -> None:
        """Use the kernels from now on if a step with them is a step of `plain`, which updates the states too.
        `hidden` and `states` are examples."""
        kernels = delta_kernels(hidden.device.type)
        if kernels is None or hidden.dtype == torch.float64:
            return
        shapes = [tuple(state.shape[1:]) for state in states]
        key = (type(self._mixer), hidden.dtype, hidden.device, self._joint, *shapes)
        if key not in _checked:
            generator = torch.Generator(hidden.device).manual_seed(0)

            def draw(like: Tensor) -> Tensor:
                found = torch.empty(3, *like.shape[1:], dtype=torch.float32, device=like.device)
                return found.normal_(generator=generator).to(like.dtype)

            example = draw(hidden)
            begin = tuple(draw(state) for state in states)

            def steps(step: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
                conv, recurrent = (state.clone() for state in begin)
                out = step(example, conv, recurrent)
                return [out, conv, recurrent.to(hidden.dtype)]

            _checked[key] = same(
                lambda: steps(plain),
                lambda: steps(self._step_with(kernels)),
                ulps=_CHECK_ULPS,
                name=DELTA_RULE,
            )
        if _checked[key]:
            self._kernels = kernels

    @property
    def has_step(self) -> bool:
        return self._kernels is not None

    def step(self, hidden: Tensor, conv: Tensor, recurrent: Tensor, running: Tensor | None = None) -> Tensor:
        """The next tokens [B, 1, H] of B rows with these states, which are updated, or only those of rows
        that are `running`."""
        assert self._kernels is not None
        return self._step_with(self._kernels, running)(hidden, conv, recurrent)

    def _step_with(
        self, kernels: ModuleType, running: Tensor | None = None
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        mixer = self._mixer

        def step(hidden: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
            qkv, z, b, a = self._project(hidden[:, 0])
            mixed = kernels.convolve_step(qkv, mixer.conv1d.weight.squeeze(1), conv, running)
            out = kernels.delta_step(mixed, a, b, mixer.A_log, mixer.dt_bias, recurrent, running)
            out = kernels.gated_norm(out, z, mixer.norm.weight, mixer.norm.variance_epsilon)
            return mixer.out_proj(out.view(len(hidden), 1, -1))

        return step

    def start(
        self, hidden: Tensor, sequences: PackedSequences, before: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A packed row [1, N, H] of sequences: the output, and the states of convolution and recurrence
        [S, ...] after each sequence. `before`: the states that they continue; None: all begin with their
        first tokens."""
        mixer = self._mixer
        qkv, z, b, a = self._project(hidden[0])
        conv_before = None if before is None else before[0]
        conv_states = self._last_inputs(qkv, sequences, conv_before)
        mixed = self._convolve(qkv, sequences, conv_before)
        key_width = mixer.num_k_heads * mixer.head_k_dim
        value_width = mixer.num_v_heads * mixer.head_v_dim
        query, key, value = mixed.split([key_width, key_width, value_width], -1)
        group = mixer.num_v_heads // mixer.num_k_heads
        query = query.unflatten(-1, (mixer.num_k_heads, -1)).repeat_interleave(group, 1)
        key = key.unflatten(-1, (mixer.num_k_heads, -1)).repeat_interleave(group, 1)
        value = value.unflatten(-1, (mixer.num_v_heads, -1))
        beta = b.sigmoid()
        g = -mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias)
        out = torch.empty_like(value)
        recurrent: Tensor | None = None
        for padded in sequences.padded:
            take = padded.take
            inside = padded.inside[..., None]
            part, states = self._chunks(
                query[take],
                key[take],
                value[take],
                g=g[take].masked_fill(~inside, 0),
                beta=beta[take].masked_fill(~inside, 0),
                initial_state=None if before is None else before[1][padded.members],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            out[take[padded.inside]] = part[padded.inside].to(out.dtype)
            if recurrent is None:
                recurrent = states.new_empty(len(sequences.sequences), *states.shape[1:])
            recurrent[padded.members] = states
        assert recurrent is not None
        size = mixer.head_v_dim
        gated = mixer.norm(out.reshape(-1, size), z.reshape(-1, size))
        return mixer.out_proj(gated.view(1, len(out), -1)), conv_states, recurrent

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [M, width], the gate z [M, width of values], b and a [M, value heads]."""
        mixer = self._mixer
        if not self._joint:
            return (
                mixer.in_proj_qkv(hidden),
                mixer.in_proj_z(hidden),
                mixer.in_proj_b(hidden),
                mixer.in_proj_a(hidden),
            )
        row = hidden[None]
        parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(row), mixer.in_proj_ba(row))
        query, key, value, z, b, a = (part[0].flatten(1) for part in parts)
        return torch.cat((query, key, value), -1), z.contiguous(), b.contiguous(), a.contiguous()

    def _convolve(self, x: Tensor, sequences: PackedSequences, before: Tensor | None) -> Tensor:
        """SiLU of the causal convolution over a packed row [N, channels]. `before` [S, channels, taps]: the
        inputs before it."""
        weight = self._mixer.conv1d.weight.squeeze(1).float()
        taps = weight.shape[1]
        positions = sequences.positions
        wide = x.float()
        total = wide * weight[:, -1]
        for back in range(1, taps):
            shifted = wide.roll(back, 0)
            outside = (positions < back)[:, None]
            if before is None:
                shifted.masked_fill_(outside, 0)
            else:
                earlier = (taps + positions - back).clamp(max=taps - 1)
                shifted = torch.where(outside, before[sequences.members, :, earlier].float(), shifted)
            total += shifted * weight[:, -1 - back]
        return F.silu(total.to(x.dtype))

    def _last_inputs(self, x: Tensor, sequences: PackedSequences, before: Tensor | None) -> Tensor:
        """The state of the convolution after each sequence: [S, channels, taps]."""
        taps = self._mixer.conv1d.weight.shape[-1]
        places, positions = sequences.last(taps)
        outside = (positions < 0)[..., None]
        if before is None:
            return x[places].masked_fill_(outside, 0).transpose(1, 2)
        earlier = before.transpose(1, 2).take_along_dim((taps + positions).clamp(max=taps - 1)[..., None], 1)
        return torch.where(outside, earlier.to(x.dtype), x[places]).transpose(1, 2)
