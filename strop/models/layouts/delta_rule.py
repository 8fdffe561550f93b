"""Mixers of the gated delta rule (Qwen3-Next, Qwen3.5) in the rollout engine.

Their own forward takes rows of one length, and prompts have many lengths: a pass per length would launch
thousands of small kernels. Here the prompts of a pass run together: a token of padding has decay 1 and rate
0, so it leaves the state as it is. On a GPU, decode steps run as three kernels (`delta_kernels.py`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.extras import MissingExtra, require
from strop.models.self_check import same

_SPLIT = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_JOINT = ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")
_PARTS = ("conv1d", "dt_bias", "A_log", "norm", "out_proj", "num_v_heads", "num_k_heads", "head_v_dim")
_CHUNKS = "torch_chunk_gated_delta_rule"
"""The function of transformers over whole rows; that of flash-linear-attention where it is installed."""
_PADDED_TOKENS = 4096
"""Tokens of a padded group, at most: the function over whole rows needs about 20 float32 copies of them."""
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


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences of similar length as a rectangle."""

    members: Tensor
    """[B]: which sequences."""
    take: Tensor
    """[B, T]: places of their tokens in the packed row. Padding repeats the last token of the same sequence,
    so that a sequence with NaN spoils no other."""
    inside: Tensor
    """[B, T]: what is no padding."""


class PackedSequences:
    """Sequences (row, place of the first token, length) of a packed row, each from its first token."""

    def __init__(self, sequences: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        self.sequences = sequences
        self.device = device

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, starts, lengths = torch.tensor(self.sequences, device=self.device).unbind(1)
        return rows, starts, lengths

    @property
    def rows(self) -> Tensor:
        return self._columns[0]

    @cached_property
    def positions(self) -> Tensor:
        """[N]: of each token in its sequence."""
        found = [torch.arange(length) for _, _, length in self.sequences]
        return torch.cat(found).to(self.device)

    def last(self, count: int) -> tuple[Tensor, Tensor]:
        """[S, count]: places of the last tokens of each sequence, and which of them exist."""
        _, starts, lengths = self._columns
        back = torch.arange(count - 1, -1, -1, device=self.device)
        places = (starts + lengths - 1)[:, None] - back
        return places.clamp(min=0), places >= starts[:, None]

    @cached_property
    def by_length(self) -> list[tuple[Tensor, Tensor]]:
        """Places [B, length] and rows [B] of the sequences of each length."""
        return by_length(self.sequences, self.device)

    @cached_property
    def padded(self) -> list[PaddedGroup]:
        """Sequences of similar length together."""
        order = sorted(range(len(self.sequences)), key=lambda i: self.sequences[i][2])
        groups: list[list[int]] = []
        for member in order:
            length = self.sequences[member][2]
            if groups:
                shortest = self.sequences[groups[-1][0]][2]
                fits = (len(groups[-1]) + 1) * length <= _PADDED_TOKENS
                if fits and length <= 1.5 * shortest + 8:
                    groups[-1].append(member)
                    continue
            groups.append([member])
        return [self._padded_group(members) for members in groups]

    def _padded_group(self, members: list[int]) -> PaddedGroup:
        starts = torch.tensor([[self.sequences[i][1]] for i in members])
        lengths = torch.tensor([[self.sequences[i][2]] for i in members])
        columns = torch.arange(int(lengths.max()))[None]
        take = starts + torch.minimum(columns, lengths - 1)
        inside = columns < lengths
        return PaddedGroup(
            torch.tensor(members, device=self.device), take.to(self.device), inside.to(self.device)
        )


def by_length(sequences: Sequence[tuple[int, int, int]], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Sequences (row, place of the first token, length) of one length run together: padding would be in their
    states."""
    found: dict[int, list[tuple[int, int]]] = {}
    for row, offset, length in sequences:
        found.setdefault(length, []).append((row, offset))
    groups = []
    for length, members in found.items():
        rows, offsets = torch.tensor(members, device=device).unbind(1)
        groups.append((offsets[:, None] + torch.arange(length, device=device), rows))
    return groups


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

    def step(self, hidden: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
        """The next tokens [B, 1, H] of B rows with these states, which are updated."""
        assert self._kernels is not None
        return self._step_with(self._kernels)(hidden, conv, recurrent)

    def _step_with(self, kernels: ModuleType) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        mixer = self._mixer

        def step(hidden: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
            qkv, z, b, a = self._project(hidden[:, 0])
            mixed = kernels.convolve_step(qkv, mixer.conv1d.weight.squeeze(1), conv)
            out = kernels.delta_step(mixed, a, b, mixer.A_log, mixer.dt_bias, recurrent)
            out = kernels.gated_norm(out, z, mixer.norm.weight, mixer.norm.variance_epsilon)
            return mixer.out_proj(out.view(len(hidden), 1, -1))

        return step

    def start(self, hidden: Tensor, sequences: PackedSequences) -> tuple[Tensor, Tensor, Tensor]:
        """A packed row [1, N, H] of sequences from their first tokens: the output, and the states of
        convolution and recurrence [S, ...] after each sequence."""
        mixer = self._mixer
        qkv, z, b, a = self._project(hidden[0])
        conv_states = self._last_inputs(qkv, sequences)
        mixed = self._convolve(qkv, sequences.positions)
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
                initial_state=None,
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

    def _convolve(self, x: Tensor, positions: Tensor) -> Tensor:
        """SiLU of the causal convolution over a packed row [N, channels]."""
        weight = self._mixer.conv1d.weight.squeeze(1).float()
        taps = weight.shape[1]
        wide = x.float()
        total = wide * weight[:, -1]
        for back in range(1, taps):
            before = wide.roll(back, 0) * weight[:, -1 - back]
            total += before.masked_fill_((positions < back)[:, None], 0)
        return F.silu(total.to(x.dtype))

    def _last_inputs(self, x: Tensor, sequences: PackedSequences) -> Tensor:
        """The state of the convolution after each sequence: [S, channels, taps]."""
        places, exist = sequences.last(self._mixer.conv1d.weight.shape[-1])
        return x[places].masked_fill_(~exist[..., None], 0).transpose(1, 2)
